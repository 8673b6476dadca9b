"""Cases of the layers.

B = 5, T = 4, S = 7, D = 6, H = 2, K = M = 3, F = 11 here and in the models: few shapes in all,
since JAX compiles anew for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from xformer import layers
from xformer.backends import Backend, Generator
from xformer.catalogue.case import (
    DEAD_BATCH,
    DEAD_QUERY,
    KEY,
    Case,
    Function,
    Make,
    Options,
    drawn,
    mask,
    random,
)
from xformer.layers.feed_forward import ACTIVATIONS
from xformer.ops import Key
from xformer.typing import Array


def cases() -> Iterator[Case]:
    """Every layer, with every option."""
    for subject in (_attention, _key_value, _feed_forward, _residual, _block, _stack, _embed):
        yield from subject()


def _layer(name: str, make: Make) -> Case:
    return Case("layers", name, make)


def _linear_params(rng: Generator, i: int, o: int, b: bool = True) -> layers.LinearParams:
    return layers.LinearParams(rng.normal((i, o), std=i**-0.5), rng.normal((o,)) if b else None)


def _attention() -> Iterator[Case]:
    def case(
        note: str,
        *,
        memory: str = "self",  # or "array", or "ready": a KeyValue
        groups: int = 2,
        k: int = 3,
        m: int = 3,
        o: bool = True,
        b: bool = True,
        pos: str = "",  # "q", "qk"
        bias: tuple[int, ...] | None = None,
        **options: Any,
    ) -> Case:
        def make(rng: Generator, backend: Backend) -> tuple[Function, tuple[Any, ...]]:
            width = 13 if memory == "array" else 6  # D_m need not be D
            kv = layers.KeyValueParams(
                _linear_params(rng, width, groups * k, b), _linear_params(rng, width, groups * m, b)
            )
            params = layers.AttentionParams(
                _linear_params(rng, 6, 2 * k, b),
                None if memory == "ready" else kv,
                _linear_params(rng, 2 * m, 6, b) if o else None,
            )
            source: Any = None
            if memory == "array":
                source = rng.normal((5, 7, width))
            elif memory == "ready":
                k_heads, v_heads = ((5, groups, 7, n) for n in (k, m))
                source = layers.KeyValue(rng.normal(k_heads), rng.normal(v_heads))
            args = (
                rng.normal((5, 4, 6)),
                params,
                source,
                None if bias is None else rng.normal(bias),
                rng.normal((4, k)) if "q" in pos else None,
                rng.normal((7, k)) if "k" in pos else None,
            )
            heads: Options = {"n_heads": 2, "n_kv_heads": groups}
            return partial(layers.attention, **heads, **drawn(rng, backend, options)), args

        return _layer(f"attention: {note}", make)

    yield case("self")
    yield case("self, causal", causal=True)
    yield case("self, positions", pos="q")
    yield case("self, bias and mask", bias=(2, 1, 4), mask=mask((5, 2, 4, 4), DEAD_QUERY))
    yield case("memory", memory="array")
    yield case("memory, one key head", memory="array", groups=1)
    yield case("memory, heads of other widths", memory="array", k=5, m=2)
    yield case("memory, positions", memory="array", pos="qk")
    yield case("memory, positions of queries", memory="array", pos="q")
    yield case("memory, padding", memory="array", mask=mask((5, 1, 1, 7), DEAD_BATCH))
    yield case("ready keys and values", memory="ready", m=2)
    yield case("no output projection", o=False, m=2)
    yield case("no biases", b=False)
    yield case("dropout and scale", scale=0.3, dropout_rate=0.3, dropout_key=KEY)
    yield case(
        "all options",
        memory="array",
        groups=1,
        pos="qk",
        bias=(4, 7),
        causal=True,
        mask=mask((5, 1, 1, 7)),
        scale=0.3,
        dropout_rate=0.3,
        dropout_key=KEY,
    )


def _key_value() -> Iterator[Case]:
    def case(note: str, m: int, pos: bool) -> Case:
        def make(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
            params = layers.KeyValueParams(_linear_params(rng, 6, 6), _linear_params(rng, 6, 2 * m))
            args = (rng.normal((5, 7, 6)), params, rng.normal((7, 3)) if pos else None)
            return partial(layers.key_value, n_kv_heads=2), args

        return _layer(f"key_value: {note}", make)

    yield case("plain", m=5, pos=False)
    yield case("positions", m=3, pos=True)


def _feed_forward() -> Iterator[Case]:
    def case(activation: str, b: bool = True) -> Case:
        def make(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
            up, down = _linear_params(rng, 6, 11, b), _linear_params(rng, 11, 6, b)
            args = (rng.normal((5, 4, 6)), layers.FeedForwardParams(up, down))
            return partial(layers.feed_forward, activation=activation), args

        return _layer(f"feed_forward: {activation}{'' if b else ', no biases'}", make)

    for activation in ACTIVATIONS:
        yield case(activation)
    yield case("relu", b=False)


def _around_ffn(x: Array, norm: Any, ffn: Any, **options: Any) -> tuple[Array, Any]:
    """`layers.residual` around a feed-forward network, whose parameters are an argument too."""
    return layers.residual(x, norm, lambda x: layers.feed_forward(x, ffn), **options)


def _residual() -> Iterator[Case]:
    def case(note: str, *, norm: bool = True, **options: Any) -> Case:
        def make(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
            ffn = layers.FeedForwardParams(_linear_params(rng, 6, 11), _linear_params(rng, 11, 6))
            like = layers.LayerNormParams.init(rng, 6, bias=True)
            args = (rng.normal((5, 4, 6)), random(rng, like) if norm else None, ffn)
            return partial(_around_ffn, **options), args

        return _layer(f"residual: {note}", make)

    for place in ("pre", "post"):
        yield case(place, place=place, eps=0.1)
    yield case("no norm", norm=False)
    yield case("dropout", dropout_rate=0.3, dropout_key=KEY)


SIZES: Options = {"d_model": 6, "n_heads": 2, "d_ff": 11, "activation": "gelu"}
BLOCK_MASKS: Options = {"mask": mask((5, 1, 1, 4), DEAD_BATCH), "memory_mask": mask((5, 1, 4, 7))}


def _blocks(
    name: str,
    *,
    cross: str = "",  # or "memory", or "shared": its keys and values are made once
    pos: bool = False,
    bias: tuple[int, ...] | None = None,
    norms: bool = True,
    config: Options | None = None,
    **options: Any,
) -> Case:
    """A block, or a stack of them, by the first word of `name`."""
    is_stack = name.startswith("stack")
    cfg = layers.BlockConfig(**SIZES | (config or {}))

    def make(rng: Generator, backend: Backend) -> tuple[Function, tuple[Any, ...]]:
        like: Options = {"cross": bool(cross), "shared_memory": cross == "shared"}
        if is_stack:
            params: Any = layers.StackParams.init(rng, cfg, 2, **like)
        else:
            params = cfg.init(rng, **like)
        if not norms:
            params = params._replace(attn_norm=None, cross_norm=None, ffn_norm=None)
        ready = cross == "shared" and not is_stack
        memory: Any = rng.normal((5, 7, 6)) if cross else None
        if ready:
            k, v = (5, cfg.kv_heads, 7, cfg.head_width), (5, cfg.kv_heads, 7, cfg.value_width)
            memory = layers.KeyValue(rng.normal(k), rng.normal(v))
        args = (
            rng.normal((5, 4, 6)),
            random(rng, params),
            memory,
            None if bias is None else rng.normal(bias),
            rng.normal((4, 3)) if pos else None,
            rng.normal((7, 3)) if pos and cross and not ready else None,
        )
        layer = layers.stack if is_stack else layers.block
        return partial(layer, config=cfg, **drawn(rng, backend, options)), args

    return _layer(name, make)


def _block() -> Iterator[Case]:
    for norm in ("pre", "post"):
        yield _blocks(f"block: encoder, {norm}", config={"norm": norm, "d_value": 2})
        yield _blocks(f"block: decoder, {norm}", cross="memory", causal=True, config={"norm": norm})
    yield _blocks("block: ready keys and values", cross="shared", config={"d_value": 2})
    wide: Options = {"d_head": 5, "d_value": 2, "eps": 0.1}
    yield _blocks("block: heads of other widths, eps", cross="memory", config=wide)
    yield _blocks("block: no norms", cross="memory", norms=False)
    yield _blocks("block: no biases", cross="memory", config={"bias": False})
    yield _blocks("block: one key head", cross="memory", config={"n_kv_heads": 1})
    yield _blocks("block: positions", cross="memory", pos=True)
    yield _blocks("block: dropout", cross="memory", config={"dropout": 0.3}, dropout_key=KEY)
    yield _blocks("block: bias and masks", cross="memory", bias=(2, 1, 4), **BLOCK_MASKS)


def _stack() -> Iterator[Case]:
    for norm in ("pre", "post"):
        yield _blocks(f"stack: encoder, {norm}", config={"norm": norm, "d_value": 2})
    yield _blocks("stack: decoder", cross="memory", causal=True)
    yield _blocks("stack: bias and positions", cross="memory", bias=(2, 1, 4), pos=True)
    yield _blocks("stack: shared memory", cross="shared", config={"d_value": 2})
    yield _blocks("stack: shared memory, positions", cross="shared", pos=True)
    yield _blocks("stack: masks", cross="memory", **BLOCK_MASKS)
    yield _blocks("stack: dropout", config={"dropout": 0.3}, dropout_key=KEY)


def _flat_embed(params: layers.EmbedParams, **options: Any) -> tuple[Any, Any]:
    """`layers.embed`, whose absent positions are no output."""
    (x, pos), cache = layers.embed(params, **options)
    return x if pos is None else (x, pos), cache


def _embed() -> Iterator[Case]:
    def case(note: str, dropout_key: Key | None = None, **config: Any) -> Case:
        sizes: Options = {"vocab_size": 13, "width": 6, "d_model": 6, "max_len": 4}
        cfg = layers.EmbedConfig(**sizes | config)

        def make(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
            ids = rng.integers((5, 4), high=cfg.vocab_size)
            fn = partial(_flat_embed, ids=ids, config=cfg, dropout_key=dropout_key)
            return fn, (random(rng, cfg.init(rng)),)

        return _layer(f"embed: {note}", make)

    yield case("no positions", positions="none")
    for positions in ("sinusoidal", "learned"):
        yield case(f"{positions}, added", positions=positions)
        concat: Options = {"positions": positions, "mode": "concat"}
        yield case(f"{positions}, concatenated", d_model=9, **concat)
        yield case(f"{positions}, concatenated, projected", d_model=11, d_positions=3, **concat)
        if positions == "learned":  # sinusoidal ones, handed on, have no gradient
            yield case(f"{positions}, for q, k, v", positions=positions, mode="qkv", d_positions=3)
    yield case("fewer tokens than max_len", positions="learned", max_len=7)
    yield case("projected", d_model=11)
    yield case("dropout", KEY, dropout=0.3)
