"""Cases of the ops. Positional arrays are given by their shapes, or None if absent."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from xformer import ops
from xformer.backends import Backend, Generator
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.ops.activation import ACTIVATIONS
from xformer.proofs.catalogue.case import (
    DEAD_BATCH,
    DEAD_QUERY,
    KEY,
    Case,
    Draw,
    Function,
    Options,
    Without,
    drawn,
    mask,
)


def cases() -> Iterator[Case]:
    """All cases of this module: every op with every option."""
    for subject in (
        _linear,
        _embedding,
        _index_add,
        _layer_norm,
        _rms_norm,
        _softmaxes,
        _scale,
        _elementwise,
        _glu,
        _clamped_swiglu,
        _rope,
        _dropout,
        _sdpa,
        _sdpa_masked,
        _sdpa_scores,
        _shaw,
        _lsh_attention,
        _additive_attention,
        _xl_attention,
        _causal_conv,
        _gated_delta_rule,
        _losses,
        _linear_losses,
        _experts,
        _router_losses,
    ):
        yield from subject()


def _op(name: str, op: Function, *shapes: tuple[int, ...] | None, **options: Any) -> Case:
    """A case of `op` on normal numbers. An option that is a function draws an array."""

    def make(rng: Generator, backend: Backend) -> tuple[Function, tuple[Any, ...]]:
        args = tuple(None if shape is None else rng.normal(shape) for shape in shapes)
        return partial(op, **drawn(rng, backend, options)), args

    return Case("ops", name, make)


def _ids(shape: tuple[int, ...], size: int) -> Draw:
    return lambda rng, _: rng.integers(shape, high=size)


def _linear() -> Iterator[Case]:
    for lead in ((), (2,), (2, 3), (2, 3, 1)):
        x = (*lead, 5)
        yield _op(f"linear: x {x}", ops.linear, x, (5, 7), (7,))
        yield _op(f"linear: x {x}, no b", ops.linear, x, (5, 7), None)
    yield _op("linear: w frozen", _frozen_linear, (2, 5), (7,), w=_normal((5, 7)), trainable=False)


def _normal(shape: tuple[int, ...]) -> Draw:
    return lambda rng, _: rng.normal(shape)


def _frozen_linear(x: Array, b: Array, *, w: Array, **options: Any) -> tuple[Array, Any]:
    """`ops.linear` with w as an option, not an argument."""
    y, cache = ops.linear(x, w, b, **options)
    return y, Without(cache, (1,))


def _embedding() -> Iterator[Case]:
    for shape in ((), (11,), (3, 5)):
        yield _op(f"embedding: ids {shape}", ops.embedding, (7, 2), ids=_ids(shape, 7))


def _index_add() -> Iterator[Case]:
    for rows, note in ((11, "repeated ids"), (1, "one row"), (0, "no rows")):
        ids = _ids((rows,), 5)
        yield _op(f"index_add: {note}", ops.index_add, (5, 3), (rows, 3), ids=ids)


def _layer_norm() -> Iterator[Case]:
    for inside in (True, False):
        position = "inside" if inside else "outside"
        for x in ((7,), (5, 7), (2, 3, 7)):
            for b in ((7,), None):
                name = f"layer_norm: x {x}, eps {position}{'' if b else ', no b'}"
                # A large eps: with 1e-5, inside and outside would hardly differ.
                yield _op(name, ops.layer_norm, x, (7,), b, eps=0.1, eps_inside=inside)
    yield _op("layer_norm: eps as it is", ops.layer_norm, (5, 7), (7,), (7,))


def _rms_norm() -> Iterator[Case]:
    for x in ((7,), (5, 7), (2, 3, 7)):
        for w in ((7,), None):
            yield _op(f"rms_norm: x {x}{'' if w else ', no w'}", ops.rms_norm, x, w, eps=0.1)
    yield _op("rms_norm: offset", ops.rms_norm, (5, 7), (7,), eps=0.1, offset=1.0)
    yield _op("rms_norm: eps as it is", ops.rms_norm, (5, 7), (7,))
    yield _op("l2_normalize: x (2, 3, 7)", ops.l2_normalize, (2, 3, 7))
    # Some of these rows are shorter than eps.
    yield _op("l2_normalize: eps", ops.l2_normalize, (11, 3), eps=1.5)


def _softmaxes() -> Iterator[Case]:
    for op in (ops.softmax, ops.log_softmax):
        for axis in (0, 1, -1):
            yield _op(f"{op.__name__}: axis {axis}", op, (3, 5, 2), axis=axis)
        yield _op(f"{op.__name__}: one axis", op, (7,))


def _scale() -> Iterator[Case]:
    for x in ((), (1,), (5, 11), (2, 3, 7)):
        yield _op(f"scale: x {x}", ops.scale, x, (1,))


def _elementwise() -> Iterator[Case]:
    plain = (ops.relu, ops.silu, ops.tanh, ops.sigmoid, ops.erf)
    for op in (*plain, ops.relu_squared, ops.quick_gelu):
        yield _op(f"{op.__name__}: x (5, 11)", op, (5, 11))
        yield _op(f"{op.__name__}: x ()", op, ())
    for form in ("none", "tanh"):
        yield _op(f"gelu: {form}", ops.gelu, (5, 11), approximate=form)
    yield _op("softcap: x (5, 11)", ops.softcap, (5, 11), cap=1.5)
    yield _op("softcap: x ()", ops.softcap, (), cap=30.0)


def _glu() -> Iterator[Case]:
    for activation in ACTIVATIONS:
        yield _op(f"glu: {activation}", ops.glu, (5, 11), (5, 11), activation=activation)


def _clamped_swiglu() -> Iterator[Case]:
    yield _op("clamped_swiglu: some are clamped", ops.clamped_swiglu, (5, 11), (5, 11), limit=0.8)
    yield _op("clamped_swiglu: x (5,)", ops.clamped_swiglu, (5,), (5,))


def _turned(x: Array, *, cos: Array, sin: Array, **options: Any) -> tuple[Array, Any]:
    """`ops.rope` with tables cast to the dtype of x, because tests convert the inputs."""
    xp = array_namespace(x)
    return ops.rope(x, cos=xp.astype(cos, x.dtype), sin=xp.astype(sin, x.dtype), **options)


def _rope() -> Iterator[Case]:
    def case(note: str, width: int, lead: tuple[int, ...] = (), **options: Any) -> Case:
        def table(rng: Generator, _: Backend) -> Array:
            return rng.normal((*lead, 5, 3))  # not a rotation: backward must be the transposed map

        return _op(f"rope: {note}", _turned, (2, 3, 5, width), cos=table, sin=table, **options)

    for interleaved in (False, True):
        pairs = "interleaved" if interleaved else "half-split"
        yield case(pairs, 6, interleaved=interleaved)
        yield case(f"{pairs}, part of a head", 11, interleaved=interleaved)
        yield case(f"{pairs}, tables of each sequence", 7, (2,), interleaved=interleaved)


def _dropout() -> Iterator[Case]:
    yield _op("dropout: rate 0", ops.dropout, (5, 11), rate=0.0, key=None)
    for rate in (0.3, 1.0):
        yield _op(f"dropout: rate {rate}", ops.dropout, (5, 11), rate=rate, key=KEY)


# B = 2, H = 3, T = 5, S = 7, K = 11, M = 13.
Q, K, V = (2, 3, 5, 11), (2, 3, 7, 11), (2, 3, 7, 13)


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
        yield _op(f"sdpa: mask {shape}", sdpa, Q, K, V, mask=mask(shape, dead))
    yield _op(
        "sdpa: all options",
        sdpa,
        *((3, 4, 5, 11), (3, 2, 7, 11), (3, 2, 7, 13), (4, 5, 1)),
        mask=mask((3, 1, 5, 7), DEAD_QUERY),
        causal=True,
        scale=0.17,
        dropout_rate=0.3,
        dropout_key=KEY,
    )


def _sdpa_scores() -> Iterator[Case]:
    """Cases of window, softcap and sinks, each alone and all together."""
    sdpa = ops.sdpa
    t_longer = ((2, 3, 7, 11), (2, 3, 5, 11), (2, 3, 5, 13))
    for window in ((2, None), (None, 1), (1, 2), (0, 0)):
        yield _op(f"sdpa: window {window}", sdpa, Q, K, V, window=window)
    yield _op("sdpa: window, T > S", sdpa, *t_longer, window=(1, 0))
    yield _op("sdpa: window, causal", sdpa, Q, K, V, window=(2, 3), causal=True)
    yield _op("sdpa: softcap", sdpa, Q, K, V, softcap=0.7)
    yield _op("sdpa: softcap, bias", sdpa, Q, K, V, (5, 7), softcap=0.7, scale=0.17)
    yield _op("sdpa: sinks", sdpa, Q, K, V, None, (3,))
    yield _op("sdpa: sinks, T > S", sdpa, *t_longer, None, (3,), causal=True)
    yield _op("sdpa: sinks, no keys", sdpa, Q, (2, 3, 0, 11), (2, 3, 0, 13), None, (3,))
    yield _op(
        "sdpa: sinks, mask, dropout",
        sdpa,
        *(Q, K, V, None, (3,)),
        mask=mask((2, 3, 5, 7), DEAD_QUERY),
        dropout_rate=0.3,
        dropout_key=KEY,
    )
    yield _op(
        "sdpa: all options, sinks too",
        sdpa,
        *((3, 4, 5, 11), (3, 2, 7, 11), (3, 2, 7, 13), (4, 5, 1), (4,)),
        mask=mask((3, 1, 5, 7), DEAD_QUERY),
        causal=True,
        window=(3, 1),
        softcap=0.7,
        scale=0.17,
        dropout_rate=0.3,
        dropout_key=KEY,
    )


def _shaw() -> Iterator[Case]:
    shaw = ops.shaw
    rel_k, rel_v = (5, 11), (5, 13)  # L = 2
    t_longer = ((2, 3, 7, 11), (2, 3, 5, 11), (2, 3, 5, 13))
    yield _op("shaw: S > T", shaw, Q, K, V, rel_k, rel_v)
    yield _op("shaw: no rel_v", shaw, Q, K, V, rel_k, None)
    yield _op("shaw: T > S, causal", shaw, *t_longer, rel_k, rel_v, causal=True)
    yield _op("shaw: L = 0", shaw, Q, K, V, (1, 11), (1, 13))
    yield _op("shaw: L = 8, beyond all keys", shaw, Q, K, V, (17, 11), (17, 13))
    yield _op("shaw: no keys", shaw, Q, (2, 3, 0, 11), (2, 3, 0, 13), rel_k, rel_v)
    yield _op(
        "shaw: all options",
        shaw,
        *((3, 4, 5, 11), (3, 2, 7, 11), (3, 2, 7, 13), rel_k, rel_v),
        mask=mask((3, 1, 5, 7), DEAD_QUERY),
        causal=True,
        scale=0.17,
        dropout_rate=0.3,
        dropout_key=KEY,
    )


def _lsh_attention() -> Iterator[Case]:
    """The buckets do not change by the small steps of finite differences."""

    def case(note: str, **options: Any) -> Case:
        sizes: Options = {"key": KEY, "n_buckets": 4, "chunk_len": 3}
        shapes = (2, 3, 12, 5), (2, 3, 12, 7)
        return _op(f"lsh_attention: {note}", ops.lsh_attention, *shapes, **sizes | options)

    yield case("one round")
    yield case("three rounds, causal", n_rounds=3, causal=True)
    yield case("one chunk, causal", chunk_len=12, n_buckets=2, causal=True)
    yield case("two rounds, two chunks", n_rounds=2, chunk_len=6)
    yield case("chunks of one token", chunk_len=1, causal=True)


def _additive_attention() -> Iterator[Case]:
    def case(note: str, *shapes: tuple[int, ...], **options: Any) -> Case:
        return _op(f"additive_attention: {note}", ops.additive_attention, *shapes, **options)

    w = (3, 11)
    t_longer = ((2, 3, 7, 11), (2, 3, 5, 11), (2, 3, 5, 13))
    yield case("S > T", Q, K, V, w)
    yield case("T > S", *t_longer, w)
    yield case("one query", (2, 3, 1, 11), K, V, w)
    yield case("no keys", Q, (2, 3, 0, 11), (2, 3, 0, 13), w)
    yield case("4 heads, 2 of keys", (3, 4, 5, 11), (3, 2, 7, 11), (3, 2, 7, 13), (4, 11))
    yield case("3 heads, 1 of keys", Q, (2, 1, 7, 11), (2, 1, 7, 13), w)
    yield case("causal, S > T", Q, K, V, w, causal=True)
    yield case("causal, T > S", *t_longer, w, causal=True)
    for shape, dead in (((2, 3, 5, 7), DEAD_QUERY), ((2, 1, 1, 7), DEAD_BATCH), ((7,), None)):
        yield case(f"mask {shape}", Q, K, V, w, mask=mask(shape, dead))
    # So many keys that the queries are cut into blocks: of two, two and one.
    yield case("blocks", (1, 2, 5, 11), (1, 2, 1009, 11), (1, 2, 1009, 3), (2, 11))
    yield case(
        "all options, blocks",
        *((2, 4, 5, 11), (2, 2, 311, 11), (2, 2, 311, 13), (4, 11)),
        mask=mask((2, 1, 5, 311), DEAD_QUERY),
        causal=True,
    )


def _xl_attention() -> Iterator[Case]:
    def case(note: str, *shapes: tuple[int, ...], h: int = 3, **options: Any) -> Case:
        (_, _, t, k), (_, g, s, _) = shapes[:2]
        n = s if options.get("causal") else s + t - 1
        biases = ((h, k), (h, k))
        name = f"xl_attention: {note}"
        return _op(name, ops.xl_attention, *shapes, (g, n, k), *biases, **options)

    t_longer = ((2, 3, 7, 11), (2, 3, 5, 11), (2, 3, 5, 13))
    yield case("S > T", Q, K, V)
    yield case("T > S", *t_longer)
    yield case("one query", (2, 3, 1, 11), K, V)
    yield case("no keys", Q, (2, 3, 0, 11), (2, 3, 0, 13))
    yield case("causal, S > T", Q, K, V, causal=True)
    yield case("causal, T > S", *t_longer, causal=True)
    yield case("causal, one query", (2, 3, 1, 11), K, V, causal=True)
    yield case("3 heads, 1 of keys", Q, (2, 1, 7, 11), (2, 1, 7, 13))
    yield case("mask", Q, K, V, mask=mask((2, 3, 5, 7), DEAD_QUERY))
    yield case(
        "all options",
        *((3, 4, 5, 11), (3, 2, 7, 11), (3, 2, 7, 13)),
        h=4,
        mask=mask((3, 1, 5, 7), DEAD_QUERY),
        causal=True,
        scale=0.17,
        dropout_rate=0.3,
        dropout_key=KEY,
    )


def _causal_conv() -> Iterator[Case]:
    x, w = (2, 7, 3), (4, 3)
    yield _op("causal_conv: before None", ops.causal_conv, x, w)
    yield _op("causal_conv: before", ops.causal_conv, x, w, (2, 3, 3))
    yield _op("causal_conv: one step", ops.causal_conv, (2, 1, 3), w, (2, 3, 3))
    yield _op("causal_conv: one row of w", ops.causal_conv, x, (1, 3))
    yield _op("log_decay: x (2, 5, 3)", ops.log_decay, (2, 5, 3), (3,))


def _gated_delta_rule() -> Iterator[Case]:
    def case(
        note: str, t: int = 5, groups: int = 3, heads: int = 3, state: bool = False, **options: Any
    ) -> Case:
        def make(rng: Generator, backend: Backend) -> tuple[Function, tuple[Any, ...]]:
            q, k = (rng.normal((2, groups, t, 7)) / 3 for _ in range(2))
            v = rng.normal((2, heads, t, 11))
            log_decay, beta = (rng.normal((2, heads, t)) for _ in range(2))
            first = (rng.normal((2, heads, 7, 11)),) if state else ()
            op = partial(ops.gated_delta_rule, **options)
            return op, (q, k, v, -ops.sigmoid(log_decay)[0], ops.sigmoid(beta)[0], *first)

        return Case("ops", f"gated_delta_rule: {note}", make)

    yield case("one chunk")
    yield case("one step", t=1, state=True)
    yield case("2 value heads for each key head", heads=6)
    yield case("chunks, the last one not full", t=11, chunk_len=4)
    yield case("all options", t=7, groups=1, heads=2, state=True, scale=0.3, chunk_len=2)


def _losses() -> Iterator[Case]:
    yield _op("mse: x (3, 5)", ops.mse, (3, 5), (3, 5))
    yield _op("info_nce: a (7, 5)", ops.info_nce, (7, 5), (7, 5), scale=0.7)
    yield _op("info_nce: scale as it is", ops.info_nce, (3, 5), (3, 5))

    def case(
        note: str, shape: tuple[int, ...] = (2, 3, 7), *, low: int = 0, **options: Any
    ) -> Case:
        def targets(rng: Generator, _: Backend) -> Array:
            return rng.integers(shape[:-1], low=low, high=7)

        return _op(f"cross_entropy: {note}", ops.cross_entropy, shape, targets=targets, **options)

    together: Options = {"ignore_index": -1, "label_smoothing": 0.1, "z_loss": 0.3}
    for reduction in ("mean", "sum", "none"):
        yield case(reduction, reduction=reduction)
        yield case(f"{reduction}, all options", (5, 7), low=-1, reduction=reduction, **together)
    yield case("one token", (7,))
    yield case("ignore_index -1", low=-1, ignore_index=-1)
    yield case("ignore_index 2", ignore_index=2)
    yield case("all ignored", low=6, ignore_index=6)
    yield case("label_smoothing", label_smoothing=0.1)
    yield case("z_loss", z_loss=0.3)


def _linear_losses() -> Iterator[Case]:
    def case(
        note: str,
        lead: tuple[int, ...] = (2, 3),
        n_classes: int = 7,
        *,
        low: int = 0,
        bias: bool = True,
        **options: Any,
    ) -> Case:
        def targets(rng: Generator, _: Backend) -> Array:
            return rng.integers(lead, low=low, high=7)

        shapes = (*lead, 5), (5, n_classes), (n_classes,) if bias else None
        name = f"linear_cross_entropy: {note}"
        return _op(name, ops.linear_cross_entropy, *shapes, targets=targets, **options)

    together: Options = {"ignore_index": -1, "label_smoothing": 0.1, "z_loss": 0.3}
    for reduction in ("mean", "sum", "none"):
        yield case(f"{reduction}, all options", low=-1, reduction=reduction, **together)
    yield case("no b", bias=False)
    yield case("one token", ())
    # So many classes that kernels use chunks.
    yield case("4099 classes", n_classes=4099)
    yield case("4099 classes, all options", n_classes=4099, low=-1, reduction="sum", **together)
    frozen: Options = {"targets": _ids((2, 3), 7), "w": _normal((5, 4099)), "trainable": False}
    yield _op("linear_cross_entropy: w frozen", _frozen_linear_loss, (2, 3, 5), (4099,), **frozen)


def _frozen_linear_loss(x: Array, b: Array, *, w: Array, **options: Any) -> tuple[Array, Any]:
    """`ops.linear_cross_entropy` with w as an option, not an argument."""
    loss, cache = ops.linear_cross_entropy(x, w, b, **options)
    return loss, Without(cache, (1,))


def _choice(rows: int, n_experts: int, k: int) -> Draw:
    """A function that draws k different experts for each row."""

    def draw(rng: Generator, backend: Backend) -> Array:
        order = backend.to_numpy(rng.normal((rows, n_experts))).argsort(axis=1)
        return backend.asarray(order[:, :k])

    return draw


def _experts() -> Iterator[Case]:
    def case(
        note: str,
        rows: int,
        ids: Draw,
        k: int = 2,
        biases: tuple[tuple[int, ...], ...] = (),
        **options: Any,
    ) -> Case:
        shapes = (rows, 3), (5, 3, 11), (5, 3, 11), (5, 11, 3), (rows, k)  # D = 3, E = 5, F = 11
        return _op(f"experts: {note}", ops.experts, *shapes, *biases, ids=ids, **options)

    yield case("2 of 5", 7, _choice(7, 5, 2))
    yield case("2 of 5, gelu", 7, _choice(7, 5, 2), activation="gelu")
    biases = (5, 11), (5, 11), (5, 3)
    yield case("2 of 5, relu, biases", 7, _choice(7, 5, 2), biases=biases, activation="relu")
    clamped: Options = {"activation": "clamped_swiglu", "biases": biases}
    yield case("2 of 5, clamped SwiGLU", 7, _choice(7, 5, 2), **clamped)
    yield case("all rows to one", 7, lambda rng, _: rng.integers((7, 1), low=3, high=4), 1)
    yield case("one row", 1, _choice(1, 5, 2))
    yield case("no rows", 0, _choice(0, 5, 2))
    ws = {"gate": _normal((5, 3, 11)), "up": _normal((5, 3, 11)), "down": _normal((5, 11, 3))}
    options: Options = {"ids": _choice(7, 5, 2), "trainable": False, **ws}
    yield _op("experts: frozen", _frozen_experts, (7, 3), (7, 2), **options)


def _frozen_experts(
    x: Array, weights: Array, *, gate: Array, up: Array, down: Array, **options: Any
) -> tuple[Array, Any]:
    """`ops.experts` with the experts' weights as options, not arguments."""
    y, cache = ops.experts(x, gate, up, down, weights, **options)
    return y, Without(cache, (1, 2, 3))


def _router_losses() -> Iterator[Case]:
    for note, options in (
        ("all rows", {}),
        ("mask", {"mask": mask((7,))}),
        ("no row counts", {"mask": mask((7,), (...,))}),
    ):
        ids = _choice(7, 5, 2)
        yield _op(f"load_balancing: {note}", ops.load_balancing, (7, 5), ids=ids, **options)
        yield _op(f"router_z_loss: {note}", ops.router_z_loss, (7, 5), **options)
