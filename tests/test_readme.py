"""What the README shows works as it stands there."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.usefixtures("one_rank")
def test_the_example_for_a_script_of_ones_own():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 21
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    ids = torch.arange(64).view(2, 32).cuda()
    loss = names["model"](ids, ids, None, labels=ids).mean()
    loss.backward()
    assert torch.isfinite(loss)
    queries = [n for n, _ in names["model"].named_parameters() if n.endswith("site.query")]
    assert len(queries) == 25


def test_named_files_and_commands_are_there():
    from megatron_mhar.cli.main import COMMANDS

    for path in set(re.findall(r"(?:configs|launch|\.github)/[\w./-]+\.\w+", README)):
        assert (ROOT / path).is_file(), path
    assert set(re.findall(r"\bmhar ([a-z]+)", README)) <= set(COMMANDS)
    makefile = (ROOT / "Makefile").read_text()
    for goal in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{goal}:" in makefile


def test_tree_of_the_readme_is_the_tree():
    (tree,) = re.findall(r"```\n(megatron_mhar/\n.*?)```", README, re.DOTALL)
    listed = set(re.findall(r"^  ([\w.]+/?) ", tree, re.MULTILINE))
    folders = {f"{p.name}/" for p in (ROOT / "megatron_mhar").iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders == {name for name in listed if name.endswith("/")}
