"""The command ``mhar``: finds its subcommands, imports one only when it is called, and turns errors into exit codes."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import click

from megatron_mhar.errors import UserError

# name: (module:attribute, line in mhar --help). Importing them all would take seconds: some need torch.
COMMANDS = {
    "train": ("megatron_mhar.cli.train:train", "Train a model from a config file; continue where the run stopped."),
    "evaluate": ("megatron_mhar.cli.evaluate:evaluate", "Compute the validation loss of a checkpoint of a run."),
    "plan": ("megatron_mhar.cli.plan:plan", "Foretell a layout's messages, memory and step time on any cluster."),
    "submit": ("megatron_mhar.cli.submit:submit", "Check a Slurm job file before it waits in a queue; submit it."),
    "status": ("megatron_mhar.cli.status:status", "Show where a run is, what happened to it and when it will end."),
    "data": ("megatron_mhar.cli.data:data", "Build training data."),
    "compare": ("megatron_mhar.cli.compare:compare", "Compare finished runs: table, loss curves, learned routing."),
    "sync": ("megatron_mhar.cli.sync:sync", "Send metrics that wait in a run's journal to the MLflow server."),
    "bench": ("megatron_mhar.cli.bench:bench", "Measure the speed of routing and of training steps."),
    "doctor": ("megatron_mhar.cli.doctor:doctor", "Show what this machine has and what a run here will use."),
}


_PATIENCE_S = 10  # longer than ranks of one machine differ in reaching the same error


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they are called or asked for help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order of :data:`COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the subcommand ``cmd_name``."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="megatron-mhar", prog_name="mhar")
def cli() -> None:
    """Train Multi-Head Attention Residuals with Megatron-core.

    \b
    Examples:
      mhar doctor
      mhar data demo
      mhar train configs/demo/mhar.yaml
      mhar train configs/demo/mhar.yaml optimizer.lr=5e-4 name=my-run
      mhar compare runs/demo-baseline runs/demo-mhar --out runs/demo

    mhar COMMAND --help says more.
    """


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Exit codes: 0 done; 2 wrong input (one message on stderr); 130 interrupted; 1 anything else.
    Under a launcher the first process of each machine writes the message.

    Args:
        args: arguments without the program's name; those of the process by default.
    """
    _open_standard_streams()
    try:
        code = cli.main(args=args, prog_name="mhar", standalone_mode=False)
    except UserError as error:
        _let_first_rank_speak()
        click.echo(f"mhar: error: {error}", err=True)
        code = 2
    except click.ClickException as error:
        _let_first_rank_speak()
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _let_first_rank_speak()
        click.echo("mhar: interrupted", err=True)
        code = 130
    except BrokenPipeError:  # the reader of a pipe has seen enough; Python must not flush into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def _open_standard_streams() -> None:
    """Open closed standard streams on /dev/null: else the next file, a checkpoint, is what libraries print to."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _let_first_rank_speak() -> None:
    """Wait on all but the first rank of a machine: it has the same to say, and its launcher then ends the others."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_PATIENCE_S)


if __name__ == "__main__":
    main()
