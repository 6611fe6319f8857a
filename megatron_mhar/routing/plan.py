"""Which sources the sites of a model read, in numbers: what a chain of fused reads is told of a depth table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Reads(NamedTuple):
    """Rows that a site reads: the first ``shared``, which sites share, and perhaps one that no other site reads."""

    shared: int
    own: int | None


@dataclass(frozen=True)
class ReadPlan:
    """Which sources each site of a model reads.

    Args:
        rows: of each site, rows of the sources it reads, null sources not among them: 0, 1, ... up to some row, none
            fewer than the site before, and then perhaps a further one, which no other site reads.
        num_heads: H.
        eps: epsilon of the keys' RMSNorm.
    """

    rows: tuple[tuple[int, ...], ...]
    num_heads: int
    eps: float = 1e-6

    def __post_init__(self) -> None:
        seen: set[int | None] = set()
        count = 0
        for (shared, own), rows in zip(self.reads, self.rows, strict=True):
            assert rows[:shared] == tuple(range(shared)) and shared >= count, f"rows of a site: {rows}"
            assert own is None or (own >= self.num_shared and own not in seen), f"a row of several sites: {own}"
            count, seen = shared, seen | {own}

    @cached_property
    def num_rows(self) -> int:
        """Sources."""
        return 1 + max(row for rows in self.rows for row in rows)

    @cached_property
    def reads(self) -> tuple[Reads, ...]:
        """What each site reads, as chains are told it: a last row before which others are left out is its own."""
        return tuple(
            Reads(len(rows) - 1, rows[-1]) if rows and rows[-1] != len(rows) - 1 else Reads(len(rows), None)
            for rows in self.rows
        )

    @cached_property
    def num_shared(self) -> int:
        """Rows that are not a site's own: these are the first ones."""
        return max(shared for shared, _ in self.reads)

    @cached_property
    def grows_by_one(self) -> bool:
        """Whether site t reads rows 0 to t, all there are: what sites read can then be read in groups."""
        return all(rows == tuple(range(site + 1)) for site, rows in enumerate(self.rows))

    @cached_property
    def first_readers(self) -> tuple[int, ...]:
        """First site that reads each of the shared rows; all that follow read it too."""
        return tuple(
            next(site for site, (shared, _) in enumerate(self.reads) if shared > row) for row in range(self.num_shared)
        )
