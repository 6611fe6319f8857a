"""The table: which sources each routing site of each method reads, and when a source comes to be.

Sublayers are numbered t = 0, 1, ... (attention, MLP, attention, ...). Site t stands before sublayer t; replacement
methods have a final site, before the final norm. With o_t the output of sublayer t and e the embedding:

    attnres, mhar              site t reads e, o_0 ... o_{t-1}
    attnres_block, mhar_block  e, the sums d_0 ... d_{k-1} of the closed blocks, and block k's open sum if not empty
    delta                      [null], e, o_0 ... o_{t-1}
    delta_block                [null], e, d_0 ... d_{k-1} (the open block is not read)
    delta_block, released      null, and the entries made so far; entry k is made at the first sublayer of block k, of
                               the stream less the last entry, and is read from the block's second sublayer on
    baseline, hyper_connections: no site reads a source, the stream is all there is

(MHAR, arXiv 2607.27230; Attention Residuals, arXiv 2603.15031; Delta Attention Residuals, Luo, Cai and Hu 2026.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from megatron_mhar.depth.residual import BLOCK, DELTA, ROUTED, SUBLAYERS_PER_LAYER, ResidualConfig
from megatron_mhar.routing.plan import ReadPlan

Kind = Literal["null", "embedding", "output", "block", "open", "entry", "stream"]


class Source(NamedTuple):
    """Name of one source, or of the stream, which no site reads as a source but every stage hands on.

    Its number is the sublayer after which an output, an open sum or a stream stands, the block of a block or entry.
    """

    kind: Kind
    number: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind in ("null", "embedding") else f"{self.kind} {self.number}"


NULL = Source("null")
EMBEDDING = Source("embedding")


@dataclass(frozen=True)
class DepthTable:
    """Sources of every site of a model with ``num_sublayers`` sublayers.

    What a sublayer's output becomes and what is still needed after it are read off the same table.
    """

    config: ResidualConfig
    num_sublayers: int

    @property
    def keeps_stream(self) -> bool:
        """Whether outputs are added to a stream (all but the replacement methods)."""
        return self.config.method not in ROUTED or self.config.method in DELTA

    @property
    def has_final_site(self) -> bool:
        """Whether the final norm reads a routed mixture of sources."""
        return not self.keeps_stream

    @property
    def num_sites(self) -> int:
        """Sites with parameters: one a sublayer, and the final one; none without routing."""
        if self.config.method not in ROUTED:
            return 0
        return self.num_sublayers + self.has_final_site

    @property
    def block_sublayers(self) -> int | None:
        """Sublayers in a block; None for methods without blocks."""
        layers = self.config.block_layers
        return SUBLAYERS_PER_LAYER * layers if self.config.method in BLOCK and layers else None

    @property
    def released(self) -> bool:
        """Whether the sources are those of the released code of delta_block."""
        return self.config.method == "delta_block" and self.config.block_form == "released"

    def opens_block(self, sublayer: int) -> bool:
        """Whether this sublayer is the first of a block."""
        return self.block_sublayers is not None and sublayer % self.block_sublayers == 0

    def closes_block(self, sublayer: int) -> bool:
        """Whether this sublayer is the last of a block."""
        return self.block_sublayers is not None and (
            self.opens_block(sublayer + 1) or sublayer == self.num_sublayers - 1
        )

    @cached_property
    def reads(self) -> tuple[tuple[Source, ...], ...]:
        """Sources of each site, in the order in which they came to be (a null source first)."""
        return tuple(self._reads(site) for site in range(self.num_sites))

    def _reads(self, site: int) -> tuple[Source, ...]:
        size = self.block_sublayers
        null = (NULL,) if self.config.has_null_source else ()
        if size is None:
            return (*null, EMBEDDING, *(Source("output", t) for t in range(site)))
        block = site // size
        if self.released:
            return (*null, *(Source("entry", k) for k in range(block + (site % size > 0))))
        # The final site stands after the last block, also where that block is a partial one.
        closed = -(-site // size) if site == self.num_sublayers else block
        sums = tuple(Source("block", k) for k in range(closed))
        open_sum = site % size > 0 and closed == block and not self.keeps_stream
        return (*null, EMBEDDING, *sums, *((Source("open", site - 1),) if open_sum else ()))

    @cached_property
    def rows(self) -> dict[Source, int]:
        """Number of each source that a site reads: open sums last, so that the others a site reads are 0, 1, 2, ..."""
        sources = sorted(self.last_read, key=lambda s: (s.kind == "open", self.made_by(s), s.number))
        return {source: row for row, source in enumerate(s for s in sources if s != NULL)}

    @cached_property
    def read_plan(self) -> ReadPlan:
        """Rows that each site reads, for :mod:`megatron_mhar.routing.plan`."""
        rows = (tuple(self.rows[source] for source in site if source != NULL) for site in self.reads)
        return ReadPlan(tuple(rows), self.config.num_heads, self.config.eps)

    @cached_property
    def last_read(self) -> dict[Source, int]:
        """Last site that reads each source; a source that no site reads is not in it."""
        return {source: site for site, sources in enumerate(self.reads) for source in sources}

    def state_after(self, sublayer: int) -> tuple[Source, ...]:
        """All that the sublayers after ``sublayer`` need of those up to it, each thing once.

        Sources that a later site reads, in reading order, then the sum of an open block that no site reads, then the
        stream. ``sublayer`` -1 means before the first: there every method has the embedding alone. Null sources belong
        to their sites and are not among them.
        """
        if sublayer == -1:
            return (EMBEDDING,)
        state: dict[Source, None] = {}
        for site in range(sublayer + 1, self.num_sites):
            for source in self.reads[site]:
                if source != NULL and self.made_by(source) <= sublayer:
                    state.setdefault(source)
        if self.block_sublayers is not None and not self.released and not self.closes_block(sublayer):
            state.setdefault(Source("open", sublayer))
        if self.keeps_stream:
            state.setdefault(Source("stream", sublayer))
        return tuple(state)

    def used_by(self, first: int, stop: int) -> tuple[Source, ...]:
        """Those of ``state_after(first - 1)`` that the sublayers ``first`` to ``stop - 1`` and their sites take in."""
        read = {source for site in self.reads[first:stop] for source in site}
        return tuple(
            s for s in self.state_after(first - 1) if first == 0 or s in read or s.kind in ("open", "entry", "stream")
        )

    def made(self, first: int, stop: int) -> tuple[Source, ...]:
        """Those of ``state_after(stop - 1)`` that were not in ``state_after(first - 1)``."""
        before = set(self.state_after(first - 1))
        return tuple(source for source in self.state_after(stop - 1) if source not in before)

    def num_tensors(self, source: Source) -> int:
        """How many `[s, b, d]` tensors ``source`` is: n for the stream of hyper-connections, else one."""
        streams = source.kind == "stream" and self.config.method == "hyper_connections"
        return self.config.num_streams if streams else 1

    def made_by(self, source: Source) -> int:
        """Sublayer after which ``source`` exists; -1 for what exists before the first."""
        match source.kind:
            case "null" | "embedding":
                return -1
            case "output" | "open" | "stream":
                return source.number
            case "block":
                assert self.block_sublayers is not None
                return min((source.number + 1) * self.block_sublayers, self.num_sublayers) - 1
            case "entry":
                assert self.block_sublayers is not None
                return source.number * self.block_sublayers - 1
