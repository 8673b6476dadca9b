"""The gated delta rule: attention whose keys and values are one matrix (Yang et al.)."""

from __future__ import annotations

from typing import Any, NamedTuple

from array_api_compat import device

from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_gradient, require_sizes
from xformer.dispatch.shapes import shapes
from xformer.ops._attention import scale_of

CHUNK_LEN = 64


@overridable
@shapes(
    "q (B, G, T, K)  k (B, G, T, K)  v (B, H, T, M)  log_decay (B, H, T)  beta (B, H, T)  "
    "state (B, H, K, M)"
)
def gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    state: Array | None = None,
    *,
    scale: float | None = None,
    chunk_len: int = CHUNK_LEN,
) -> tuple[tuple[Array, Array], GatedDeltaRuleCache]:
    """y_t = scale * q_t S_t, where the state S is updated by one key and value a step; and S_T.

    u_t = beta_t * (v_t - a_t k_t S_{t-1}), S_t = a_t S_{t-1} + k_t^T u_t, a = exp(log_decay)
    (arXiv:2412.06464, eq. 10). The state first decays, and then the value that it holds for k_t
    moves to v_t by the fraction beta_t. Chunks of steps are computed together (section 3.3).

    q, k: (B, G, T, K)   v, y: (B, H, T, M)
        G must divide H. Value head h uses query and key head h // (H / G).
    log_decay: (B, H, T), at most 0 for a state that does not grow
    beta: (B, H, T), between 0 and 1
    state: (B, H, K, M), S_0; None: zeros. S_T has the same shape.
    scale: K^-1/2 if None
    chunk_len: C, the steps of a chunk, a power of 2. It changes y by rounding only.

    ValueError for shapes and options that do not fit.
    Derivation: docs/derivations/gated_delta_rule.md
    """
    _require_groups(k, v)
    scale = scale_of("gated_delta_rule", scale, q)
    (chunk_len,) = require_sizes("gated_delta_rule", 1, chunk_len=chunk_len)
    if chunk_len & (chunk_len - 1):
        raise ValueError(f"gated_delta_rule: chunk_len must be a power of 2, got {chunk_len}")
    while chunk_len > 1 and chunk_len // 2 >= v.shape[2]:
        chunk_len //= 2
    xp = array_namespace(v)
    chunks = _chunked(q, k, v, log_decay, beta, scale, chunk_len)
    groups = (*chunks.v.shape[:3], k.shape[3], v.shape[3])  # (B, G, H/G, K, M)
    s = (
        xp.zeros(groups, dtype=v.dtype, device=device(v))
        if state is None
        else xp.reshape(state, groups)
    )
    of_v, of_state = chunks.solved()
    keys = chunks.keys_to_end.mT  # (..., K, C)
    states = []
    for n in range(of_v.shape[3]):
        states.append(s)
        u = of_v[:, :, :, n, :, :] - of_state[:, :, :, n, :, :] @ s
        s = chunks.decay_of_chunk[:, :, :, n, :, :] * s + keys[:, :, :, n, :, :] @ u
    before = xp.stack(states, axis=3)  # (B, G, H/G, N, K, M)
    u = of_v - of_state @ before
    y = chunks.queries @ before + chunks.probs @ u
    y = _steps(y, v.shape)
    last = xp.reshape(s, (*v.shape[:2], *groups[3:]))
    return (y, last), GatedDeltaRuleCache(
        q, k, v, log_decay, beta, before, scale, chunk_len, state is not None
    )


@short
class GatedDeltaRuleCache(NamedTuple):
    """Saved by `gated_delta_rule` for backward: the inputs, and the state before each chunk.

    Everything else of a chunk is computed again from these.
    """

    q: Array  # (B, G, T, K)
    k: Array  # (B, G, T, K)
    v: Array  # (B, H, T, M)
    log_decay: Array  # (B, H, T)
    beta: Array  # (B, H, T)
    before: Array  # (B, G, H/G, N, K, M), the state before each of the N chunks
    scale: float
    chunk_len: int
    has_state: bool  # whether a first state was given, which then has a gradient

    def backward(self, dy: Array, dstate: Array | None = None) -> tuple[Any, ...]:
        """Gradients of q, k, v, log_decay, beta and state, in that order.

        dstate: of S_T; None: zeros

        With dS the gradient of the state after a chunk, from the last chunk to the first:
        du = probs^T dy + keys_to_end dS, and the gradient of the state before the chunk is
        queries^T dy - of_state^T du + decay_of_chunk * dS. All other gradients follow from dy, du
        and dS of each chunk at once.
        """
        require_gradient("gated_delta_rule", "dy", dy, self.v)
        q, k, v, log_decay, beta, before, scale, chunk_len, has_state = self
        shape = (*v.shape[:2], *before.shape[4:])  # of the states
        xp = array_namespace(dy)
        c = _chunked(q, k, v, log_decay, beta, scale, chunk_len)
        dy = _in_chunks(dy, k.shape[1], chunk_len)
        of_v, of_state = c.solved()
        du_of_y = c.probs.mT @ dy  # (..., N, C, M)
        ds_of_y = c.queries.mT @ dy  # (..., N, K, M)
        ds = xp.zeros_like(before[:, :, :, 0, :, :])
        if dstate is not None:
            require_gradient("gated_delta_rule", "dstate", dstate, v, shape)
            ds = xp.reshape(dstate, ds.shape)
        dus, after = [], []  # of each chunk, from the last to the first
        for n in reversed(range(before.shape[3])):
            after.append(ds)
            du = du_of_y[:, :, :, n, :, :] + c.keys_to_end[:, :, :, n, :, :] @ ds
            dus.append(du)
            ds = (
                ds_of_y[:, :, :, n, :, :]
                - of_state[:, :, :, n, :, :].mT @ du
                + c.decay_of_chunk[:, :, :, n, :, :] * ds
            )
        du, dafter = (xp.stack(list(reversed(a)), axis=3) for a in (dus, after))
        grads = c.backward(dy, du, dafter, before, of_v - of_state @ before)
        dq, dk, dv, dlog_decay, dbeta = grads
        return (
            _steps(xp.sum(dq, axis=2, keepdims=True), q.shape),
            _steps(xp.sum(dk, axis=2, keepdims=True), k.shape),
            _steps(dv, v.shape),
            _steps(dlog_decay, (*v.shape[:3], 1))[..., 0],
            _steps(dbeta, (*v.shape[:3], 1))[..., 0],
            xp.reshape(ds, shape) if has_state else None,
        )


class _Chunks(NamedTuple):
    """What the N chunks of C steps compute without the state. Leading axes: (B, G, H/G, N).

    With S the state before a chunk, u = inverse (beta * (v - grown k S)), y = queries S + probs u,
    and the state after it is decay_of_chunk * S + keys_to_end^T u.
    """

    q: Array  # (B, G, 1, N, C, K)
    k: Array  # (B, G, 1, N, C, K)
    v: Array  # (..., C, M)
    beta: Array  # (..., C, 1)
    decay: Array  # (..., C, C): of step s until step t, exp(sum of log_decay after s), 0 for s > t
    from_start: Array  # (..., C, 1): the decay from the start of the chunk until after step t
    to_end: Array  # (..., C, 1): the decay after step t until the end of the chunk
    inverse: Array  # (..., C, C), of 1 + beta * decay * (k k^T) below the diagonal
    lower: Array  # (C, C), 1 on and below the diagonal
    scale: float

    @property
    def decay_of_chunk(self) -> Array:
        """(..., 1, 1), of the state over all steps."""
        return self.from_start[..., -1:, :]

    @property
    def queries(self) -> Array:
        """(..., C, K), of the state before the chunk."""
        return self.scale * self.from_start * self.q

    @property
    def probs(self) -> Array:
        """(..., C, C), the weight of each u in each y."""
        return self.scale * self.decay * (self.q @ self.k.mT)

    @property
    def keys_to_end(self) -> Array:
        """(..., C, K), k decayed to the end of the chunk."""
        return self.to_end * self.k

    def solved(self) -> tuple[Array, Array]:
        """(of_v, of_state) with u = of_v - of_state S: (..., C, M) and (..., C, K)."""
        of_v = self.inverse @ (self.beta * self.v)
        return of_v, self.inverse @ (self.beta * self.from_start * self.k)

    def backward(
        self, dy: Array, du: Array, dafter: Array, before: Array, u: Array
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Gradients of q, k (for each value head), v, log_decay (..., C, 1) and beta (..., C, 1).

        dafter: of the state after each chunk   before: the state before it
        """
        q, k, v, beta, decay, from_start, to_end, inverse, lower, scale = self
        xp = array_namespace(dy)
        below = lower - xp.eye(lower.shape[0], dtype=dy.dtype, device=device(dy))
        kk, qk = k @ k.mT, q @ k.mT
        dr = inverse.mT @ du  # of beta * (v - from_start k S)
        dmatrix = -(dr @ u.mT) * below
        dprobs = (dy @ u.mT) * lower
        ks, qs = from_start * (k @ before), scale * from_start * (q @ before)
        dv = beta * dr
        dqk, dkk = scale * decay * dprobs, beta * decay * dmatrix
        dq = scale * from_start * (dy @ before.mT) + dqk @ k
        dend = to_end * (u @ dafter.mT)
        dk = dqk.mT @ q + dkk @ k + dkk.mT @ k - from_start * (dv @ before.mT) + dend
        dbeta = _row_sum(decay * kk * dmatrix) + _row_sum(dr * (v - ks))
        # Each decay is exp of a sum of log_decay: dlog is its gradient times the decay.
        between = (scale * qk * dprobs + beta * kk * dmatrix) * decay
        kept = _row_sum(dend * k)
        until = _row_sum(dy * qs) - _row_sum(dv * ks) - kept
        until = until + _row_sum(between) - xp.sum(between, axis=-2)[..., None]
        whole = self.decay_of_chunk * _row_sum(xp.sum(dafter * before, axis=-2)[..., None, :])
        whole = whole + xp.sum(kept, axis=-2, keepdims=True)
        return dq, dk, dv, lower.mT @ until + whole, dbeta


def _chunked(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, scale: float, chunk_len: int
) -> _Chunks:
    xp = array_namespace(v)
    columns = (log_decay[..., None], beta[..., None])
    q, k, v, log_decay, beta = (_in_chunks(x, k.shape[1], chunk_len) for x in (q, k, v, *columns))
    step = xp.arange(chunk_len, device=device(v))
    is_lower = step[:, None] >= step
    lower = xp.astype(is_lower, v.dtype)
    below = lower - xp.eye(chunk_len, dtype=v.dtype, device=device(v))
    # Of the steps after s until t. A difference of two sums from the start of the chunk would lose
    # the digits of slow steps after fast ones.
    between = lower @ (below * log_decay)  # (..., C, C), 0 above the diagonal
    decay = xp.where(is_lower, xp.exp(between), 0.0)
    inverse = _unit_lower_inverse(beta * decay * (k @ k.mT) * below)
    from_start, to_end = xp.exp(lower @ log_decay), xp.exp(between[..., -1:, :].mT)
    return _Chunks(q, k, v, beta, decay, from_start, to_end, inverse, lower, scale)


def _unit_lower_inverse(a: Array) -> Array:
    """(1 + a)^-1 for a (..., C, C) that is 0 on and above the diagonal; C is a power of 2.

    By halves: [[p, 0], [r, s]]^-1 = [[p^-1, 0], [-s^-1 r p^-1, s^-1]]. (A product of powers of a is
    shorter, but equal keys make its terms so large that they cancel to nothing.)
    """
    xp = array_namespace(a)
    n, size = a.shape[-1], 1
    shape = (*a.shape[:-2], n, 1, 1)
    inverse = xp.ones(shape, dtype=a.dtype, device=device(a))  # of the blocks on the diagonal
    while size < n:
        starts = range(0, n, 2 * size)
        r = xp.stack([a[..., i + size : i + 2 * size, i : i + size] for i in starts], axis=-3)
        p, s = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        upper = xp.concat([p, xp.zeros_like(p)], axis=-1)
        inverse = xp.concat([upper, xp.concat([-(s @ r @ p), s], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


def _in_chunks(x: Array, groups: int, chunk_len: int) -> Array:
    """(B, H, T, .) -> (B, G, H/G, N, C, .), with zeros after the last step."""
    xp = array_namespace(x)
    b, heads, n_steps, width = x.shape
    n = max(1, -(-n_steps // chunk_len))
    rest = n * chunk_len - n_steps
    if rest:
        zeros = xp.zeros((b, heads, rest, width), dtype=x.dtype, device=device(x))
        x = xp.concat([x, zeros], axis=2)
    return xp.reshape(x, (b, groups, heads // groups, n, chunk_len, width))


def _steps(x: Array, shape: tuple[int, ...]) -> Array:
    """(B, G, H/G, N, C, .) -> `shape` (B, H, T, .): the inverse of `_in_chunks`."""
    flat = array_namespace(x).reshape(x, (*shape[:2], x.shape[3] * x.shape[4], shape[3]))
    return flat[:, :, : shape[2], :]


def _row_sum(x: Array) -> Array:
    return array_namespace(x).sum(x, axis=-1, keepdims=True)


def _require_groups(k: Array, v: Array) -> None:
    if k.shape[1] == 0 or v.shape[1] % k.shape[1]:
        raise ValueError(
            f"gated_delta_rule: the {k.shape[1]} heads of k must divide the {v.shape[1]} heads of v"
        )
