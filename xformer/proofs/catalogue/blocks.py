"""Cases of the parts of blocks, of blocks, stacks and the embedding.

Sizes are those of `xformer.proofs.catalogue.layers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from xformer import layers
from xformer.backends import Backend, Generator
from xformer.base.typing import Array
from xformer.layers.pooling import POOLINGS
from xformer.layers.splade import POOLINGS as SPLADE_POOLINGS
from xformer.layers.splade import SATURATIONS
from xformer.proofs.catalogue.case import (
    DEAD_BATCH,
    KEY,
    Case,
    Draw,
    Function,
    Options,
    called,
    drawn,
    mask,
    random,
)
from xformer.proofs.catalogue.layers import linear_params, turning


def cases() -> Iterator[Case]:
    """All cases of this module: every layer with every option."""
    for subject in (
        _norm,
        _add_norm,
        _residual,
        _parallel,
        _block,
        _several,
        _stack,
        _embed,
        _pool,
        _splade,
    ):
        yield from subject()


def _ffn_params(rng: Generator) -> layers.FeedForwardParams:
    return layers.FeedForwardParams(linear_params(rng, 6, 11), linear_params(rng, 11, 6))


def _norm_params(rng: Generator, b: bool = True) -> layers.NormParams:
    return layers.NormParams(rng.normal((6,)), rng.normal((6,)) if b else None)


RMS = layers.NormConfig("rms", eps=0.1, offset=1.0)
OUTSIDE = layers.NormConfig(eps=0.1, eps_inside=False)


def _norm() -> Iterator[Case]:
    def case(note: str, config: layers.NormConfig, b: bool) -> Case:
        def make(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
            return partial(layers.norm, config=config), (
                rng.normal((5, 4, 6)),
                _norm_params(rng, b),
            )

        return Case("layers", f"norm: {note}", make)

    yield case("layer", layers.NormConfig(eps=0.1), b=True)
    yield case("layer, no b", layers.NormConfig(), b=False)
    yield case("layer, eps outside the root", OUTSIDE, b=True)
    yield case("rms", RMS, b=False)


def _add_norm() -> Iterator[Case]:
    def case(note: str, config: layers.NormConfig, b: bool, *shape: int, r: bool = True) -> Case:
        def make(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
            terms = rng.normal((*shape, 6)), rng.normal((*shape, 6)) if r else None
            return partial(layers.add_norm, config=config), (*terms, _norm_params(rng, b))

        return Case("layers", f"add_norm: {note}", make)

    yield case("layer", layers.NormConfig(eps=0.1), True, 5, 4)
    yield case("layer, no b", layers.NormConfig(), False, 5, 4)
    yield case("layer, eps outside the root", OUTSIDE, True, 5, 4)
    yield case("rms", RMS, False, 5, 4)
    yield case("rms, a row", RMS, False)
    yield case("layer, no r", layers.NormConfig(eps=0.1), True, 5, 4, r=False)
    yield case("rms, no r", RMS, False, 5, 4, r=False)


def _around_ffn(
    x: Array, norm: Any, out_norm: Any, scale: Any, ffn: Any, **options: Any
) -> tuple[Array, Any]:
    """`layers.residual` around a feed-forward network, whose parameters are also an argument."""
    sublayer = partial(layers.feed_forward, params=ffn)
    return layers.residual(x, norm, sublayer, out_norm, scale, **options)


def _residual() -> Iterator[Case]:
    def case(
        note: str, *, norm: bool = True, out_norm: bool = False, scale: bool = False, **options: Any
    ) -> Case:
        def make(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
            b = "config" not in options
            norms = (_norm_params(rng, b) if has else None for has in (norm, out_norm))
            return partial(_around_ffn, **options), (
                rng.normal((5, 4, 6)),
                *norms,
                rng.normal((1,)) if scale else None,
                _ffn_params(rng),
            )

        return Case("layers", f"residual: {note}", make)

    for placement in ("pre", "post"):
        yield case(placement, norm_placement=placement)
        yield case(f"{placement}, rms", norm_placement=placement, config=RMS)
        yield case(f"{placement}, scale", norm_placement=placement, scale=True)
    yield case("no norm", norm=False)
    yield case("no norm, scale", norm=False, scale=True)
    yield case("sandwich", out_norm=True)
    yield case("output norm", norm=False, out_norm=True, config=RMS)
    yield case("multiplier", multiplier=0.3)
    dropout: Options = {"dropout_rate": 0.3, "dropout_key": KEY}
    yield case("dropout", out_norm=True, **dropout)
    yield case("dropout, scale, multiplier", out_norm=True, scale=True, multiplier=0.3, **dropout)


class _Flat(NamedTuple):
    """A cache of `layers.parallel` with gradients in the order of arguments of `_side_by_side`."""

    cache: Any

    def backward(self, dy: Array) -> tuple[Any, ...]:
        dx, (first, second) = self.cache.backward(dy)
        (dnorm, _, dscale, dparams), (dsecond_norm, _, dsecond_scale, dsecond) = first, second
        return dx, dnorm, dsecond_norm, dscale, dsecond_scale, dparams, dsecond


def _side_by_side(
    x: Array,
    norm: Any,
    second_norm: Any,
    f_scale: Any,
    g_scale: Any,
    first: Any,
    second: Any,
    **options: Any,
) -> tuple[Array, Any]:
    """`layers.parallel` of two feed-forward networks."""
    f, g = (partial(layers.feed_forward, params=params) for params in (first, second))
    keys = (KEY, KEY.at(1)) if "dropout_rate" in options else (None, None)
    branches = (
        layers.Branch(f, norm, None, f_scale, keys[0]),
        layers.Branch(g, second_norm, None, g_scale, keys[1]),
    )
    (y, r), cache = layers.parallel(x, branches, **options)
    return y + r, _Flat(cache)


def _parallel() -> Iterator[Case]:
    def case(note: str, *, n_norms: int = 2, scales: bool = False, **options: Any) -> Case:
        def make(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
            b = "config" not in options
            norms = (_norm_params(rng, b) if n < n_norms else None for n in range(2))
            numbers = (rng.normal((1,)) if scales else None for _ in range(2))
            args = (rng.normal((5, 4, 6)), *norms, *numbers, _ffn_params(rng), _ffn_params(rng))
            return partial(_side_by_side, **options), args

        return Case("layers", f"parallel: {note}", make)

    yield case("two norms")
    yield case("one norm, rms", n_norms=1, config=RMS)
    dropout: Options = {"dropout_rate": 0.3}
    yield case("dropout", **dropout)
    yield case("no norm", n_norms=0)
    yield case("scales, dropout", scales=True, **dropout)
    yield case("no norm, scales, multiplier", n_norms=0, scales=True, multiplier=0.3)


LLAMA: Options = {
    "attn": {"bias": False, "d_head": 4, "n_kv_heads": 1},
    "ffn": {"bias": False, "gated": True, "activation": "silu"},
    "norm": {"kind": "rms"},
}
DROPOUT: Options = {"attn": {"dropout": 0.3}, "dropout": 0.3}
RATES: Options = {"attn": {"dropout": 0.3}, "ffn": {"dropout": 0.2}, "dropout": 0.1}
REZERO: Options = {"norm_placement": "none", "residual_scale": 0.0}
NO_BIAS: Options = {"attn": {"bias": False}, "ffn": {"bias": False}, "norm": {"bias": False}}


def block_config(*options: Options) -> layers.BlockConfig:
    """A small block. options: of its parts "attn", "ffn" and "norm", and of the block. Later win.

    "ffn" may also be an ExpertsConfig.
    """
    parts: dict[str, Any] = {
        "attn": {"d_model": 6, "n_heads": 2},
        "ffn": {"d_ff": 11, "activation": "gelu"},
        "norm": {},
    }
    for name, value in ((name, value) for each in options for name, value in each.items()):
        parts[name] = parts[name] | value if isinstance(value, dict) else value
    kinds: dict[str, Any] = {
        "attn": layers.AttentionConfig,
        "ffn": layers.FeedForwardConfig,
        "norm": layers.NormConfig,
    }
    for name, kind in kinds.items():
        if isinstance(parts[name], dict):
            parts[name] = kind(**parts[name])
    return layers.BlockConfig(**parts)


DELTA = layers.GatedDeltaNetConfig(6, n_heads=4, d_key=13, d_value=5, n_key_heads=2)
LATENT = layers.LatentAttentionConfig(6, 2, kv_rank=5, d_nope=3, d_rope=4, d_value=2, q_rank=7)
TURNED: Options = {"rotary": turning(4, width=2), "causal": True}
BLOCK_MASKS: Options = {"mask": mask((5, 1, 1, 4), DEAD_BATCH), "memory_mask": mask((5, 1, 4, 7))}


def _blocks(
    name: str,
    *,
    cross: str = "",  # or "memory"; or keys and values ready, for all layers "shared", or "each"
    pos: bool = False,
    bias: tuple[int, ...] | None = None,
    norms: bool = True,
    n_blocks: int = 2,
    relative_bias: layers.RelativeConfig | None = None,
    config: Options | None = None,
    second: Options | None = None,  # other options of the second block
    batch: tuple[int, ...] = (5,),  # (): one sequence
    **options: Any,
) -> Case:
    """A case of a block, of blocks or of a stack, according to the first word of `name`."""
    is_stack, several = name.startswith("stack"), name.startswith("blocks")
    cfg = block_config(config or {})
    cfgs = (cfg, block_config(config or {}, second or {}))

    def make(rng: Generator, backend: Backend) -> tuple[Function, tuple[Any, ...]]:
        like: Options = {"cross": bool(cross), "shared_memory": cross in ("shared", "each")}
        if is_stack or several:
            layer_cfgs = cfgs[:n_blocks]  # with one block, both layers share its parameters
            params: Any = layers.StackParams.init(
                rng, layer_cfgs, relative_bias=relative_bias, **like
            )
            params = params if is_stack else params.blocks
        else:
            params = cfg.init(rng, **like)
        if not norms:
            params = params._replace(attn_norm=None, cross_norm=None, ffn_norm=None)
        ready = cross in ("shared", "each") and not is_stack
        memory: Any = rng.normal((*batch, 7, 6)) if cross else None
        if ready:
            n, widths = cfg.attn.kv_heads, (cfg.attn.head_width, cfg.attn.value_width)
            k, v = ((5, n, 7, width) for width in widths)
            pairs = tuple(layers.KeyValue(rng.normal(k), rng.normal(v)) for _ in cfgs)
            memory = pairs if cross == "each" else pairs[0]
        x, params = rng.normal((*batch, 4, 6)), random(rng, params)
        side = layers.SideInputs(
            memory,
            None if bias is None else rng.normal(bias),
            rng.normal((4, 3)) if pos else None,
            rng.normal((7, 3)) if pos and cross and not ready else None,
        )
        args = x, params, side
        keywords = called(drawn(rng, backend, options))
        if is_stack:
            return partial(
                layers.stack, configs=cfgs, relative_bias=relative_bias, **keywords
            ), args
        if several:
            return partial(layers.blocks, configs=cfgs, **keywords), args
        return partial(layers.block, config=cfg, **keywords), args

    return Case("layers", name, make)


def _block() -> Iterator[Case]:
    for norm in ("pre", "post"):
        yield _blocks(
            f"block: encoder, {norm}", config={"norm_placement": norm, "attn": {"d_value": 2}}
        )
        yield _blocks(
            f"block: decoder, {norm}", cross="memory", causal=True, config={"norm_placement": norm}
        )
    yield _blocks("block: ready keys and values", cross="shared", config={"attn": {"d_value": 2}})
    wide: Options = {"attn": {"d_head": 5, "d_value": 2}, "norm": {"eps": 0.1}}
    yield _blocks("block: heads of other widths, eps", cross="memory", config=wide)
    outside: Options = {"norm": {"eps": 0.1, "eps_inside": False}}
    yield _blocks("block: eps outside the root", cross="memory", config=outside)
    yield _blocks("block: norms left out", cross="memory", norms=False)
    yield _blocks("block: no norms", cross="memory", config={"norm_placement": "none"})
    yield _blocks("block: ReZero", cross="memory", config=REZERO)
    yield _blocks("block: ReZero, dropout", config=REZERO | DROPOUT, dropout_key=KEY)
    for norm in ("pre", "post", "sandwich", "output"):
        scaled: Options = {"norm_placement": norm, "residual_scale": 1.0}
        yield _blocks(f"block: scales, {norm}", config=scaled)
    for placement in ("pre", "post", "sandwich"):
        bare: Options = {"attn_norm": False, "norm_placement": placement}
        yield _blocks(f"block: no norm of attention, {placement}", cross="memory", config=bare)
    short: Options = {"ffn": {"d_ff": 6, "down": False}}
    yield _blocks("block: feed-forward of one linear layer", config=short)
    yield _blocks("block: no biases", cross="memory", config=NO_BIAS)
    one: Options = {"batch": (), "causal": True}
    yield _blocks("block: one sequence", cross="memory", pos=True, bias=(2, 1, 4), **one)
    yield _blocks("block: one key head", cross="memory", config={"attn": {"n_kv_heads": 1}})
    yield _blocks("block: positions", cross="memory", pos=True)
    yield _blocks("block: dropout", cross="memory", config=DROPOUT, dropout_key=KEY)
    yield _blocks("block: bias and masks", cross="memory", bias=(2, 1, 4), **BLOCK_MASKS)
    yield from _modern_block()


def _modern_block() -> Iterator[Case]:
    turned: Options = {"rotary": turning(4), "causal": True}
    yield _blocks("block: Llama", config=LLAMA, **turned)
    llama: Options = LLAMA["attn"]
    qwen = LLAMA | {"attn": llama | {"qkv_bias": True, "qk_norm": "head", "window": (1, 0)}}
    yield _blocks("block: Qwen", config=qwen, **turned)
    gemma = LLAMA | {
        "attn": llama | {"softcap": 2.0, "scale": 0.3},
        "norm": {"kind": "rms", "offset": 1.0},
        "norm_placement": "sandwich",
    }
    yield _blocks("block: Gemma 2", config=gemma, **turned)
    olmo = LLAMA | {"norm_placement": "output", "attn": llama | {"qk_norm": "all"}}
    yield _blocks("block: OLMo 2", config=olmo, **turned)
    delta: Options = {"causal": True, "mask": mask((5, 1, 1, 4), DEAD_BATCH)}
    yield _blocks("block: gated DeltaNet", config=LLAMA | {"attn": DELTA}, **delta)
    both: Options = LLAMA | {"attn": DELTA, "parallel": True}
    yield _blocks("block: gated DeltaNet, parallel", config=both, causal=True)
    latent = LLAMA | {"attn": LATENT}
    yield _blocks("block: latent attention", config=latent, bias=(2, 1, 4), **turned)
    yield _blocks("block: latent attention, parallel", config=latent | {"parallel": True}, **turned)
    granite = LLAMA | {"residual_multiplier": 0.22, "attn": llama | {"scale": 0.3}}
    yield _blocks("block: Granite", config=granite, **turned)
    experts = layers.ExpertsConfig(n_experts=3, top_k=2, d_ff=11)
    yield _blocks("block: Mixtral", config=LLAMA | {"ffn": experts}, **turned)
    options: Options = {"score": "sigmoid", "correction": True, "d_shared": 7}
    v3 = layers.ExpertsConfig(4, 2, 11, n_groups=2, group_top=2, **options)
    yield _blocks("block: experts of DeepSeek-V3", config=LLAMA | {"ffn": v3}, **turned)
    qwen2 = layers.ExpertsConfig(3, 2, 11, normalise=False, d_shared=7, shared_gate=True)
    yield _blocks("block: Qwen2-MoE", config=LLAMA | {"ffn": qwen2}, **turned)
    clamped = layers.ExpertsConfig(3, 2, 11, activation="clamped_swiglu", bias=True)
    oss: Options = {"attn": llama | {"sinks": True, "bias": True, "window": (1, 0)}, "ffn": clamped}
    yield _blocks("block: gpt-oss", config=LLAMA | oss, **turned)
    some: Options = {"attn": {"sinks": True, "o_bias": False}, "ffn": {"bias": False}}
    yield _blocks("block: sinks, biases", config=some)
    for output in ("bias", "none"):
        bare: Options = {"attn": {"output": output}}
        yield _blocks(f"block: heads' output {output}", cross="memory", config=bare)
    yield _blocks(
        "block: Mixtral, one sequence", config=LLAMA | {"ffn": experts}, batch=(), **turned
    )
    chunked: Options = {"ffn": {"chunk_len": 3, "gated": True}}  # of 4 tokens
    yield _blocks("block: chunked feed-forward", config=chunked)
    yield _blocks("block: parallel", config={"parallel": True})
    shared: Options = {"parallel": True, "shared_norm": True, **DROPOUT}
    yield _blocks("block: parallel, one norm, dropout", config=shared, dropout_key=KEY)
    yield _blocks("block: parallel, no norms", config={"parallel": True, "norm_placement": "none"})
    yield _blocks("block: parallel, ReZero", config={"parallel": True, **REZERO})
    for norm in ("sandwich", "output"):
        yield _blocks(f"block: decoder, {norm}", cross="memory", config={"norm_placement": norm})
    yield _blocks("block: Shaw", config={"attn": {"shaw_max_distance": 2, "d_value": 2}})
    yield _blocks("block: output gate", config=LLAMA | {"attn": llama | {"output_gate": True}})
    xl: Options = {"attn": {"xl": True, "d_value": 2}}
    yield _blocks("block: XL", config=xl, causal=True)
    memory: Options = {"segment_memory": lambda rng, _: rng.normal((5, 3, 6)), "causal": True}
    yield _blocks(
        "block: XL, segment memory, post", config=xl | {"norm_placement": "post"}, **memory
    )
    yield _blocks("block: XL, segment memory, parallel", config=xl | {"parallel": True}, **memory)
    before: Options = {"kv_cache": lambda rng, _: layers.KVCache(*_heads(rng)), "causal": True}
    yield _blocks("block: after a KV cache", **before)
    yield _blocks("block: three rates of dropout", config=RATES, dropout_key=KEY)


def _heads(rng: Generator) -> tuple[Array, Array]:
    return rng.normal((5, 2, 3, 3)), rng.normal((5, 2, 3, 3))


def _turning_each(rng: Generator, _: Backend) -> layers.RopeTables:
    """RoPE tables with different positions for each sequence."""
    config, positions = layers.RopeConfig(2), rng.integers((5, 4), high=7)
    return layers.rope_tables(config, like=rng.full((1,), 0.0), length=7, positions=positions)


def _turning_by_layer(rng: Generator, backend: Backend) -> tuple[layers.RopeTables | None, ...]:
    """RoPE tables of the first of two layers, with positions of each sequence; NoPE after it."""
    return _turning_each(rng, backend), None


def _several() -> Iterator[Case]:
    yield _blocks("blocks: encoder", config={"norm_placement": "post", "attn": {"d_value": 2}})
    yield _blocks("blocks: one for both layers", n_blocks=1, **TURNED)
    each: Options = {"rotary": _turning_each, "bias": (5, 1, 4, 4), "causal": True}
    yield _blocks(
        "blocks: bias and rotary of each sequence", second={"attn": {"window": (1, 1)}}, **each
    )
    by_layer: Options = {"rotary": _turning_by_layer, "causal": True}
    yield _blocks("blocks: rotary by layer", **by_layer)
    again: Options = {"activation_checkpointing": True, "bias": (2, 1, 4), "pos": True}
    yield _blocks("blocks: memory, masks, checkpointing", cross="memory", **again, **BLOCK_MASKS)
    yield _blocks("blocks: ready keys and values", cross="shared", config={"attn": {"d_value": 2}})
    yield _blocks("blocks: ready keys and values of each layer", cross="each")
    one: Options = {"batch": (), "activation_checkpointing": True}
    yield _blocks("blocks: one sequence, memory, checkpointing", cross="memory", **one)
    yield _blocks("blocks: dropout", config=RATES, dropout_key=KEY)
    streams: Options = {"config": {"reversible": True, "norm_placement": "sandwich", **LLAMA}}
    yield _blocks("blocks: reversible, Llama, sandwich", **streams, **TURNED)
    yield _blocks("blocks: reversible, rotary by layer", **streams, **by_layer)
    both: Options = {"segment_memory": _segment_memory, "causal": True}
    again = {"activation_checkpointing": True, "dropout_key": KEY}
    xl: Options = DROPOUT | {"attn": {"xl": True}}
    yield _blocks("blocks: XL, segment memory, checkpointing, dropout", config=xl, **both, **again)


def _segment_memory(rng: Generator, _: Backend) -> tuple[Array, Array]:
    return rng.normal((5, 3, 6)), rng.normal((5, 3, 6))


def _stack() -> Iterator[Case]:
    for norm in ("pre", "post"):
        yield _blocks(
            f"stack: encoder, {norm}", config={"norm_placement": norm, "attn": {"d_value": 2}}
        )
    yield _blocks("stack: decoder", cross="memory", causal=True)
    yield _blocks("stack: bias and positions", cross="memory", bias=(2, 1, 4), pos=True)
    yield _blocks("stack: shared memory", cross="shared", config={"attn": {"d_value": 2}})
    yield _blocks("stack: shared memory, positions", cross="shared", pos=True)
    for kind in ("layer", "rms"):
        normed: Options = {"attn": {"qk_norm": "head"}, "norm": {"kind": kind, "eps": 0.1}}
        yield _blocks(f"stack: shared memory, {kind} norm of keys", cross="shared", config=normed)
    yield _blocks("stack: masks", cross="memory", **BLOCK_MASKS)
    yield _blocks("stack: dropout", config=DROPOUT, dropout_rate=0.2, dropout_key=KEY)
    yield _blocks("stack: one block for both layers", n_blocks=1)
    yield _blocks("stack: no norms", cross="memory", config={"norm_placement": "none"})
    yield _blocks("stack: ReZero, one block for both layers", n_blocks=1, config=REZERO)
    relative_bias = layers.RelativeConfig(2, n_buckets=8, max_distance=6)
    yield _blocks("stack: relative bias", relative_bias=relative_bias)
    one: Options = {"batch": (), "cross": "shared", "relative_bias": relative_bias}
    yield _blocks("stack: one sequence, shared memory, relative bias", **one)
    yield _blocks("stack: relative bias and bias", relative_bias=relative_bias, bias=(5, 1, 4, 4))
    yield _blocks("stack: other windows, rotary", second={"attn": {"window": (1, 1)}}, **TURNED)
    again: Options = {
        "activation_checkpointing": True,
        "relative_bias": relative_bias,
        "bias": (5, 1, 4, 4),
        "pos": True,
    }
    yield _blocks("stack: checkpointing", cross="memory", **again, **BLOCK_MASKS)
    again = {"activation_checkpointing": True, "config": {"parallel": True, **DROPOUT}}
    yield _blocks("stack: checkpointing, parallel, dropout", dropout_key=KEY, **again)
    again = {"activation_checkpointing": True, "config": REZERO | DROPOUT}
    yield _blocks("stack: checkpointing, ReZero, dropout", dropout_key=KEY, **again)
    streams: Options = {"config": {"reversible": True, **RATES}, "relative_bias": relative_bias}
    masked: Options = {"mask": BLOCK_MASKS["mask"], "dropout_key": KEY}
    yield _blocks("stack: reversible", bias=(5, 1, 4, 4), pos=True, **streams, **masked)
    one = {"n_blocks": 1, "config": {"reversible": True, "norm_placement": "output"}}
    one["config"] |= {"residual_multiplier": 0.3}
    yield _blocks("stack: reversible, one block for both layers", **one)
    before: Options = {"segment_memory": _segment_memory, "causal": True}
    yield _blocks("stack: XL, segment memory", config={"attn": {"xl": True}}, **before)


def _flat_embed(params: layers.EmbedParams, **options: Any) -> tuple[Any, Any]:
    """`layers.embed`, without the output of positions if it is None."""
    (x, pos), cache = layers.embed(params, **options)
    return x if pos is None else (x, pos), cache


def _embed() -> Iterator[Case]:
    def case(note: str, inputs: Options | None = None, **config: Any) -> Case:
        sizes: Options = {"vocab_size": 13, "width": 6, "d_model": 6, "max_len": 4}
        cfg = layers.EmbedConfig(**sizes | config)

        def make(rng: Generator, backend: Backend) -> tuple[Function, tuple[Any, ...]]:
            ids = rng.integers((5, 4), high=cfg.vocab_size)
            fn = partial(_flat_embed, ids=ids, config=cfg, **drawn(rng, backend, inputs or {}))
            return fn, (random(rng, cfg.init(rng)),)

        return Case("layers", f"embed: {note}", make)

    yield case("no positions", positions="none")
    for positions in ("sinusoidal", "learned"):
        yield case(f"{positions}, added", positions=positions)
        concat: Options = {"positions": positions, "mode": "concat"}
        yield case(f"{positions}, concatenated", d_model=9, **concat)
        yield case(f"{positions}, concatenated, projected", d_model=11, d_positions=3, **concat)
        if positions == "learned":  # sinusoidal positions have no gradient
            yield case(f"{positions}, for q, k, v", positions=positions, mode="qkv", d_positions=3)
    yield case("fewer tokens than max_len", positions="learned", max_len=7)
    yield case("projected", d_model=11)
    yield case("dropout", {"dropout_key": KEY}, dropout=0.3)
    learned: Options = {"positions": "learned", "max_len": 7}
    yield case("offset", offset=2, **learned)
    yield case("start", {"start": 2}, offset=1, **learned)
    yield case("start, sinusoidal", {"start": 2}, max_len=7)
    yield case("positions of each token", {"positions": _ids((5, 4), 5)}, offset=2, **learned)
    yield case("positions of all rows", {"positions": _ids((4,), 7)}, **learned)
    yield case("sinusoidal, places", {"positions": _ids((5, 4), 7)}, max_len=7)
    yield case("any length, scale", positions="none", max_len=None, scale=2.5)
    bert: Options = {"n_types": 3, "norm": layers.NormConfig(eps=0.1), **learned}
    yield case("BERT", {"types": _ids((5, 4), 3)}, **bert)
    yield case("BERT, no types", **bert)
    albert: Options = {"project": True, "project_bias": True, "dropout": 0.3}
    yield case("ALBERT", {"dropout_key": KEY}, **bert | albert)


def _pool() -> Iterator[Case]:
    tokens = mask((5, 4), DEAD_BATCH)
    poolings: list[tuple[str, Any, Options]] = [(name, name, {}) for name in POOLINGS]
    poolings += [(f"{name}, skip", name, {"skip": 1}) for name in ("first", "max", "weighted_mean")]
    poolings += [("max and mean", ("max", "mean"), {})]
    for note, how, options in poolings:
        for inputs in ({}, {"mask": tokens}):

            def make(
                rng: Generator,
                backend: Backend,
                how: Any = how,
                inputs: Options = inputs,
                options: Options = options,
            ) -> tuple[Function, tuple[Any, ...]]:
                fn = partial(layers.pool, pooling=how, **options, **drawn(rng, backend, inputs))
                return fn, (rng.normal((5, 4, 6)),)

            yield Case("layers", f"pool: {note}{', mask' if inputs else ''}", make)


def _splade() -> Iterator[Case]:
    options: list[Options] = [
        {"pooling": pooling, "saturation": saturation}
        for pooling in SPLADE_POOLINGS
        for saturation in SATURATIONS
    ]
    for named in options:
        for inputs in ({}, {"mask": mask((5, 4), DEAD_BATCH)}):

            def make(
                rng: Generator, backend: Backend, named: Options = named, inputs: Options = inputs
            ) -> tuple[Function, tuple[Any, ...]]:
                fn = partial(layers.splade, **named, **drawn(rng, backend, inputs))
                return fn, (rng.normal((5, 4, 6)),)

            note = ", ".join([*named.values(), *inputs])
            yield Case("layers", f"splade: {note}", make)


def _ids(shape: tuple[int, ...], size: int) -> Draw:
    return lambda rng, _: rng.integers(shape, high=size)
