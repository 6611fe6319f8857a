"""How a chain's kernels are launched, by the number of heads and the channels of one: tiles, groups, warps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import triton

from megatron_mhar.routing import kernels
from megatron_mhar.routing.plan import ReadPlan

GROUP: int = kernels.GROUP.value
HALF = GROUP // 2
_WIDEST_GROUPED = 512  # channels of a head; a group's tiles of more do not fit into a program's registers

Options = dict[str, Any]


@dataclass(frozen=True)
class Schedule:
    """Best of what was measured on an H200 at widths of 512 to 4,096.

    Results are as right with any other, but not the same bits: sums are taken in another order, and groups and halves
    keep partial ones in the sources' type.

    Attributes:
        tile: what kernels of all heads are told of H and K, and the two tiles that cover a head's channels.
        group_tile: the same for kernels of one head and a group.
        groups: whether heads are narrow enough for groups.
        span: sites and rows that ``read`` and ``pull`` go through one by one: a block's, or half.
        num_warps: of kernels that are not named below.
        pull_tokens: of a program; two share what is loaded of the queries, as long as registers hold both.
        read, pull, read_group, pull_group: stages, warps and registers.
        read_half, pull_half: the same where the group kernels serve half a block.
        columns: channels of a program of ``query``.
    """

    tile: Options
    group_tile: Options
    groups: bool
    span: int
    num_warps: int
    pull_tokens: int
    read: Options
    pull: Options
    read_group: Options
    pull_group: Options
    read_half: Options
    pull_half: Options
    columns: int


@cache
def schedule(heads: int, key: int) -> Schedule:
    """Schedule for ``heads`` heads of ``key`` channels."""
    tile = _tile(heads, key)
    channels = tile["HP"] * tile["K1"]
    of_one_head = {name: v for name, v in _tile(heads, max(16, key), least=16).items() if name != "HP"} | {"K": key}
    if heads > 1 and tile["K1"] == triton.next_power_of_2(key) == 512:
        # 256 are what a warp loads at once: a head's sums stay within a warp, and need no barrier.
        tile |= {"K1": 256, "K2": 256}
    num_warps = max(1, min(4, channels // 512))
    pull_tokens = 2 if channels <= 1024 else 1
    pull_warps = num_warps if pull_tokens == 1 else 1 if key == 128 else 2
    # A group's program is one warp with many registers. Fewer make room for more programs at a time, which hides the
    # memory's latency, until they spill.
    one_warp = tile["K1"] <= 128
    read_group: Options = {"STAGES": 3, "num_warps": 1 if one_warp else 8}
    pull_group: Options = {"STAGES": 2, "num_warps": 1 if one_warp else 8}
    limits = ({"maxnreg": 128 if key <= 128 else 168}, {"maxnreg": 128 if key <= 64 else 168}) if one_warp else ({}, {})
    return Schedule(
        tile=tile,
        group_tile=of_one_head,
        groups=key <= _WIDEST_GROUPED,
        span=HALF if 64 < key <= 256 else GROUP,
        num_warps=num_warps,
        pull_tokens=pull_tokens,
        read={"STAGES": 3, "num_warps": 4 if channels > 1024 else 1},
        pull={"STAGES": 3, "num_warps": pull_warps},
        read_group=read_group | limits[0],
        pull_group=pull_group | limits[1],
        read_half={"STAGES": 1, "num_warps": 1, "maxnreg": 168} if one_warp else read_group,
        pull_half=pull_group,
        columns=min(256 if key <= 256 else 128, max(16, triton.next_power_of_2(key))),
    )


def describe(plan: ReadPlan, width: int) -> str:
    """In words, how sites read sources of ``width`` channels."""
    chosen = schedule(plan.num_heads, width // plan.num_heads)
    if not (plan.grows_by_one and chosen.groups and len(plan.rows) > chosen.span):
        return "site by site"
    halves = ", and in halves of them" if chosen.span < GROUP else ""
    return f"in groups of {GROUP} sites{halves}"


def _tile(heads: int, key: int, *, least: int = 1) -> Options:
    """Tiles that cover the channels of all heads: 160 as 128 + 32; one tile where that would not fit.

    Args:
        least: channels of a tile; a matrix product takes 16 or more.
    """
    first = triton.next_power_of_2(key)
    second = key - first // 2
    split = first != key and second == triton.next_power_of_2(second) and second >= least
    parts = {"K1": first // 2, "K2": second} if split else {"K1": first, "K2": 1}
    return {"H": heads, "K": key, "HP": triton.next_power_of_2(heads), **parts}
