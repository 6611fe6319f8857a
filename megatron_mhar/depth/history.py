"""The depth history: the sources of one micro-batch on one stage.

Ownership. A history is born in a stack's forward with the embedding, or with what another stage sent, is handed from
sublayer to sublayer, and dies with the forward; no module and no global keeps it, so any number of micro-batches may be
in flight. It alone holds the sources: sites read them through :meth:`DepthHistory.sources`, the stack appends outputs
through :meth:`DepthHistory.append`, and a source is let go after the last site that reads it (what backward needs stays
with autograd). A source is never written to once it is in the history. :meth:`DepthHistory.state` and
:meth:`DepthHistory.after` are the two ends of every cut through depth: between pipeline stages, and around sublayers
that are run again in the backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from megatron_mhar.depth.sites import EMBEDDING, NULL, DepthTable, Source

if TYPE_CHECKING:
    from megatron_mhar.routing.chain import Reader


class SiteObserver(Protocol):
    """What probes hand to a stack to see every routed read; it must not change what it sees."""

    def __call__(self, site: int, sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor) -> None:
        """``sources`` are what site number ``site`` is about to read with these parameters."""


class DepthHistory:
    """Sources, open block and stream between sublayers.

    Args:
        table: sources of every site.
        embedding: `[s, b, d]` (`[s / tp, b, d]` under sequence parallelism), the source e.
        observer: called at each routing site, see :class:`SiteObserver`.
        fused: takes the sources as they come to be, and reads them, where reads are fused.

    Attributes:
        stream: the residual stream of methods that keep one (for hyper-connections, n streams `[n, s, b, d]`).
        next_site: site that is read next, also the number of sublayers that have run.
    """

    def __init__(
        self,
        table: DepthTable,
        embedding: Tensor,
        observer: SiteObserver | None = None,
        fused: Reader | None = None,
    ) -> None:
        self.table = table
        self.observer = observer
        self.fused = fused
        self.next_site = 0
        self.stream: Tensor | None = embedding if table.keeps_stream else None
        self._sources: dict[Source, Tensor] = {}
        self._open: Tensor | None = None  # sum of the outputs of the block that is not closed yet
        self._last_entry: Tensor | None = None
        if table.released:
            self._make_entry(0)
        elif table.num_sites:
            self._keep(EMBEDDING, embedding)

    @classmethod
    def after(
        cls,
        table: DepthTable,
        sublayer: int,
        state: Mapping[Source, Tensor],
        observer: SiteObserver | None = None,
        fused: Reader | None = None,
    ) -> DepthHistory:
        """History as it stands after ``sublayer`` (-1: before the first).

        Args:
            state: what :meth:`state` gave there, or of it what ``table.used_by`` names if no more is to be run; its
                sources are in the chain of ``fused`` already.
        """
        if sublayer == -1:
            return cls(table, state[EMBEDDING], observer, fused)
        history = cls.__new__(cls)
        history.table, history.observer, history.fused = table, observer, fused
        history.next_site = sublayer + 1
        history.stream = state.get(Source("stream", sublayer))
        history._open = state.get(Source("open", sublayer))
        history._sources = {name: tensor for name, tensor in state.items() if name in table.last_read}
        entries = [name for name in state if name.kind == "entry"]
        history._last_entry = state[max(entries)] if entries else None
        return history

    def state(self, names: Sequence[Source] | None = None) -> dict[Source, Tensor]:
        """All that the sublayers to come need, by name: ``table.state_after`` the last one that has run.

        Args:
            names: of them, only these.
        """
        names = self.table.state_after(self.next_site - 1) if names is None else names
        return {name: self._tensor(name) for name in names}

    def _tensor(self, name: Source) -> Tensor:
        tensor: Tensor | None
        if name.kind == "stream" or self.next_site == 0:
            tensor = self.stream if self.stream is not None else self._sources[EMBEDDING]
        else:
            tensor = self._open if name.kind == "open" else self._sources[name]
        assert tensor is not None, name
        return tensor

    def sources(self, null: Tensor | None = None) -> list[Tensor]:
        """Tensors that the next site reads, in the table's order.

        Args:
            null: `[d]`, the site's null source, where the method has one.

        Returns:
            Tensors `[s, b, d]`, and ``null`` first if the site reads it. Those that no later site reads are let go.
        """
        names = self.table.reads[self.next_site]
        tensors = [null if name == NULL else self._sources[name] for name in names]
        for name in names:
            if name != NULL and self.table.last_read[name] == self.next_site:
                del self._sources[name]
        assert all(t is not None for t in tensors), "a site of this method reads a null source, none given"
        return tensors  # type: ignore[return-value]

    def append(self, output: Tensor) -> None:
        """Take the output `[s, b, d]` of the sublayer that has just run."""
        sublayer = self.next_site
        self.next_site += 1
        if self.table.keeps_stream:
            assert self.stream is not None
            self.stream = self.stream + output
        if self.table.released:
            # The last entry is the stream up to here less the entry before it; nothing follows the last block.
            if self.table.closes_block(sublayer) and self.next_site < self.table.num_sublayers:
                self._make_entry(self.next_site // self.table.block_sublayers)  # type: ignore[operator]
        elif self.table.block_sublayers is not None:
            total = output if self._open is None else self._open + output
            if self.table.closes_block(sublayer):
                self._keep(Source("block", sublayer // self.table.block_sublayers), total)
                self._open = None
            else:
                self._open = self._keep(Source("open", sublayer), total)
        else:
            self._keep(Source("output", sublayer), output)

    def replace_stream(self, stream: Tensor) -> None:
        """For methods that mix their streams themselves: the streams after the sublayer that has just run."""
        self.next_site += 1
        self.stream = stream

    def output(self) -> Tensor:
        """What the final norm reads where there is no final site: the stream, `[s, b, d]` (the mean of n streams)."""
        assert self.stream is not None
        return self.stream.mean(0) if self.stream.dim() > 3 else self.stream

    def _keep(self, name: Source, tensor: Tensor) -> Tensor:
        """Take a source in if it is one; what is returned stands for it from here on."""
        if name in self.table.last_read:
            if self.fused is not None:
                tensor = self.fused.add(self.table.rows[name], tensor)
            self._sources[name] = tensor
        return tensor

    def _make_entry(self, block: int) -> None:
        assert self.stream is not None
        if self.fused is not None:
            self.fused.settle()  # the last entry is looked at here, perhaps before a site has read it
        entry = self.stream if self._last_entry is None else self.stream - self._last_entry
        self._last_entry = self._keep(Source("entry", block), entry)

    @property
    def held(self) -> tuple[Source, ...]:
        """Names of the sources held now."""
        return tuple(self._sources)
