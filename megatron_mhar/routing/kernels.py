"""Triton kernels of a routing chain; :mod:`megatron_mhar.routing.chain` says what is called when.

Shapes: T tokens, d width, H heads of K = d / H. Shared sources lie in one buffer `[rows, T, d]`, the output gradients
of the sites in another, `[sites, T, d]`. A program of most kernels has one token and all its heads: two tiles,
`[HP, K1]` and `[HP, K2]`, cover its heads' channels (K = 160 is 128 + 32; where K is not such a sum, the second tile
has nothing). Sums are fp32 in a fixed order, without atomics: two runs give the same bits. Exponentials are base 2, and
queries come multiplied by log2(e).

Per site t and source i, with r_i = 1/rms(s_i) and qg_t = query_t * norm_weight_t:

    read     logit = r_i < qg_t, s_i >,  out_t = sum_i softmax_i(logit) s_i,  lse_t = log2 sum 2^logit   (online)
    couple   coupling_t = < dout_t, out_t > a head, which is sum_i a_i < dout_t, s_i >; from behind gate or norm
    pull     ds_i = sum_t (a dout_t + dl r_i qg_t) - s_i r_i^2 / d sum dl logit,  dl = a (< dout_t, s_i > - coupling_t)
    own      pull, for a source that no other site reads, and its part of u
    query    u_t = sum_{i, tokens} dl r_i s_i, so that dquery = u norm_weight and dnorm_weight = u query
    null     sum over tokens of a dout and of dl, for a source `[d]` that all tokens share

Sites and rows come in blocks of ``GROUP``. Where every site reads all rows there are, a block of sites reads the rows
of older blocks together (``read_group``), and a block of rows takes its gradients from the sites of later blocks
together (``pull_group``): each row, and each output gradient, is then loaded once for ``GROUP`` of them. Where it pays,
the same kernels serve the second half of a block of sites with the rows of its first half, and the first half of a
block of rows with the sites of its second. ``read`` and ``pull`` do the rest, within spans of ``SPAN`` sites and rows:
blocks or halves.

dl r of all pairs goes to tiles `[H, blocks of sites, T, GROUP rows, GROUP sites]`, one buffer a block of rows.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton compiles these functions and takes their types from what they are called with.
from __future__ import annotations

import os

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
# Numbers that differ from launch to launch: a kernel has no forms of its own for 1, or for multiples of 16.
NUMBERS = (
    "tokens", "row", "site", "first", "last", "start", "stop", "num_sites", "num_rows",
    "first_row", "first_site", "first_block", "num_blocks", "tokens_a_part",
)  # fmt: skip
INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
GROUP: tl.constexpr = tl.constexpr(16)  # sites or rows in a block: rows of a tensor core's tile


@triton.jit
def _tiles(H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr):
    """Heads `[HP]`; offsets of a token's channels in the two tiles, and which of them there are."""
    head = tl.arange(0, HP)
    first = tl.arange(0, K1)
    second = K1 + tl.arange(0, K2)
    offset = head[:, None] * K
    there = (head < H)[:, None]
    return (
        head,
        offset + first[None, :],
        there & (first < K)[None, :],
        offset + second[None, :],
        there & (second < K)[None, :],
    )


@triton.jit
def _load(pointer, at1, there1, at2, there2):
    """Both tiles in fp32."""
    x1 = tl.load(pointer + at1, mask=there1, other=0.0)
    x2 = tl.load(pointer + at2, mask=there2, other=0.0)
    return x1.to(tl.float32), x2.to(tl.float32)


@triton.jit
def _dot(x1, x2, y1, y2):
    """Product over the channels of each head, `[HP]`."""
    return tl.sum(x1 * y1, 1) + tl.sum(x2 * y2, 1)


@triton.jit
def _inverse_rms(x1, x2, eps, D: tl.constexpr):
    return tl.rsqrt(tl.sum(_dot(x1, x2, x1, x2), 0) / D + eps)


@triton.jit(do_not_specialize=NUMBERS)
def add(
    source, sources, inverse_rms, tokens, row, eps,
    H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
):  # fmt: skip
    """Take a source `[T, d]` into ``row``, with 1/rms of each of its tokens."""
    token = tl.program_id(0)
    D: tl.constexpr = H * K
    head, at1, there1, at2, there2 = _tiles(H, K, HP, K1, K2)
    base = token.to(tl.int64) * D
    place = row.to(tl.int64) * tokens * D + base
    x1 = tl.load(source + base + at1, mask=there1, other=0.0)
    x2 = tl.load(source + base + at2, mask=there2, other=0.0)
    tl.store(sources + place + at1, x1, mask=there1)
    tl.store(sources + place + at2, x2, mask=there2)
    r = _inverse_rms(x1.to(tl.float32), x2.to(tl.float32), eps, D)
    tl.store(inverse_rms + row.to(tl.int64) * tokens + token, r)


@triton.jit
def _merge(top, total, mixed1, mixed2, logit, x1, x2):
    """One source more in an online softmax: highest logit so far, sum of weights, weighted sums of sources."""
    higher = tl.maximum(top, logit)
    old = tl.exp2(top - higher)
    new = tl.exp2(logit - higher)
    mixed1 = mixed1 * old[:, None] + new[:, None] * x1
    mixed2 = mixed2 * old[:, None] + new[:, None] * x2
    return higher, total * old + new, mixed1, mixed2


@triton.jit
def _pair(site, row, num_rows, SPAN: tl.constexpr):
    """Place of a site's logit of a row: among those of all pairs, or of the pairs within spans, which are triangles."""
    if SPAN == 0:
        pair = site.to(tl.int64) * num_rows + row
    else:
        i = site % SPAN
        pair = (site // SPAN).to(tl.int64) * (SPAN * (SPAN + 1) // 2) + i * (i + 1) // 2 + row % SPAN
    return pair


@triton.jit
def _program(turn):
    """Number of this program: up in one launch, down in the next, which finds what was used last still in the cache."""
    number = tl.program_id(0)
    return tl.where(turn % 2 == 0, number, tl.num_programs(0) - 1 - number)


@triton.jit(do_not_specialize=NUMBERS)
def read(
    sources, inverse_rms, newest, query, norm_weight, null, gate, stream, norm, older, older_lse, out, given,
    scaled_query, lse, logits, tokens, site, num_rows, start, stop, eps, norm_eps,
    HAS_NEWEST: tl.constexpr, HAS_OWN: tl.constexpr, HAS_NULL: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_OLDER: tl.constexpr, KEEP: tl.constexpr, SPAN: tl.constexpr, H: tl.constexpr,
    K: tl.constexpr, HP: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One site's read of the rows ``start`` to ``stop`` by online softmax, the last one first.

    With ``HAS_NEWEST`` the last one is not there yet: it is taken in on the way, as :func:`add` does. With ``HAS_OWN``
    what is read in its place is a source of the site's own, which stays where it is.
    With ``HAS_OLDER`` what :func:`read_group` has made of older rows is one source more. With ``KEEP`` the logits go
    to ``logits`` `[pairs, T, H]`, for :func:`pull`. With ``HAS_GATE`` ``given`` gets stream + gate * out, rounded
    once: a gate of zero leaves the stream's bits. With ``HAS_NORM`` it gets the RMS norm of what is in ``out``.
    """
    token = _program(site)
    D: tl.constexpr = H * K
    head, at1, there1, at2, there2 = _tiles(H, K, HP, K1, K2)
    q1, q2 = _load(query, at1, there1, at2, there2)
    g1, g2 = _load(norm_weight, at1, there1, at2, there2)
    q1 *= g1 * LOG2_E
    q2 *= g2 * LOG2_E
    if token == 0:
        tl.store(scaled_query + site * D + at1, q1.to(scaled_query.dtype.element_ty), mask=there1)
        tl.store(scaled_query + site * D + at2, q2.to(scaled_query.dtype.element_ty), mask=there2)
    size = tokens.to(tl.int64) * D
    base = token.to(tl.int64) * D
    if HAS_NEWEST:
        n1 = tl.load(newest + base + at1, mask=there1, other=0.0)
        n2 = tl.load(newest + base + at2, mask=there2, other=0.0)
        mixed1 = n1.to(tl.float32)
        mixed2 = n2.to(tl.float32)
        r = _inverse_rms(mixed1, mixed2, eps, D)
        if not HAS_OWN:
            tl.store(sources + stop * size + base + at1, n1, mask=there1)
            tl.store(sources + stop * size + base + at2, n2, mask=there2)
            tl.store(inverse_rms + stop * tokens.to(tl.int64) + token, r)
    else:
        mixed1, mixed2 = _load(sources + stop * size + base, at1, there1, at2, there2)
        r = tl.load(inverse_rms + stop * tokens.to(tl.int64) + token)
    top = _dot(mixed1, mixed2, q1, q2) * r
    total = tl.full([HP], 1.0, tl.float32)
    if KEEP and not HAS_OWN:
        tl.store(logits + (_pair(site, stop, num_rows, SPAN) * tokens + token) * H + head, top, mask=head < H)
    if HAS_NULL:
        x1, x2 = _load(null, at1, there1, at2, there2)
        logit = _dot(x1, x2, q1, q2) * _inverse_rms(x1, x2, eps, D)
        top, total, mixed1, mixed2 = _merge(top, total, mixed1, mixed2, logit, x1, x2)
    if HAS_OLDER:
        slot = site % GROUP
        x1, x2 = _load(older + slot * size + base, at1, there1, at2, there2)
        logit = tl.load(older_lse + slot + token.to(tl.int64) * (H * GROUP) + head * GROUP, mask=head < H, other=0.0)
        top, total, mixed1, mixed2 = _merge(top, total, mixed1, mixed2, logit, x1, x2)
    for row in tl.range(start, stop, num_stages=STAGES):
        x1, x2 = _load(sources + row * size + base, at1, there1, at2, there2)
        logit = _dot(x1, x2, q1, q2) * tl.load(inverse_rms + row * tokens.to(tl.int64) + token)
        if KEEP:
            tl.store(logits + (_pair(site, row, num_rows, SPAN) * tokens + token) * H + head, logit, mask=head < H)
        top, total, mixed1, mixed2 = _merge(top, total, mixed1, mixed2, logit, x1, x2)
    scale = (1 / total)[:, None]
    mixed1 *= scale
    mixed2 *= scale
    tl.store(out + base + at1, mixed1.to(out.dtype.element_ty), mask=there1)
    tl.store(out + base + at2, mixed2.to(out.dtype.element_ty), mask=there2)
    if HAS_GATE:
        strength = tl.load(gate).to(tl.float32)
        x1, x2 = _load(stream + base, at1, there1, at2, there2)
        tl.store(given + base + at1, (x1 + strength * mixed1).to(out.dtype.element_ty), mask=there1)
        tl.store(given + base + at2, (x2 + strength * mixed2).to(out.dtype.element_ty), mask=there2)
    if HAS_NORM:
        x1 = mixed1.to(out.dtype.element_ty).to(tl.float32)  # rounded, as the backward finds it
        x2 = mixed2.to(out.dtype.element_ty).to(tl.float32)
        r = _inverse_rms(x1, x2, norm_eps, D)
        g1, g2 = _load(norm, at1, there1, at2, there2)
        tl.store(given + base + at1, (x1 * r * g1).to(out.dtype.element_ty), mask=there1)
        tl.store(given + base + at2, (x2 * r * g2).to(out.dtype.element_ty), mask=there2)
    tl.store(lse + (site.to(tl.int64) * tokens + token) * H + head, top + tl.log2(total), mask=head < H)


@triton.jit
def _product(x, y, total):
    """`x y`, and ``total``, on tensor cores; exact also where x and y are fp32."""
    if INTERPRETED:  # Triton's interpreter takes the bits of bf16 for integers
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, total, input_precision="ieee")


@triton.jit
def _add_product(total, x, y):
    """``total`` and `x y^T`."""
    return _product(x, tl.trans(y), total)


@triton.jit(do_not_specialize=NUMBERS)
def read_group(
    sources, inverse_rms, high, low, older, older_lse, tokens, first, num_sites, start, stop,
    GO_ON: tl.constexpr, H: tl.constexpr, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows ``start`` to ``stop - 1`` as up to ``GROUP`` sites from ``first`` on read them: each is loaded once for all.

    Exact, as flash attention is: the sites are its queries, the rows its keys and values. One program has one token and
    head. Mixtures go to ``older`` `[GROUP, T, d]`, and log2 of the sums of 2^logit to ``older_lse`` `[T, H, GROUP]`.
    With ``GO_ON`` they go on from what is there. Queries `[sites, d]` come in two parts, of the sources' type, for the
    tensor cores.
    """
    head = tl.program_id(0) % H
    token = tl.program_id(0) // H
    D: tl.constexpr = H * K
    size = tokens.to(tl.int64) * D
    i = tl.arange(0, GROUP)
    first_part = tl.arange(0, K1)
    second_part = K1 + tl.arange(0, K2)
    here = (i < num_sites)[:, None]
    at_query = (first + i)[:, None] * D + head * K
    in1 = here & (first_part < K)[None, :]
    high1 = tl.load(high + at_query + first_part[None, :], mask=in1, other=0.0)
    low1 = tl.load(low + at_query + first_part[None, :], mask=in1, other=0.0)
    if K2 > 1:
        in2 = here & (second_part < K)[None, :]
        high2 = tl.load(high + at_query + second_part[None, :], mask=in2, other=0.0)
        low2 = tl.load(low + at_query + second_part[None, :], mask=in2, other=0.0)
    there_lse = older_lse + tl.program_id(0).to(tl.int64) * GROUP + i
    out = older + i.to(tl.int64)[:, None] * size + token.to(tl.int64) * D + head * K
    if GO_ON:
        top = tl.load(there_lse, mask=i < num_sites, other=0.0)
        total = tl.full([GROUP], 1.0, tl.float32)
        mixed1 = tl.load(out + first_part[None, :], mask=in1, other=0.0).to(tl.float32)
        if K2 > 1:
            mixed2 = tl.load(out + second_part[None, :], mask=in2, other=0.0).to(tl.float32)
    else:
        top = tl.full([GROUP], -1e30, tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        mixed1 = tl.zeros([GROUP, K1], tl.float32)
        if K2 > 1:
            mixed2 = tl.zeros([GROUP, K2], tl.float32)
    base = sources + token.to(tl.int64) * D + head * K
    for at in tl.range(start, stop, GROUP, num_stages=STAGES):
        row = at + i
        there = row < stop
        place = base + row.to(tl.int64)[:, None] * size
        x1 = tl.load(place + first_part[None, :], mask=there[:, None] & (first_part < K)[None, :], other=0.0)
        logit = _add_product(_add_product(None, high1, x1), low1, x1)
        if K2 > 1:
            x2 = tl.load(place + second_part[None, :], mask=there[:, None] & (second_part < K)[None, :], other=0.0)
            logit = _add_product(_add_product(logit, high2, x2), low2, x2)
        r = tl.load(inverse_rms + row * tokens.to(tl.int64) + token, mask=there, other=0.0)
        logit = tl.where(there[None, :], logit * r[None, :], -1e30)
        higher = tl.maximum(top, tl.max(logit, 1))
        old = tl.exp2(top - higher)
        new = tl.exp2(logit - higher[:, None])
        total = total * old + tl.sum(new, 1)
        weight = new.to(sources.dtype.element_ty)
        mixed1 = _product(weight, x1, mixed1 * old[:, None])
        if K2 > 1:
            mixed2 = _product(weight, x2, mixed2 * old[:, None])
        top = higher
    scale = (1 / total)[:, None]
    out_type = older.dtype.element_ty
    tl.store(out + first_part[None, :], (mixed1 * scale).to(out_type), mask=in1)
    if K2 > 1:
        tl.store(out + second_part[None, :], (mixed2 * scale).to(out_type), mask=in2)
    tl.store(there_lse, top + tl.log2(total), mask=i < num_sites)


@triton.jit(do_not_specialize=NUMBERS)
def couple(
    out, grad_out, gate, grad_outs, coupling, grad_gate, tokens, site,
    HAS_GATE: tl.constexpr, H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
):  # fmt: skip
    """Take in a site's output gradient, and its product with the output, a head.

    With ``HAS_GATE`` it is that of what came out of the gate; the gate's own goes to ``grad_gate`` `[T, H]`, in parts.
    """
    token = tl.program_id(0)
    D: tl.constexpr = H * K
    head, at1, there1, at2, there2 = _tiles(H, K, HP, K1, K2)
    base = token.to(tl.int64) * D
    x1, x2 = _load(out + base, at1, there1, at2, there2)
    g1 = tl.load(grad_out + base + at1, mask=there1, other=0.0)
    g2 = tl.load(grad_out + base + at2, mask=there2, other=0.0)
    if HAS_GATE:
        part = _dot(x1, x2, g1.to(tl.float32), g2.to(tl.float32))
        tl.store(grad_gate + (site.to(tl.int64) * tokens + token) * H + head, part, mask=head < H)
        strength = tl.load(gate).to(tl.float32)
        g1 = (g1 * strength).to(g1.dtype)
        g2 = (g2 * strength).to(g2.dtype)
    place = (site.to(tl.int64) * tokens + token) * D
    tl.store(grad_outs + place + at1, g1, mask=there1)
    tl.store(grad_outs + place + at2, g2, mask=there2)
    product = _dot(x1, x2, g1.to(tl.float32), g2.to(tl.float32))
    tl.store(coupling + (site.to(tl.int64) * tokens + token) * H + head, product, mask=head < H)


@triton.jit(do_not_specialize=NUMBERS)
def couple_normed(
    out, grad_normed, norm, grad_outs, coupling, grad_norm, tokens, site, tokens_a_part, eps,
    H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
):  # fmt: skip
    """:func:`couple` behind an RMS norm of the output: what came back to the norm, over one part of the tokens.

    The part's share in the gradient of the norm's weight goes to ``grad_norm`` `[parts, d]`.
    """
    part = tl.program_id(0)
    D: tl.constexpr = H * K
    head, at1, there1, at2, there2 = _tiles(H, K, HP, K1, K2)
    w1, w2 = _load(norm, at1, there1, at2, there2)
    total1 = tl.zeros([HP, K1], tl.float32)
    total2 = tl.zeros([HP, K2], tl.float32)
    start = part * tokens_a_part
    for i in tl.range(0, tl.minimum(tokens_a_part, tokens - start), num_stages=2):
        base = (start + i).to(tl.int64) * D
        x1, x2 = _load(out + base, at1, there1, at2, there2)
        g1, g2 = _load(grad_normed + base, at1, there1, at2, there2)
        r = _inverse_rms(x1, x2, eps, D)
        total1 += g1 * x1 * r
        total2 += g2 * x2 * r
        g1 *= w1
        g2 *= w2
        along = tl.sum(_dot(g1, g2, x1, x2), 0) * r * r / D
        d1 = ((g1 - along * x1) * r).to(grad_outs.dtype.element_ty)
        d2 = ((g2 - along * x2) * r).to(grad_outs.dtype.element_ty)
        place = site.to(tl.int64) * tokens + start + i
        tl.store(grad_outs + place * D + at1, d1, mask=there1)
        tl.store(grad_outs + place * D + at2, d2, mask=there2)
        product = _dot(x1, x2, d1.to(tl.float32), d2.to(tl.float32))
        tl.store(coupling + place * H + head, product, mask=head < H)
    tl.store(grad_norm + part * D + at1, total1, mask=there1)
    tl.store(grad_norm + part * D + at2, total2, mask=there2)


@triton.jit
def _pull(
    total1, total2, radial, site, row, x1, x2, r, g1, g2, coupled, scaled_query, lse, logits, tile, at1, there1, at2,
    there2, statistic, in_heads, tokens, num_rows, KEPT: tl.constexpr, SPAN: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """What one site adds to a source's gradient and to the sum of dl logit; dl r goes to its tile."""
    heads = tokens.to(tl.int64) * H
    q1, q2 = _load(scaled_query + site * D, at1, there1, at2, there2)
    q1 = q1[None, :, :]
    q2 = q2[None, :, :]
    if KEPT:
        logit = tl.load(logits + _pair(site, row, num_rows, SPAN) * heads + statistic, mask=in_heads, other=0.0)
    else:
        logit = (tl.sum(x1 * q1, 2) + tl.sum(x2 * q2, 2)) * r
    weight = tl.exp2(logit - tl.load(lse + site * heads + statistic, mask=in_heads, other=float("inf")))
    dl = weight * (tl.sum(x1 * g1, 2) + tl.sum(x2 * g2, 2) - coupled)
    radial += dl * logit
    dl *= r
    place = tile + site // GROUP * tokens.to(tl.int64) * (GROUP * GROUP) + site % GROUP
    tl.store(place, dl.to(tile.dtype.element_ty), mask=in_heads)
    dl *= LN_2
    total1 += weight[:, :, None] * g1 + dl[:, :, None] * q1
    total2 += weight[:, :, None] * g2 + dl[:, :, None] * q2
    return total1, total2, radial


@triton.jit(do_not_specialize=NUMBERS)
def pull(
    sources, grad, grad_source, out, grad_out, gate, grad_outs, inverse_rms, scaled_query, lse, coupling, grad_gate,
    logits, later, later_radial, tiles, readers, tokens, num_rows, row, first, stop, last, first_block, num_blocks,
    HAS_GRAD: tl.constexpr, HAS_OUT: tl.constexpr, HAS_GATE: tl.constexpr, HAS_LATER: tl.constexpr, KEPT: tl.constexpr,
    SPAN: tl.constexpr, H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradient of one source from the sites ``first`` to ``last - 1`` that read it, and dl r of each pair.

    The sites from ``stop`` on are those of :func:`pull_group`: with ``HAS_LATER`` what it has made of them is added.
    With ``HAS_OUT`` the first site is taken in on the way, as :func:`couple` does. With ``KEPT`` the logits are those
    that :func:`read` kept. Which sites the row's tiles are of is noted in ``readers`` `[GROUP, 2]`, for :func:`query`.
    A program has ``TOKENS`` tokens, which share the queries it loads: tiles `[TOKENS, HP, K1]` and `[TOKENS, HP, K2]`.
    """
    D: tl.constexpr = H * K
    token = _program(row) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    head, at1, there1, at2, there2 = _tiles(H, K, HP, K1, K2)
    size = tokens.to(tl.int64) * D
    base1 = token.to(tl.int64)[:, None, None] * D + at1[None, :, :]
    base2 = token.to(tl.int64)[:, None, None] * D + at2[None, :, :]
    in1 = inside[:, None, None] & there1[None, :, :]
    in2 = inside[:, None, None] & there2[None, :, :]
    in_heads = inside[:, None] & (head < H)[None, :]
    # Statistics of the program's tokens, from those of its first one on, to which pointers are moved: 32 bits do.
    statistic = tl.arange(0, TOKENS)[:, None] * H + head[None, :]
    before = (_program(row) * TOKENS).to(tl.int64) * H
    lse += before
    coupling += before
    if KEPT:
        logits += before
    heads = tokens.to(tl.int64) * H
    x1, x2 = _load(sources + row * size, base1, in1, base2, in2)
    r = tl.load(inverse_rms + row * tokens.to(tl.int64) + token, mask=inside, other=0.0)[:, None]
    tile = (head[None, :] * num_blocks - first_block).to(tl.int64) * tokens + token[:, None]
    tile = tiles + tile * (GROUP * GROUP) + row % GROUP * GROUP
    if tl.program_id(0) == 0:
        tl.store(readers + row % GROUP * 2, first)
        tl.store(readers + row % GROUP * 2 + 1, last)
    if HAS_GRAD:
        total1, total2 = _load(grad, base1, in1, base2, in2)
    else:
        total1 = tl.zeros([TOKENS, HP, K1], tl.float32)
        total2 = tl.zeros([TOKENS, HP, K2], tl.float32)
    radial = tl.zeros([TOKENS, HP], tl.float32)
    if HAS_LATER:
        slot = row % GROUP
        p1, p2 = _load(later + slot * size, base1, in1, base2, in2)
        total1 += p1
        total2 += p2
        radial += tl.load(later_radial + before * GROUP + (statistic * GROUP + slot), mask=in_heads, other=0.0)
    if HAS_OUT:
        o1, o2 = _load(out, base1, in1, base2, in2)
        g1 = tl.load(grad_out + base1, mask=in1, other=0.0)
        g2 = tl.load(grad_out + base2, mask=in2, other=0.0)
        if HAS_GATE:
            part = tl.sum(o1 * g1.to(tl.float32), 2) + tl.sum(o2 * g2.to(tl.float32), 2)
            tl.store(grad_gate + (first * heads + before) + statistic, part, mask=in_heads)
            strength = tl.load(gate).to(tl.float32)
            g1 = (g1 * strength).to(g1.dtype)
            g2 = (g2 * strength).to(g2.dtype)
        tl.store(grad_outs + first * size + base1, g1, mask=in1)
        tl.store(grad_outs + first * size + base2, g2, mask=in2)
        g1 = g1.to(tl.float32)
        g2 = g2.to(tl.float32)
        coupled = tl.sum(o1 * g1, 2) + tl.sum(o2 * g2, 2)
        tl.store(coupling + first * heads + statistic, coupled, mask=in_heads)
        total1, total2, radial = _pull(
            total1, total2, radial, first, row, x1, x2, r, g1, g2, coupled, scaled_query, lse, logits, tile, at1,
            there1, at2, there2, statistic, in_heads, tokens, num_rows, KEPT, SPAN, H, D,
        )  # fmt: skip
        first += 1
    for i in tl.range(0, stop - first, num_stages=STAGES):
        site = first + i
        g1, g2 = _load(grad_outs + site * size, base1, in1, base2, in2)
        coupled = tl.load(coupling + site * heads + statistic, mask=in_heads, other=0.0)
        total1, total2, radial = _pull(
            total1, total2, radial, site, row, x1, x2, r, g1, g2, coupled, scaled_query, lse, logits, tile, at1,
            there1, at2, there2, statistic, in_heads, tokens, num_rows, KEPT, SPAN, H, D,
        )  # fmt: skip
    radius = (r * r / D * LN_2 * tl.sum(radial, 1)[:, None])[:, :, None]
    tl.store(grad_source + base1, (total1 - radius * x1).to(grad_source.dtype.element_ty), mask=in1)
    tl.store(grad_source + base2, (total2 - radius * x2).to(grad_source.dtype.element_ty), mask=in2)


@triton.jit(do_not_specialize=NUMBERS)
def own(
    source, query, norm_weight, grad_outs, lse, coupling, grad_source, partial, tokens, site, tokens_a_part, eps,
    H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
):  # fmt: skip
    """Gradient of a source `[T, d]` that one site alone reads, and its part of u, over one part of the tokens.

    What :func:`read` made of the source is made anew. The part of u goes to ``partial`` `[parts, d]`.
    """
    part = tl.program_id(0)
    D: tl.constexpr = H * K
    head, at1, there1, at2, there2 = _tiles(H, K, HP, K1, K2)
    q1, q2 = _load(query, at1, there1, at2, there2)
    g1, g2 = _load(norm_weight, at1, there1, at2, there2)
    q1 *= g1 * LOG2_E
    q2 *= g2 * LOG2_E
    u1 = tl.zeros([HP, K1], tl.float32)
    u2 = tl.zeros([HP, K2], tl.float32)
    start = part * tokens_a_part
    for i in tl.range(0, tl.minimum(tokens_a_part, tokens - start), num_stages=2):
        base = (start + i).to(tl.int64) * D
        place = site.to(tl.int64) * tokens + start + i
        x1, x2 = _load(source + base, at1, there1, at2, there2)
        g1, g2 = _load(grad_outs + place * D, at1, there1, at2, there2)
        r = _inverse_rms(x1, x2, eps, D)
        logit = _dot(x1, x2, q1, q2) * r
        weight = tl.exp2(logit - tl.load(lse + place * H + head, mask=head < H, other=float("inf")))
        coupled = tl.load(coupling + place * H + head, mask=head < H, other=0.0)
        dl = weight * (_dot(x1, x2, g1, g2) - coupled)
        radius = r * r / D * LN_2 * tl.sum(dl * logit, 0)
        dl *= r
        u1 += dl[:, None] * x1
        u2 += dl[:, None] * x2
        dl *= LN_2
        d1 = weight[:, None] * g1 + dl[:, None] * q1 - radius * x1
        d2 = weight[:, None] * g2 + dl[:, None] * q2 - radius * x2
        tl.store(grad_source + base + at1, d1.to(grad_source.dtype.element_ty), mask=there1)
        tl.store(grad_source + base + at2, d2.to(grad_source.dtype.element_ty), mask=there2)
    tl.store(partial + part * D + at1, u1, mask=there1)
    tl.store(partial + part * D + at2, u2, mask=there2)


@triton.jit(do_not_specialize=NUMBERS)
def pull_group(
    sources, grad_outs, inverse_rms, high, low, lse, coupling, later, later_radial, tiles,
    tokens, first_row, num_rows, start, first, stop, first_block, num_blocks,
    GO_ON: tl.constexpr, H: tl.constexpr, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What :func:`pull` does, for up to ``GROUP`` rows at once: each output gradient is loaded once for all.

    The sites are ``first`` to ``stop - 1``, all of which read all the rows, and ``start`` the first of a block. One
    program has one token and head. Partial gradients go to ``later`` `[GROUP, T, d]` in the sources' type, the sums of
    dl logit to ``later_radial`` `[T, H, GROUP]`; with ``GO_ON`` they go on from what is there.
    """
    head = tl.program_id(0) % H
    token = tl.program_id(0) // H
    D: tl.constexpr = H * K
    dtype = sources.dtype.element_ty
    size = tokens.to(tl.int64) * D
    i = tl.arange(0, GROUP)
    first_part = tl.arange(0, K1)
    second_part = K1 + tl.arange(0, K2)
    here = (i < num_rows)[:, None]
    base = token.to(tl.int64) * D + head * K
    rows = base + (first_row + i).to(tl.int64)[:, None] * size
    in1 = here & (first_part < K)[None, :]
    x1 = tl.load(sources + rows + first_part[None, :], mask=in1, other=0.0)
    if K2 > 1:
        in2 = here & (second_part < K)[None, :]
        x2 = tl.load(sources + rows + second_part[None, :], mask=in2, other=0.0)
    r = tl.load(inverse_rms + (first_row + i) * tokens.to(tl.int64) + token, mask=i < num_rows, other=0.0)[:, None]
    statistic = tl.program_id(0)  # token * H + head: what a launch can count, and so within 32 bits
    there_radial = later_radial + statistic.to(tl.int64) * GROUP + i
    out = later + i.to(tl.int64)[:, None] * size + base
    if GO_ON:
        radial = tl.load(there_radial, mask=i < num_rows, other=0.0)
        total1 = tl.load(out + first_part[None, :], mask=in1, other=0.0).to(tl.float32)
        if K2 > 1:
            total2 = tl.load(out + second_part[None, :], mask=in2, other=0.0).to(tl.float32)
    else:
        radial = tl.zeros([GROUP], tl.float32)
        total1 = tl.zeros([GROUP, K1], tl.float32)
        if K2 > 1:
            total2 = tl.zeros([GROUP, K2], tl.float32)
    heads = tokens.to(tl.int64) * H
    tile = tiles + (head * num_blocks * tokens.to(tl.int64) + token) * (GROUP * GROUP) + i[:, None] * GROUP
    for at in tl.range(start, stop, GROUP, num_stages=STAGES):
        site = at + i
        there = (site >= first) & (site < stop)
        places = base + site.to(tl.int64)[:, None] * size
        at_query = site[:, None] * D + head * K
        from1 = there[:, None] & (first_part < K)[None, :]
        g1 = tl.load(grad_outs + places + first_part[None, :], mask=from1, other=0.0)
        q1 = tl.load(high + at_query + first_part[None, :], mask=from1, other=0.0)
        l1 = tl.load(low + at_query + first_part[None, :], mask=from1, other=0.0)
        own_lse = tl.load(lse + site * heads + statistic, mask=there, other=float("inf"))
        coupled = tl.load(coupling + site * heads + statistic, mask=there, other=0.0)
        logit = _add_product(_add_product(None, x1, q1), x1, l1)
        along = _add_product(None, x1, g1)
        if K2 > 1:
            from2 = there[:, None] & (second_part < K)[None, :]
            g2 = tl.load(grad_outs + places + second_part[None, :], mask=from2, other=0.0)
            q2 = tl.load(high + at_query + second_part[None, :], mask=from2, other=0.0)
            l2 = tl.load(low + at_query + second_part[None, :], mask=from2, other=0.0)
            logit = _add_product(_add_product(logit, x2, q2), x2, l2)
            along = _add_product(along, x2, g2)
        logit *= r
        weight = tl.exp2(logit - own_lse[None, :])
        dl = weight * (along - coupled[None, :])
        radial += tl.sum(dl * logit, 1)
        dl *= r
        # All of the tile's sites are stored: query drops what are none.
        place = tile + (at // GROUP - first_block) * tokens.to(tl.int64) * (GROUP * GROUP) + i[None, :]
        tl.store(place, dl.to(tiles.dtype.element_ty), mask=here)
        weight = weight.to(dtype)
        dl = (dl * LN_2).to(dtype)
        total1 = _product(weight, g1, total1)
        total1 = _product(dl, q1, total1)
        if K2 > 1:
            total2 = _product(weight, g2, total2)
            total2 = _product(dl, q2, total2)
    tl.store(out + first_part[None, :], total1.to(dtype), mask=in1)
    if K2 > 1:
        tl.store(out + second_part[None, :], total2.to(dtype), mask=in2)
    tl.store(there_radial, radial, mask=i < num_rows)


@triton.jit(do_not_specialize=NUMBERS)
def query(
    sources, tiles, readers, partial, tokens, first_row, first_block, num_blocks, num_sites, tokens_a_part,
    H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SITES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add what a block of rows gives to u_t, for ``SITES`` sites and one head, over one part of the tokens.

    ``readers`` `[GROUP, 2]`: first site that each row's tiles are of, and the one after the last (0, 0: no such row).
    ``BLOCK`` is the rows of a step: all of the block, of ``BLOCK / GROUP`` tokens.
    """
    i = tl.program_id(0) * SITES + tl.arange(0, SITES)  # fastest: these programs read the same sources
    site = first_block * GROUP + i
    chunks: tl.constexpr = (K + KP - 1) // KP
    head = tl.program_id(1) // chunks
    part = tl.program_id(2)
    channel = tl.program_id(1) % chunks * KP + tl.arange(0, KP)
    place = partial + ((part * num_sites + site).to(tl.int64) * H + head)[:, None] * K + channel[None, :]
    there = (site < num_sites)[:, None] & (channel < K)[None, :]
    u = tl.load(place, mask=there, other=0.0)
    k = tl.arange(0, BLOCK)
    row = k % GROUP
    first = tl.load(readers + row * 2)
    stop = tl.load(readers + row * 2 + 1)
    # Loaded in runs of GROUP sites; what has not been written of them is dropped after that.
    reads = (site[None, :] >= first[:, None]) & (site[None, :] < stop[:, None])
    there_dl = (i // GROUP < num_blocks)[None, :]
    start = part * tokens_a_part
    end = tl.minimum(start + tokens_a_part, tokens)
    column = (head * num_blocks + i // GROUP).to(tl.int64) * tokens * (GROUP * GROUP) + i % GROUP
    column = tl.max_contiguous(tl.multiple_of(column, GROUP), GROUP)  # what the compiler cannot see
    tile = tiles + row[:, None] * GROUP + column[None, :]
    base = sources + (first_row + row).to(tl.int64)[:, None] * tokens * (H * K) + head * K + channel[None, :]
    for at in tl.range(start, end, BLOCK // GROUP, num_stages=STAGES):
        token = at + k // GROUP
        inside = (token < end)[:, None]
        dl = tl.load(tile + token.to(tl.int64)[:, None] * (GROUP * GROUP), mask=inside & there_dl, other=0.0)
        dl = tl.where(reads, dl, 0.0)
        there_x = inside & (stop > first)[:, None] & (channel < K)[None, :]
        x = tl.load(base + token.to(tl.int64)[:, None] * (H * K), mask=there_x, other=0.0)
        u = _product(tl.trans(dl), x, u)
    tl.store(place, u, mask=there)


@triton.jit(do_not_specialize=NUMBERS)
def null(
    nulls, scaled, grad_outs, lse, coupling, mixed, grad_logit, tokens, first_site, tokens_a_part, eps,
    H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
):  # fmt: skip
    """What the null sources' gradients are made of, over one part of the tokens: sums of a dout and of dl.

    Null sources, and ``scaled``, query * norm_weight, `[n, d]` are those of the sites from ``first_site`` on. Sums:
    `[n, parts, d]` and `[n, parts, H]`.
    """
    part = tl.program_id(0)
    i = tl.program_id(1)
    site = first_site + i
    D: tl.constexpr = H * K
    head, at1, there1, at2, there2 = _tiles(H, K, HP, K1, K2)
    x1, x2 = _load(nulls + i * D, at1, there1, at2, there2)
    q1, q2 = _load(scaled + i * D, at1, there1, at2, there2)
    logit = _dot(x1, x2, q1, q2) * (_inverse_rms(x1, x2, eps, D) * LOG2_E)
    total1 = tl.zeros([HP, K1], tl.float32)
    total2 = tl.zeros([HP, K2], tl.float32)
    total_dl = tl.zeros([HP], tl.float32)
    start = part * tokens_a_part
    for j in tl.range(0, tl.minimum(tokens_a_part, tokens - start), num_stages=3):
        place = site.to(tl.int64) * tokens + start + j
        g1, g2 = _load(grad_outs + place * D, at1, there1, at2, there2)
        weight = tl.exp2(logit - tl.load(lse + place * H + head, mask=head < H, other=float("inf")))
        total1 += weight[:, None] * g1
        total2 += weight[:, None] * g2
        total_dl += weight * (_dot(x1, x2, g1, g2) - tl.load(coupling + place * H + head, mask=head < H, other=0.0))
    out = i.to(tl.int64) * tl.num_programs(0) + part
    tl.store(mixed + out * D + at1, total1, mask=there1)
    tl.store(mixed + out * D + at2, total2, mask=there2)
    tl.store(grad_logit + out * H + head, total_dl, mask=head < H)
