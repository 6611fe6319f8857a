"""Which sources the sites of a model read, in numbers: what a chain of fused reads is told of a depth table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Reads(NamedTuple):
    """Rows that a site reads: the first ``prefix`` of all, and ``total - prefix`` more from ``start`` on."""

    prefix: int
    start: int
    total: int


@dataclass(frozen=True)
class ReadPlan:
    """Which sources each site of a model reads.

    Args:
        rows: of each site, rows of the sources it reads, null sources not among them: 0, 1, ... up to some row, and
            then a run of further ones. The sites that read a row follow each other.
        num_heads: H.
        eps: epsilon of the keys' RMSNorm.
    """

    rows: tuple[tuple[int, ...], ...]
    num_heads: int
    eps: float = 1e-6

    @cached_property
    def num_rows(self) -> int:
        """Sources."""
        return 1 + max(row for rows in self.rows for row in rows)

    @cached_property
    def reads(self) -> tuple[Reads, ...]:
        """Rows of each site, as kernels are told them."""
        found = []
        for rows in self.rows:
            prefix = next((i for i, row in enumerate(rows) if row != i), len(rows))
            start = rows[prefix] if prefix < len(rows) else prefix
            assert rows[prefix:] == tuple(range(start, start + len(rows) - prefix)), f"rows of a site: {rows}"
            found.append(Reads(prefix, start, len(rows)))
        return tuple(found)

    @cached_property
    def grows_by_one(self) -> bool:
        """Whether site t reads rows 0 to t, all there are: what sites read can then be read in groups."""
        return all(rows == tuple(range(site + 1)) for site, rows in enumerate(self.rows))

    @cached_property
    def readers(self) -> tuple[range, ...]:
        """Sites that read each row."""
        sites: list[list[int]] = [[] for _ in range(self.num_rows)]
        for site, rows in enumerate(self.rows):
            for row in rows:
                sites[row].append(site)
        ranges = tuple(range(s[0], s[-1] + 1) if s else range(0) for s in sites)
        assert all(list(r) == s for r, s in zip(ranges, sites, strict=True)), "sites that read a row must follow"
        return ranges
