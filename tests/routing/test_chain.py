"""Fused kernels against the reference: in Triton's interpreter without a GPU, compiled where there is one."""

import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_mhar.routing import resolve_backend, route, through_gate
from megatron_mhar.routing.chain import SiteParameters, _Buffers, start
from megatron_mhar.routing.eager import route_eager
from megatron_mhar.routing.plan import ReadPlan, Reads
from megatron_mhar.routing.reference import route_reference
from megatron_mhar.routing.schedule import describe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = 1e-5  # relative, in fp32

SHAPES = [  # sites, tokens, d, H
    (1, 5, 8, 2),
    (4, 3, 40, 5),
    (5, 2, 1280, 8),  # heads of 160 channels: two tiles
    (4, 3, 1000, 8),  # heads of 125: a tile that is not full
    (3, 2, 1000, 1),
    (3, 2, 896, 2),  # heads of 448: two tiles, of which one is not full
    (6, 2, 96, 16),
    (35, 2, 64, 2),  # three groups of sites
    (18, 2, 320, 2),  # heads of 160 channels in groups
]


def full(sites):
    return tuple(tuple(range(t + 1)) for t in range(sites))


def random(*shape, seed, scale=1.0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * scale).to(DEVICE, dtype)


def parameters(sites, d, null, scale, dtype, gate=False):
    return [
        SiteParameters(
            random(d, seed=3 * t, scale=scale, dtype=dtype),
            1 + random(d, seed=3 * t + 1, scale=0.2, dtype=dtype),
            random(d, seed=3 * t + 2, dtype=dtype) if null else None,
            random(1, seed=500 + t, dtype=dtype) if gate else None,
        )
        for t in range(sites)
    ]


def model(rows, sites, embedding, heads, fused, *, made, plain=route_reference, cut=None, norms=None):
    """A model whose sublayers are tanh: output, sources. ``made`` names the row that each output becomes.

    With ``cut`` the sites from there on have a chain of their own, as on another pipeline stage. ``norms`` are weights
    of norms that the reads go through, None for a site without.
    """
    eps = 1e-3  # not that of the keys
    plan = ReadPlan(rows, heads)
    every = dict(enumerate(sites))
    reader = start(plan, {t: every[t] for t in range(cut or len(sites))}) if fused else None

    def add(row, tensor):
        return reader.add(row, tensor) if reader else tensor

    sources = {0: add(0, embedding)}
    for t, read in enumerate(rows):
        if reader and t == cut:
            reader = start(plan, {site: every[site] for site in range(cut, len(sites))})
            sources = {row: reader.add(row, source) for row, source in sources.items()}
        own = [sources[row] for row in read]
        query, norm_weight, null, gate = sites[t]
        stream = None if gate is None else embedding * 0.5
        weight = norms[t] if norms else None
        if reader:
            norm = None if weight is None else SimpleNamespace(weight=weight, eps=eps)
            h = reader.read(t, stream, norm, None if plan.reads[t].own is None else own[-1])
        else:
            h = plain(([] if null is None else [null]) + own, query, norm_weight, heads, plan.eps)
            h = through_gate(h, gate, stream)
            h = h if weight is None else torch.nn.functional.rms_norm(h, weight.shape, weight, eps)
        out = torch.tanh(h * 1.5) + 0.1 * h
        for row in made[t]:
            sources[row] = add(row, out)
    return out, sources


def gradients(rows, sites, embedding, heads, fused, *, made, extra=(), plain=route_reference, cut=None, norms=()):
    """Loss and gradients of embedding and parameters; sources in ``extra`` are also used by someone else.

    The reference is run in float64.
    """
    dtype = torch.float64 if not fused and plain is route_reference else embedding.dtype
    sites = [
        SiteParameters(*(None if p is None else p.to(dtype, copy=True).requires_grad_() for p in s)) for s in sites
    ]
    embedding = embedding.to(dtype, copy=True).requires_grad_()
    norms = [None if weight is None else weight.to(dtype, copy=True).requires_grad_() for weight in norms]
    out, sources = model(rows, sites, embedding, heads, fused, made=made, plain=plain, cut=cut, norms=norms)
    weight = torch.linspace(-1, 1, out.shape[-1], device=DEVICE, dtype=torch.float64)
    loss = (out.double() * weight).sum() + sum((sources[row].double() ** 2).sum() for row in extra)
    loss.backward()
    grads = [p.grad for s in sites for p in s if p is not None]
    return loss.detach(), embedding.grad, grads, [weight.grad for weight in norms if weight is not None]


def chained(sites):
    return {t: (t + 1,) if t + 1 < sites else () for t in range(sites)}


def error(found, expected):
    return (found.double() - expected.double()).norm()


def assert_close(found, expected, tolerance):
    """Relative to the whole tensor's norm, and absolutely where that is nothing (a site with one source)."""
    assert error(found, expected) <= tolerance * max(expected.double().norm(), 1e-2 * expected.numel() ** 0.5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("delta", [False, True], ids=["replacement", "delta"])
def test_a_chain_equals_the_reference(shape, delta):
    """Replacement, and the delta form: null sources, and gates that add to a stream."""
    count, tokens, d, heads = shape
    sites = parameters(count, d, delta, 2 * (heads / d) ** 0.5, torch.float32, gate=delta)
    embedding = random(tokens, d, seed=99)
    assert_equals_reference(full(count), sites, embedding, heads, made=chained(count), extra=(0, count // 2))


@pytest.mark.parametrize("width", [64, 160])  # heads of 32 and 80 channels: blocks whole, and in halves
@pytest.mark.parametrize("cut", [5, 16, 27])
def test_a_chain_may_begin_at_any_site(width, cut):
    """Within a block, within its second half, at one: what the sites of a later pipeline stage read and send back."""
    sites, embedding = parameters(36, width, False, 0.3, torch.float32), random(2, width, seed=9)
    assert_equals_reference(full(36), sites, embedding, 2, made=chained(36), cut=cut)


@pytest.mark.parametrize("shape", [(1, 3, 8, 2), (3, 5, 1000, 8), (3, 2, 896, 2), (35, 2, 64, 2), (18, 2, 320, 2)])
def test_reads_may_end_with_a_norm(shape):
    """That of the next sublayer, at some sites: its output, what comes back through it, its weight's gradient."""
    count, tokens, d, heads = shape
    sites = parameters(count, d, False, 2 * (heads / d) ** 0.5, torch.float32)
    norms = [None if t % 5 == 1 else 1 + random(d, seed=700 + t, scale=0.2) for t in range(count)]
    given = {"made": chained(count), "extra": (0, count // 2), "norms": norms}
    assert_equals_reference(full(count), sites, random(tokens, d, seed=99), heads, **given)


def assert_equals_reference(rows, sites, embedding, heads, **given):
    truth, chain = (gradients(rows, sites, embedding, heads, fused, **given) for fused in (False, True))
    plain = gradients(rows, sites, embedding, heads, False, plain=route_eager, **given)
    assert_close(chain[0], truth[0], EXACT)
    for true, found in zip([*truth[2], *truth[3]], [*chain[2], *chain[3]], strict=True):
        assert_close(found, true, 10 * EXACT)  # one site's sum may cancel
    kinds = sum(p is not None for p in sites[0])

    def by_kind(results):
        each = [results[2][kind::kinds] for kind in range(kinds)] + [results[3]] * bool(results[3])
        return [results[1], *map(torch.cat, each)]

    for true, found, other in zip(by_kind(truth), by_kind(chain), by_kind(plain), strict=True):
        # Where softmaxes are sharp or sums cancel, fp32 itself is no better than 1e-5: then as good as plain fp32.
        if error(found, true) > 4 * error(other, true):
            assert_close(found, true, EXACT)


BLOCKS = ((0,), (0, 3), (0, 1), (0, 1, 4), (0, 1, 2))
MADE_OF_BLOCKS = {0: (3,), 1: (1,), 2: (4,), 3: (2,), 4: ()}


@pytest.mark.parametrize("kind", ["plain", "gated", "normed"])
@pytest.mark.parametrize(
    ("width", "heads", "cut"), [(24, 2, None), (24, 2, 1), (24, 2, 2), (24, 2, 3), (1000, 8, None), (320, 2, None)]
)
def test_rows_of_blocks(width, heads, kind, cut):
    """Closed blocks first, an open sum that one site reads: what the block forms give, on one stage or two."""
    assert ReadPlan(BLOCKS, heads).reads == (
        Reads(1, None), Reads(1, 3), Reads(2, None), Reads(2, 4), Reads(3, None)
    )  # fmt: skip
    sites = parameters(5, width, True, 2 * (heads / width) ** 0.5, torch.float32, kind == "gated")
    norms = [1 + random(width, seed=700 + t, scale=0.2) if kind == "normed" else None for t in range(5)]
    embedding = random(2, 3, width, seed=7)
    assert_equals_reference(BLOCKS, sites, embedding, heads, made=MADE_OF_BLOCKS, norms=norms, cut=cut, extra=(1, 3))


@pytest.mark.parametrize("rows", [((0,), (0, 2), (0, 2)), ((0,), (0, 1), (0,)), ((0, 2, 1),), ((1,), (0, 1))])
def test_rows_that_no_chain_reads_are_refused(rows):
    with pytest.raises(AssertionError, match="rows? of"):
        ReadPlan(rows, 1)


def test_a_sites_own_source_is_not_kept():
    """Nobody holds it once its site has read it, unless autograd needs it: recomputation and evaluations let it go."""
    sites = dict(enumerate(parameters(5, 24, False, 1.0, torch.float32)))
    for needed in (False, True):
        reader = start(ReadPlan(BLOCKS, 2), sites)
        reader.add(0, random(3, 24, seed=1))
        own = random(3, 24, seed=2).requires_grad_(needed)
        held = weakref.ref(own)
        out = reader.read(1, own=reader.add(3, own))
        del own
        assert (held() is not None) == needed and out.requires_grad == needed


def test_what_a_group_has_read_is_let_go_with_the_last_site(monkeypatch):
    """The logits and their gradients come next, and a group's reads are as large as its sites' outputs."""
    held = []
    new_group = _Buffers.new_group

    def watched(buffers):
        group = new_group(buffers)
        held.append(weakref.ref(group))
        return group

    monkeypatch.setattr(_Buffers, "new_group", watched)
    reader = start(ReadPlan(full(18), 2), dict(enumerate(parameters(18, 64, False, 1.0, torch.float32))))
    for site in range(18):
        reader.add(site, random(3, 64, seed=site).requires_grad_())
        reader.read(site)
        assert [group() is not None for group in held] == [site == 16] * (site >= 16)


@pytest.mark.parametrize("scale", [0.0, 30.0])
@pytest.mark.parametrize(
    ("count", "width", "heads", "delta"),
    [(4, 32, 4, False), (18, 64, 2, False), (18, 320, 2, False), (4, 32, 4, True), (17, 160, 2, True)],
    ids=["site by site", "groups", "halves of groups", "delta", "delta in groups and halves"],
)
def test_large_and_zero_queries(count, width, heads, delta, scale):
    sites, embedding = parameters(count, width, delta, scale, torch.float32, gate=delta), random(2, width, seed=1)
    one, other = (gradients(full(count), sites, embedding, heads, fused, made=chained(count)) for fused in (0, 1))
    for found, expected in zip(*([*r[:2], torch.cat(r[2])] for r in (other, one)), strict=True):
        assert torch.isfinite(found).all()
        # Logits of 500 are known to 3e-5 in fp32, and so many times that are weights and their gradients.
        assert_close(found, expected, 1e-3)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("scale", [0.0, 100.0])
def test_large_and_zero_queries_in_bf16(scale):
    """One-hot softmaxes over groups and halves: nothing overflows, and each site gives the source that it picks."""
    sites = 40
    for width, heads in ((512, 8), (1280, 8), (512, 1)):
        given = dict(enumerate(parameters(sites, width, False, scale, torch.bfloat16)))
        reader, sources = start(ReadPlan(full(sites), heads), given), []
        for site in range(sites):
            sources.append(random(9, width, seed=site, dtype=torch.bfloat16))
            reader.add(site, sources[-1])
            found = reader.read(site)
            query, norm_weight = (p.double() for p in given[site][:2])
            assert torch.isfinite(found).all()
            truth = route_reference([s.double() for s in sources], query, norm_weight, heads, 1e-6)
            assert_close(found, truth, 2**-7)


@pytest.mark.parametrize("sources", [1, 3, 9])
def test_bf16_is_within_two_roundings_of_the_truth(sources):
    tokens, d, heads = 6, 64, 4
    s = [random(tokens, d, seed=i, dtype=torch.bfloat16) for i in range(sources)]
    query, norm = random(d, seed=50, dtype=torch.bfloat16), 1 + random(d, seed=51, scale=0.2, dtype=torch.bfloat16)
    truth = route_reference([x.double() for x in s], query.double(), norm.double(), heads, 1e-6)
    found = route(s, query, norm, num_heads=heads, backend="triton")
    # Where a GPU rounds to bf16, Triton's interpreter cuts off: as wrong as two roundings.
    allowed = 2 if DEVICE == "cuda" else 3
    one_rounding = (truth.to(torch.bfloat16).double() - truth).norm()
    assert (found.double() - truth).norm() <= allowed * one_rounding


@pytest.mark.parametrize("shape", [(4, 5, 64, 4), (18, 3, 64, 2), (18, 2, 160, 2)])
def test_gradients_in_bf16(shape):
    """In groups and halves too. Through all of a model's sites bf16 is a sixth off where it is cut off, not rounded.

    An interpreter that takes bf16 for integers is off by orders of magnitude.
    """
    count, tokens, d, heads = shape
    sites = parameters(count, d, False, 1.0, torch.bfloat16)
    embedding = random(tokens, d, seed=99, dtype=torch.bfloat16)
    truth, found = (gradients(full(count), sites, embedding, heads, fused, made=chained(count)) for fused in (0, 1))
    for kind in (slice(0, None, 2), slice(1, None, 2)):
        assert_close(torch.cat(found[2][kind]), torch.cat(truth[2][kind]), 0.25)
    assert_close(found[1], truth[1], 0.25)


@pytest.mark.parametrize("trainable", list(itertools.product([True, False], repeat=4)))
def test_every_subset_frozen(trainable):
    """Of a source, a query, a norm weight of keys and the norm behind a read."""
    embedding, behind = random(4, 24, seed=1), random(24, seed=60)
    (query, norm, null, _), *rest = parameters(2, 24, True, 1.0, torch.float32)
    found = []
    for fused in (False, True):
        leaves = [x.clone().requires_grad_(t) for x, t in zip((embedding, query, norm, behind), trainable)]
        sites = [SiteParameters(leaves[1], leaves[2], null), *rest]
        out, _ = model(full(2), sites, leaves[0], 3, fused, made=chained(2), norms=[leaves[3], None])
        if any(trainable):
            out.square().sum().backward()
        else:
            assert not out.requires_grad
        found.append([leaf.grad for leaf in leaves])
    for one, other, wanted in zip(*found, trainable):
        assert (one is not None) == (other is not None) == wanted
        if wanted:
            assert_close(other, one, EXACT)


def spread(tensor):
    """The same values, every second element of memory; what is between is NaN."""
    return torch.stack([tensor, torch.full_like(tensor, float("nan"))], -1)[..., 0]


@pytest.mark.parametrize("kind", ["query", "norm_weight", "null_source", "stream", "norm", "own"])
@pytest.mark.parametrize("lie", [spread, lambda tensor: tensor[:1].expand_as(tensor)], ids=["spread", "expanded"])
def test_tensors_may_lie_in_memory_as_they_like(kind, lie):
    """Each kind by itself, as a column of something wider and as one number, or row, for all. A gate is one number."""
    (site,) = parameters(1, 16, True, 1.0, torch.float32, gate=kind == "stream")
    behind = {"stream": random(3, 16, seed=8)} if kind == "stream" else {"norm": random(16, seed=9)}
    if kind == "own":
        behind["own"] = random(3, 16, seed=21)
    given = {name: tensor for name, tensor in (site._asdict() | behind).items() if tensor is not None}
    given[kind] = lie(given[kind])
    found = []
    for tensors in (given, {name: torch.empty(t.shape, device=DEVICE).copy_(t) for name, t in given.items()}):
        leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
        stream, norm = leaves.get("stream"), leaves.get("norm")
        own_site = SiteParameters(*(leaves.get(name) for name in SiteParameters._fields))
        reader = start(ReadPlan(((0, 2) if kind == "own" else (0, 1),), 2), {0: own_site})
        for row in range(1 if kind == "own" else 2):
            reader.add(row, random(3, 16, seed=20 + row))
        behind_norm = None if norm is None else SimpleNamespace(weight=norm, eps=1e-3)
        out = reader.read(0, stream, behind_norm, leaves.get("own"))
        found.append([out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_two_chains_in_flight_and_in_any_order():
    sites = [
        SiteParameters(*(None if p is None else p.requires_grad_() for p in s))
        for s in parameters(3, 24, False, 1.0, torch.float32)
    ]
    embeddings = [random(4, 24, seed=i).requires_grad_() for i in range(2)]
    alone = []
    for order in ((0,), (1,), (0, 1), (1, 0)):
        outs = {i: model(full(3), sites, embeddings[i], 3, True, made=chained(3))[0] for i in (0, 1) if i in order}
        for i in order:
            outs[i].square().sum().backward()
        alone.append([x.grad.clone() for x in (embeddings[order[0]], sites[1].query)])
        for x in (*embeddings, *(p for s in sites for p in s if p is not None)):
            x.grad = None
    assert torch.equal(alone[2][0], alone[0][0]) and torch.equal(alone[3][0], alone[1][0])
    torch.testing.assert_close(alone[2][1], alone[0][1] + alone[1][1])
    torch.testing.assert_close(alone[3][1], alone[2][1])


@pytest.mark.parametrize(
    ("count", "width", "heads", "delta", "cut"),
    [
        (5, 40, 5, False, None),
        (35, 64, 2, False, None),
        (19, 320, 2, False, None),
        (5, 40, 5, True, 2),
        (17, 160, 2, True, 5),
    ],
    ids=["site by site", "groups", "halves of groups", "delta", "delta in groups and halves"],
)
def test_repeats_bit_for_bit_on_poisoned_memory(monkeypatch, count, width, heads, delta, cut):
    """Fresh memory is full of NaN: nothing is read that has not been written. With gates, or norms behind the reads."""
    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def poisoned(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-(2**30))

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poisoned(new_empty(*a, **k)))
    dtype = torch.bfloat16
    sites = parameters(count, width, delta, 1.0, dtype, gate=delta)
    embedding = random(3, width, seed=1, dtype=dtype)
    norms = [None if delta or t % 5 == 1 else random(width, seed=700 + t, dtype=dtype) for t in range(count)]
    given = {"made": chained(count), "extra": (2,), "norms": norms, "cut": cut}
    first, second = (gradients(full(count), sites, embedding, heads, True, **given) for _ in range(2))
    for a, b in zip([*first[:2], *first[2], *first[3]], [*second[:2], *second[2], *second[3]], strict=True):
        assert torch.isfinite(a).all() and torch.equal(a, b)


@pytest.mark.parametrize("fused", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("kind", ["query", "norm_weight", "null_source", "gate"])
@pytest.mark.parametrize(("count", "changed"), [(2, 1), (18, 17)], ids=["site by site", "groups"])
def test_parameters_changed_before_the_backward_are_refused(count, changed, kind, frozen, fused):
    """As by any backend: their gradients, and those of sources, would be of other values."""
    sites = [SiteParameters(*(p.requires_grad_(not frozen) for p in site))
             for site in parameters(count, 32, True, 1.0, torch.float32, gate=True)]  # fmt: skip
    given = {"made": chained(count), "plain": route_eager}
    embedding = random(2, 32, seed=1).requires_grad_()
    out, _ = model(full(count), sites, embedding, 2, fused, **given)
    with torch.no_grad():
        getattr(sites[changed], kind).mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("count", [3, 18], ids=["site by site", "groups"])
def test_parameters_changed_before_they_are_read_again_are_refused(count):
    """Recomputed reads see the new values, and what groups have read is of the old ones."""
    sites = [SiteParameters(*(None if p is None else p.requires_grad_() for p in site))
             for site in parameters(count, 32, False, 1.0, torch.float32)]  # fmt: skip
    reader = start(ReadPlan(full(count), 2), dict(enumerate(sites)))

    def unit(site, x, ticket):
        here = reader.at(ticket)
        here.add(site, x)
        return torch.tanh(here.read(site)), here.ticket

    x, ticket = random(2, 32, seed=1).requires_grad_(), reader.ticket
    for site in range(count):
        x, ticket = checkpoint(unit, site, x, ticket, use_reentrant=True)
    with torch.no_grad():
        sites[count - 2].query.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


@pytest.mark.parametrize("own", [(2, 24), (4, 24), (3, 1, 24)])
def test_an_own_source_of_another_shape_is_refused(own):
    reader = start(ReadPlan(BLOCKS, 2), dict(enumerate(parameters(5, 24, False, 1.0, torch.float32))))
    reader.add(0, random(3, 24, seed=1))
    with pytest.raises(AssertionError, match="site 1: its own source is"):
        reader.read(1, own=random(*own, seed=2))


def test_a_site_that_reads_nothing_is_refused():
    reader = start(ReadPlan(((), (0,)), 2), dict(enumerate(parameters(2, 24, True, 1.0, torch.float32))))
    reader.add(0, random(3, 24, seed=1))
    with pytest.raises(AssertionError, match="site 0 reads no row"):
        reader.read(0)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_a_second_backward_is_refused(frozen, normed):
    sites = [SiteParameters(*(None if p is None else p.requires_grad_(not frozen) for p in s))
             for s in parameters(2, 8, False, 1.0, torch.float32)]  # fmt: skip
    norms = [random(8, seed=60 + t) for t in range(2)] if normed else None
    out, _ = model(full(2), sites, random(3, 8, seed=1).requires_grad_(), 2, True, made=chained(2), norms=norms)
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has been through its backward"):
        out.sum().backward()


def test_a_loss_on_an_early_read_alone_is_refused():
    sites = [SiteParameters(*(None if p is None else p.requires_grad_() for p in s))
             for s in parameters(2, 8, False, 1.0, torch.float32)]  # fmt: skip
    reader = start(ReadPlan(full(2), 2), dict(enumerate(sites)))
    reader.add(0, random(3, 8, seed=1).requires_grad_())
    early = reader.read(0)
    reader.add(1, early)
    reader.read(1)
    with pytest.raises(RuntimeError, match=r"left out its sources \[1\]: the loss must depend on all of the chain"):
        early.sum().backward()


def test_one_call_takes_shared_sources_and_stacked_ones():
    query, norm = random(24, seed=1), random(24, seed=2)
    sources = [random(24, seed=3), random(2, 3, 24, seed=4), random(24, seed=5), random(2, 3, 24, seed=6)]
    for given in (sources, torch.stack(sources[1::2]), sources[:1]):
        leaves = (
            given.clone().requires_grad_() if torch.is_tensor(given) else [s.clone().requires_grad_() for s in given]
        )
        results = []
        for backend in ("reference", "triton"):
            out = route(leaves, query, norm, num_heads=3, backend=backend)
            grads = torch.autograd.grad(out.square().sum(), [leaves] if torch.is_tensor(leaves) else leaves)
            results.append((out, grads))
        torch.testing.assert_close(results[1][0], results[0][0])
        for one, other in zip(results[0][1], results[1][1], strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


def test_backends_by_device():
    assert resolve_backend("auto", "cuda") == "triton" and resolve_backend("auto", "cpu") == "torch"
    assert resolve_backend("auto", "cuda", torch.float64) == "torch"
    with pytest.raises(ValueError, match="fp32, bf16 or fp16: torch.float64 given"):
        route([random(2, 8, seed=1).double()], random(8, seed=2), random(8, seed=3), num_heads=2, backend="triton")


def test_without_a_gpu_it_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs Triton and a GPU"):
        resolve_backend("triton", "cpu")


@pytest.mark.parametrize(
    ("sites", "width", "heads", "words"),
    [
        (73, 1280, 8, "in groups of 16 sites, and in halves of them"),
        (25, 512, 8, "in groups of 16 sites"),
        (9, 4096, 8, "site by site"),  # fewer sites than a group
        (73, 1280, 1, "site by site"),  # a head too wide for a program
    ],
)
def test_the_schedule_in_words(sites, width, heads, words):
    assert describe(ReadPlan(full(sites), heads), width) == words
