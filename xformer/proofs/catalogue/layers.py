"""Cases of the layers.

B = 5, T = 4, S = 7, D = 6, H = 2, K = M = 3, F = 11 here and in the models. There are few shapes,
because JAX compiles again for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from xformer import layers
from xformer.backends import Backend, Generator
from xformer.base.tree import Constant
from xformer.base.typing import Array
from xformer.ops.activation import ACTIVATIONS
from xformer.proofs.catalogue.case import (
    DEAD_BATCH,
    DEAD_QUERY,
    KEY,
    Case,
    Draw,
    Function,
    Make,
    Options,
    called,
    drawn,
    mask,
    random,
)


def cases() -> Iterator[Case]:
    """All cases of this module: every layer with every option."""
    for subject in (
        _linear,
        _linears,
        _attention,
        _latent_attention,
        _key_value,
        _feed_forward,
        _mixture,
        _gated_delta_net,
        _relative_bias,
    ):
        yield from subject()


def _layer(name: str, make: Make) -> Case:
    return Case("layers", name, make)


def linear_params(rng: Generator, i: int, o: int, b: bool = True) -> layers.LinearParams:
    """Random parameters of a linear map: a weight of unit gain, and a bias if b is True."""
    return layers.LinearParams(rng.normal((i, o), std=i**-0.5), rng.normal((o,)) if b else None)


def xl_params(rng: Generator, groups: int, k: int) -> layers.XLParams:
    """Random parameters of Transformer-XL's positions, of 2 heads and D = 6."""
    return layers.XLParams(
        linear_params(rng, 6, groups * k, b=False), rng.normal((2 * k,)), rng.normal((2 * k,))
    )


def _linear() -> Iterator[Case]:
    def case(note: str, b: bool = True, rank: int = 0) -> Case:
        def make(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
            params: Any = linear_params(rng, 6, 11, b)
            if rank:
                low = rng.normal((6, rank)), rng.normal((rank, 11))
                params = layers.LoRAParams(params, *low, Constant(0.7))
            return partial(layers.linear), (rng.normal((5, 4, 6)), params)

        return _layer(f"linear: {note}", make)

    yield case("plain")
    yield case("no bias", b=False)
    yield case("adapter", rank=2)
    yield case("adapter, no bias", b=False, rank=2)

    def bias_alone(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
        return partial(layers.linear), (rng.normal((5, 4, 6)), layers.BiasParams(rng.normal((6,))))

    yield _layer("linear: bias alone", bias_alone)


def _linears() -> Iterator[Case]:
    def case(note: str, *biased: bool, lead: tuple[int, ...] = (5, 4), **options: bool) -> Case:
        def make(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
            maps = tuple(
                linear_params(rng, 6, o, b) for o, b in zip((11, 3, 7), biased, strict=False)
            )
            many: Any = layers.linear_many
            return partial(many, **options), (rng.normal((*lead, 6)), maps)

        return _layer(f"linear_many: {note}", make)

    yield case("two", True, True)
    yield case("three, one without bias", True, False, True)
    yield case("all kept", True, False, True, all_kept=True)
    yield case("one, of a vector", True, lead=())
    yield case("of many rows", False, True, lead=(67,))


def _attention() -> Iterator[Case]:
    def case(
        note: str,
        *,
        memory: str = "self",  # or "array", or "ready": a KeyValue
        groups: int = 2,
        k: int = 3,
        m: int = 3,
        o: str = "linear",  # or "bias" or "none"
        b: bool = True,
        norms: tuple[int, int] | None = None,  # widths of q_norm and k_norm
        sinks: bool = False,
        shaw: str = "",  # the tables: "k" or "kv"
        xl: bool = False,
        gate: bool = False,
        pos: str = "",  # "q", "qk"
        bias: tuple[int, ...] | None = None,
        batch: tuple[int, ...] = (5,),  # (): one sequence
        config: Options | None = None,  # other options of the layer
        norm: layers.NormConfig | None = None,
        **options: Any,
    ) -> Case:
        cfg = layers.AttentionConfig(6, 2, groups, k, m, **config or {})

        def make(rng: Generator, backend: Backend) -> tuple[Function, tuple[Any, ...]]:
            width = 13 if memory == "array" else 6  # D_m may differ from D
            q_norm, k_norm = (
                None if norms is None else layers.NormParams(rng.normal((n,)), None)
                for n in norms or (0, 0)
            )
            kv = layers.KeyValueParams(
                linear_params(rng, width, groups * k, b),
                linear_params(rng, width, groups * m, b),
                k_norm,
            )
            outputs: dict[str, Any] = {
                "linear": lambda: linear_params(rng, 2 * m, 6, b),
                "bias": lambda: layers.BiasParams(rng.normal((2 * m,))),
                "none": lambda: None,
            }
            params = layers.AttentionParams(
                linear_params(rng, 6, 2 * k, b),
                None if memory == "ready" else kv,
                outputs[o](),
                q_norm,
                rng.normal((2,)) if sinks else None,
                layers.ShawParams(rng.normal((5, k)), rng.normal((5, m)) if "v" in shaw else None)
                if shaw
                else None,
                xl_params(rng, groups, k) if xl else None,
                linear_params(rng, 6, 2 * m, b) if gate else None,
            )
            source: Any = None
            if memory == "array":
                source = rng.normal((*batch, 7, width))
            elif memory == "ready":
                k_heads, v_heads = ((*(batch or (1,)), groups, 7, n) for n in (k, m))
                source = layers.KeyValue(rng.normal(k_heads), rng.normal(v_heads))
            x = rng.normal((*batch, 4, 6))
            side = layers.SideInputs(
                source,
                None if bias is None else rng.normal(bias),
                rng.normal((4, k)) if "q" in pos else None,
                rng.normal((7, k)) if "k" in pos else None,
            )
            keywords = called(drawn(rng, backend, options))
            return partial(layers.attention, config=cfg, norm=norm, **keywords), (x, params, side)

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
    one: Options = {"batch": (), "bias": (2, 4, 1), "pos": "q"}
    yield case("one sequence", o="none", norms=(6, 6), causal=True, **one)
    yield case("one sequence, memory", memory="array", batch=(), mask=mask((4, 7)))
    yield case("one sequence, ready keys and values", memory="ready", batch=(), m=2)
    yield case("no output projection", o="none", m=2)
    yield case("bias alone after the heads", o="bias", m=2)
    yield case("no biases", b=False)
    yield case("self, norm of each head", norms=(3, 3))
    yield case("self, norm of all heads", norms=(6, 6), norm=layers.NormConfig("rms", 0.1, 1.0))
    yield case("self, rotary", k=4, rotary=turning(4))
    modern: Options = {"norms": (4, 4), "rotary": turning(4), "causal": True}
    modern["config"] = {"window": (1, 0), "softcap": 2.0}
    yield case("self, all that is modern", k=4, m=3, groups=1, sinks=True, **modern)
    yield case("self, Shaw", shaw="kv", m=2, causal=True)
    yield case("memory, Shaw, keys alone", shaw="k", memory="array")
    yield case("self, XL", xl=True, m=2, causal=True)
    memory: Options = {"segment_memory": lambda rng, _: rng.normal((5, 3, 6)), "causal": True}
    yield case("self, XL, segment memory", xl=True, groups=1, m=2, **memory)
    dropped: Options = {"config": {"dropout": 0.3}, "dropout_key": KEY}
    normed: Options = {"norms": (3, 3), **dropped}
    cut = mask((5, 1, 4, 7), DEAD_QUERY)
    yield case("self, XL, segment memory, all options", xl=True, mask=cut, **memory, **normed)
    yield case("self, gate", gate=True, m=2, causal=True)
    yield case("memory, gate, no biases", gate=True, memory="array", b=False)
    before: Options = {"kv_cache": _past((5, 1, 2, 4)), "causal": True}
    before["config"] = {"window": (3, None)}
    yield case("self, after a KV cache", k=4, m=4, groups=1, **before)
    scaled: Options = {"config": {"dropout": 0.3, "scale": 0.3}, "dropout_key": KEY}
    yield case("dropout and scale", **scaled)
    yield case(
        "all options",
        memory="array",
        groups=1,
        pos="qk",
        bias=(4, 7),
        causal=True,
        mask=mask((5, 1, 1, 7)),
        **scaled,
    )


def _latent_attention() -> Iterator[Case]:
    sizes: Options = {"n_heads": 2, "kv_rank": 5, "d_nope": 3, "d_rope": 4, "d_value": 2}

    def case(
        note: str,
        *,
        bias: tuple[int, ...] | None = None,
        batch: tuple[int, ...] = (5,),  # (): one sequence
        config: Options | None = None,
        **options: Any,
    ) -> Case:
        cfg = layers.LatentAttentionConfig(6, **sizes | (config or {}))

        def make(rng: Generator, backend: Backend) -> tuple[Function, tuple[Any, ...]]:
            params = random(rng, cfg.init(rng, cfg.norm))
            x, drawn_bias = rng.normal((*batch, 4, 6)), None if bias is None else rng.normal(bias)
            keywords = called(drawn(rng, backend, options))
            args = x, params, layers.SideInputs(bias=drawn_bias)
            return partial(layers.latent_attention, config=cfg, **keywords), args

        return _layer(f"latent_attention: {note}", make)

    turned: Options = {"rotary": turning(4), "causal": True}
    yield case("no positions")
    yield case("rotary, causal", **turned)
    yield case("latent queries", config={"q_rank": 7, "eps": 0.1}, **turned)
    yield case("one sequence, latent queries", batch=(), config={"q_rank": 7}, **turned)
    every: Options = {"q_rank": 7, "bias": True, "scale": 0.3, "dropout": 0.3}
    masked: Options = {"bias": (2, 1, 4), "mask": mask((5, 2, 4, 4), DEAD_QUERY)}
    yield case("all options", config=every, dropout_key=KEY, **masked, **turned)


def _key_value() -> Iterator[Case]:
    def case(
        note: str,
        m: int,
        k: int = 3,
        pos: bool = False,
        norm: bool = False,
        batch: tuple[int, ...] = (5,),
        **options: Any,
    ) -> Case:
        def make(rng: Generator, backend: Backend) -> tuple[Function, tuple[Any, ...]]:
            params = layers.KeyValueParams(
                linear_params(rng, 6, 2 * k),
                linear_params(rng, 6, 2 * m),
                layers.NormParams(rng.normal((k,)), None) if norm else None,
            )
            args = (rng.normal((*batch, 7, 6)), params, rng.normal((7, k)) if pos else None)
            return partial(layers.key_value, n_kv_heads=2, **drawn(rng, backend, options)), args

        return _layer(f"key_value: {note}", make)

    yield case("plain", m=5)
    yield case("positions", m=3, pos=True)
    yield case("one sequence", m=5, batch=())
    eps: Options = {"k_norm": layers.NormConfig("rms", eps=0.1)}
    yield case("norm, rotary", m=5, k=4, norm=True, rotary=turning(7), **eps)


def _feed_forward() -> Iterator[Case]:
    def case(
        activation: str, b: bool = True, gate: bool = False, down: bool = True, **options: Any
    ) -> Case:
        def make(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
            up = linear_params(rng, 6, 11, b)
            down_params = linear_params(rng, 11, 6, b) if down else None
            params = layers.FeedForwardParams(
                up, down_params, linear_params(rng, 6, 11, b) if gate else None
            )
            fn = partial(layers.feed_forward, activation=activation, **options)
            return fn, (rng.normal((5, 4, 6)), params)

        note = f"{', gated' if gate else ''}{'' if b else ', no biases'}"
        note += "" if down else ", no second linear layer"
        dropped = ", dropout" if options else ""
        return _layer(f"feed_forward: {activation}{note}{dropped}", make)

    for activation in ACTIVATIONS:
        yield case(activation)
    yield case("relu", b=False)
    yield case("gelu_tanh", down=False)
    yield case("silu", gate=True, down=False, dropout_rate=0.3, dropout_key=KEY)
    for activation in ("silu", "gelu"):
        yield case(activation, gate=True)
    yield case("silu", b=False, gate=True, dropout_rate=0.3, dropout_key=KEY)


def _past(shape: tuple[int, ...]) -> Draw:
    """A function that draws the KV cache of earlier tokens, which is constant."""
    return lambda rng, _: layers.KVCache(rng.normal(shape), rng.normal(shape))


def turning(length: int, width: int = 4) -> Draw:
    """A function that returns RoPE tables of `length` positions."""
    config = layers.RopeConfig(width)
    return lambda rng, backend: layers.rope_tables(config, like=rng.full((1,), 0.0), length=length)


def _mixture_and_logits(x: Array, params: layers.ExpertsParams, **options: Any) -> tuple[Any, Any]:
    """`layers.mixture` with the router's logits as a second output, as for auxiliary losses."""
    y, cache = layers.mixture(x, params, **options)
    return (y, cache.router_logits), cache


def _mixture() -> Iterator[Case]:
    def case(
        note: str,
        function: Function = layers.mixture,
        *,
        top_k: int = 2,
        batch: tuple[int, ...] = (5,),
        scale: float = 1.0,
        **options: Any,
    ) -> Case:
        sizes: Options = {"n_experts": 3, "top_k": top_k, "d_ff": 11}
        cfg = layers.ExpertsConfig(**sizes | options)

        def make(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
            params = cfg.init(rng, 6, draw=lambda rng, s: rng.normal(s, std=s[0] ** -0.5))
            if cfg.bias:
                params = random(rng, params)
            if cfg.correction:
                params = params._replace(correction=rng.normal((cfg.n_experts,)))
            return partial(function, config=cfg), (rng.normal((*batch, 4, 6), std=scale), params)

        return _layer(f"mixture: {note}", make)

    yield case("2 of 3")
    yield case("1 of 3", top_k=1)
    yield case("2 of 3, as they are", normalise=False)
    groups: Options = {"n_experts": 6, "n_groups": 3, "top_groups": 2, "weight_scale": 2.5}
    yield case("2 of 3, sigmoid", score="sigmoid", normalise=False)
    yield case("DeepSeek-V2", normalise=False, d_shared=7, **groups)
    v3: Options = {"score": "sigmoid", "correction": True, "group_top": 2}
    yield case("DeepSeek-V3", d_shared=7, **v3, **groups)
    yield case("2 of 3, relu", activation="relu")
    yield case("2 of 3, one sequence", batch=())
    yield case("2 of 3, auxiliary loss", _mixture_and_logits)
    yield case("2 of 3, biases", bias=True)
    yield case("2 of 3, clamped SwiGLU", activation="clamped_swiglu", bias=True, scale=4.0)
    yield case("2 of 3, shared expert", d_shared=7)
    yield case("2 of 3, shared expert with a gate", d_shared=7, shared_gate=True)


def _gated_delta_net() -> Iterator[Case]:
    def case(
        note: str, batch: tuple[int, ...] = (5,), sizes: Options | None = None, **options: Any
    ) -> Case:
        few: Options = {"n_heads": 4, "n_key_heads": 2, "d_key": 11, "d_value": 5}
        cfg = layers.GatedDeltaNetConfig(6, **few | (sizes or {}))

        def make(rng: Generator, backend: Backend) -> tuple[Function, tuple[Any, ...]]:
            params = random(rng, cfg.init(rng, cfg.norm))
            keywords = called(drawn(rng, backend, {"causal": True, **options}))
            function = partial(layers.gated_delta_net, config=cfg, **keywords)
            return function, (rng.normal((*batch, 7, 6)), params, layers.SideInputs())

        return _layer(f"gated_delta_net: {note}", make)

    yield case("2 value heads for each key head")
    yield case("one sequence", batch=())
    yield case("padding", mask=mask((5, 1, 1, 7), DEAD_BATCH))
    yield case("all options", sizes={"n_key_heads": None, "conv_len": 3, "eps": 0.1})

    def earlier(rng: Generator, _: Backend) -> layers.RecurrentState:
        return layers.RecurrentState(rng.normal((5, 3, 64)), rng.normal((5, 4, 11, 5)))

    yield case("after a state", kv_cache=earlier)


def _relative_bias() -> Iterator[Case]:
    def case(
        note: str, n_queries: int = 4, n_keys: int = 7, at: int | None = None, **config: Any
    ) -> Case:
        # Few buckets, so that all are used: those of one distance and the wider ones.
        few: Options = {"n_heads": 2, "n_buckets": 8, "max_distance": 5}
        cfg = layers.RelativeConfig(**few | config)

        def make(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
            sizes: Options = {"n_queries": n_queries, "n_keys": n_keys}
            if at is not None:
                sizes["at"] = rng.integers((), low=at, high=at + 1)
            return partial(layers.relative_bias, config=cfg, **sizes), (random(rng, cfg.init(rng)),)

        return _layer(f"relative_bias: {note}", make)

    yield case("S > T")
    yield case("T > S", 7, 4)
    yield case("backwards only", bidirectional=False)
    yield case("distances beyond the last bucket", max_distance=3)
    yield case("in a static KV cache", 1, 7, at=3)
    yield case("as T5 has it", n_buckets=32, max_distance=128)
