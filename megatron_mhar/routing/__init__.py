"""The routing operator: tensors in and out, no Megatron.

:func:`route` reads N sources by a softmax over depth, one softmax a head, each head on its own slice of the width:

    k_i      = RMSNorm(s_i; g)
    a_i[h]   = softmax over i of < q[h], k_i[h] >
    out[h]   = sum over i of a_i[h] * s_i[h]

(Multi-Head Attention Residuals, arXiv 2607.27230; with one head, Attention Residuals, arXiv 2603.15031.)
"""

from megatron_mhar.routing.api import BACKENDS, resolve_backend, route
from megatron_mhar.routing.reference import depth_weights

__all__ = ["BACKENDS", "depth_weights", "resolve_backend", "route"]
