"""Rules of ops that carry a state along: state spaces, linear attention, delta nets, and what
goes with them."""

from __future__ import annotations

import numpy as np

from caravan.worker.rules.registry import F32, I32, I64, Nodes, Tensors, rule

# The widest step of a kernel that has no code for the rest of a row, elements.
_STEP = 64
_STREAMS = 4
_MOST_ROUNDS = 1 << 16


@rule("SSM_CONV", sources=2)
def ssm_conv(nodes: Nodes) -> None:
    """Source [K - 1 + T, C, S] and weights [K, C]; the result is [C, T, S]."""
    d, s0, s1 = nodes.d, nodes.s(0), nodes.s(1)
    _single(nodes, 2)
    width, channels = s1.ne[:, 0], s0.ne[:, 1]
    nodes.require(s1.has_shape(width, channels), "the weights do not match the source")
    nodes.require(
        d.has_shape(channels, s0.ne[:, 0] - width + 1, s0.ne[:, 2]),
        "the result has the wrong shape",
    )
    nodes.require(s0.ne[:, 3] == 1, "the source has four dimensions")
    nodes.require(d.packed & s1.contiguous & (s1.nb[:, 1] == 4 * width), "not contiguous")
    rows = (s0.nb[:, 0] == 4) & (s0.nb[:, 1] == 4 * s0.ne[:, 0])
    nodes.require(rows, "the source's rows are not adjacent")


@rule("SSM_SCAN", sources=7)
def ssm_scan(nodes: Nodes) -> None:
    """States [N, D, H, any], x [D, H, T, S], dt [H, T, S], A [N or 1, H], B and C [N, G, T, S],
    ids [S]; the result has what x has, and behind it K states of each sequence."""
    d, s, x, dt = nodes.d, nodes.s(0), nodes.s(1), nodes.s(2)
    a, b, c, ids = nodes.s(3), nodes.s(4), nodes.s(5), nodes.s(6)
    _single(nodes, 6)
    dim, heads, tokens, seqs = x.ne.T
    width, kept = s.ne[:, 0], nodes.wide(0, 1)[:, 0]
    nodes.require(ids.is_type(I32) & (ids.nb[:, 0] == 4), "the ids are not i32")
    nodes.require(ids.has_shape(seqs), "the ids do not match the sequences")
    nodes.require(s.has_shape(width, dim, heads, s.ne[:, 3]), "the states have the wrong shape")
    # The result has states of the same layout.
    nodes.require(s.dense & dt.contiguous & a.contiguous, "not contiguous")
    nodes.require((dt.nb[:, 0] == 4) & (a.nb[:, 0] == 4), "not contiguous")
    nodes.require(dt.has_shape(heads, tokens, seqs), "dt does not match x")
    nodes.require(a.has_shape(width, heads) | a.has_shape(1, heads), "A does not match the states")
    groups = b.ne[:, 1]
    nodes.require(b.same_shape(c), "B and C differ in shape")
    nodes.require(b.has_shape(width, groups, tokens, seqs), "B does not match the states")
    nodes.require(heads % np.maximum(groups, 1) == 0, "groups do not divide the heads")
    for tensor in (x, b, c):  # the heads' strides are not looked at
        rows = (tensor.nb[:, 0] == 4) & (tensor.nb[:, 1] == 4 * tensor.ne[:, 0])
        nodes.require(rows, "rows are not adjacent")
    nodes.require((kept == 1) | ((kept > 1) & (a.ne[:, 0] == 1)), "states cannot be kept")
    nodes.require(d.contiguous, "the result is not contiguous")
    nodes.require(
        _holds(d, x.nelements, width, dim, heads, seqs, kept), "the result has the wrong size"
    )


def _holds(d: Tensors, plain: I64, *sizes: I64) -> np.ndarray:
    """Its size is `plain` and the product of `sizes`, which might not fit into 64 bits."""
    product = np.ones(len(plain))
    for size in sizes:
        product = product * size
    exact = np.where(product < 2.0**62, product, 0).astype(np.int64)
    return np.asarray((product < 2.0**52) & (d.nelements == plain + exact))


@rule("RWKV_WKV6", sources=6)
def rwkv6(nodes: Nodes) -> None:
    """k, v, r [E, H, T], first [E, H], decay [E, H, T], state of S sequences."""
    first = nodes.s(3)
    width, heads, _ = _linear_attention(nodes, (0, 1, 2, 4), 5)
    nodes.require(first.is_type(F32) & first.contiguous, "not contiguous f32")
    nodes.require(first.nelements == width * heads, "the first factors have the wrong size")


@rule("GATED_LINEAR_ATTN", sources=5)
def gated_linear_attention(nodes: Nodes) -> None:
    """k, v, q, g [E, H, T], state of S sequences."""
    _linear_attention(nodes, (0, 1, 2, 3), 4)


@rule("RWKV_WKV7", sources=7)
def rwkv7(nodes: Nodes) -> None:
    """r, w, k, v, a, b [E, H, T], state of S sequences."""
    width, _, _ = _linear_attention(nodes, (0, 1, 2, 3, 4, 5), 6)
    nodes.require(width % _STEP == 0, "a head is not as wide as the kernel's step")


def _linear_attention(nodes: Nodes, per_token: tuple[int, ...], state: int) -> tuple[I64, ...]:
    """What these have in common; the result is [E * H, T + E * S]: rows, and then states."""
    d, s = nodes.d, nodes.s(state)
    width, heads, tokens, more = nodes.s(0).ne.T
    nodes.require(more == 1, "a source has four dimensions")
    for k in per_token:
        source = nodes.s(k)
        nodes.require(source.is_type(F32) & source.contiguous, "not contiguous f32")
        nodes.require(source.has_shape(width, heads, tokens), "the sources differ in shape")
    seqs = s.ne[:, 1]
    nodes.require(d.is_type(F32) & s.is_type(F32), "result or state is not f32")
    nodes.require(d.contiguous & s.contiguous, "not contiguous")
    nodes.require(s.nelements == width * width * heads * seqs, "the state has the wrong size")
    # The kernel gives each sequence the same number of tokens, and divides by that.
    nodes.require(tokens % np.maximum(seqs, 1) == 0, "the sequences differ in length")
    nodes.require(
        d.has_shape(width * heads, tokens + width * seqs), "the result has the wrong shape"
    )
    return width, heads, tokens


@rule("SOLVE_TRI", sources=2)
def solve_tri(nodes: Nodes) -> None:
    """A lower triangle [N, N, ..] and right sides [M, N, ..]."""
    d, a, b = nodes.d, nodes.s(0), nodes.s(1)
    _single(nodes, 2)
    nodes.require(a.ne[:, 0] == a.ne[:, 1], "the matrix is not square")
    nodes.require((a.ne[:, 1:] == b.ne[:, 1:]).all(axis=1), "matrix and right sides differ")
    nodes.require(d.same_shape(b), "result and right sides differ in shape")
    nodes.require(d.contiguous & a.contiguous & b.contiguous, "not contiguous")


@rule("GATED_DELTA_NET", sources=6)
def gated_delta_net(nodes: Nodes) -> None:
    """q and k [E, Hq, T, Sq], v [E, H, T, S], g [E or 1, H, T, S], beta [1, H, T, S], state
    [E, E, H, S]; the result is [E * H, T * S + K * E * S]."""
    d, q, k, v = nodes.d, nodes.s(0), nodes.s(1), nodes.s(2)
    g, beta, state = nodes.s(3), nodes.s(4), nodes.s(5)
    _single(nodes, 6)
    width, heads, tokens, seqs = v.ne.T
    kept = nodes.wide(0, 1)[:, 0]
    nodes.require(kept >= 1, "no state is kept")
    for source in (q, k):
        fits = source.has_shape(width, source.ne[:, 1], tokens, source.ne[:, 3])
        nodes.require(fits, "queries, keys and values differ in shape")
        repeats = seqs % np.maximum(source.ne[:, 3], 1) == 0
        nodes.require(repeats, "queries or keys do not repeat over the sequences")
    nodes.require(q.packed & k.packed & v.packed, "elements of a row are not adjacent")
    gate = g.has_shape(1, heads, tokens, seqs) | g.has_shape(width, heads, tokens, seqs)
    nodes.require(gate, "the gate has the wrong shape")
    nodes.require(beta.has_shape(1, heads, tokens, seqs), "beta has the wrong shape")
    nodes.require(state.has_shape(width, width, heads, seqs), "the state has the wrong shape")
    nodes.require(g.contiguous & beta.contiguous & state.contiguous, "not contiguous")
    nodes.require(d.contiguous, "the result is not contiguous")
    nodes.require(
        _holds(d, v.nelements, width, width, heads, seqs, kept), "the result has the wrong size"
    )


@rule("DSV4_HC_COMB", sources=3)
def hyper_connection_mixes(nodes: Nodes) -> None:
    """Mixes [24, T], scale [3 or more], base [24]; the result is [4, 4, T]."""
    d, mixes, scale, base = nodes.d, nodes.s(0), nodes.s(1), nodes.s(2)
    _single(nodes, 3)
    length = (2 + _STREAMS) * _STREAMS
    nodes.require(mixes.has_shape(length, mixes.ne[:, 1]), "the mixes have the wrong shape")
    nodes.require((scale.ne[:, 0] >= 3) & (scale.nrows == 1), "the scale has the wrong shape")
    nodes.require(base.has_shape(length), "the base has the wrong shape")
    nodes.require(d.has_shape(_STREAMS, _STREAMS, mixes.ne[:, 1]), "the result has the wrong shape")
    rounds = nodes.params(1)
    nodes.require((rounds > 0) & (rounds <= _MOST_ROUNDS), "no iterations, or too many")


@rule("DSV4_HC_PRE", sources=2)
def hyper_connection_before(nodes: Nodes) -> None:
    """x [E, C, T], weights [C, T] or gates [E, C, T]; the result is [E, T]."""
    d, x, weights = nodes.d, nodes.s(0), nodes.s(1)
    _single(nodes, 2)
    gated = nodes.params(1) != 0
    nodes.require(x.ne[:, 3] == 1, "the source has four dimensions")
    plain = weights.has_shape(x.ne[:, 1], x.ne[:, 2])
    nodes.require(np.where(gated, weights.same_shape(x), plain), "the weights do not fit")
    nodes.require(d.has_shape(x.ne[:, 0], x.ne[:, 2]), "the result has the wrong shape")


@rule("DSV4_HC_POST", sources=3)
def hyper_connection_after(nodes: Nodes) -> None:
    """x [E, T], residual [E, C, T], factors [C, T], mixes [C, C, T]; the result is [E, C, T]."""
    d, x, residual, post = nodes.d, nodes.s(0), nodes.s(1), nodes.s(2)
    _single(nodes, 3)
    length, streams, tokens, more = residual.ne.T
    nodes.require((more == 1) & x.has_shape(length, tokens), "the sources differ in shape")
    nodes.require(post.has_shape(streams, tokens), "the factors have the wrong shape")
    nodes.require(d.same_shape(residual), "the result has the wrong shape")
    mixed = nodes.with_source(3)
    if mixed is not None:
        comb, ne = mixed.s(3), mixed.s(1).ne
        mixed.require(comb.is_type(F32), "the mixes are not f32")
        mixed.require(comb.has_shape(ne[:, 1], ne[:, 1], ne[:, 2]), "the mixes do not fit")


def _single(nodes: Nodes, sources: int) -> None:
    nodes.require(nodes.d.is_type(F32), "the result is not f32")
    for k in range(sources):
        nodes.require(nodes.s(k).is_type(F32), f"source {k} is not f32")
