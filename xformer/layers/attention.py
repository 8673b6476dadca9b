"""Multi-head attention: self-attention, and cross-attention to a memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from xformer import layers, ops
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.tree import Frozen, value
from xformer.base.typing import Array
from xformer.dispatch.checks import require_sizes
from xformer.dispatch.shapes import require_array, require_like
from xformer.layers.kv_cache import KVCache, append
from xformer.layers.linear import BiasParams, LinearParams, linear, linear_many
from xformer.layers.norm import NormConfig, NormParams, norm
from xformer.layers.positions import distances
from xformer.layers.protocol import Context, SideInputs, rate, require_no
from xformer.ops.sum_to import sum_to


@short
class KeyValueParams(NamedTuple):
    """Parameters of the projections to keys and values."""

    k: LinearParams  # (D, G * K)
    v: LinearParams  # (D, G * M)
    k_norm: NormParams | None = None  # of the keys: of each head (K), or of all heads (G * K)


@short
class ShawParams(NamedTuple):
    """Parameters of Shaw's relative positions: tables for distances from -L to L (`ops.shaw`)."""

    k: Array  # (2L+1, K)
    v: Array | None  # (2L+1, M)


@short
class XLParams(NamedTuple):
    """Parameters of Transformer-XL's relative positions (`ops.xl_attention`)."""

    r: LinearParams  # (D, G * K), of the encodings of distances to keys
    # Vectors, as other biases, so that weight decay leaves them alone.
    content_bias: Array  # (H * K,)
    position_bias: Array  # (H * K,)


@short
class AttentionParams(NamedTuple):
    """Parameters of `attention`. K and M need not be D / H, and M need not be K."""

    q: LinearParams  # (D, H * K)
    kv: KeyValueParams | None  # None: the memory is a KeyValue
    # (H * M, D). BiasParams: only a bias is added to the concatenated heads; None: nothing is
    o: LinearParams | BiasParams | None
    q_norm: NormParams | None = None  # of the queries: of each head (K), or of all heads (H * K)
    sinks: Array | None = None  # (H,), of `ops.sdpa`
    shaw: ShawParams | None = None  # excludes bias, sinks, window and softcap
    xl: XLParams | None = None  # excludes these, shaw, pos and rotary; causal self-attention only
    gate: LinearParams | None = None  # (D, H * M), of x; its sigmoid multiplies the heads' output


class KeyValue(NamedTuple):
    """Keys and values after projection, split into heads."""

    k: Array  # (B, G, S, K)
    v: Array  # (B, G, S, M)


def attention(
    x: Array,
    params: AttentionParams,
    side: SideInputs = SideInputs(),
    *,
    config: layers.AttentionConfig,
    norm: NormConfig | None = None,
    context: Context = Context(),
) -> tuple[Array, AttentionCache]:
    """y = concat(heads) w_o + b_o, heads = sdpa(x w_q, memory w_k, memory w_v) (arXiv:1706.03762).

    With BiasParams as params.o y is concat(heads) + b_o, without params.o concat(heads).
    Queries and keys are normalised if params have q_norm and k_norm, and then rotated by RoPE. With
    params.gate, concat(heads) is multiplied by sigmoid(x w_gate + b_gate) (arXiv:2505.06708).

    x: (B, T, D), or one sequence (T, D)   y: (B, T, D') or (T, D')
    side.memory: (B, S, D_m), or (S, D_m) for one sequence; or a KeyValue, which several layers may
        share, with B = 1 for one sequence; None: self-attention
    config: the numbers of heads, softcap, scale, dropout, and the window of a self-attention; other
        sizes come from params
    norm: of queries and keys; None: RMSNorm
    context.mask, causal: of `ops.sdpa`
    context.rotary: RoPE tables, for self-attention only
    context.kv_cache: keys and values of earlier tokens, for self-attention only. S counts them too.
        They have no gradient. The cache's `kv_cache` has all keys and values. If it is static, mask
        must hide the slots that are not written, and there is no backward.
    context.segment_memory: (B, N, D), the inputs of this attention at the N positions before x;
        only with params.xl. It gets no gradient. S = N + T. The cache's `extended` has it and x.
    ValueError for shapes and arguments that do not fit together.
    """
    memory, bias, pos, memory_pos = side
    mask, causal, _, rotary, kv_cache, segment_memory, dropout_key = context
    require_no("attention", context, ("memory_mask",))
    n_heads, n_kv_heads = config.n_heads, config.kv_heads
    window = config.window if memory is None else None
    _require_memory(memory, memory_pos, rotary, kv_cache, params)
    if params.xl is not None:
        _require_xl(x, memory, causal, kv_cache, segment_memory)
    elif segment_memory is not None:
        raise ValueError("attention: segment_memory needs params.xl, got None")
    extended = None
    if segment_memory is not None:
        memory = extended = array_namespace(x).concat([segment_memory, x], axis=1)
    qk_options: Any = {"rotary": rotary, "config": norm}
    kv_params: Any = params.kv
    of_x: Any = (params.q, kv_params.k, kv_params.v) if memory is None else (params.q,)
    of_x = of_x if params.gate is None else (*of_x, params.gate)
    k_norm = kv_params and kv_params.k_norm
    all_kept = _is_kept(params.q_norm, pos, rotary) and _is_kept(k_norm, pos, rotary)
    mapped, maps = linear_many(x, of_x, all_kept=all_kept)
    q, q_cache = _heads(mapped[0], pos, n_heads, "q", params.q_norm, **qk_options)
    kv: Any = memory
    kv_saved: Any = None
    if memory is None:
        kv, kv_saved = _key_value(mapped[1:3], kv_params, pos, n_kv_heads, **qk_options)
    elif kv_params is not None:
        _require_axes(memory, x)
        options: Any = {"n_kv_heads": n_kv_heads, "k_norm": norm}
        kv, kv_saved = key_value(memory, kv_params, memory_pos, **options)
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
    options = {
        "mask": mask,
        "causal": causal,
        "scale": config.scale,
        "dropout_rate": rate(config.dropout, context),
        "dropout_key": dropout_key,
    }
    limits: Any = {"window": window, "softcap": config.softcap}
    extras = {"bias": bias, "sinks": params.sinks, **limits}
    k, v = kv
    core: Any
    r_cache: Any = None
    tables: tuple[Any, ...] = (params.sinks,)
    if params.xl is not None:
        _require_no("xl", {**extras, "shaw": params.shaw, "pos": pos, "rotary": rotary})
        encodings = distances(k.shape[2], x.shape[-1], like=x)[None, ...]  # (1, S, D)
        r, r_cache = linear(encodings, params.xl.r)
        r, tables = split_heads(r, n_kv_heads)[0, ...], params.xl[1:]
        biases = (_of_heads(value(table), n_heads) for table in tables)
        ctx, core = ops.xl_attention(q, k, v, r, *biases, **options)
    elif params.shaw is not None:
        _require_no("shaw", extras)
        tables = params.shaw
        ctx, core = ops.shaw(q, k, v, *map(value, tables), **options)
    else:
        sinks = value(params.sinks)
        ctx, core = ops.sdpa(q, k, v, bias, sinks, **limits, **options)
    y, gate_cache, o_cache = merge_heads(ctx, x.ndim), None, None
    if params.gate is not None:
        y, gate_cache = ops.glu(mapped[-1], y, activation="sigmoid")
    if params.o is not None:
        y, o_cache = linear(y, params.o)
    frozen = tuple(isinstance(table, Frozen) for table in tables)
    caches = (maps, q_cache, kv_saved, core, r_cache, gate_cache, o_cache)
    return y, AttentionCache(*caches, frozen, kv_cache, n_new, extended)


@short
class AttentionCache(NamedTuple):
    """Saved by `attention` for backward: the caches of the projections, heads and attention op.

    `backward` drops the gradients of cached keys and values; `n_new` tells how many are new.
    """

    maps: Any  # of x to the queries; in self-attention also to keys and values; to the gate
    q: HeadsCache
    # Self-attention: KeyValueHeadsCache. A memory (B, S, D): KeyValueSaved. A KeyValue: None.
    kv: KeyValueHeadsCache | KeyValueSaved | None
    core: Any  # of `ops.sdpa`, `ops.shaw` or `ops.xl_attention`
    r: Any  # of the projection of distances; None without params.xl
    gate: Any  # of `ops.glu`; None without params.gate
    o: Any  # of the output projection; None: there is none
    frozen: tuple[bool, ...]  # whether the sinks, or each of the tables of Shaw or XL, are frozen
    kv_cache: KVCache | None  # with the keys and values of x
    n_new: int  # the number of new keys, after those of the KV cache
    extended: Array | None  # (B, N + T, D), the segment memory and x; None without a memory

    def backward(self, dy: Array) -> tuple[Array, AttentionParams, SideInputs]:
        """Gradients of x, params and side."""
        do = None
        if self.o is not None:
            dy, do = self.o.backward(dy)
        dgate: tuple[Array, ...] = ()
        if self.gate is not None:
            *dgate, dy = self.gate.backward(dy)
        dq, dk, dv, *dtables = self.core.backward(split_heads(dy, self.q.n_heads))
        dq, dq_norm, dpos = self.q.backward(dq)
        n_cached = dk.shape[2] - self.n_new
        if n_cached:
            dk, dv = dk[:, :, n_cached:, :], dv[:, :, n_cached:, :]
        dkv = dmemory_pos = None
        dmemory: Any = KeyValue(dk, dv)
        if isinstance(self.kv, KeyValueHeadsCache):
            dk, dv, dk_norm, dkv_pos = self.kv.backward(dk, dv)
            dx, (dq, dk, dv, *dgate) = self.maps.backward(dq, dk, dv, *dgate)
            dkv, dmemory = KeyValueParams(dk, dv, dk_norm), None
            dpos = None if dpos is None else dpos + dkv_pos
        else:
            dx, (dq, *dgate) = self.maps.backward(dq, *dgate)
            if self.kv is not None:
                dmemory, dkv, dmemory_pos = self.kv.backward(dk, dv)
            if self.extended is not None:  # the part of the memory is dropped
                n_earlier = dmemory.shape[1] - dx.shape[1]
                dx, dmemory = dx + dmemory[:, n_earlier:, :], None
        dbias, *dpositions = self._tables(dtables)
        dparams = AttentionParams(dq, dkv, do, dq_norm, *dpositions, *dgate)
        return dx, dparams, SideInputs(dmemory, dbias, dpos, dmemory_pos)

    def _tables(self, grads: list[Any]) -> tuple[Any, ...]:
        """Gradients of bias, sinks, shaw and xl, from the core's gradients after q, k and v."""
        if len(self.frozen) == 1:
            return grads[0], None if self.frozen[0] else grads[1], None, None
        *dr, first, second = grads
        pair = zip(self.frozen, (first, second), strict=True)
        trained = [None if is_frozen else grad for is_frozen, grad in pair]
        if self.r is None:
            return None, None, ShawParams(*trained), None
        _, dr_params = self.r.backward(merge_heads(dr[0][None, ...]))
        xp = array_namespace(first)
        vectors = (None if grad is None else xp.reshape(grad, (-1,)) for grad in trained)
        return None, None, None, XLParams(dr_params, *vectors)


def key_value(
    x: Array,
    params: KeyValueParams,
    pos: Array | None = None,
    *,
    n_kv_heads: int,
    rotary: layers.RopeTables | None = None,
    k_norm: NormConfig | None = None,
) -> tuple[KeyValue, KeyValueSaved]:
    """Keys x w_k + b_k and values x w_v + b_v, split into heads, plus pos.

    Keys are normalised if params have k_norm, and then rotated by `rotary`.

    x: (B, S, D), or (S, D) with B = 1   k: (B, G, S, K)   v: (B, G, S, M)
    pos: (S, K), added to keys and values of every head, so that M = K; None: nothing is added
    rotary: RoPE tables; None: no rotation
    k_norm: the norm of the keys; None: RMSNorm
    ValueError for shapes that do not fit.
    """
    all_kept = _is_kept(params.k_norm, pos, rotary)
    pair, maps = linear_many(x, (params.k, params.v), all_kept=all_kept)
    kv, heads = _key_value(pair, params, pos, n_kv_heads, rotary=rotary, config=k_norm)
    return kv, KeyValueSaved(maps, heads)


@short
class KeyValueSaved(NamedTuple):
    """Saved by `key_value` for backward: the cache of the projections, and of the heads."""

    maps: Any  # one cache of `linear_many`, of the joint projection to k and v
    heads: KeyValueHeadsCache  # of what follows in each head: splitting, pos, norm, RoPE

    def backward(self, dk: Array, dv: Array) -> tuple[Array, KeyValueParams, Array | None]:
        """Gradients of x, params and pos."""
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
    """Keys and values in heads. pair: x w_k + b_k and x w_v + b_v."""
    k, v = pair
    k, k_cache = _heads(k, pos, n_kv_heads, "k", params.k_norm, rotary=rotary, config=config)
    v, v_cache = _heads(v, pos, n_kv_heads, "v")
    return KeyValue(k, v), KeyValueHeadsCache(k_cache, v_cache)


@short
class KeyValueHeadsCache(NamedTuple):
    """Saved by `_key_value` for backward: the cache of the heads of keys, and of values."""

    k: HeadsCache
    v: HeadsCache

    def backward(
        self, dk: Array, dv: Array
    ) -> tuple[Array, Array, NormParams | None, Array | None]:
        """Gradients of x w_k + b_k and x w_v + b_v, of k_norm and of pos."""
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
    """rope(norm(split_heads(y) + pos)). y: (..., T, H * K). A norm of all heads comes first."""
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
    return heads, HeadsCache(all_norm, head_norm, rope_cache, n_heads, pos_shape, y.ndim)


def _is_kept(*steps: Any) -> bool:
    """Whether `_heads` takes none of these steps, so that attention saves the linear output."""
    return all(step is None for step in steps)


@short
class HeadsCache(NamedTuple):
    """Saved by `_heads` for backward: the caches of the norm and RoPE; None for absent steps.

    Splitting into heads and adding positions need only numbers and a shape.
    """

    all_norm: Any  # a norm of all heads together
    head_norm: Any  # a norm of each head
    rope: Any  # of `ops.rope`
    n_heads: int
    pos_shape: tuple[int, ...] | None  # of pos; None: no positions were added
    ndim: int  # 3, or 2 for one sequence

    def backward(self, dheads: Array) -> tuple[Array, NormParams | None, Array | None]:
        """Gradients of y, norm_params and pos."""
        dnorm = None
        if self.rope is not None:
            dheads = self.rope.backward(dheads)
        if self.head_norm is not None:
            dheads, dnorm = self.head_norm.backward(dheads)
        dpos = None if self.pos_shape is None else sum_to(dheads, shape=self.pos_shape)
        dy = merge_heads(dheads, self.ndim)
        if self.all_norm is not None:
            dy, dnorm = self.all_norm.backward(dy)
        return dy, dnorm, dpos


def _require_no(what: str, extras: dict[str, Any]) -> None:
    present = [name for name, extra in extras.items() if extra is not None]
    if present:
        raise ValueError(f"attention: params.{what} excludes {', '.join(present)}")


def _require_mask(mask: Array | None, params: AttentionParams) -> None:
    if mask is None:
        raise ValueError("attention: a static KV cache needs a mask")
    for name in ("shaw", "xl"):
        if getattr(params, name) is not None:
            raise ValueError(
                f"attention: a static KV cache needs no params.{name}, which depends on the number "
                "of keys"
            )


def _require_xl(
    x: Array,
    memory: Any,
    causal: bool,
    kv_cache: KVCache | None,
    segment_memory: Array | None,
) -> None:
    """ValueError unless the attention is causal self-attention, after one memory at most."""
    if memory is not None or not causal:
        what = "a memory" if memory is not None else "causal = False"
        raise ValueError(f"attention: params.xl needs causal self-attention, got {what}")
    if segment_memory is None:
        return
    if kv_cache is not None:
        raise ValueError("attention: segment_memory and kv_cache exclude each other, got both")
    require_like("attention", "segment_memory", segment_memory, x)
    if x.ndim != 3:
        raise ValueError(f"attention: segment_memory needs x (B, T, D), got shape {tuple(x.shape)}")
    wanted = (x.shape[0], x.shape[2])
    if segment_memory.ndim != 3 or (segment_memory.shape[0], segment_memory.shape[2]) != wanted:
        raise ValueError(
            f"attention: segment_memory must be (B, N, D) with B = {wanted[0]}, D = {wanted[1]} "
            f"(from x), got shape {tuple(segment_memory.shape)}"
        )


def _last_keys(x: Array | None, n: int) -> Array | None:
    """The part of a mask or a bias for the last `n` keys, which a window has kept."""
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
        raise ValueError("attention: memory must be a KeyValue if and only if params.kv is None")
    if memory_pos is not None and (memory is None or params.kv is None):
        raise ValueError("attention: memory_pos needs a memory (B, S, D), and there is none")
    if memory is not None and not (rotary is None and kv_cache is None):
        raise ValueError("attention: rotary and kv_cache need self-attention, but memory was given")


def _of_heads(bias: Array, n_heads: int) -> Array:
    """(H * K,) -> (H, K). ValueError for another shape."""
    if bias.ndim != 1 or bias.shape[0] % n_heads:
        raise ValueError(
            f"attention: biases of params.xl must be (H * K,) with H = {n_heads}, "
            f"got shape {tuple(bias.shape)}"
        )
    return array_namespace(bias).reshape(bias, (n_heads, -1))


def _require_axes(memory: Any, x: Array) -> None:
    require_array("attention", "memory", memory)
    if memory.ndim != x.ndim:
        raise ValueError(
            f"attention: memory must have as many axes as x, {x.ndim}, "
            f"got shape {tuple(memory.shape)}"
        )


def _require_positions(name: str, pos: Array, heads: Array) -> None:
    require_like("attention", f"positions for {name}", pos, heads)
    if tuple(pos.shape) != tuple(heads.shape[2:]):
        raise ValueError(
            f"attention: positions for {name} must be {tuple(heads.shape[2:])}, "
            f"got shape {tuple(pos.shape)}"
        )


def split_heads(x: Array, n_heads: int) -> Array:
    """(B, T, H * K) -> (B, H, T, K); (T, H * K) -> (1, H, T, K)."""
    if x.ndim not in (2, 3):
        raise ValueError(
            f"attention: sequences must be (B, T, D) or (T, D), got shape {tuple(x.shape)}"
        )
    xp = array_namespace(x)
    b, t, width = (1, *x.shape)[-3:]
    return xp.permute_dims(xp.reshape(x, (b, t, n_heads, width // n_heads)), (0, 2, 1, 3))


def merge_heads(x: Array, ndim: int = 3) -> Array:
    """(B, H, T, K) -> (B, T, H * K); with ndim 2, (1, H, T, K) -> (T, H * K)."""
    xp = array_namespace(x)
    b, h, t, k = x.shape
    return xp.reshape(xp.permute_dims(x, (0, 2, 1, 3)), (b, t, h * k)[-ndim:])
