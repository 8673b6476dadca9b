"""Sections of `benchmarks.gpu`: time of each CUDA kernel beside its floor, and launch costs.

The floor of a kernel is a lower bound of its time: the bytes that it must read and write, at the
rate of a copy, or its FLOPs, at the rate of a large matmul, whichever takes longer. All is timed in
interleaved rounds of several calls, and each round ends with a wait for the device. Each kernel is
first compared with the op's reference on the same arrays.
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
from xformer import RandomKey, explain, ops, reference_only
from xformer.backends import Backend
from xformer.backends.cupy import deterministic, module, softmax, tf32
from xformer.base import tree
from xformer.base.typing import Array
from xformer.dispatch import Overridable
from xformer.layers import NormConfig, NormParams, add_norm
from xformer.layers.kv_cache import KVCache, append
from xformer.optim.adam import adam_update
from xformer.optim.clip import clip_leaves

TOLERANCE = 1e-5  # relative, in the norm of each output in float32
ROUNDED = {"float16": 2e-3, "bfloat16": 1.6e-2}  # four roundings
REAL, STORED = 4, 2  # bytes
KEY = RandomKey(1, 2, 3)
ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "rate": 1e-3, "root": 1.0, "keep": 0.9}


class Sizes(NamedTuple):
    """The sizes of the arrays; the largest arrays must not fit into the device's cache."""

    rows: int  # of hidden states, as `width`
    width: int
    tokens: int  # rows of logits
    classes: int  # columns of logits
    padded: int  # columns of logits in bfloat16; the kernel pads each row
    batch: int  # of attention, as `heads`, `length` and `keys`
    heads: int
    length: int
    keys: int  # of attention with one query
    matrix: int  # rows and columns of the matmul whose rate is measured
    repeats: int  # calls in a round


LARGE = Sizes(32768, 1024, 4096, 50304, 50257, 16, 16, 1024, 4096, 8192, 10)
CACHE = 126 << 20  # bytes, at most, of a device's last cache (B200)
SMALL = Sizes(6, 8, 3, 4100, 4099, 1, 2, 17, 130, 8, 1)  # of a dry run


class KernelCall(NamedTuple):
    """A call of an op, with the bytes that it must move and the FLOPs that it must compute."""

    name: str
    op: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    forward: tuple[int, int]  # bytes, FLOPs
    backward: tuple[int, int] | None = None  # bytes, FLOPs; None: without a backward
    context: Callable[[], AbstractContextManager[None]] = nullcontext  # to call it in
    tolerance: float = TOLERANCE
    product: str = "product"  # the key of `rates` for its FLOPs
    reference: Callable[..., Any] | None = None  # None: the reference of `op`


def cases(backend: Backend, s: Sizes) -> Iterator[KernelCall]:
    """Yield the calls that are measured: of ops, of updates of the optimiser, and of casts.

    Each has random arrays of the sizes `s`, and the bytes and FLOPs that it cannot do without.
    """
    rng = backend.generator(0)
    n, (x, up) = s.rows * s.width * REAL, (rng.normal((s.rows, s.width)) for _ in range(2))
    w, b = rng.normal((s.width,)), rng.normal((s.width,))
    moved: Any = partial(_moved, n)
    yield KernelCall("layer_norm", ops.layer_norm, (x, w, b), {}, *moved(2, 3))
    yield KernelCall("rms_norm", ops.rms_norm, (x, w), {}, *moved(2, 3))
    for kind, b_or_none in (("layer", b), ("rms", None)):
        options: Any = {"config": NormConfig(kind)}
        sums = (x, up, NormParams(w, b_or_none))
        yield KernelCall(f"add_norm, {kind}", add_norm, sums, options, *moved(4, 4))
    yield from _rounded(backend, s, x, up, NormParams(w, b))
    yield KernelCall("softmax", ops.softmax, (x,), {}, *moved(2, 3))
    yield KernelCall("gelu", ops.gelu, (x,), {}, *moved(2, 3))
    yield KernelCall("gelu, tanh", ops.gelu, (x,), {"approximate": "tanh"}, *moved(2, 3))
    yield KernelCall("glu", ops.glu, (x, up), {}, *moved(3, 5))
    yield KernelCall("dropout", ops.dropout, (x,), {"rate": 0.1, "key": KEY}, *moved(2, 2))
    bits = {"key": KEY, "size": s.rows * s.width}
    yield KernelCall("random_bits", ops.random_bits, (x,), bits, (2 * n, 0))
    yield from _ids(backend, s)
    yield from _heads(backend, s)
    yield from _products(backend, s, x)
    leaves = [[rng.uniform((s.rows, s.width)) for _ in range(2)] for _ in range(4)]
    yield KernelCall("adam", adam_update, tuple(leaves), ADAM, (2 * 7 * n, 0))
    yield KernelCall("clip", clip_leaves, (leaves[0],), {"max_norm": 1.0}, (2 * 3 * n, 0))


def _rounded(
    backend: Backend, s: Sizes, x: Array, up: Array, norm: NormParams
) -> Iterator[KernelCall]:
    """Yield the kernels with a separate path for bfloat16.

    These are norms of sums, logits with padded rows, and casts of weights. x, up: (rows, width).
    """
    rng, rounded = backend.generator(5), partial(backend.cast_params, precision="bfloat16")
    n, extra = s.rows * s.width * STORED, {"tolerance": ROUNDED["bfloat16"]}
    for kind, params in (("layer", norm), ("rms", norm._replace(b=None))):
        options: Any = {"config": NormConfig(kind)}
        name, args = f"add_norm, {kind}, bfloat16", tuple(rounded([x, up, params]))
        yield KernelCall(name, add_norm, args, options, *_moved(n, 4, 4), **extra)
    table = rng.normal((s.padded, s.width)) * s.width**-0.5  # logits around 1
    h, table = rounded([rng.normal((s.tokens, s.width)), table])
    targets = {"targets": rng.integers((s.tokens,), high=s.padded)}
    flops, moved = 2 * s.tokens * s.width * s.padded, 2 * (s.tokens + s.padded) * s.width * STORED
    floors: Any = (0, 3 * flops), (moved, 0)
    extra |= {"product": "product, float16"}
    name, head = "linear_cross_entropy, bfloat16", ops.linear_cross_entropy
    yield KernelCall(name, head, (h, table.T), targets, *floors, **extra)

    def cast(leaves: Any) -> Any:
        return tree.map(lambda leaf: backend.xp.astype(leaf, h.dtype), leaves)

    leaves, moved = [x, up, *norm], 2 * s.rows * s.width * (REAL + STORED)
    yield KernelCall("weights", rounded, (leaves,), {}, (moved, 0), tolerance=0.0, reference=cast)


def _moved(n: int, forward: int, backward: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return `KernelCall.forward` and `.backward` for so many arrays of n bytes, without FLOPs."""
    return (forward * n, 0), (backward * n, 0)


def _ids(backend: Backend, s: Sizes) -> Iterator[KernelCall]:
    rng = backend.generator(1)
    table, ids = rng.normal((s.classes, s.width)), rng.integers((s.rows,), high=s.classes)
    n, whole = s.rows * s.width * REAL, s.classes * s.width * REAL
    for name, context in (("embedding", nullcontext), ("embedding, sorted", deterministic)):
        floors = (2 * n, 0), (n + whole, 0)
        yield KernelCall(name, ops.embedding, (table,), {"ids": ids}, *floors, context)
    logits, targets = rng.normal((s.tokens, s.classes)), rng.integers((s.tokens,), high=s.classes)
    n = s.tokens * s.classes * REAL
    options = {"targets": targets, "ignore_index": -1}
    yield KernelCall("cross_entropy", ops.cross_entropy, (logits,), options, (n, 0), (2 * n, 0))


def _heads(backend: Backend, s: Sizes) -> Iterator[KernelCall]:
    """Yield attention, RoPE of its queries, and appending to a KV cache."""
    rng, width = backend.generator(2), 64
    q, k, v = (rng.normal((s.batch, s.heads, s.length, width)) for _ in range(3))
    cos, sin = (rng.uniform((s.length, width // 2)) for _ in range(2))
    n = math.prod(q.shape) * REAL
    yield KernelCall("rope", ops.rope, (q,), {"cos": cos, "sin": sin}, (2 * n, 0), (2 * n, 0))
    flops = 2 * s.batch * s.heads * s.length * (s.length + 1) // 2 * width  # of one matmul
    floors = (4 * n, 2 * flops), (8 * n, 5 * flops)  # backward recomputes the scores
    yield KernelCall("sdpa, causal", ops.sdpa, (q, k, v), {"causal": True}, *floors)
    halves = tuple(backend.cast_params([q, k, v], "float16"))
    floors = (2 * n, 2 * flops), (4 * n, 5 * flops)
    extra: dict[str, Any] = {"tolerance": ROUNDED["float16"], "product": "product, float16"}
    yield KernelCall("sdpa, causal, float16", ops.sdpa, halves, {"causal": True}, *floors, **extra)
    bias = rng.normal((1, s.heads, s.length, s.length))
    m, flops = math.prod(bias.shape) * REAL, 2 * s.batch * s.heads * s.length**2 * width
    floors = (4 * n + m, 2 * flops), (8 * n + 2 * m, 5 * flops)
    yield KernelCall("sdpa, bias", ops.sdpa, (q, k, v, bias), {}, *floors)
    one = rng.normal((s.batch, s.heads, 1, width))
    k, v = (rng.normal((s.batch, s.heads, s.keys, width)) for _ in range(2))
    n = math.prod(k.shape) * REAL  # reading the keys takes longer than the matmuls of one query
    yield KernelCall("sdpa, one query", ops.sdpa, (one, k, v), {}, (2 * n, 0), (4 * n, 0))
    n, last = math.prod(one.shape) * REAL, rng.integers((), low=s.keys - 1, high=s.keys)
    options = {"kv_cache": KVCache(k, v, write_index=last)}
    yield KernelCall("append, in a column", append, (one, 2 * one), options, (4 * n, 0))


def _products(backend: Backend, s: Sizes, x: Array) -> Iterator[KernelCall]:
    rng = backend.generator(3)
    w, b = rng.normal((s.width, 4 * s.width)), rng.normal((4 * s.width,))
    flops = 2 * s.rows * s.width * 4 * s.width
    yield KernelCall("linear", ops.linear, (x, w, b), {}, (0, flops), (0, 2 * flops))
    h, table = rng.normal((s.tokens, s.width)), rng.normal((s.classes, s.width))
    options = {"targets": rng.integers((s.tokens,), high=s.classes)}
    flops, moved = 2 * s.tokens * s.width * s.classes, 2 * (s.tokens + s.classes) * s.width * REAL
    floors = (0, 3 * flops), (moved, 0)  # forward computes the gradients; backward scales them
    yield KernelCall(
        "linear_cross_entropy", ops.linear_cross_entropy, (h, table.T), options, *floors
    )


def rates(backend: Backend, s: Sizes, rounds: int) -> dict[str, float]:
    """Return the rates of the device: bytes per second of a copy, FLOPs per second of matmuls.

    The copy counts bytes read and bytes written. On CuPy it is the driver's copy: elementwise
    kernels of CuPy, `x.copy()` too, reach 40 % of its rate on an H200. The matmuls are in float32,
    float16 and, on CuPy, TF32.
    """
    rng = backend.generator(4)
    x = rng.normal((4 * s.rows, s.width))
    a, b, out = (rng.normal((s.matrix, s.matrix)) for _ in range(3))
    calls: dict[str, Callable[[], Any]] = {"copy": x.copy}
    calls["product"] = lambda: a.dot(b, out)
    a16, b16 = backend.cast_params([a, b], "float16")
    calls["product, float16"] = lambda: a16.dot(b16)
    if backend.name == "cupy":  # the stand-in has neither
        from cupy import copyto, empty_like

        calls["copy"] = partial(copyto, empty_like(x), x)

        def rounded() -> None:
            with tf32():
                a.dot(b, out)

        calls["product, TF32"] = rounded
    seconds = measured(backend, calls, s.repeats, rounds)
    work = {"copy": 2 * math.prod(x.shape) * REAL}
    return {name: work.get(name, 2 * s.matrix**3) / min(times) for name, times in seconds.items()}


def costs(backend: Backend, rounds: int, repeats: int) -> dict[str, float]:
    """Return {label: seconds per call} of calls on 2 x 2 arrays, where the host takes nearly all.

    The calls are a launch of a RawKernel, an op with one launch, an array call, and a matmul, both
    as kernels call it (`dot`) and as generic code does (`@`).

    rounds, repeats: the result is the minimum of `rounds` rounds. Each has `repeats` calls and ends
        with a wait for the device.
    """
    x, y = (backend.asarray([[1.0, 2.0], [3.0, 4.0]], "float32") for _ in range(2))
    calls: dict[str, Callable[[], Any]] = {
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
    seconds = measured(backend, calls, repeats, rounds)
    return {name: min(times) for name, times in seconds.items()}


def kernels(
    backend: Backend,
    s: Sizes,
    rate: dict[str, float],
    rounds: int,
    is_over: Callable[[], bool] = lambda: False,
    keep: Callable[[list[dict[str, Any]]], Any] = lambda rows: None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Compare and time all cases. Returns a row per case and direction, and a list of failures.

    A case with wrong results or an error has no row. A case that runs out of memory is tried again
    after the others.

    rate: of `rates`   is_over: returns True when no further case may begin
    keep: called with all rows so far, after each case.
    """
    rows, wrong, out_of_memory = list[dict[str, Any]](), list[str](), list[KernelCall]()

    def tried(case: KernelCall, *, again: bool) -> None:
        try:
            with case.context():
                rows.extend(_measured(backend, s, rate, rounds, case))
        except Exception as error:
            if harness.is_out_of_memory(error) and not again:
                out_of_memory.append(case)
                machine.give_back()
                return
            why = "out of memory, alone too: " if harness.is_out_of_memory(error) else ""
            kind = "" if isinstance(error, Disagreement) else f"{type(error).__name__}: "
            wrong.append(f"{case.name}: {why}{kind}{error}")
        keep(rows)

    for case in cases(backend, s):
        if is_over():
            wrong.append(f"{case.name} and what follows: not begun, time was over")
            return rows, wrong
        tried(case, again=False)
    for case in out_of_memory:
        tried(case, again=True)
    return rows, wrong


def _measured(
    backend: Backend, s: Sizes, rate: dict[str, float], rounds: int, case: KernelCall
) -> list[dict[str, Any]]:
    """Return the rows of a case. Raises Disagreement if its results differ from the reference."""
    error = _error(backend, case)
    if not error <= case.tolerance:
        raise Disagreement(f"relative error {error:.1e}, allowed {case.tolerance:.0e}")
    runs = backend.cast_params.__qualname__
    if isinstance(case.op, Overridable):
        line = explain(case.op, *case.args, **case.options).partition("\n")[0]
        runs = line.partition(": ")[2]
    calls: dict[str, Callable[[], Any]] = {"forward": partial(_run, case)}
    if case.backward is not None:
        y, cache = case.op(*case.args, **case.options)
        calls["backward"] = partial(cache.backward, *_like(backend, y))
    rows = []
    for direction, times in measured(backend, calls, s.repeats, rounds).items():
        moved, flops = case.forward if direction == "forward" else case.backward or (0, 0)
        floor = max(moved / rate["copy"], flops / rate[case.product])
        row = {"name": f"{case.name}, {direction}", "seconds": min(times), "floor": floor}
        row["moves"] = moved / rate["copy"] >= flops / rate[case.product]
        row |= {"median": statistics.median(times), "n": len(times)}
        rows.append(row | {"error": error, "runs": runs})
    return rows


def measured(
    backend: Backend, calls: dict[str, Callable[[], Any]], repeats: int, rounds: int
) -> dict[str, list[float]]:
    """Return for each of `calls` its seconds per call in each round of `repeats` calls."""

    def seconds(run: Callable[[], Any]) -> list[float]:
        run()  # an idle device is slow at first
        backend.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        backend.synchronize()
        return [(time.perf_counter() - start) / repeats]

    timed = {name: partial(seconds, call) for name, call in calls.items()}
    return harness.interleave(timed, rounds, lambda: None)


def _run(case: KernelCall) -> Any:
    return case.op(*case.args, **case.options)


def _like(backend: Backend, y: Array | tuple[Array, ...]) -> tuple[Array, ...]:
    """Return a gradient for each output y, of numbers that do not cancel in a sum with y."""
    xp, results = backend.xp, y if isinstance(y, tuple) else (y,)

    def some(out: Array) -> Array:
        numbers = xp.arange(math.prod(out.shape), dtype=backend.upcast(out).dtype)
        return xp.astype(xp.reshape(0.5 + xp.cos(numbers), out.shape), out.dtype)

    return tuple(map(some, results))


def _results(backend: Backend, case: KernelCall) -> list[Array]:
    """Return the outputs of a case, and the gradients if it has a backward."""
    if case.backward is None:
        return list(tree.flatten(_run(case)).values())
    y, cache = _run(case)
    return list(tree.flatten((y, cache.backward(*_like(backend, y)))).values())


def _error(backend: Backend, case: KernelCall) -> float:
    """Return the largest relative error of an output or gradient, against the reference."""
    got = [backend.upcast(a) for a in _results(backend, case)]
    judge = case._replace(args=tree.map(backend.upcast, case.args), op=case.reference or case.op)
    with reference_only():
        wanted = [backend.upcast(a) for a in _results(backend, judge)]
    return max(_off(backend, *pair) for pair in zip(got, wanted, strict=True))


def _off(backend: Backend, got: Array, wanted: Array) -> float:
    xp = backend.xp
    got, wanted = (xp.astype(a, xp.float64) for a in (got, wanted))
    size = float(xp.sum(wanted**2)) ** 0.5
    return float(xp.sum((got - wanted) ** 2)) ** 0.5 / max(size, 1e-30)


def kernel_table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of a table, one row per case and direction."""
    lines = [["kernel", "us", "floor, us", "of the floor", "error", "runs"]]
    for row in rows:
        share = f"{row['floor'] / row['seconds']:.0%}"
        seconds = f"{1e6 * row['seconds']:.1f} ({1e6 * row['median']:.1f})"
        times = (seconds, f"{1e6 * row['floor']:.1f}")
        short = row["runs"].removeprefix("xformer.backends.")
        lines.append([row["name"], *times, share, f"{row['error']:.0e}", short])
    return lines
