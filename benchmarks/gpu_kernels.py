"""What a CUDA kernel takes, beside what it cannot do without; what it costs the host to begin one.

The floor of a kernel is the time of the bytes that it must read and write, at the rate of a copy,
or of its multiplications, at the rate of a large product. Everything is measured in interleaved
turns of several calls on end, and waits for the device at the end of a turn. Each result is first
compared with that of the op's reference on the same arrays.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from benchmarks import harness, machine
from benchmarks.harness import Disagreement
from xformer import RandomKey, explain, ops, reference_only, tree
from xformer.backends import Backend
from xformer.backends.cupy import deterministic, module, softmax, tf32
from xformer.dispatch import Overridable
from xformer.layers import NormConfig, NormParams, add_norm
from xformer.layers.kv_cache import KVCache, append
from xformer.optim.adam import adam_update
from xformer.optim.clip import clip_leaves
from xformer.typing import Array

TOLERANCE = 1e-5  # relative, in the norm of each result in float32
ROUNDED = {"float16": 2e-3, "bfloat16": 1.6e-2}  # four roundings
REAL, STORED = 4, 2  # bytes
KEY = RandomKey(1, 2, 3)
ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "rate": 1e-3, "root": 1.0, "keep": 0.9}


class Sizes(NamedTuple):
    """Of the arrays; the largest ones must not fit in the device's cache."""

    rows: int
    width: int
    tokens: int  # of a head
    classes: int
    padded: int  # classes whose rows of logits are padded
    batch: int  # of attention
    heads: int
    length: int
    keys: int  # of one query
    matrix: int  # of the product whose rate is measured
    repeats: int  # calls in a turn


LARGE = Sizes(32768, 1024, 4096, 50304, 50257, 16, 16, 1024, 4096, 8192, 10)
CACHE = 126 << 20  # bytes, at most, of a device's last cache (B200)
SMALL = Sizes(6, 8, 3, 4100, 4099, 1, 2, 17, 130, 8, 1)  # of a dry run


class Case(NamedTuple):
    """A call, and what it cannot do without: bytes, or multiplications and additions."""

    name: str
    op: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    forward: tuple[int, int]  # bytes, FLOPs
    backward: tuple[int, int] | None = None  # None: there is none
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    tolerance: float = TOLERANCE
    product: str = "product"  # of `rates`, that it is made of
    reference: Callable[..., Any] | None = None  # of what is no op


def cases(place: Backend, s: Sizes) -> Iterator[Case]:
    """Every kernel, in the calls that models make."""
    rng = place.generator(0)
    n, (x, up) = s.rows * s.width * REAL, (rng.normal((s.rows, s.width)) for _ in range(2))
    w, b = rng.normal((s.width,)), rng.normal((s.width,))
    moved: Any = partial(_moved, n)
    yield Case("layer_norm", ops.layer_norm, (x, w, b), {}, *moved(2, 3))
    yield Case("rms_norm", ops.rms_norm, (x, w), {}, *moved(2, 3))
    for kind, b_or_none in (("layer", b), ("rms", None)):
        options: Any = {"config": NormConfig(kind)}
        sums = (x, up, NormParams(w, b_or_none))
        yield Case(f"add_norm, {kind}", add_norm, sums, options, *moved(4, 4))
    yield from _rounded(place, s, x, up, NormParams(w, b))
    yield Case("softmax", ops.softmax, (x,), {}, *moved(2, 3))
    yield Case("gelu", ops.gelu, (x,), {}, *moved(2, 3))
    yield Case("gelu, tanh", ops.gelu, (x,), {"approximate": "tanh"}, *moved(2, 3))
    yield Case("glu", ops.glu, (x, up), {}, *moved(3, 5))
    yield Case("dropout", ops.dropout, (x,), {"rate": 0.1, "key": KEY}, *moved(2, 2))
    bits = {"key": KEY, "size": s.rows * s.width}
    yield Case("random_bits", ops.random_bits, (x,), bits, (2 * n, 0))
    yield from _ids(place, s)
    yield from _heads(place, s)
    yield from _products(place, s, x)
    leaves = [[rng.uniform((s.rows, s.width)) for _ in range(2)] for _ in range(4)]
    yield Case("adam", adam_update, tuple(leaves), ADAM, (2 * 7 * n, 0))
    yield Case("clip", clip_leaves, (leaves[0],), {"max_norm": 1.0}, (2 * 3 * n, 0))


def _rounded(place: Backend, s: Sizes, x: Array, up: Array, norm: NormParams) -> Iterator[Case]:
    """What bfloat16 has of its own: norms of sums, padded rows of logits, weights."""
    rng, rounded = place.generator(5), partial(place.cast_params, precision="bfloat16")
    n, rest = s.rows * s.width * STORED, {"tolerance": ROUNDED["bfloat16"]}
    for kind, params in (("layer", norm), ("rms", norm._replace(b=None))):
        options: Any = {"config": NormConfig(kind)}
        name, args = f"add_norm, {kind}, bfloat16", tuple(rounded([x, up, params]))
        yield Case(name, add_norm, args, options, *_moved(n, 4, 4), **rest)
    table = rng.normal((s.padded, s.width)) * s.width**-0.5  # logits around 1
    h, table = rounded([rng.normal((s.tokens, s.width)), table])
    targets = {"targets": rng.integers((s.tokens,), high=s.padded)}
    flops, moved = 2 * s.tokens * s.width * s.padded, 2 * (s.tokens + s.padded) * s.width * STORED
    floors: Any = (0, 3 * flops), (moved, 0)
    rest |= {"product": "product, float16"}
    name, head = "linear_cross_entropy, bfloat16", ops.linear_cross_entropy
    yield Case(name, head, (h, table.T), targets, *floors, **rest)

    def cast(leaves: Any) -> Any:
        return tree.map(lambda leaf: place.xp.astype(leaf, h.dtype), leaves)

    leaves, moved = [x, up, *norm], 2 * s.rows * s.width * (REAL + STORED)
    yield Case("weights", rounded, (leaves,), {}, (moved, 0), tolerance=0.0, reference=cast)


def _moved(n: int, forward: int, backward: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """So many arrays of n bytes each way."""
    return (forward * n, 0), (backward * n, 0)


def _ids(place: Backend, s: Sizes) -> Iterator[Case]:
    rng = place.generator(1)
    table, ids = rng.normal((s.classes, s.width)), rng.integers((s.rows,), high=s.classes)
    n, whole = s.rows * s.width * REAL, s.classes * s.width * REAL
    for name, context in (("embedding", nullcontext), ("embedding, sorted", deterministic)):
        floors = (2 * n, 0), (n + whole, 0)
        yield Case(name, ops.embedding, (table,), {"ids": ids}, *floors, context)
    logits, targets = rng.normal((s.tokens, s.classes)), rng.integers((s.tokens,), high=s.classes)
    n = s.tokens * s.classes * REAL
    options = {"targets": targets, "ignore_index": -1}
    yield Case("cross_entropy", ops.cross_entropy, (logits,), options, (n, 0), (2 * n, 0))


def _heads(place: Backend, s: Sizes) -> Iterator[Case]:
    """Attention, and the rotary embedding of its queries."""
    rng, width = place.generator(2), 64
    q, k, v = (rng.normal((s.batch, s.heads, s.length, width)) for _ in range(3))
    cos, sin = (rng.uniform((s.length, width // 2)) for _ in range(2))
    n = math.prod(q.shape) * REAL
    yield Case("rope", ops.rope, (q,), {"cos": cos, "sin": sin}, (2 * n, 0), (2 * n, 0))
    flops = 2 * s.batch * s.heads * s.length * (s.length + 1) // 2 * width  # of one product
    floors = (4 * n, 2 * flops), (8 * n, 5 * flops)  # the scores are made again
    yield Case("sdpa, causal", ops.sdpa, (q, k, v), {"causal": True}, *floors)
    halves = tuple(place.cast_params([q, k, v], "float16"))
    floors = (2 * n, 2 * flops), (4 * n, 5 * flops)
    rest: dict[str, Any] = {"tolerance": ROUNDED["float16"], "product": "product, float16"}
    yield Case("sdpa, causal, float16", ops.sdpa, halves, {"causal": True}, *floors, **rest)
    bias = rng.normal((1, s.heads, s.length, s.length))
    m, flops = math.prod(bias.shape) * REAL, 2 * s.batch * s.heads * s.length**2 * width
    floors = (4 * n + m, 2 * flops), (8 * n + 2 * m, 5 * flops)
    yield Case("sdpa, bias", ops.sdpa, (q, k, v, bias), {}, *floors)
    one = rng.normal((s.batch, s.heads, 1, width))
    k, v = (rng.normal((s.batch, s.heads, s.keys, width)) for _ in range(2))
    n = math.prod(k.shape) * REAL  # reading them outlasts the products with one query
    yield Case("sdpa, one query", ops.sdpa, (one, k, v), {}, (2 * n, 0), (4 * n, 0))
    n, last = math.prod(one.shape) * REAL, rng.integers((), low=s.keys - 1, high=s.keys)
    options = {"kv_cache": KVCache(k, v, write_index=last)}
    yield Case("append, in a column", append, (one, 2 * one), options, (4 * n, 0))


def _products(place: Backend, s: Sizes, x: Array) -> Iterator[Case]:
    rng = place.generator(3)
    w, b = rng.normal((s.width, 4 * s.width)), rng.normal((4 * s.width,))
    flops = 2 * s.rows * s.width * 4 * s.width
    yield Case("linear", ops.linear, (x, w, b), {}, (0, flops), (0, 2 * flops))
    h, table = rng.normal((s.tokens, s.width)), rng.normal((s.classes, s.width))
    options = {"targets": rng.integers((s.tokens,), high=s.classes)}
    flops, moved = 2 * s.tokens * s.width * s.classes, 2 * (s.tokens + s.classes) * s.width * REAL
    floors = (0, 3 * flops), (moved, 0)  # gradients are made going forward, and multiplied
    yield Case("linear_cross_entropy", ops.linear_cross_entropy, (h, table.T), options, *floors)


def rates(place: Backend, s: Sizes, rounds: int) -> dict[str, float]:
    """Bytes a second of a copy, read and written; FLOPs a second of a product, and in TF32.

    The copy is the driver's, or a kernel's that reads and writes as much, whichever is faster.
    """
    rng = place.generator(4)
    x = rng.normal((4 * s.rows, s.width))
    a, b, out = (rng.normal((s.matrix, s.matrix)) for _ in range(3))
    turns: dict[str, Callable[[], Any]] = {"copy": x.copy, "kernel": lambda: -x}
    turns["product"] = lambda: a.dot(b, out)
    low, other = place.cast_params([a, b], "float16")
    turns["product, float16"] = lambda: low.dot(other)
    if place.name == "cupy":  # the switch is CuPy's own

        def rounded() -> None:
            with tf32():
                a.dot(b, out)

        turns["product, TF32"] = rounded
    seconds = measured(place, turns, s.repeats, rounds)
    seconds["copy"] += seconds.pop("kernel")
    work = {"copy": 2 * math.prod(x.shape) * REAL}
    return {name: work.get(name, 2 * s.matrix**3) / min(found) for name, found in seconds.items()}


def costs(place: Backend, rounds: int, repeats: int) -> dict[str, float]:
    """Seconds of the host, from one call to the next, of calls that give a device next to no work.

    A RawKernel by our launcher; an op that launches one; an array call; a product of two dimensions
    as kernels call it, and as generic code does.
    """
    x, y = (place.asarray([[1.0, 2.0], [3.0, 4.0]], "float32") for _ in range(2))
    turns: dict[str, Callable[[], Any]] = {
        "launch of a RawKernel": partial(
            module.launch,
            softmax.SOURCE,
            "softmax_forward",
            x,
            grid=(2,),
            block=(32,),
            args=(x, y, 2, 1),
            WIDE=0,
        ),
        "op with one launch": lambda: ops.silu(x),
        "array call, x + y": lambda: x + y,
        "product, a.dot(b)": lambda: x.dot(y),
        "product, a @ b": lambda: x @ y,
    }
    seconds = measured(place, turns, repeats, rounds)
    return {name: min(found) for name, found in seconds.items()}


def kernels(
    place: Backend,
    s: Sizes,
    rate: dict[str, float],
    rounds: int,
    is_over: Callable[[], bool] = lambda: False,
    keep: Callable[[list[dict[str, Any]]], Any] = lambda rows: None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Of each case and direction a row, and what is wrong: its times are not reported.

    A case that fails is wrong too; one that has too little memory is tried again after the others.
    is_over: whether time is, and no other case may begin. keep: called with all rows so far.
    """
    rows, wrong, later = list[dict[str, Any]](), list[str](), list[Case]()

    def tried(case: Case, *, again: bool) -> None:
        try:
            with case.context():
                rows.extend(_measured(place, s, rate, rounds, case))
        except Exception as error:
            if harness.is_out_of_memory(error) and not again:
                later.append(case)
                machine.give_back()
                return
            why = "out of memory, alone too: " if harness.is_out_of_memory(error) else ""
            kind = "" if isinstance(error, Disagreement) else f"{type(error).__name__}: "
            wrong.append(f"{case.name}: {why}{kind}{error}")
        keep(rows)

    for case in cases(place, s):
        if is_over():
            wrong.append(f"{case.name} and what follows: not begun, time was over")
            return rows, wrong
        tried(case, again=False)
    for case in later:
        tried(case, again=True)
    return rows, wrong


def _measured(
    place: Backend, s: Sizes, rate: dict[str, float], rounds: int, case: Case
) -> list[dict[str, Any]]:
    """A row of each direction. Disagreement where the results are not the reference's."""
    error = _error(place, case)
    if not error <= case.tolerance:
        raise Disagreement(f"relative error {error:.1e}, allowed {case.tolerance:.0e}")
    runs = place.cast_params.__qualname__
    if isinstance(case.op, Overridable):
        said = explain(case.op, *case.args, **case.options).partition("\n")[0]
        runs = said.partition(": ")[2]
    turns: dict[str, Callable[[], Any]] = {"forward": partial(_run, case)}
    if case.backward is not None:
        y, cache = case.op(*case.args, **case.options)
        turns["backward"] = partial(cache.backward, *_like(place, y))
    rows = []
    for direction, found in measured(place, turns, s.repeats, rounds).items():
        moved, flops = case.forward if direction == "forward" else case.backward or (0, 0)
        floor = max(moved / rate["copy"], flops / rate[case.product])
        row = {"name": f"{case.name}, {direction}", "seconds": min(found), "floor": floor}
        row["moves"] = moved / rate["copy"] >= flops / rate[case.product]
        row |= {"median": statistics.median(found), "n": len(found)}
        rows.append(row | {"error": error, "runs": runs})
    return rows


def measured(
    place: Backend, turns: dict[str, Callable[[], Any]], repeats: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of a call in each turn of `repeats` calls."""

    def turn(run: Callable[[], Any]) -> list[float]:
        run()  # a device that has slept is slow at first
        place.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        place.synchronize()
        return [(time.perf_counter() - start) / repeats]

    own = {name: partial(turn, run) for name, run in turns.items()}
    return harness.interleave(own, rounds, lambda: None)


def _run(case: Case) -> Any:
    return case.op(*case.args, **case.options)


def _like(place: Backend, y: Array | tuple[Array, ...]) -> tuple[Array, ...]:
    """A gradient of each result, of numbers that do not cancel in a sum with the result."""
    xp, results = place.xp, y if isinstance(y, tuple) else (y,)

    def some(out: Array) -> Array:
        numbers = xp.arange(math.prod(out.shape), dtype=place.upcast(out).dtype)
        return xp.astype(xp.reshape(0.5 + xp.cos(numbers), out.shape), out.dtype)

    return tuple(map(some, results))


def _results(place: Backend, case: Case) -> list[Array]:
    """What the call gives, and its gradients."""
    if case.backward is None:
        return list(tree.flatten(_run(case)).values())
    y, cache = _run(case)
    return list(tree.flatten((y, cache.backward(*_like(place, y)))).values())


def _error(place: Backend, case: Case) -> float:
    """The largest relative error of the results, against the reference's."""
    got = [place.upcast(a) for a in _results(place, case)]
    judge = case._replace(args=tree.map(place.upcast, case.args), op=case.reference or case.op)
    with reference_only():
        wanted = [place.upcast(a) for a in _results(place, judge)]
    return max(_off(place, *pair) for pair in zip(got, wanted, strict=True))


def _off(place: Backend, got: Array, wanted: Array) -> float:
    xp = place.xp
    got, wanted = (xp.astype(a, xp.float64) for a in (got, wanted))
    size = float(xp.sum(wanted**2)) ** 0.5
    return float(xp.sum((got - wanted) ** 2)) ** 0.5 / max(size, 1e-30)


def kernel_table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Cells of a table."""
    lines = [["kernel", "us", "floor, us", "of the floor", "error", "runs"]]
    for row in rows:
        share = f"{row['floor'] / row['seconds']:.0%}"
        own = f"{1e6 * row['seconds']:.1f} ({1e6 * row['median']:.1f})"
        times = (own, f"{1e6 * row['floor']:.1f}")
        short = row["runs"].removeprefix("xformer.backends.")
        lines.append([row["name"], *times, share, f"{row['error']:.0e}", short])
    return lines
