"""Multi-head attention: of a sequence to itself, or to another one (the memory)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from array_api_compat import array_namespace

from xformer import layers, ops
from xformer.checks import require_sizes
from xformer.layers.kv_cache import KVCache, append
from xformer.layers.linear import LinearParams, linear, linear_many
from xformer.layers.norm import NormConfig, NormParams, norm
from xformer.ops.sum_to import sum_to
from xformer.shapes import require_like
from xformer.showing import short
from xformer.tree import Frozen, value
from xformer.typing import Array


@short
class KeyValueParams(NamedTuple):
    """Projections of a sequence to keys and values."""

    k: LinearParams  # (D, G * K)
    v: LinearParams  # (D, G * M)
    k_norm: NormParams | None = None  # of each head's keys (K), or of all heads' at once (G * K)


@short
class ShawParams(NamedTuple):
    """Tables of Shaw's relative positions, for distances from -L to L, as in `ops.shaw`."""

    k: Array  # (2L+1, K)
    v: Array | None  # (2L+1, M)


@short
class AttentionParams(NamedTuple):
    """Projections of one attention; K and M need not be D / H, M need not be K."""

    q: LinearParams  # (D, H * K)
    kv: KeyValueParams | None  # None where keys and values come ready from elsewhere
    o: LinearParams | None  # (H * M, D); None: the heads side by side are the output
    q_norm: NormParams | None = None  # of each head's queries (K), or of all heads' (H * K)
    sinks: Array | None = None  # (H,), as in `ops.sdpa`
    shaw: ShawParams | None = None  # then there are no bias, sinks, window and softcap


class KeyValue(NamedTuple):
    """Keys and values, projected and split into heads."""

    k: Array  # (B, G, S, K)
    v: Array  # (B, G, S, M)


def attention(
    x: Array,
    params: AttentionParams,
    memory: Array | KeyValue | None = None,
    bias: Array | None = None,
    pos: Array | None = None,
    memory_pos: Array | None = None,
    *,
    n_heads: int,
    n_kv_heads: int | None = None,
    rotary: layers.RopeTables | None = None,
    qk_norm: NormConfig | None = None,
    kv_cache: KVCache | None = None,
    mask: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ops.RandomKey | None = None,
) -> tuple[Array, AttentionCache]:
    """y = concat(heads) w_o + b_o, heads = sdpa(x w_q, memory w_k, memory w_v) (arXiv:1706.03762).

    x: (B, T, D)   y: (B, T, D'). memory: (B, S, D_m) to attend to, None for x itself, or a
    KeyValue that `key_value` made (shared by several layers). bias, mask, causal, window, softcap,
    scale, dropout: as in `ops.sdpa`. pos, memory_pos: (T, K), (S, K), added to the queries, and to
    the keys and values, of every head; memory_pos is pos where memory is x. Queries and keys are
    normalised where params hold q_norm and k_norm, by qk_norm (RMSNorm unless given), then rotated
    by rotary, which goes with memory None. kv_cache: keys and values of earlier tokens, which are
    constants here; S counts them too, and the cache's `kv_cache` has all of them; with
    kv_cache.write_index, of which there is no backward, mask hides the columns behind it.
    ValueError where shapes do not fit.
    """
    n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    _require_memory(memory, memory_pos, rotary, kv_cache, params)
    around: Any = {"rotary": rotary, "config": qk_norm}
    own: Any = params.kv
    of_x = (params.q, own.k, own.v) if memory is None else (params.q,)
    as_made = _is_kept(params.q_norm, pos, rotary) and _is_kept(own and own.k_norm, pos, rotary)
    mapped, maps = linear_many(x, of_x, all_kept=as_made)
    q, q_cache = _heads(mapped[0], pos, n_heads, "q", params.q_norm, **around)
    kv: Any = memory
    kv_saved: Any = None
    if memory is None:
        kv, kv_saved = _key_value(mapped[1:], own, pos, n_kv_heads, **around)
    elif own is not None:
        kv, kv_saved = key_value(memory, own, memory_pos, n_kv_heads=n_kv_heads, k_norm=qk_norm)
    n_new = kv.k.shape[2]
    if kv_cache is not None and kv_cache.write_index is not None:
        _require_mask(mask, params)
        kv_cache = append(*kv, kv_cache=kv_cache)
        kv = KeyValue(kv_cache.k, kv_cache.v)
        if window is not None and window[0] is not None:
            mask, window = kv_cache.window_mask(mask, window[0]), None
    elif kv_cache is not None:
        if window is not None and window[0] is not None:
            kv_cache = kv_cache.last(window[0])
        kv_cache = append(*kv, kv_cache=kv_cache)
        kv = KeyValue(kv_cache.k, kv_cache.v)
        mask, bias = (_last_keys(a, kv.k.shape[2]) for a in (mask, bias))
    options: Any = {
        "mask": mask,
        "causal": causal,
        "scale": scale,
        "dropout_rate": dropout_rate,
        "dropout_key": dropout_key,
    }
    extras = {"bias": bias, "sinks": params.sinks, "window": window, "softcap": softcap}
    k, v = kv
    core: Any
    if params.shaw is None:
        sinks = value(params.sinks)
        ctx, core = ops.sdpa(q, k, v, bias, sinks, window=window, softcap=softcap, **options)
    else:
        _require_no("shaw", extras)
        ctx, core = ops.shaw(q, k, v, value(params.shaw.k), value(params.shaw.v), **options)
    y, o_cache = merge_heads(ctx), None
    if params.o is not None:
        y, o_cache = linear(y, params.o)
    tables = (params.sinks,) if params.shaw is None else params.shaw
    fixed = tuple(isinstance(table, Frozen) for table in tables)
    caches = (maps, q_cache, kv_saved, core, o_cache)
    return y, AttentionCache(*caches, fixed, kv_cache, n_new)


@short
class AttentionCache(NamedTuple):
    """What `attention` keeps for its backward."""

    maps: Any  # of x: to the queries, and of a self-attention to keys and values too
    q: HeadsCache
    kv: KeyValueHeadsCache | KeyValueSaved | None
    core: Any  # of `ops.sdpa` or `ops.shaw`
    o: Any
    fixed: tuple[bool, ...]  # whether the sinks, or both tables of Shaw's, are frozen
    kv_cache: KVCache | None  # with the keys and values of x
    n_new: int  # keys that are not of the KV cache

    def backward(self, dy: Array) -> tuple[Any, ...]:
        """Gradients of x, params, memory, bias, pos, memory_pos, in that order."""
        do = None
        if self.o is not None:
            dy, do = self.o.backward(dy)
        dq, dk, dv, *dtables = self.core.backward(split_heads(dy, self.q.n_heads))
        dq, dq_norm, dpos = self.q.backward(dq)
        n_cached = dk.shape[2] - self.n_new
        if n_cached:
            dk, dv = dk[:, :, n_cached:, :], dv[:, :, n_cached:, :]
        dkv = dmemory_pos = None
        dmemory: Any = KeyValue(dk, dv)
        if isinstance(self.kv, KeyValueHeadsCache):
            dk, dv, dk_norm, dkv_pos = self.kv.backward(dk, dv)
            dx, (dq, dk, dv) = self.maps.backward(dq, dk, dv)
            dkv, dmemory = KeyValueParams(dk, dv, dk_norm), None
            dpos = None if dpos is None else dpos + dkv_pos
        else:
            dx, (dq,) = self.maps.backward(dq)
            if self.kv is not None:
                dmemory, dkv, dmemory_pos = self.kv.backward(dk, dv)
        dbias, dsinks, dshaw = self._tables(dtables)
        dparams = AttentionParams(dq, dkv, do, dq_norm, dsinks, dshaw)
        return dx, dparams, dmemory, dbias, dpos, dmemory_pos

    def _tables(self, grads: list[Any]) -> tuple[Any, ...]:
        """Gradients of bias, sinks and shaw, of which the core has its own two."""
        if len(self.fixed) == 1:
            return grads[0], None if self.fixed[0] else grads[1], None
        kept = (None if f else grad for f, grad in zip(self.fixed, grads, strict=True))
        return None, None, ShawParams(*kept)


def key_value(
    x: Array,
    params: KeyValueParams,
    pos: Array | None = None,
    *,
    n_kv_heads: int,
    rotary: layers.RopeTables | None = None,
    k_norm: NormConfig | None = None,
) -> tuple[KeyValue, KeyValueSaved]:
    """Keys and values of a sequence: x w_k + b_k, x w_v + b_v, split into heads, plus pos.

    x: (B, S, D)   pos: (S, K)   k: (B, G, S, K)   v: (B, G, S, M), M = K where pos is given. Keys
    are normalised where params.k_norm is, by k_norm (RMSNorm unless given), then rotated by rotary.
    """
    as_made = _is_kept(params.k_norm, pos, rotary)
    pair, maps = linear_many(x, (params.k, params.v), all_kept=as_made)
    kv, heads = _key_value(pair, params, pos, n_kv_heads, rotary=rotary, config=k_norm)
    return kv, KeyValueSaved(maps, heads)


@short
class KeyValueSaved(NamedTuple):
    """What `key_value` keeps for its backward."""

    maps: Any
    heads: KeyValueHeadsCache

    def backward(self, dk: Array, dv: Array) -> tuple[Array, KeyValueParams, Array | None]:
        """Gradients of x, params, pos."""
        dk, dv, dk_norm, dpos = self.heads.backward(dk, dv)
        dx, (dk_params, dv_params) = self.maps.backward(dk, dv)
        return dx, KeyValueParams(dk_params, dv_params, dk_norm), dpos


def _key_value(
    pair: Sequence[Array],
    params: KeyValueParams,
    pos: Array | None,
    n_kv_heads: int,
    *,
    rotary: layers.RopeTables | None,
    config: NormConfig | None,
) -> tuple[KeyValue, KeyValueHeadsCache]:
    """Heads of x w_k + b_k and x w_v + b_v, which are the pair."""
    k, v = pair
    around: Any = {"rotary": rotary, "config": config}
    k, k_cache = _heads(k, pos, n_kv_heads, "k", params.k_norm, **around)
    v, v_cache = _heads(v, pos, n_kv_heads, "v")
    return KeyValue(k, v), KeyValueHeadsCache(k_cache, v_cache)


@short
class KeyValueHeadsCache(NamedTuple):
    """What `_key_value` keeps for its backward."""

    k: HeadsCache
    v: HeadsCache

    def backward(
        self, dk: Array, dv: Array
    ) -> tuple[Array, Array, NormParams | None, Array | None]:
        """Gradients of the pair, k_norm, pos."""
        dk, dk_norm, dpos_k = self.k.backward(dk)
        dv, _, dpos_v = self.v.backward(dv)
        return dk, dv, dk_norm, None if dpos_k is None else dpos_k + dpos_v


def _heads(
    y: Array,
    pos: Array | None,
    n_heads: int,
    name: str,
    norm_params: NormParams | None = None,
    *,
    rotary: layers.RopeTables | None = None,
    config: NormConfig | None = None,
) -> tuple[Array, HeadsCache]:
    """rope(norm(split_heads(y) + pos)). y: (B, T, H * K)."""
    (n_heads,) = require_sizes("attention", 1, n_heads=n_heads)
    width = y.shape[-1]
    if width % n_heads:
        raise ValueError(
            f"attention: the {width} columns of {name}.w must split into {n_heads} heads"
        )
    config = NormConfig("rms") if config is None else config
    all_norm = head_norm = rope_cache = None
    per_head = norm_params is not None and value(norm_params.w).shape[0] == width // n_heads
    if norm_params is not None and not per_head:
        y, all_norm = norm(y, norm_params, config=config)
    heads = split_heads(y, n_heads)  # (B, H, T, K)
    if pos is not None:
        _require_positions(name, pos, heads)
        heads = heads + pos
    if norm_params is not None and per_head:
        heads, head_norm = norm(heads, norm_params, config=config)
    if rotary is not None:
        heads, rope_cache = ops.rope(heads, **rotary._asdict())
    pos_shape = None if pos is None else tuple(pos.shape)
    return heads, HeadsCache(all_norm, head_norm, rope_cache, n_heads, pos_shape)


def _is_kept(*steps: Any) -> bool:
    """Whether `_heads` takes none of these steps: attention then keeps what comes in."""
    return all(step is None for step in steps)


@short
class HeadsCache(NamedTuple):
    """What `_heads` keeps for its backward."""

    all_norm: Any  # of all heads at once
    head_norm: Any  # of each head
    rope: Any
    n_heads: int
    pos_shape: tuple[int, ...] | None

    def backward(self, dheads: Array) -> tuple[Array, NormParams | None, Array | None]:
        """Gradients of y, norm_params, pos."""
        dnorm = None
        if self.rope is not None:
            dheads = self.rope.backward(dheads)
        if self.head_norm is not None:
            dheads, dnorm = self.head_norm.backward(dheads)
        dpos = None if self.pos_shape is None else sum_to(dheads, shape=self.pos_shape)
        dy = merge_heads(dheads)
        if self.all_norm is not None:
            dy, dnorm = self.all_norm.backward(dy)
        return dy, dnorm, dpos


def _require_no(what: str, extras: dict[str, Any]) -> None:
    given = [name for name, extra in extras.items() if extra is not None]
    if given:
        raise ValueError(f"attention: params.{what} does not go with {', '.join(given)}")


def _require_mask(mask: Array | None, params: AttentionParams) -> None:
    if mask is None or params.shaw is not None:
        what = "a mask" if mask is None else "no params.shaw, which go by the number of keys"
        raise ValueError(f"attention: a static KV cache needs {what}")


def _last_keys(x: Array | None, n: int) -> Array | None:
    """A mask or a bias of the last `n` keys, those that a window has left."""
    if x is None or x.shape[-1] in (1, n):
        return x
    return x[..., x.shape[-1] - n :]


def _require_memory(
    memory: Any,
    memory_pos: Array | None,
    rotary: layers.RopeTables | None,
    kv_cache: KVCache | None,
    params: AttentionParams,
) -> None:
    if isinstance(memory, KeyValue) != (params.kv is None):
        raise ValueError("attention: either memory is a KeyValue or params.kv projects it")
    if memory_pos is not None and (memory is None or params.kv is None):
        raise ValueError("attention: memory_pos goes with a memory (B, S, D), and there is none")
    if memory is not None and not (rotary is None and kv_cache is None):
        raise ValueError("attention: rotary and kv_cache go with self-attention, there is a memory")


def _require_positions(name: str, pos: Array, heads: Array) -> None:
    require_like("attention", f"positions for {name}", pos, heads)
    if tuple(pos.shape) != tuple(heads.shape[2:]):
        raise ValueError(
            f"attention: positions for {name} must be {tuple(heads.shape[2:])}, "
            f"got shape {tuple(pos.shape)}"
        )


def split_heads(x: Array, n_heads: int) -> Array:
    """(B, T, H * K) -> (B, H, T, K)."""
    if x.ndim != 3:
        raise ValueError(f"attention: sequences must be (B, T, D), got shape {tuple(x.shape)}")
    xp = array_namespace(x)
    b, t, width = x.shape
    return xp.permute_dims(xp.reshape(x, (b, t, n_heads, width // n_heads)), (0, 2, 1, 3))


def merge_heads(x: Array) -> Array:
    """(B, H, T, K) -> (B, T, H * K)."""
    xp = array_namespace(x)
    b, h, t, k = x.shape
    return xp.reshape(xp.permute_dims(x, (0, 2, 1, 3)), (b, t, h * k))
