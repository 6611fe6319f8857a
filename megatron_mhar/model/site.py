"""Sites as modules: the parameters between two sublayers, how a sublayer's input is read and its output taken in."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megatron_mhar.depth.history import DepthHistory
from megatron_mhar.depth.residual import DELTA, ROUTED, ResidualConfig
from megatron_mhar.model.norm import SiteNorm
from megatron_mhar.routing import route, through_gate


class Site(nn.Module):
    """What stands before a sublayer where nothing is learned: the input is the stream, the output is added to it.

    Reading is the module's forward, so that megatron-core's hooks see a site's parameters used (under parameter-gather
    overlap they are not there before); :meth:`write` gives the sublayer's output back.

    The parameters of the subclasses are replicated over tensor-parallel ranks and held in ``config.params_dtype``.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self._config = config

    def _parameter(self, value: Tensor) -> nn.Parameter:
        parameter = nn.Parameter(value.to(device=torch.cuda.current_device(), dtype=self._config.params_dtype))
        # Under sequence parallelism each rank sees a part of the tokens: megatron-core then sums the gradients.
        parameter.sequence_parallel = self._config.sequence_parallel  # type: ignore[attr-defined]
        return parameter

    def forward(self, history: DepthHistory) -> Tensor:
        """Input `[s, b, d]` of the next sublayer, or of the final norm."""
        assert history.stream is not None
        return history.stream

    def write(self, history: DepthHistory, output: Tensor) -> None:
        """Take in the sublayer's output `[s, b, d]`."""
        history.append(output)


class RoutingSite(Site):
    """Softmax over depth, H heads. The delta form adds the mixture to the stream through a gate.

    Parameters (all 1-D): ``query`` `[d]`, zero at first, so that every softmax starts uniform; ``norm_weight`` `[d]`,
    ones; for delta also ``gate`` `[1]` and, if the method has one, ``null_source`` `[d]`, zeros.
    """

    def __init__(self, config: TransformerConfig, residual: ResidualConfig) -> None:
        super().__init__(config)
        self.residual = residual
        width = config.hidden_size
        self.query = self._parameter(torch.zeros(width))
        self.norm_weight = self._parameter(torch.ones(width))
        self.gate = self._parameter(torch.full((1,), residual.initial_gate)) if residual.method in DELTA else None
        self.null_source = self._parameter(torch.zeros(width)) if residual.has_null_source else None

    def forward(self, history: DepthHistory | None = None, norm: SiteNorm | None = None) -> Tensor | None:  # type: ignore[override]
        """Routed sources `[s, b, d]`, through ``norm`` if there is one; for delta, stream + gate * routed sources.

        Without a history it does nothing but be called: hooks that wait for its parameters have then run.
        """
        if history is None:
            return None
        site, sources = history.next_site, history.sources(self.null_source)
        if history.observer is not None:
            if history.fused is not None:
                history.fused.settle()
            history.observer(site, sources, self.query, self.norm_weight)
        shared = self.null_source is not None
        if history.fused is not None and len(sources) > shared:  # the released form's first site reads null alone
            own = None if history.table.read_plan.reads[site].own is None else sources[-1]
            return history.fused.read(site, None if self.gate is None else history.stream, norm, own)
        routed = route(
            sources,
            self.query,
            self.norm_weight,
            num_heads=self.residual.num_heads,
            eps=self.residual.eps,
            backend=self.residual.backend,
        )
        out = through_gate(routed, self.gate, history.stream)
        return out if norm is None else norm.normalize(out)


class HyperConnectionSite(Site):
    """Static hyper-connections (Zhu et al. 2024): n streams, read by softmax(alpha), written by S := A S + beta o.

    Parameters: ``alpha`` `[n]` = 0.02 N(0,1), ``mixing`` `[n, n]` = I + 0.02 N(0,1), ``beta`` `[n]` = e_0 + same noise.
    The noise comes from a generator of its own, numbered by torch's seed and the layer: the other weights of a model do
    not depend on the method.
    """

    NOISE = 0.02

    def __init__(self, config: TransformerConfig, residual: ResidualConfig, layer_number: int) -> None:
        super().__init__(config)
        n = self.num_streams = residual.num_streams
        noise = torch.Generator().manual_seed((torch.initial_seed() * 1_000_003 + layer_number) % 2**63)

        def perturbed(value: Tensor) -> nn.Parameter:
            return self._parameter(value + self.NOISE * torch.randn(value.shape, generator=noise))

        self.alpha = perturbed(torch.zeros(n))
        self.mixing = perturbed(torch.eye(n))
        self.beta = perturbed(torch.eye(n)[0])

    def forward(self, history: DepthHistory) -> Tensor:
        """Weighted sum `[s, b, d]` of the n streams `[n, s, b, d]`, all of which are the embedding at first."""
        assert history.stream is not None
        if history.next_site == 0:
            history.stream = history.stream.expand(self.num_streams, *history.stream.shape)
        weights = self.alpha.float().softmax(0).to(history.stream.dtype)
        return torch.tensordot(weights, history.stream, dims=1)

    def write(self, history: DepthHistory, output: Tensor) -> None:
        """Mix the streams and spread the output over them."""
        assert history.stream is not None
        mixed = torch.tensordot(self.mixing.to(output.dtype), history.stream, dims=1)
        history.replace_stream(mixed + self.beta.to(output.dtype).view(-1, 1, 1, 1) * output)


def build_site(config: TransformerConfig, residual: ResidualConfig, layer_number: int) -> Site:
    """Site of one sublayer; ``layer_number`` counts sublayers from 1 over all stages."""
    if residual.method in ROUTED:
        return RoutingSite(config, residual)
    if residual.method == "hyper_connections":
        return HyperConnectionSite(config, residual, layer_number)
    return Site(config)
