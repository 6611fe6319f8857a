"""One rank of the all-reduce of known sum that is made before a run: python -m megatron_mhar.launch.probe

It gets a rank's environment, and ends with code 0 if all is well. If not, its last line is JSON: ``{"accused": [rank,
...], "reason": "..."}``, with the ranks that are to blame; none where that is not known.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from typing import NoReturn

import torch

from megatron_mhar import platform

TIMEOUT_S = 120
_SIZE = 1 << 20  # numbers, 8 bytes each: several packets and all channels between two ranks


def main() -> None:
    """Compute on this rank's device, then add up over all ranks what each is known to give."""
    rank, world, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    try:
        device = platform.setup(local_rank)
        _compute(device)
    except Exception as error:
        _fail([rank], f"its device does not compute: {_first_line(error)}")
    try:
        timeout = datetime.timedelta(seconds=TIMEOUT_S)
        torch.distributed.init_process_group(platform.BACKEND, timeout=timeout)
        # Whole numbers are exact. First a place for each rank, where it alone adds its number; then all add it.
        numbers = torch.full([world + _SIZE], rank + 1, dtype=torch.int64, device=device)
        numbers[:world] = 0
        numbers[rank] = rank + 1
        torch.distributed.all_reduce(numbers)
        result = numbers.cpu()
    except Exception as error:
        _fail([], f"the all-reduce over all ranks failed: {_first_line(error)}")
    wrong = (result[:world] != torch.arange(1, world + 1)).nonzero().flatten().tolist()
    total = world * (world + 1) // 2
    if wrong:
        _fail(wrong, "its part of a sum over all ranks arrived as another number")
    if not bool((result[world:] == total).all()):
        _fail([], f"a sum over all ranks is not {total} everywhere")
    torch.distributed.destroy_process_group()


def _compute(device: torch.device) -> None:
    """A product whose every entry is known."""
    size = 256
    product = torch.ones(size, size, device=device) @ torch.full([size, size], 2.0, device=device)
    if not bool((product == 2.0 * size).all()):
        raise ArithmeticError(f"a product of matrices is not {2 * size} everywhere")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _fail(accused: list[int], reason: str) -> NoReturn:
    print(json.dumps({"accused": accused, "reason": reason}), flush=True)
    sys.stdout.flush()
    os._exit(1)  # the end of a process whose collective has failed may hang


if __name__ == "__main__":
    main()
