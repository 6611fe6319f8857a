"""Triton kernels of a routing chain; :mod:`megatron_mhar.routing.chain` says what is called when.

Shapes: T tokens, d width, H heads of K = d / H. Sources lie in one buffer `[rows, T, d]`, the output gradients of the
sites in another, `[sites, T, d]`. A program of most kernels has one token and all its heads: two tiles, `[HP, K1]` and
`[HP, K2]`, cover its heads' channels (K = 160 is 128 + 32; where K is not such a sum, the second tile has nothing).
Sums are fp32 in a fixed order, without atomics: two runs give the same bits. Exponentials are base 2, and queries come
multiplied by log2(e).

Per site t and source i, with r_i = 1/rms(s_i) and qg_t = query_t * norm_weight_t:

    read     logit = r_i < qg_t, s_i >,  out_t = sum_i softmax_i(logit) s_i,  lse_t = log2 sum 2^logit   (online)
    read_group    the same over the rows that exist before a group of sites, for all of them at once
    couple   coupling_t = < dout_t, out_t > a head, which is sum_i a_i < dout_t, s_i >
    pull     ds_i = sum_t (a dout_t + dl r_i qg_t) - s_i r_i^2 / d sum dl logit,  dl = a (< dout_t, s_i > - coupling_t)
    null     sum over tokens of a dout and of dl, for a source `[d]` that all tokens share
    query    u_t = sum_{i, tokens} dl r_i s_i, so that dquery = u norm_weight and dnorm_weight = u query
"""

# mypy: disable-error-code="no-untyped-def"
# Triton compiles these functions and takes their types from what they are called with.
from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
GROUP: tl.constexpr = tl.constexpr(16)  # sites that read their older sources together: rows of a tensor-core tile


@triton.jit(do_not_specialize=["row"])
def add(source, sources, inverse_rms, row, tokens, eps, D: tl.constexpr, DP: tl.constexpr):
    """Take a source `[T, d]` into ``row``, with 1/rms of each of its tokens."""
    token = tl.program_id(0)
    column = tl.arange(0, DP)
    x = tl.load(source + token.to(tl.int64) * D + column, mask=column < D, other=0.0)
    tl.store(sources + (row.to(tl.int64) * tokens + token) * D + column, x, mask=column < D)
    x = x.to(tl.float32)
    tl.store(inverse_rms + row.to(tl.int64) * tokens + token, tl.rsqrt(tl.sum(x * x, 0) / D + eps))


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
def _merge(top, total, mixed1, mixed2, logit, x1, x2):
    """One source more in an online softmax: highest logit so far, sum of weights, weighted sums of sources."""
    higher = tl.maximum(top, logit)
    old = tl.exp2(top - higher)
    new = tl.exp2(logit - higher)
    mixed1 = mixed1 * old[:, None] + new[:, None] * x1
    mixed2 = mixed2 * old[:, None] + new[:, None] * x2
    return higher, total * old + new, mixed1, mixed2


@triton.jit(do_not_specialize=["site", "prefix", "skip", "count"])
def read(
    sources, inverse_rms, query, norm_weight, null, null_inverse_rms, older, older_lse, out, scaled_query, lse,
    tokens, site, prefix, skip, count,
    HAS_NULL: tl.constexpr, HAS_OLDER: tl.constexpr, H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One site's read of ``count`` rows, by online softmax: 0 to ``prefix - 1``, and the others ``skip`` further on.

    With ``HAS_OLDER`` what :func:`read_group` has made of the rows before those is one source more.
    """
    token = tl.program_id(0)
    D: tl.constexpr = H * K
    head, at1, there1, at2, there2 = _tiles(H, K, HP, K1, K2)
    q1, q2 = _load(query, at1, there1, at2, there2)
    g1, g2 = _load(norm_weight, at1, there1, at2, there2)
    q1 *= g1 * LOG2_E
    q2 *= g2 * LOG2_E
    if token == 0:
        tl.store(scaled_query + site * D + at1, q1, mask=there1)
        tl.store(scaled_query + site * D + at2, q2, mask=there2)
    if HAS_NULL:
        mixed1, mixed2 = _load(null, at1, there1, at2, there2)
        top = _dot(mixed1, mixed2, q1, q2) * tl.load(null_inverse_rms)
        total = tl.full([HP], 1.0, tl.float32)
    else:
        mixed1 = tl.zeros([HP, K1], tl.float32)
        mixed2 = tl.zeros([HP, K2], tl.float32)
        top = tl.full([HP], -float("inf"), tl.float32)
        total = tl.zeros([HP], tl.float32)
    size = tokens.to(tl.int64) * D
    base = token.to(tl.int64) * D
    if HAS_OLDER:
        slot = site % GROUP
        x1, x2 = _load(older + slot * size + base, at1, there1, at2, there2)
        logit = tl.load(older_lse + (token * H + head) * GROUP + slot, mask=head < H, other=0.0)
        top, total, mixed1, mixed2 = _merge(top, total, mixed1, mixed2, logit, x1, x2)
    for i in tl.range(0, count, num_stages=STAGES):
        row = tl.where(i < prefix, i, i + skip)
        x1, x2 = _load(sources + row * size + base, at1, there1, at2, there2)
        logit = _dot(x1, x2, q1, q2) * tl.load(inverse_rms + row * tokens.to(tl.int64) + token)
        top, total, mixed1, mixed2 = _merge(top, total, mixed1, mixed2, logit, x1, x2)
    scale = (1 / total)[:, None]
    tl.store(out + base + at1, (mixed1 * scale).to(out.dtype.element_ty), mask=there1)
    tl.store(out + base + at2, (mixed2 * scale).to(out.dtype.element_ty), mask=there2)
    tl.store(lse + (site.to(tl.int64) * tokens + token) * H + head, top + tl.log2(total), mask=head < H)


@triton.jit
def _product(x, y_high, y_low):
    """`x y`, with ``y`` in two parts whose sum has more digits than x's type."""
    product = tl.dot(y_high, tl.trans(x), input_precision="ieee")
    return tl.dot(y_low, tl.trans(x), product, input_precision="ieee")


@triton.jit(do_not_specialize=["first", "num_sites", "count"])
def read_group(
    sources, inverse_rms, scaled_query, older, older_lse, tokens, first, num_sites, count,
    H: tl.constexpr, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows 0 to ``count - 1`` as up to ``GROUP`` sites from ``first`` on read them: each row is loaded once for all.

    Exact, as flash attention is: the sites are its queries, the rows its keys and values. One program has one token and
    head. Mixtures go to ``older`` `[GROUP, T, d]`, and log2 of the sums of 2^logit to ``older_lse`` `[T, H, GROUP]`.
    """
    head = tl.program_id(0) % H
    token = tl.program_id(0) // H
    D: tl.constexpr = H * K
    size = tokens.to(tl.int64) * D
    i = tl.arange(0, GROUP)
    first_part = tl.arange(0, K1)
    second_part = K1 + tl.arange(0, K2)
    here = (i < num_sites)[:, None]
    q_place = scaled_query + (first + i)[:, None] * D + head * K
    q1 = tl.load(q_place + first_part[None, :], mask=here & (first_part < K)[None, :], other=0.0)
    high1 = q1.to(sources.dtype.element_ty)
    low1 = (q1 - high1.to(tl.float32)).to(sources.dtype.element_ty)
    mixed1 = tl.zeros([GROUP, K1], tl.float32)
    if K2 > 1:
        q2 = tl.load(q_place + second_part[None, :], mask=here & (second_part < K)[None, :], other=0.0)
        high2 = q2.to(sources.dtype.element_ty)
        low2 = (q2 - high2.to(tl.float32)).to(sources.dtype.element_ty)
        mixed2 = tl.zeros([GROUP, K2], tl.float32)
    top = tl.full([GROUP], -1e30, tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    base = sources + token.to(tl.int64) * D + head * K
    for start in tl.range(0, count, GROUP, num_stages=STAGES):
        row = start + i
        there = row < count
        place = base + row.to(tl.int64)[:, None] * size
        x1 = tl.load(place + first_part[None, :], mask=there[:, None] & (first_part < K)[None, :], other=0.0)
        logit = _product(x1, high1, low1)
        if K2 > 1:
            x2 = tl.load(place + second_part[None, :], mask=there[:, None] & (second_part < K)[None, :], other=0.0)
            logit += _product(x2, high2, low2)
        r = tl.load(inverse_rms + row * tokens.to(tl.int64) + token, mask=there, other=0.0)
        logit = tl.where(there[None, :], logit * r[None, :], -1e30)
        higher = tl.maximum(top, tl.max(logit, 1))
        old = tl.exp2(top - higher)
        new = tl.exp2(logit - higher[:, None])
        total = total * old + tl.sum(new, 1)
        weight = new.to(sources.dtype.element_ty)
        mixed1 = tl.dot(weight, x1, mixed1 * old[:, None], input_precision="ieee")
        if K2 > 1:
            mixed2 = tl.dot(weight, x2, mixed2 * old[:, None], input_precision="ieee")
        top = higher
    scale = (1 / total)[:, None]
    out = older + i.to(tl.int64)[:, None] * size + token.to(tl.int64) * D + head * K
    out_type = older.dtype.element_ty
    tl.store(out + first_part[None, :], (mixed1 * scale).to(out_type), mask=here & (first_part < K)[None, :])
    if K2 > 1:
        tl.store(out + second_part[None, :], (mixed2 * scale).to(out_type), mask=here & (second_part < K)[None, :])
    tl.store(older_lse + (token * H + head) * GROUP + i, top + tl.log2(total), mask=i < num_sites)


@triton.jit(do_not_specialize=["site"])
def couple(
    out, grad_out, grad_outs, coupling, tokens, site,
    H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
):  # fmt: skip
    """Take in a site's output gradient, and its product with the output, a head."""
    token = tl.program_id(0)
    D: tl.constexpr = H * K
    head, at1, there1, at2, there2 = _tiles(H, K, HP, K1, K2)
    base = token.to(tl.int64) * D
    x1, x2 = _load(out + base, at1, there1, at2, there2)
    g1 = tl.load(grad_out + base + at1, mask=there1, other=0.0)
    g2 = tl.load(grad_out + base + at2, mask=there2, other=0.0)
    place = (site.to(tl.int64) * tokens + token) * D
    tl.store(grad_outs + place + at1, g1, mask=there1)
    tl.store(grad_outs + place + at2, g2, mask=there2)
    product = _dot(x1, x2, g1.to(tl.float32), g2.to(tl.float32))
    tl.store(coupling + (site.to(tl.int64) * tokens + token) * H + head, product, mask=head < H)


@triton.jit(do_not_specialize=["row", "first", "count"])
def pull(
    sources, grad, grad_source, grad_outs, inverse_rms, scaled_query, lse, coupling, grad_logit,
    tokens, row, first, count,
    HAS_GRAD: tl.constexpr, H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradient of one source from all ``count`` sites that read it, and dl * r of each pair `[H, count, T]`.

    A program has ``TOKENS`` tokens, which share the queries it loads: tiles `[TOKENS, HP, K1]` and `[TOKENS, HP, K2]`.
    """
    D: tl.constexpr = H * K
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    head, at1, there1, at2, there2 = _tiles(H, K, HP, K1, K2)
    size = tokens.to(tl.int64) * D
    base1 = token.to(tl.int64)[:, None, None] * D + at1[None, :, :]
    base2 = token.to(tl.int64)[:, None, None] * D + at2[None, :, :]
    in1 = inside[:, None, None] & there1[None, :, :]
    in2 = inside[:, None, None] & there2[None, :, :]
    in_heads = inside[:, None] & (head < H)[None, :]
    x1, x2 = _load(sources + row * size, base1, in1, base2, in2)
    r = tl.load(inverse_rms + row * tokens.to(tl.int64) + token, mask=inside, other=0.0)[:, None]
    if HAS_GRAD:
        total1, total2 = _load(grad, base1, in1, base2, in2)
    else:
        total1 = tl.zeros([TOKENS, HP, K1], tl.float32)
        total2 = tl.zeros([TOKENS, HP, K2], tl.float32)
    radial = tl.zeros([TOKENS, HP], tl.float32)
    for i in tl.range(0, count, num_stages=STAGES):
        site = first + i
        q1, q2 = _load(scaled_query + site * D, at1, there1, at2, there2)
        g1, g2 = _load(grad_outs + site * size, base1, in1, base2, in2)
        statistic = (site * tokens.to(tl.int64) + token)[:, None] * H + head[None, :]
        logit = (tl.sum(x1 * q1[None, :, :], 2) + tl.sum(x2 * q2[None, :, :], 2)) * r
        weight = tl.exp2(logit - tl.load(lse + statistic, mask=in_heads, other=float("inf")))
        along = tl.sum(x1 * g1, 2) + tl.sum(x2 * g2, 2)
        dl = weight * (along - tl.load(coupling + statistic, mask=in_heads, other=0.0))
        radial += dl * logit
        dl *= r
        place = (head.to(tl.int64)[None, :] * count + i) * tokens + token[:, None]
        tl.store(grad_logit + place, dl.to(grad_logit.dtype.element_ty), mask=in_heads)
        dl *= LN_2
        total1 += weight[:, :, None] * g1 + dl[:, :, None] * q1[None, :, :]
        total2 += weight[:, :, None] * g2 + dl[:, :, None] * q2[None, :, :]
    radius = (r * r / D * LN_2 * tl.sum(radial, 1)[:, None])[:, :, None]
    tl.store(grad_source + base1, (total1 - radius * x1).to(grad_source.dtype.element_ty), mask=in1)
    tl.store(grad_source + base2, (total2 - radius * x2).to(grad_source.dtype.element_ty), mask=in2)


@triton.jit(do_not_specialize=["row", "first", "count"])
def query(
    sources, grad_logit, partial, tokens, row, first, count, num_sites, tokens_a_part,
    H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SITES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add one source's part of u_t, for ``SITES`` sites and one head, over one part of the tokens."""
    i = tl.program_id(0) * SITES + tl.arange(0, SITES)  # fastest: these programs read the same sources
    head = tl.program_id(1)
    part = tl.program_id(2)
    channel = tl.arange(0, KP)
    place = partial + ((part * num_sites + first + i).to(tl.int64) * H + head)[:, None] * K + channel[None, :]
    there = (i < count)[:, None] & (channel < K)[None, :]
    u = tl.load(place, mask=there, other=0.0)
    start = part * tokens_a_part
    stop = tl.minimum(start + tokens_a_part, tokens)
    base = sources + row * tokens.to(tl.int64) * (H * K) + head * K + channel[None, :]
    for at in tl.range(start, stop, BLOCK, num_stages=STAGES):
        token = at + tl.arange(0, BLOCK)
        inside = token < stop
        place_dl = (head.to(tl.int64) * count + i)[:, None] * tokens + token[None, :]
        dl = tl.load(grad_logit + place_dl, mask=(i < count)[:, None] & inside[None, :], other=0.0)
        there_x = inside[:, None] & (channel < K)[None, :]
        x = tl.load(base + token.to(tl.int64)[:, None] * (H * K), mask=there_x, other=0.0)
        u = tl.dot(dl, x, u, input_precision="ieee")
    tl.store(place, u, mask=there)


@triton.jit(do_not_specialize=["site"])
def null(
    source, inverse_rms, grad_outs, scaled_query, lse, coupling, mixed, grad_logit, tokens, site, tokens_a_part,
    H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
):  # fmt: skip
    """What a null source's gradient is made of, over one part of the tokens: sums of a dout `[d]` and of dl `[H]`."""
    part = tl.program_id(0)
    D: tl.constexpr = H * K
    head, at1, there1, at2, there2 = _tiles(H, K, HP, K1, K2)
    x1, x2 = _load(source, at1, there1, at2, there2)
    q1, q2 = _load(scaled_query + site * D, at1, there1, at2, there2)
    logit = _dot(x1, x2, q1, q2) * tl.load(inverse_rms)
    total1 = tl.zeros([HP, K1], tl.float32)
    total2 = tl.zeros([HP, K2], tl.float32)
    total_dl = tl.zeros([HP], tl.float32)
    start = part * tokens_a_part
    for i in tl.range(0, tl.minimum(tokens_a_part, tokens - start)):
        place = site.to(tl.int64) * tokens + start + i
        g1, g2 = _load(grad_outs + place * D, at1, there1, at2, there2)
        weight = tl.exp2(logit - tl.load(lse + place * H + head, mask=head < H, other=float("inf")))
        total1 += weight[:, None] * g1
        total2 += weight[:, None] * g2
        total_dl += weight * (_dot(x1, x2, g1, g2) - tl.load(coupling + place * H + head, mask=head < H, other=0.0))
    tl.store(mixed + part * D + at1, total1, mask=there1)
    tl.store(mixed + part * D + at2, total2, mask=there2)
    tl.store(grad_logit + part * H + head, total_dl, mask=head < H)
