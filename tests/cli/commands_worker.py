"""Run commands of mhar one after the other in this process and write what each said and how it ended.

python commands_worker.py IN OUT: IN is a JSON list of commands; a list of words is for mhar, a text for the shell.
OUT gets a JSON list of [exit code, stderr], None for the shell's; under torchrun rank r writes OUT.r.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_mhar.cli import main as cli


def run(arguments: list[str]) -> tuple[object, str]:
    """Exit code and stderr of one command of mhar."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            cli.main(arguments)
        except SystemExit as end:
            return end.code, stderr.getvalue()


@contextlib.contextmanager
def ranks(number: int) -> Iterator[None]:
    """Process group of the launcher's ranks for command ``number``: its store serves one group of a name."""
    import torch.distributed as dist

    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = dist.TCPStore(*address, is_master=False)  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"command{number}", server)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    yield
    # The command uses the group that it finds and leaves it, with what it built on it.
    if "megatron" in sys.modules:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def main() -> None:
    cli._PATIENCE_S = 0  # nobody ends the other ranks here: they are to be heard
    results: list[tuple[object, str] | None] = []
    for number, command in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        if isinstance(command, str):
            subprocess.run(command, shell=True, check=True)
            results.append(None)
        else:
            with ranks(number) if "RANK" in os.environ else contextlib.nullcontext():
                results.append(run(command))
    Path(sys.argv[2] + (f".{os.environ['RANK']}" if "RANK" in os.environ else "")).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
