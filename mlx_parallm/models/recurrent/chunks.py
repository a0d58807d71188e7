"""The recurrences of linear-attention and state-space layers in chunks: differentiable, ordinary
MLX operations.

    gated_delta        S ← e^g S; S ← S + k ⊗ β(v - Sᵀk); o = Sᵀq: a gate a head, or one for each
                       channel of the key
    linear_scan        h ← a h + b, element by element
    selective_scan     Mamba 1: h ← exp(δA) h + δ B x; y = C h

mlx-lm computes them token by token: a graph of O(T) operations that a gradient keeps alive, or a
Metal kernel without a gradient. In chunks of C tokens nearly everything is a product of matrices
over all chunks at once, and one state a chunk is kept. Formulas: Yang et al., arXiv:2406.06484 (the
WY form) and arXiv:2412.06464 (gates); Kimi Team, arXiv:2510.26692 (a gate a channel). All of it is
float32 inside, whatever comes in.

Decays come as they are, between 0 and 1. The decay between two tokens is a product of decays of
whole blocks of 1, 2, 4 … tokens, without logarithms or quotients: nothing overflows, however strong
decays are, and weak ones behind strong ones stay exact.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_parallm.models.attention_parts import LOG2_E
from mlx_parallm.models.ops import exp2_minus

CHUNK = 64  # tokens between two states that are kept
SCAN_CHUNK = 32
SELECTIVE_CHUNK = 16
SCAN_PART = 256  # tokens of a selective scan whose states are held at a time


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    decay: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[mx.array, mx.array]:
    """The gated delta rule over T tokens; returns the outputs [B, T, Hv, Dv] in q's type and the
    state after them.

    q, k: [B, T, Hk, Dk], Hk a divisor of Hv; v: [B, T, Hv, Dv]; beta: [B, T, Hv]; decay e^g: [B, T,
    Hv], or [B, T, Hv, Dk] for a gate a channel; state: [B, Hv, Dv, Dk], None = 0; mask: [B, T],
    False for padding: it leaves the state as it is, and its output means nothing. As
    mlx-lm's `gated_delta_ops`.
    """
    dtype, (batch, length, heads, _) = q.dtype, v.shape
    if mask is not None:
        beta = mx.where(mask[..., None], beta, 0)
        decay = mx.where(mask.reshape(*mask.shape, *[1] * (decay.ndim - 2)), decay, 1)
    if decay.ndim == 3:
        decay = decay[..., None]
    if q.shape[2] != heads:
        q, k = (mx.repeat(x, heads // x.shape[2], axis=2) for x in (q, k))
    chunk = min(chunk, 1 << (length - 1).bit_length())
    q, k, v, beta = (_in_chunks(x, chunk) for x in (q, k, v, beta[..., None]))
    terms = delta_terms(q, k, v, _in_chunks(decay, chunk, 1.0), beta)
    queries, keys, within, u, w, faded = terms
    state = (
        mx.zeros((batch, heads, k.shape[-1], v.shape[-1]))
        if state is None
        else _float(state.swapaxes(-1, -2))
    )
    outputs = []
    for n in range(u.shape[2]):
        fresh = u[:, :, n] - w[:, :, n] @ state
        outputs.append(queries[:, :, n] @ state + within[:, :, n] @ fresh)
        state = faded[:, :, n] * state + keys[:, :, n] @ fresh
    y = mx.stack(outputs, axis=2).reshape(batch, heads, -1, v.shape[-1])[:, :, :length]
    return y.swapaxes(1, 2).astype(dtype), state.swapaxes(-1, -2)


def delta_terms(
    q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array
) -> tuple[mx.array, ...]:
    """Compute the part of the gated delta rule's chunks that needs no state.

    Args:
        q, k: […, C, Dk] float32; v: […, C, Dv]; decay: […, C, 1 or Dk]; beta: […, C, 1].

    Returns: queries, keys, within, u, w and faded. Of them a state S […, Dk, Dv] makes `fresh` = u
    - w S, the outputs queries S + within fresh, and the next state faded S + keys fresh.
    """
    weighted = beta * k
    within, inverse, from_start, to_end = _triangles(q, k, weighted, decay)
    u, w = inverse @ (beta * v), inverse @ (weighted * from_start)
    queries, keys = q * from_start, (k * to_end).swapaxes(-1, -2)
    return queries, keys, within, u, w, from_start[..., -1, :, None]  # the last: […, Dk or 1, 1]


def _float(x: mx.array) -> mx.array:
    return x.astype(mx.float32)


def _in_chunks(x: mx.array, chunk: int, filling: float = 0.0) -> mx.array:
    """[B, T, H, D] as [B, H, N, C, D] float32; `filling` fills the last chunk."""
    batch, length, heads, width = x.shape
    if missing := -length % chunk:
        x = mx.pad(x, [(0, 0), (0, missing), (0, 0), (0, 0)], constant_values=filling)
    return _float(x).swapaxes(1, 2).reshape(batch, heads, -1, chunk, width)


def _triangles(
    q: mx.array, k: mx.array, weighted: mx.array, decay: mx.array
) -> tuple[mx.array, ...]:
    """Return two lower triangles [B, H, N, C, C] and the decays [B, H, N, C, D] from a chunk's
    start to each token, it included, and from behind it to the chunk's end.

    The triangles are q_i · (d_ij k_j) with the decay d_ij between the tokens, and (I + A)⁻¹ where A
    is (βk_i) · (d_ij k_j) below the diagonal. All four grow from blocks of one token. For two
    neighbours the lower left corner is added: d_ij is the decay from j to the middle times the one
    from the middle to i.
    """
    within = (q * k).sum(axis=-1)[..., None, None]  # [B, H, N, blocks, size, size]
    inverse = mx.ones_like(within)
    from_start = decay[..., None, :]  # [B, H, N, blocks, size, D]
    to_end = mx.ones_like(from_start)
    size, chunk = 1, q.shape[-2]
    while size < chunk:
        before, end = _pairs(to_end)
        start, after = _pairs(from_start)
        columns = _pairs(_blocks(k, size))[0]
        rows = mx.concatenate([_pairs(_blocks(x, size))[1] for x in (q, weighted)], axis=-2)
        afters = mx.concatenate([after, after], axis=-2)
        if decay.shape[-1] > 1:
            corners = (rows * afters) @ (columns * before).swapaxes(-1, -2)
        else:
            corners = (rows @ columns.swapaxes(-1, -2)) * afters * before.swapaxes(-1, -2)
        first, second = _pairs(inverse)
        inverse = _merged(first, -(second @ corners[..., size:, :] @ first), second)
        first, second = _pairs(within)
        within = _merged(first, corners[..., :size, :], second)
        to_end = mx.concatenate([before * after[..., -1:, :], end], axis=-2)
        from_start = mx.concatenate([start, after * start[..., -1:, :]], axis=-2)
        size *= 2
    return (
        within[..., 0, :, :],
        inverse[..., 0, :, :],
        from_start[..., 0, :, :],
        to_end[..., 0, :, :],
    )


def _blocks(x: mx.array, size: int) -> mx.array:
    """[…, C, D] as […, C / size, size, D]."""
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def _pairs(blocks: mx.array) -> tuple[mx.array, mx.array]:
    """[…, 2n, s, s] as its even and its odd blocks."""
    blocks = blocks.reshape(*blocks.shape[:-3], -1, 2, *blocks.shape[-2:])
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def _merged(first: mx.array, corner: mx.array, second: mx.array) -> mx.array:
    """The lower triangles [[first, 0], [corner, second]]."""
    above = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
    return mx.concatenate([above, mx.concatenate([corner, second], axis=-1)], axis=-2)


def linear_scan(
    decay: mx.array, x: mx.array, state: mx.array | None = None, *, chunk: int = SCAN_CHUNK
) -> mx.array:
    """h_t = decay_t · h_{t-1} + x_t over axis 1; returns all h [B, T, …] in x's type.

    decay, x: [B, T, …]; state: [B, …], None = 0.
    """
    dtype, length = x.dtype, x.shape[1]
    missing = -length % chunk
    padding = [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)]
    decay, x = (
        _float(mx.pad(array, padding, constant_values=filling)).reshape(
            x.shape[0], -1, chunk, *x.shape[2:]
        )
        for array, filling in ((decay, 1.0), (x, 0.0))
    )
    h, product = [x[:, :, 0]], [decay[:, :, 0]]  # all chunks at once, as if each began with 0
    for t in range(1, chunk):
        h.append(decay[:, :, t] * h[-1] + x[:, :, t])
        product.append(decay[:, :, t] * product[-1])
    starts = [mx.zeros_like(x[:, 0, 0]) if state is None else _float(state)]
    for n in range(x.shape[1] - 1):
        starts.append(product[-1][:, n] * starts[-1] + h[-1][:, n])
    whole = mx.stack(h, axis=2) + mx.stack(product, axis=2) * mx.stack(starts, axis=1)[:, :, None]
    return whole.reshape(x.shape[0], -1, *x.shape[3:])[:, :length].astype(dtype)


def selective_scan(
    x: mx.array,
    delta: mx.array,
    a: mx.array,
    b: mx.array,
    c: mx.array,
    state: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Mamba's h_t = exp(δ_t A) h_{t-1} + δ_t B_t x_t, y_t = h_t C_t; y [B, T, D] and the last h [B,
    D, S], in x's type.

    x, delta: [B, T, D]; a: [D, S], negative; b, c: [B, T, S]; state: [B, D, S], None = 0. A
    gradient keeps the decays and one state for SCAN_PART tokens; it is written out below.
    """
    dtype = x.dtype
    x, delta, a, b, c = (_float(array) for array in (x, delta, a, b, c))
    state = mx.zeros((x.shape[0], *a.shape)) if state is None else _float(state)
    outputs = []
    for start in range(0, x.shape[1], SCAN_PART):
        part = slice(start, start + SCAN_PART)
        computed: Any = _selective_part(
            x[:, part], delta[:, part], a, b[:, part], c[:, part], state
        )
        outputs.append(computed[0])
        state = computed[1]
    return mx.concatenate(outputs, axis=1).astype(dtype), state.astype(dtype)


@mx.custom_function
def _selective_part(
    x: mx.array, delta: mx.array, a: mx.array, b: mx.array, c: mx.array, state: mx.array
) -> tuple[mx.array, ...]:
    """y, the last state, and the decays by place, which the gradient needs again."""
    deltas = _by_place(delta)
    scale = a * LOG2_E
    decays = [exp2_minus(d[..., None] * scale, mx.zeros((1,))) for d in deltas]
    inputs = _inputs(x, delta, b)
    outputs, last = [], state
    for h, ct in zip(_states(decays, inputs, deltas, scale, state), _by_place(c), strict=True):
        outputs.append((h @ ct[..., None])[..., 0])
        last = h[:, -1]
    return _in_order(outputs, x.shape[1]), last, *decays


@_selective_part.vjp
def _selective_part_gradient(
    primals: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
) -> tuple[mx.array, ...]:
    """With g_t = C_t y'_t + exp(δ_{t+1} A) g_{t+1}, the gradient of h_t, and u_t = g_t exp(δ_t
    A) h_{t-1}: x' = δ (g B), δ' = u A + x (g B), A' = Σ u δ, B' = Σ g δ x, C' = Σ y' h over the
    axes that each lacks."""
    x, delta, a, b, c, state = primals
    decays, length = outputs[2:], x.shape[1]
    places = [_by_place(array) for array in (x, delta, b, c, cotangents[0])]
    hs = _states(decays, _inputs(x, delta, b), places[1], a * LOG2_E, state)
    before = [mx.concatenate([state[:, None], hs[-1][:, :-1]], axis=1), *hs[:-1]]
    pushed = [y[..., None] * ct[..., None, :] for y, ct in zip(places[4], places[3], strict=True)]
    gs, to_state = _states_gradients(decays, pushed, cotangents[1])
    columns: list[list[mx.array]] = [[], [], [], []]
    of_a = mx.zeros_like(decays[0])
    for xt, dt, bt, yt, h, h_before, decay, g in zip(
        *places[:3], places[4], hs, before, decays, gs, strict=True
    ):
        u, read = g * decay * h_before, (g @ bt[..., None])[..., 0]
        of_a = of_a + u * dt[..., None]
        columns[0].append(dt * read)
        columns[1].append((u * a).sum(axis=-1) + xt * read)
        columns[2].append(((dt * xt)[..., None, :] @ g)[..., 0, :])
        columns[3].append((yt[..., None, :] @ h)[..., 0, :])
    of_x, of_delta, of_b, of_c = (_in_order(column, length) for column in columns)
    return of_x, of_delta, of_a.sum(axis=(0, 1)), of_b, of_c, to_state


def _by_place(array: mx.array) -> list[mx.array]:
    """[B, T, D] as one array [B, N, D] for each place in a chunk; zeros fill the last one."""
    batch, length, width = array.shape
    chunk = min(SELECTIVE_CHUNK, length)
    padded = mx.pad(array, [(0, 0), (0, -length % chunk), (0, 0)]).reshape(batch, -1, chunk, width)
    return [padded[:, :, place] for place in range(chunk)]


def _in_order(places: list[mx.array], length: int) -> mx.array:
    """`_by_place` back to [B, T, D]."""
    together = mx.stack(places, axis=2)
    return together.reshape(together.shape[0], -1, together.shape[-1])[:, :length]


def _inputs(x: mx.array, delta: mx.array, b: mx.array) -> list[mx.array]:
    return [
        dx[..., None] * bt[..., None, :]
        for dx, bt in zip(_by_place(delta * x), _by_place(b), strict=True)
    ]


def _states(
    decays: Sequence[mx.array],
    inputs: list[mx.array],
    deltas: list[mx.array],
    scale: mx.array,
    state: mx.array,
) -> list[mx.array]:
    """h at each place, [B, N, D, S]: first the chunks' ends as if each began with 0, then all
    again."""
    h = inputs[0]
    for decay, new in zip(decays[1:], inputs[1:], strict=True):
        h = decay * h + new
    whole = mx.stack(deltas).sum(axis=0)
    products = exp2_minus(whole[..., None] * scale, mx.zeros((1,)))
    starts = [state]
    for n in range(h.shape[1] - 1):
        starts.append(products[:, n] * starts[-1] + h[:, n])
    h, places = mx.stack(starts, axis=1), []
    for decay, new in zip(decays, inputs, strict=True):
        h = decay * h + new
        places.append(h)
    return places


def _states_gradients(
    decays: Sequence[mx.array], pushed: list[mx.array], last: mx.array
) -> tuple[list[mx.array], mx.array]:
    """g at each place, from the end to the beginning in the same two passes; and the gradient of
    the first state."""
    g, product = pushed[-1] * decays[-1], decays[-1]
    for push, decay in zip(pushed[-2::-1], decays[-2::-1], strict=True):
        g, product = (g + push) * decay, product * decay
    ends = [last]
    for n in range(g.shape[1] - 1, -1, -1):
        ends.append(product[:, n] * ends[-1] + g[:, n])
    g, places = mx.stack(ends[-2::-1], axis=1), []
    for push, following in zip(pushed[::-1], [None, *decays[:0:-1]], strict=True):
        g = push + (g if following is None else following * g)
        places.append(g)
    return places[::-1], ends[-1]
