"""What the README shows works as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_for_a_script_of_ones_own():
    """Both blocks in a fresh process, as a reader would paste them, and a step of training after them."""
    setup, example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 21
    use = """
ids = torch.arange(64).view(2, 32).cuda()
loss = model(ids, ids, None, labels=ids).mean()
loss.backward()
print(torch.isfinite(loss).item(), sum(n.endswith("site.query") for n, _ in model.named_parameters()))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", setup + example + use], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.split() == ["True", "25"], done.stderr


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
