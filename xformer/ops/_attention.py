"""Shared by the attention ops: grouped heads, allowed keys, and a softmax without NaN."""

from __future__ import annotations

from typing import Any, NamedTuple

from array_api_compat import device

from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch.checks import finite, require_cap, require_mask, whole
from xformer.ops.dropout import require_rate
from xformer.ops.random_bits import RandomKey

Window = tuple[int | None, int | None]


class SdpaOptions(NamedTuple):
    """The options of `sdpa` after their checks. `sdpa_options` returns them."""

    causal: bool
    window: Window
    softcap: float | None
    scale: float
    dropout_rate: float
    dropout_key: RandomKey | None

    @property
    def band(self) -> Window:
        """(left, right) of the keys that a query may attend to, by the window and by causality."""
        left, right = self.window
        return left, 0 if self.causal else right


def sdpa_options(
    q: Array,
    k: Array,
    bias: Array | None = None,
    *,
    mask: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: RandomKey | None = None,
) -> SdpaOptions:
    """The options of a call of `sdpa`. It checks them, the heads of q and k, bias and mask.

    The reference and every kernel call it first. The errors are those of `sdpa`.
    """
    require_heads("sdpa", q, k, mask)
    if type(causal).__name__ not in ("bool", "bool_"):  # the latter is NumPy's
        raise TypeError(f"sdpa: causal must be True or False, got {causal!r:.100}")
    if bias is not None:
        require_broadcasts("sdpa", "bias", bias, (*q.shape[:3], k.shape[2]))
    return SdpaOptions(
        causal,
        window_of("sdpa", window),
        None if softcap is None else require_cap("sdpa", softcap),
        scale_of("sdpa", scale, q),
        require_rate("sdpa", "dropout_rate", dropout_rate, "dropout_key", dropout_key),
        dropout_key,
    )


def fold(x: Array, k: Array) -> Array:
    """(B, H, T, .) -> (B, G, H/G * T, .): the query heads of a group become rows of one head.

    k: (B, G, S, .), used only for G
    """
    groups = k.shape[1]
    if x.shape[1] == groups:
        return x
    rows = x.shape[1] // groups * x.shape[2]
    return array_namespace(x).reshape(x, (x.shape[0], groups, rows, x.shape[3]))


def unfold(x: Array, q: Array) -> Array:
    """(B, G, H/G * T, .) -> (B, H, T, .): the inverse of `fold`.

    q: (B, H, T, .), used only for its shape
    """
    if x.shape[1] == q.shape[1]:
        return x
    return array_namespace(x).reshape(x, (*q.shape[:3], x.shape[3]))


def forbid(scores: Array, mask: Array | None, causal: bool, window: Window = (None, None)) -> Array:
    """scores (B, H, T, S) with -inf for each key that a query may not attend to."""
    allowed = _allowed_keys(scores, mask, causal, window)
    if allowed is None:
        return scores
    xp = array_namespace(scores)
    return xp.where(allowed, scores, -xp.inf)


def _allowed_keys(scores: Array, mask: Array | None, causal: bool, window: Window) -> Array | None:
    """Mask, causality and window together: boolean, (T, S) or wider; None if all are allowed."""
    left, right = window
    right = 0 if causal else right
    n_queries, n_keys = scores.shape[-2:]
    if n_queries == 1:
        right = None  # the only query has the position of the last key
    if left is None and right is None:
        return mask
    key, query = aligned(scores, n_queries, n_keys)
    allowed = mask
    if right is not None:  # a size beyond T or S has no effect, and might not fit an index
        allowed = _both(key <= query + min(right, n_queries), allowed)
    if left is not None:
        allowed = _both(key >= query - min(left, n_keys), allowed)
    return allowed


def _both(seen: Array, allowed: Array | None) -> Array:
    return seen if allowed is None else seen & allowed


def aligned(
    like: Array, n_queries: int, n_keys: int, at: Array | None = None
) -> tuple[Array, Array]:
    """Positions of keys (1, S) and queries (T, 1). The last query is at the last key.

    at: integer (), the position of the first query; None: S - T.
    """
    xp = array_namespace(like)
    key = xp.arange(n_keys, device=device(like))[None, :]
    query = xp.arange(n_queries, device=device(like))[:, None]
    return key, query + (n_keys - n_queries if at is None else at)


def softmax_or_zero(scores: Array, sinks: Array | None = None) -> tuple[Array, Array | None]:
    """(probs, shares): the softmax over the keys and one sink a head, and the sinks' probabilities.

    scores: (B, H, T, S)   sinks: (H,) or None   probs: (B, H, T, S)   shares: (B, H, T, 1) or None
    A row of -inf, or without elements, gives zeros.
    """
    xp = array_namespace(scores)
    if scores.shape[-1]:
        top = xp.max(scores, axis=-1, keepdims=True)
    else:
        column = (*scores.shape[:-1], 1)
        top = xp.full(column, -xp.inf, dtype=scores.dtype, device=device(scores))
    if sinks is not None:
        sinks = sinks[:, None, None]  # (H, 1, 1)
        top = xp.maximum(top, sinks)
    top = xp.where(top == -xp.inf, 0.0, top)
    e = xp.exp(scores - top)
    total = xp.sum(e, axis=-1, keepdims=True)
    e_sinks = None if sinks is None else xp.exp(sinks - top)
    total = total if e_sinks is None else total + e_sinks
    total = xp.where(total == 0, 1.0, total)
    return e / total, None if e_sinks is None else e_sinks / total


def require_heads(op: str, q: Array, k: Array, mask: Array | None) -> None:
    """ValueError unless the heads of k divide the heads of q and the mask broadcasts to the scores.

    TypeError unless the mask is boolean.
    """
    heads, groups = q.shape[1], k.shape[1]
    if groups == 0:
        raise ValueError(f"{op}: k must have at least one head, got shape {tuple(k.shape)}")
    if heads % groups:
        raise ValueError(f"{op}: the {groups} heads of k must divide the {heads} heads of q")
    if mask is not None:
        require_mask(op, "mask", mask, q)
        require_broadcasts(op, "mask", mask, (*q.shape[:3], k.shape[2]))


def require_broadcasts(op: str, name: str, array: Array, full: tuple[int, ...]) -> None:
    """ValueError unless `array` broadcasts to (B, H, T, S) = `full`."""
    shape = tuple(array.shape)
    pairs = zip(reversed(shape), reversed(full), strict=False)
    if len(shape) > len(full) or not all(n in (1, m) for n, m in pairs):
        raise ValueError(f"{op}: {name} must broadcast to (B, H, T, S) = {full}, got shape {shape}")


def scale_of(op: str, scale: float | None, q: Array) -> float:
    """The scale of the scores as a float; K^-1/2 if it is None."""
    # With K = 0 all scores are 0, whatever the scale.
    return max(q.shape[3], 1) ** -0.5 if scale is None else finite(op, "scale", scale)


def window_of(op: str, window: Any) -> Window:
    """The window as (left, right); None means unbounded.

    ValueError unless `window` is None or a pair of sizes, each an int of at least 0 or None.
    """
    if window is None:
        return None, None
    is_pair = isinstance(window, tuple | list) and len(window) == 2
    sizes = [whole(n) for n in window] if is_pair else []
    if not is_pair or any(
        size is not None and (n is None or n < 0) for size, n in zip(window, sizes, strict=True)
    ):
        raise ValueError(
            f"{op}: window must be (left, right), each an int of at least 0 or None, got {window!r}"
        )
    return sizes[0], sizes[1]
