"""The routing operator against an independent loop, gradcheck, special cases and what it keeps for backward."""

import itertools
import math

import pytest
import torch

from megatron_mhar.routing import BACKENDS, depth_weights, resolve_backend, route

# Those of float64 and of any device; tests/routing/test_chain.py is about the fused kernels.
PLAIN = [backend for backend in BACKENDS if backend != "triton"]

SHAPES = [  # N, tokens, d, H
    (1, 5, 8, 2),
    (3, 4, 12, 3),
    (7, 3, 40, 5),
    (5, 2, 1280, 8),
    (4, 3, 1000, 1),
    (25, 2, 96, 16),
]


def make(n, tokens, d, seed=0, dtype=torch.float64, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    sources = [torch.randn(tokens, d, generator=g, dtype=dtype) * (1 + i) for i in range(n)]
    query = torch.randn(d, generator=g, dtype=dtype) * scale
    norm = torch.rand(d, generator=g, dtype=dtype) + 0.5
    return sources, query, norm


def by_hand(sources, query, norm, num_heads, eps=1e-6):
    """The formula read off the paper, in Python numbers: loops over tokens, heads and sources."""
    tokens, d = sources[0].shape
    width = d // num_heads
    q, g = query.tolist(), norm.tolist()
    rows = [s.tolist() for s in sources]
    out = []
    for t in range(tokens):
        line = []
        for h in range(num_heads):
            channels = range(h * width, (h + 1) * width)
            logits = []
            for row in rows:
                rms = math.sqrt(math.fsum(x * x for x in row[t]) / d + eps)
                logits.append(math.fsum(q[c] * g[c] * row[t][c] / rms for c in channels))
            top = max(logits)
            e = [math.exp(x - top) for x in logits]
            line += [math.fsum(a * row[t][c] for a, row in zip(e, rows)) / math.fsum(e) for c in channels]
        out.append(line)
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_loop_over_tokens_heads_and_sources(shape, backend):
    n, tokens, d, heads = shape
    sources, query, norm = make(n, tokens, d)
    out = route(sources, query, norm, num_heads=heads, backend=backend)
    torch.testing.assert_close(out, by_hand(sources, query, norm, heads), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("shape", [(1, 3, 4, 2), (3, 2, 12, 3), (4, 2, 10, 1)])
def test_gradcheck(shape, backend):
    n, tokens, d, heads = shape
    sources, query, norm = make(n, tokens, d)
    null = torch.linspace(-1, 1, d, dtype=torch.float64)

    def f(query, norm, *sources):
        return route(sources, query, norm, num_heads=heads, backend=backend)

    def stacked(query, norm, sources):
        return route(sources, query, norm, num_heads=heads, backend=backend)

    inputs = [x.requires_grad_() for x in (query, norm, *sources)]
    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradcheck(f, [*inputs[:2], null.requires_grad_(), *inputs[2:]])
    assert torch.autograd.gradcheck(f, [*inputs[:2], null])
    assert torch.autograd.gradcheck(stacked, [*inputs[:2], torch.stack(sources).detach().requires_grad_()])


@pytest.mark.parametrize("backend", PLAIN)
def test_one_head_is_the_single_head_formula(backend):
    """AttnRes (arXiv 2603.15031): softmax over depth of <w, RMSNorm(s)>, values are the raw sources."""
    sources, query, norm = make(6, 5, 24)
    values = torch.stack(sources)
    keys = torch.nn.functional.rms_norm(values, (24,), norm, 1e-6)
    expected = torch.einsum("nt,ntd->td", torch.softmax(keys @ query, 0), values)
    out = route(sources, query, norm, num_heads=1, backend=backend)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", PLAIN)
def test_zero_query_gives_the_plain_mean(backend):
    sources, query, norm = make(7, 4, 20)
    out = route(sources, torch.zeros_like(query), norm, num_heads=5, backend=backend)
    torch.testing.assert_close(out, torch.stack(sources).mean(0), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("backend", PLAIN)
def test_one_source_passes_through_and_moves_no_query(backend):
    (source,), query, norm = make(1, 4, 20)
    leaves = [x.requires_grad_() for x in (source, query, norm)]
    out = route([source], query, norm, num_heads=4, backend=backend)
    assert torch.equal(out, source)
    out.sum().backward()
    assert torch.equal(leaves[0].grad, torch.ones_like(source))
    assert not leaves[1].grad.any() and not leaves[2].grad.any()


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("scale", [0.0, 0.1, 5.0])
def test_torch_backend_follows_the_reference(dtype, tolerance, scale):
    sources, query, norm = make(9, 33, 160, dtype=torch.float32, scale=scale)
    null = torch.randn(160, generator=torch.Generator().manual_seed(1)) * 0.1
    grad = torch.randn(33, 160, generator=torch.Generator().manual_seed(2))
    results = []
    for kind, backend in ((torch.float64, "reference"), (dtype, "torch")):
        leaves = [x.to(dtype).to(kind).requires_grad_() for x in (query, norm, null, *sources)]
        out = route(leaves[2:], leaves[0], leaves[1], num_heads=8, backend=backend)
        assert out.dtype == kind
        out.backward(grad.to(dtype).to(kind))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for want, got in zip(*results):
        error = (got.double() - want).norm() / want.norm().clamp_min(1e-3)
        assert error < tolerance


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("trainable", list(itertools.product([True, False], repeat=3)))
def test_every_subset_frozen(backend, trainable):
    """Whatever of {queries, norms, sources} is frozen, the rest gets the gradient it gets with nothing frozen."""
    sources, query, norm = make(5, 6, 24)

    def gradients(flags):
        q, g = (x.clone().requires_grad_(flag) for x, flag in zip((query, norm), flags))
        s = [x.clone().requires_grad_(flags[2]) for x in sources]
        out = route(s, q, g, num_heads=3, backend=backend)
        assert out.requires_grad == any(flags)
        if out.requires_grad:
            out.square().sum().backward()
        return [x.grad for x in (q, g, *s)]

    full = gradients((True, True, True))
    for got, want, flag in zip(gradients(trainable), full, [*trainable[:2], *[trainable[2]] * 5]):
        assert (got is not None) == flag
        if flag:
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_one_frozen_source_among_trainable_ones():
    sources, query, norm = make(4, 3, 8)
    leaves = [s.requires_grad_(i != 2) for i, s in enumerate(sources)]
    route(leaves, query, norm, num_heads=2, backend="torch").sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [False, False, True, False]


@pytest.mark.parametrize("backend", [b for b in PLAIN if b != "reference"])
@pytest.mark.parametrize("stacked", [False, True])
def test_saves_only_sources_weights_and_statistics(backend, stacked):
    n, tokens, d, heads = 6, 64, 96, 4
    sources, query, norm = make(n, tokens, d, dtype=torch.float32)
    given = [x.requires_grad_() for x in ([torch.stack(sources).detach()] if stacked else sources)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        route(given[0] if stacked else given, query.requires_grad_(), norm, num_heads=heads, backend=backend)
    own = {x.untyped_storage().data_ptr() for x in (*given, query, norm)}
    extra = {t.untyped_storage().data_ptr(): t.numel() for t in saved if t.untyped_storage().data_ptr() not in own}
    assert sum(extra.values()) <= n * tokens * heads + n * tokens


@pytest.mark.parametrize("backend", PLAIN)
def test_repeats_bit_for_bit_and_changes_no_source(backend):
    sources, query, norm = make(5, 7, 32, dtype=torch.float32)
    before = [s.clone() for s in sources]
    runs = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in (query, norm, *sources)]
        out = route(leaves[2:], *leaves[:2], num_heads=4, backend=backend)
        out.square().sum().backward()
        runs.append([out, *(x.grad for x in leaves)])
        assert all(torch.equal(a, b) for a, b in zip(leaves[2:], before))
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_leading_shape_is_kept():
    sources, query, norm = make(3, 12, 16)
    flat = route(sources, query, norm, num_heads=2)
    shaped = route([s.view(2, 3, 2, 16) for s in sources], query, norm, num_heads=2)
    assert torch.equal(shaped, flat.view(2, 3, 2, 16))


def test_depth_weights_sum_to_one_and_make_the_output():
    sources, query, norm = make(5, 4, 24)
    weights = depth_weights(sources, query, norm, num_heads=3)
    assert weights.shape == (5, 4, 3)
    torch.testing.assert_close(weights.sum(0), torch.ones(4, 3, dtype=torch.float64))
    out = (weights[..., None] * torch.stack(sources).unflatten(-1, (3, 8))).sum(0).flatten(-2)
    torch.testing.assert_close(out, route(sources, query, norm, num_heads=3))


@pytest.mark.parametrize(
    "sources,query,norm,heads,backend,word",
    [
        ([], torch.ones(4), torch.ones(4), 1, "auto", "no source"),
        ([torch.ones(2, 4)], torch.ones(4), torch.ones(4), 3, "auto", "num_heads 3"),
        ([torch.ones(2, 4)], torch.ones(4), torch.ones(4), 0, "auto", "num_heads 0"),
        ([torch.ones(2, 4)], torch.ones(4), torch.ones(5), 1, "auto", "norm_weight"),
        ([torch.ones(2, 4), torch.ones(3, 4)], torch.ones(4), torch.ones(4), 1, "auto", "one shape"),
        ([torch.ones(2, 5)], torch.ones(4), torch.ones(4), 1, "auto", "sources must be"),
        ([torch.ones(2, 4), torch.ones(2, 4).half()], torch.ones(4), torch.ones(4), 1, "auto", "one dtype"),
        ([torch.ones(2, 4)], torch.ones(4), torch.ones(4), 1, "fast", "backend 'fast'"),
    ],
)
def test_bad_arguments_are_named(sources, query, norm, heads, backend, word):
    with pytest.raises(ValueError, match=word):
        route(sources, query, norm, num_heads=heads, backend=backend)


def test_auto_is_visible():
    assert resolve_backend("auto", "cpu") == "torch"
