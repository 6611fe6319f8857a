"""The command line: what it is made of, how it fails, and that help is quick."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from megatron_mhar.cli import main as cli
from megatron_mhar.errors import UserError

# The command line is an interface: a change here is a change for everyone's scripts.
ARGUMENTS = {
    "train": ["CONFIG", "[KEY=VALUE]..."],
    "evaluate": ["RUN_DIR", "[KEY=VALUE]..."],
    "plan": ["CONFIG", "[KEY=VALUE]..."],
    "submit": ["FILE", "[ARGUMENT]..."],
    "status": ["RUN_DIR"],
    "data demo": [],
    "compare": ["RUN_DIR..."],
    "sync": ["RUN_DIR..."],
    "bench routing": [],
    "bench step": ["CONFIG... [KEY=VALUE]..."],
    "doctor": [],
}
OPTIONS = {
    "train": [],
    "evaluate": ["--batches", "--checkpoint"],
    "plan": ["--gpus", "--gpus-per-node", "--json", "--link-gbps", "--memory", "--tflops"],
    "submit": ["--after", "--check", "--memory", "--nodes", "--partition", "--time"],
    "status": ["--json"],
    "data demo": ["--force", "--max-mb", "--min-mb", "--out", "--seed", "--vocab-size"],
    "compare": ["--out"],
    "sync": ["--timeout", "--uri"],
    "bench routing": [
        "--algorithms",
        "--bare",
        "--dtype",
        "--heads",
        "--json",
        "--method",
        "--no-graph",
        "--rounds",
        "--shape",
        "--tokens",
    ],
    "bench step": ["--json", "--methods", "--micro-batch", "--precision", "--rounds", "--steps"],
    "doctor": ["--json"],
}


def commands() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(cli.cli)
    for name in cli.cli.list_commands(context):
        command = cli.cli.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from ((f"{name} {sub}", inner) for sub, inner in command.commands.items())
        else:
            yield name, command


def test_command_line_is_frozen() -> None:
    arguments, options = {}, {}
    for name, command in commands():
        context = click.Context(command)
        given = [p for p in command.params if isinstance(p, click.Argument)]
        arguments[name] = [argument.make_metavar(context) for argument in given]
        options[name] = sorted(o for p in command.params if isinstance(p, click.Option) for o in p.opts)
    assert arguments == ARGUMENTS
    assert options == OPTIONS


def test_every_command_has_help_with_an_example() -> None:
    for name, command in commands():
        text = command.get_help(click.Context(command, info_name=f"mhar {name}"))
        assert f"mhar {name}" in text.partition("Examples:")[2], f"mhar {name} --help has no example"


def test_list_of_commands_tells_the_names() -> None:
    assert list(cli.COMMANDS) == sorted({name.split()[0] for name in ARGUMENTS}, key=list(cli.COMMANDS).index)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from megatron_mhar.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as e: code = e.code\n"
        "heavy = {'torch', 'megatron', 'mlflow', 'matplotlib', 'numpy', 'pydantic', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    for name in cli.COMMANDS:
        assert f"\n  {name} " in result.stdout


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    return caught.value.code, capsys.readouterr().err


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException]]:
    """A command ``doctor`` that raises the one exception in the list."""
    raised: list[BaseException] = []

    @click.command()
    def doctor() -> None:
        raise raised[0]

    monkeypatch.setattr("megatron_mhar.cli.doctor.doctor", doctor)
    yield raised


def test_user_error_is_one_message_and_exit_2(raising: list[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    raising.append(UserError("runs/x: no such folder"))
    assert run(["doctor"], capsys) == (2, "mhar: error: runs/x: no such folder\n")


def test_interrupt_is_130(raising: list[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    raising.append(KeyboardInterrupt())
    code, err = run(["doctor"], capsys)
    assert code == 130
    assert err.strip() == "mhar: interrupted"


def test_a_fault_of_ours_keeps_its_traceback(raising: list[BaseException]) -> None:
    raising.append(ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError, match="ours"):
        cli.main(["doctor"])


@pytest.mark.parametrize("arguments", [["trian"], ["doctor", "--jsn"], ["doctor", "x"]])
def test_wrong_usage_is_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, err = run(arguments, capsys)
    assert code == 2
    assert "Error: " in err


@pytest.mark.parametrize("how", [SystemExit(1), click.exceptions.Exit(1)])
def test_exit_code_of_a_command_arrives(
    how: BaseException, raising: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    raising.append(how)
    assert run(["doctor"], capsys) == (1, "")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("mhar, version ")
