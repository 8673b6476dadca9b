"""Gradient checks to make: every op, layer and model, with every option, on small random inputs.

    for case in xformer.catalogue.cases():
        fn, args = case.build(backends.get("torch"))
        xformer.gradcheck(fn, *args).require()

`xformer check` and the tests run them. Sizes are different primes where they may be, so that no two
axes can be taken for each other; gains and biases are random, never ones and zeros.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

from xformer import backends, layers, ops, tree
from xformer.backends import Backend, Generator
from xformer.gradcheck import Report, gradcheck
from xformer.layers.feed_forward import ACTIVATIONS
from xformer.models import GPT, Transformer
from xformer.ops import Key
from xformer.typing import Array

Function = Callable[..., tuple[Any, Any]]
Make = Callable[[Generator, Backend], tuple[Function, tuple[Any, ...]]]
Draw = Callable[[Generator, Backend], Array]

KEY = Key(seed=7, step=3)


@dataclass(frozen=True)
class Case:
    """One function to check: `fn(*args)` gives (y, cache), with gradients for all of args.

    name: "linear: no b", the thing first. room: "ops", "layers" or "models".
    """

    room: str
    name: str
    make: Make

    @property
    def subject(self) -> str:
        """The op, layer or model that the case is about."""
        return self.name.partition(":")[0]

    def build(self, backend: Backend, dtype: str = "float64") -> tuple[Function, tuple[Any, ...]]:
        """fn and args on a backend: the same values on each, in every run."""
        return self.make(backend.generator(zlib.crc32(self.name.encode()), dtype), backend)

    def check(self, backend: Backend, **options: Any) -> Report:
        """`gradcheck` of the case on a backend; options are those of `gradcheck`.

        Only fn itself runs there. The comparison is made on the host: JAX would compile it anew
        for every shape.
        """
        fn, _ = self.build(backend)
        _, args = self.build(backends.get("numpy"))

        def on_backend(*args: Any) -> tuple[Any, Any]:
            y, cache = fn(*_move(args, backend.asarray))
            return _move(y, backend.to_numpy), _HostCache(cache, backend)

        update_wrapper(on_backend, fn)
        on_backend.__name__ = self.name
        return gradcheck(on_backend, *args, **options)


@dataclass(frozen=True)
class _HostCache:
    """A cache of a backend, for gradients that are on the host."""

    cache: Any
    backend: Backend

    def backward(self, *dy: Any) -> Any:
        return _move(self.cache.backward(*_move(dy, self.backend.asarray)), self.backend.to_numpy)


def _move(arrays: Any, mover: Callable[[Any], Any]) -> Any:
    return tree.map(mover, arrays)


def cases() -> tuple[Case, ...]:
    """All of them: ops, then layers, then models."""
    makers = (
        *(_linear, _embedding, _index_add, _layer_norm, _softmaxes, _elementwise, _dropout),
        *(_sdpa, _sdpa_masked, _losses),
        *(_attention, _key_value, _feed_forward, _residual, _block, _stack, _embed),
        *(_gpt, _transformer),
    )
    return tuple(case for maker in makers for case in maker())


# ---- Ops: positional arrays by their shapes, None for an absent one ----


def _op(name: str, op: Function, *shapes: tuple[int, ...] | None, **options: Any) -> Case:
    """A case of `op` on normal numbers; an option that is a function draws its array."""

    def make(rng: Generator, backend: Backend) -> tuple[Function, tuple[Any, ...]]:
        args = tuple(None if shape is None else rng.normal(shape) for shape in shapes)
        return partial(op, **_drawn(rng, backend, options)), args

    return Case("ops", name, make)


def _drawn(rng: Generator, backend: Backend, options: dict[str, Any]) -> dict[str, Any]:
    """`options`, with arrays in place of the functions that draw them."""
    return {k: v(rng, backend) if callable(v) else v for k, v in options.items()}


def _ids(shape: tuple[int, ...], size: int) -> Draw:
    return lambda rng, _: rng.integers(shape, high=size)


def _linear() -> Iterator[Case]:
    for lead in ((), (2,), (2, 3), (2, 3, 1)):
        x = (*lead, 5)
        yield _op(f"linear: x {x}", ops.linear, x, (5, 7), (7,))
        yield _op(f"linear: x {x}, no b", ops.linear, x, (5, 7), None)


def _embedding() -> Iterator[Case]:
    for shape in ((), (11,), (3, 5)):
        yield _op(f"embedding: ids {shape}", ops.embedding, (7, 2), ids=_ids(shape, 7))


def _index_add() -> Iterator[Case]:
    for rows, note in ((11, "repeated ids"), (1, "one row"), (0, "no rows")):
        ids = _ids((rows,), 5)
        yield _op(f"index_add: {note}", ops.index_add, (5, 3), (rows, 3), ids=ids)


def _layer_norm() -> Iterator[Case]:
    for inside in (True, False):
        place = "inside" if inside else "outside"
        for x in ((7,), (5, 7), (2, 3, 7)):
            for b in ((7,), None):
                name = f"layer_norm: x {x}, eps {place}{'' if b else ', no b'}"
                # An eps that matters: with 1e-5 its place would not show.
                yield _op(name, ops.layer_norm, x, (7,), b, eps=0.1, eps_inside=inside)
    yield _op("layer_norm: eps as it is", ops.layer_norm, (5, 7), (7,), (7,))


def _softmaxes() -> Iterator[Case]:
    for op in (ops.softmax, ops.log_softmax):
        for axis in (0, 1, -1):
            yield _op(f"{op.__name__}: axis {axis}", op, (3, 5, 2), axis=axis)
        yield _op(f"{op.__name__}: one axis", op, (7,))


def _elementwise() -> Iterator[Case]:
    for op in (ops.relu, ops.silu, ops.tanh, ops.sigmoid, ops.erf):
        yield _op(f"{op.__name__}: x (5, 11)", op, (5, 11))
        yield _op(f"{op.__name__}: x ()", op, ())
    for form in ("none", "tanh"):
        yield _op(f"gelu: {form}", ops.gelu, (5, 11), approximate=form)


def _dropout() -> Iterator[Case]:
    yield _op("dropout: rate 0", ops.dropout, (5, 11), rate=0.0, key=None)
    for rate in (0.3, 1.0):
        yield _op(f"dropout: rate {rate}", ops.dropout, (5, 11), rate=rate, key=KEY)


# B = 2, H = 3, T = 5, S = 7, K = 11, M = 13.
Q, K, V = (2, 3, 5, 11), (2, 3, 7, 11), (2, 3, 7, 13)
DEAD_QUERY = (..., 2, slice(None))  # one that may attend to nothing
DEAD_BATCH = (1,)


def _sdpa() -> Iterator[Case]:
    sdpa = ops.sdpa
    yield _op("sdpa: S > T", sdpa, Q, K, V)
    yield _op("sdpa: T > S", sdpa, (2, 3, 7, 11), (2, 3, 5, 11), (2, 3, 5, 13))
    yield _op("sdpa: one query", sdpa, (2, 3, 1, 11), K, V)
    yield _op("sdpa: no keys", sdpa, Q, (2, 3, 0, 11), (2, 3, 0, 13))
    yield _op("sdpa: 4 heads, 2 of keys", sdpa, (3, 4, 5, 11), (3, 2, 7, 11), (3, 2, 7, 13))
    yield _op("sdpa: 3 heads, 1 of keys", sdpa, Q, (2, 1, 7, 11), (2, 1, 7, 13))
    yield _op("sdpa: scale", sdpa, Q, K, V, scale=0.17)
    yield _op("sdpa: dropout", sdpa, Q, K, V, dropout_rate=0.3, dropout_key=KEY)
    for bias in ((2, 3, 5, 7), (3, 5, 7), (5, 7), (7,), (5, 1), (2, 1, 1, 7), (1, 3, 1, 1), ()):
        yield _op(f"sdpa: bias {bias}", sdpa, Q, K, V, bias)


def _sdpa_masked() -> Iterator[Case]:
    sdpa = ops.sdpa
    yield _op("sdpa: causal, S > T", sdpa, Q, K, V, causal=True)
    yield _op("sdpa: causal, S = T", sdpa, Q, Q, (2, 3, 5, 13), causal=True)
    t_longer = ((2, 3, 7, 11), (2, 3, 5, 11), (2, 3, 5, 13))
    yield _op("sdpa: causal, T > S", sdpa, *t_longer, causal=True)
    for shape, dead in (
        ((2, 3, 5, 7), DEAD_QUERY),
        ((3, 5, 7), DEAD_QUERY),
        ((5, 7), DEAD_QUERY),
        ((2, 1, 1, 7), DEAD_BATCH),
        ((1, 3, 1, 7), None),
        ((7,), None),
    ):
        yield _op(f"sdpa: mask {shape}", sdpa, Q, K, V, mask=_mask(shape, dead))
    yield _op(
        "sdpa: all options",
        sdpa,
        *((3, 4, 5, 11), (3, 2, 7, 11), (3, 2, 7, 13), (4, 5, 1)),
        mask=_mask((3, 1, 5, 7), DEAD_QUERY),
        causal=True,
        scale=0.17,
        dropout_rate=0.3,
        dropout_key=KEY,
    )


def _mask(shape: tuple[int, ...], dead: tuple[Any, ...] | None = None) -> Draw:
    """Random booleans, two of three True, all False at the index `dead`."""

    def draw(rng: Generator, backend: Backend) -> Array:
        host = backend.to_numpy(rng.integers(shape, high=3)) > 0
        if dead is not None:
            host[dead] = False
        return backend.asarray(host)

    return draw


def _losses() -> Iterator[Case]:
    yield _op("mse: x (3, 5)", ops.mse, (3, 5), (3, 5))

    def case(
        note: str, shape: tuple[int, ...] = (2, 3, 7), *, low: int = 0, **options: Any
    ) -> Case:
        def targets(rng: Generator, _: Backend) -> Array:
            return rng.integers(shape[:-1], low=low, high=7)

        return _op(f"cross_entropy: {note}", ops.cross_entropy, shape, targets=targets, **options)

    together = {"ignore_index": -1, "label_smoothing": 0.1, "z_loss": 0.3}
    for reduction in ("mean", "sum", "none"):
        yield case(reduction, reduction=reduction)
        yield case(f"{reduction}, all options", (5, 7), low=-1, reduction=reduction, **together)
    yield case("one token", (7,))
    yield case("ignore_index -1", low=-1, ignore_index=-1)
    yield case("ignore_index 2", ignore_index=2)
    yield case("all ignored", low=6, ignore_index=6)
    yield case("label_smoothing", label_smoothing=0.1)
    yield case("z_loss", z_loss=0.3)


# ---- Layers and models: B = 5, T = 4, S = 7, D = 6, H = 2, K = M = 3, F = 11, few shapes in all:
# JAX compiles anew for each ----


def _layer(name: str, make: Make) -> Case:
    return Case("layers", name, make)


def _random(rng: Generator, like: Any) -> Any:
    """Parameters of the shapes of `like`: weights of unit gain, the rest around 1/2."""

    def draw(a: Array) -> Array:
        if a.ndim == 2:
            return rng.normal(a.shape, std=a.shape[0] ** -0.5)
        return rng.normal(a.shape, mean=0.5, std=0.5)

    return tree.map(draw, like)


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
            source = {
                "self": lambda: None,
                "array": lambda: rng.normal((5, 7, width)),
                "ready": lambda: layers.KeyValue(
                    rng.normal((5, groups, 7, k)), rng.normal((5, groups, 7, m))
                ),
            }[memory]()
            args = (
                rng.normal((5, 4, 6)),
                params,
                source,
                None if bias is None else rng.normal(bias),
                rng.normal((4, k)) if "q" in pos else None,
                rng.normal((7, k)) if "k" in pos else None,
            )
            drawn = _drawn(rng, backend, options)
            return partial(layers.attention, n_heads=2, n_kv_heads=groups, **drawn), args

        return _layer(f"attention: {note}", make)

    yield case("self")
    yield case("self, causal", causal=True)
    yield case("self, positions", pos="q")
    yield case("self, bias and mask", bias=(2, 1, 4), mask=_mask((5, 2, 4, 4), DEAD_QUERY))
    yield case("memory", memory="array")
    yield case("memory, one key head", memory="array", groups=1)
    yield case("memory, heads of other widths", memory="array", k=5, m=2)
    yield case("memory, positions", memory="array", pos="qk")
    yield case("memory, positions of queries", memory="array", pos="q")
    yield case("memory, padding", memory="array", mask=_mask((5, 1, 1, 7), DEAD_BATCH))
    yield case("ready keys and values", memory="ready", m=2)
    yield case("no output projection", o=False, m=2)
    yield case("no biases", b=False)
    yield case("dropout and scale", scale=0.3, dropout_rate=0.3, dropout_key=KEY)
    yield case(
        "all options",
        **{"memory": "array", "groups": 1, "pos": "qk", "bias": (4, 7)},
        causal=True,
        mask=_mask((5, 1, 1, 7)),
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


def _residual() -> Iterator[Case]:
    def case(note: str, *, norm: bool = True, **options: Any) -> Case:
        def make(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
            ffn = layers.FeedForwardParams(_linear_params(rng, 6, 11), _linear_params(rng, 11, 6))
            like = layers.LayerNormParams.init(rng, 6, bias=True)

            def fn(x: Array, norm: Any, ffn: Any) -> tuple[Array, Any]:
                sublayer = lambda x: layers.feed_forward(x, ffn, activation="tanh")  # noqa: E731
                return layers.residual(x, norm, sublayer, **options)

            return fn, (rng.normal((5, 4, 6)), _random(rng, like) if norm else None, ffn)

        return _layer(f"residual: {note}", make)

    for place in ("pre", "post"):
        yield case(place, place=place, eps=0.1)
    yield case("no norm", norm=False)
    yield case("dropout", dropout_rate=0.3, dropout_key=KEY)


SIZES = {"d_model": 6, "n_heads": 2, "d_ff": 11, "activation": "gelu"}


def _blocks(
    name: str,
    *,
    cross: str = "",  # or "memory", or "shared": its keys and values are made once
    pos: bool = False,
    bias: tuple[int, ...] | None = None,
    norms: bool = True,
    n_layers: int = 2,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> Case:
    """A block, or a stack of them, by the first word of `name`."""
    is_stack = name.startswith("stack")
    cfg = layers.BlockConfig(**SIZES | (config or {}))

    def make(rng: Generator, backend: Backend) -> tuple[Function, tuple[Any, ...]]:
        like = {"cross": bool(cross), "shared_memory": cross == "shared"}
        if is_stack:
            params = layers.StackParams.init(rng, cfg, n_layers, **like)
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
            _random(rng, params),
            memory,
            None if bias is None else rng.normal(bias),
            rng.normal((4, 3)) if pos else None,
            rng.normal((7, 3)) if pos and cross and not ready else None,
        )
        layer = layers.stack if is_stack else layers.block
        return partial(layer, config=cfg, **_drawn(rng, backend, options)), args

    return _layer(name, make)


def _block() -> Iterator[Case]:
    for norm in ("pre", "post"):
        yield _blocks(f"block: encoder, {norm}", config={"norm": norm, "d_value": 2})
        yield _blocks(f"block: decoder, {norm}", cross="memory", causal=True, config={"norm": norm})
    yield _blocks("block: ready keys and values", cross="shared", config={"d_value": 2})
    yield _blocks("block: no norms", cross="memory", norms=False)
    yield _blocks("block: no biases", cross="memory", config={"bias": False})
    yield _blocks("block: one key head", cross="memory", config={"n_kv_heads": 1})
    yield _blocks("block: positions", cross="memory", pos=True)
    yield _blocks("block: dropout", cross="memory", config={"dropout": 0.3}, dropout_key=KEY)
    masks = {"mask": _mask((5, 1, 1, 4), DEAD_BATCH), "memory_mask": _mask((5, 1, 4, 7))}
    yield _blocks("block: bias and masks", cross="memory", bias=(2, 1, 4), **masks)


def _stack() -> Iterator[Case]:
    for norm in ("pre", "post"):
        yield _blocks(f"stack: encoder, {norm}", config={"norm": norm, "d_value": 2})
    yield _blocks("stack: decoder", cross="memory", causal=True)
    yield _blocks("stack: bias and positions", cross="memory", bias=(2, 1, 4), pos=True)
    yield _blocks("stack: shared memory", cross="shared", config={"d_value": 2})
    yield _blocks("stack: shared memory, positions", cross="shared", pos=True)
    yield _blocks("stack: dropout", config={"dropout": 0.3}, dropout_key=KEY)
    yield _blocks("stack: no blocks", n_layers=0)


def _embed() -> Iterator[Case]:
    def case(note: str, dropout_key: Key | None = None, **config: Any) -> Case:
        sizes = {"vocab_size": 13, "width": 6, "d_model": 6, "max_len": 4}
        cfg = layers.EmbedConfig(**sizes | config)

        def make(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
            ids = rng.integers((5, 4), high=cfg.vocab_size)

            def fn(params: layers.EmbedParams) -> tuple[Any, Any]:
                (x, pos), cache = layers.embed(params, ids=ids, config=cfg, dropout_key=dropout_key)
                return x if pos is None else (x, pos), cache

            return fn, (_random(rng, cfg.init(rng)),)

        return _layer(f"embed: {note}", make)

    yield case("no positions", positions="none")
    for positions in ("sinusoidal", "learned"):
        yield case(f"{positions}, added", positions=positions)
        concat = {"positions": positions, "mode": "concat"}
        yield case(f"{positions}, concatenated", d_model=9, **concat)
        yield case(f"{positions}, concatenated, projected", d_model=11, d_positions=3, **concat)
        if positions == "learned":  # sinusoidal ones, handed on, have no gradient
            yield case(f"{positions}, for q, k, v", positions=positions, mode="qkv", d_positions=3)
    yield case("fewer tokens than max_len", positions="learned", max_len=7)
    yield case("projected", d_model=11)
    yield case("dropout", KEY, dropout=0.3)


# ---- Models: their loss, and the gradients of all parameters ----


def _gpt() -> Iterator[Case]:
    def case(note: str, loss: dict[str, Any] | None = None, **config: Any) -> Case:
        sizes = {"vocab_size": 13, "n_layers": 1, "d_model": 6, "n_heads": 2, "max_len": 7}
        model = GPT(**sizes | {"d_ff": 11} | config)

        def make(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
            tokens, targets = rng.integers((5, 4), high=13), rng.integers((5, 4), high=13)

            def fn(params: Any) -> tuple[Array, Any]:
                return model.loss(params, tokens, targets, **loss or {})

            return fn, (_random(rng, model.init()),)

        return Case("models", f"GPT: {note}", make)

    yield case("as it is")
    yield case("two layers, untied, post-norm", n_layers=2, tied=False, norm="post")
    yield case("one key head, no biases", n_kv_heads=1, bias=False)
    yield case("no layers", n_layers=0)
    yield case("positions: none", positions="none")
    yield case("positions: sinusoidal", positions="sinusoidal")
    yield case("positions: learned, for q, k, v", position_mode="qkv", n_layers=2)
    options = {"label_smoothing": 0.1, "z_loss": 0.3, "ignore_index": 2}
    yield case("dropout and loss options", {"dropout_key": KEY, **options}, dropout=0.3)


def _transformer() -> Iterator[Case]:
    def case(note: str, loss: dict[str, Any] | None = None, **config: Any) -> Case:
        sizes = {"src_vocab_size": 17, "tgt_vocab_size": 13, "d_model": 6, "n_heads": 2}
        depth = {"n_encoder_layers": 1, "n_decoder_layers": 1}
        model = Transformer(**sizes | depth | {"max_len": 7, "d_ff": 11} | config)

        def make(rng: Generator, backend: Backend) -> tuple[Function, tuple[Any, ...]]:
            src, tgt = _padded(rng, backend, 7, 17), _padded(rng, backend, 5, 13)

            def fn(params: Any) -> tuple[Array, Any]:
                return model.loss(params, src, tgt, **loss or {})

            return fn, (_random(rng, model.init()),)

        return Case("models", f"Transformer: {note}", make)

    yield case("as it is")
    yield case("pre-norm, tied", norm="pre", tied=True)
    yield case("two layers each", n_encoder_layers=2, n_decoder_layers=2)
    yield case("two layers each, shared memory", shared_memory=True, n_decoder_layers=2)
    yield case("free widths, no biases", d_head=5, d_value=2, src_width=5, tgt_width=9, bias=False)
    yield case("one key head", n_kv_heads=1, activation="silu")
    concat = {"position_mode": "concat", "src_width": 5, "tgt_width": 3, "d_positions": 3}
    yield case("positions: concatenated", **concat)
    yield case("positions: learned", positions="learned")
    qkv = {"positions": "learned", "position_mode": "qkv"}
    yield case("positions: learned, for q, k, v", **qkv)
    yield case("positions: learned, for q, k, v, shared memory", shared_memory=True, **qkv)
    yield case("positions: sinusoidal, for q, k, v", position_mode="qkv")
    options = {"label_smoothing": 0.1, "z_loss": 0.3}
    yield case("dropout and loss options", {"dropout_key": KEY, **options}, dropout=0.3)


def _padded(rng: Generator, backend: Backend, length: int, size: int) -> Array:
    """(5, length) ids: some rows full, one that ends in padding (0), one with a single token."""
    host = backend.to_numpy(rng.integers((5, length), low=1, high=size)).copy()
    host[1, length - 2 :] = 0
    host[2, 1:] = 0
    return backend.asarray(host)
