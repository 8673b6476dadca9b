"""`python -m benchmarks.ops`: the time of each op, forward and backward, on the CPU.

Each op gets arrays as in a training step of a GPT. Four contestants take turns in one process:

    torch eager       torch's function of the same name, with autograd; some ops have none
    numpy reference   this library's op in the array API
    numpy kernel      with its kernels for NumPy
    numba kernel      as a program (`xformer.compile`), extra `numba`

The result and all gradients are first compared with those of the reference in float64.
`docs/make_ops_page.py` puts the newest result into `docs/ops.md`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import xformer as xf
from benchmarks import command, contestants, harness, machine, report, stored
from benchmarks.contestants import PEER
from benchmarks.harness import Disagreement
from xformer import ops
from xformer.base import tree
from xformer.cli.progress import each

REFERENCE, KERNEL, PROGRAM = "numpy reference", "numpy kernel", "numba kernel"
NAMES = (PEER, REFERENCE, KERNEL, PROGRAM)
FORWARD, BOTH = "forward", "forward and backward"
TOLERANCE = 1e-5  # relative, in the norm of each result
TURN_SECONDS, MOST = 0.05, 50  # a turn has consecutive calls for so many seconds, at most MOST
ROUNDS = 10

Arrays = tuple[Any, ...]


class OpCall(NamedTuple):
    """An op and the arguments of a call."""

    name: str
    op: Callable[..., Any]
    args: Arrays
    options: dict[str, Any]
    peer: Callable[..., Any] | None = None  # torch's function of args and options as tensors


def cases() -> Iterator[OpCall]:
    """A call of every op in `xformer.ops`: width 768, 2,048 tokens, 16,384 classes."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    x, y, wide, up = normal(2048, 768), normal(2048, 768), normal(2048, 3072), normal(2048, 3072)
    w, b, key = normal(768), normal(768), xf.RandomKey(1, 2, 3)
    ids, targets = rng.integers(0, 16384, 2048), rng.integers(0, 16384, 512)
    yield from _pointwise(wide)
    peer = lambda gate, up: _quick(gate.clamp(max=7)) * (up.clamp(-7, 7) + 1)  # noqa: E731
    yield OpCall("clamped_swiglu", ops.clamped_swiglu, (wide, up), {}, peer)
    yield OpCall("glu", ops.glu, (wide, up), {}, lambda gate, up: _nn().silu(gate) * up)
    yield OpCall("dropout", ops.dropout, (wide,), {"rate": 0.1, "key": key})
    yield OpCall("random_bits", ops.random_bits, (wide,), {"key": key, "size": wide.size})
    yield OpCall("softmax", ops.softmax, (wide,), {}, lambda x: x.softmax(-1))
    yield OpCall("log_softmax", ops.log_softmax, (wide,), {}, lambda x: x.log_softmax(-1))
    peer: Any = lambda x, w, b: _nn().layer_norm(x, w.shape, w, b)  # noqa: E731
    yield OpCall("layer_norm", ops.layer_norm, (x, w, b), {}, peer)
    peer = lambda x, w, eps: _nn().rms_norm(x, w.shape, w, eps)  # noqa: E731
    yield OpCall("rms_norm", ops.rms_norm, (x, w), {"eps": 1e-6}, peer)
    yield OpCall("l2_normalize", ops.l2_normalize, (x,), {}, lambda x: _nn().normalize(x, dim=-1))
    yield OpCall("scale", ops.scale, (x, normal(1)), {}, lambda x, alpha: alpha * x)
    maps = normal(768, 3072) / 28, normal(3072)
    yield OpCall("linear", ops.linear, (x, *maps), {}, lambda x, w, b: b.addmm(x, w))
    table = normal(16384, 768)
    peer = lambda table, ids: _nn().embedding(ids, table)  # noqa: E731
    yield OpCall("embedding", ops.embedding, (table,), {"ids": ids}, peer)
    peer = lambda table, x, ids: table.index_add(0, ids, x)  # noqa: E731
    yield OpCall("index_add", ops.index_add, (table, x), {"ids": ids}, peer)
    yield from _attention(normal)
    peer = lambda x, targets: _nn().cross_entropy(x, targets)  # noqa: E731
    options = {"targets": targets}
    yield OpCall("cross_entropy", ops.cross_entropy, (normal(512, 16384),), options, peer)
    peer = lambda x, w, b, targets: _nn().cross_entropy(b.addmm(x, w), targets)  # noqa: E731
    head = x[:512], normal(768, 16384) / 28, normal(16384)
    yield OpCall("linear_cross_entropy", ops.linear_cross_entropy, head, options, peer)
    yield OpCall("mse", ops.mse, (x, y), {}, lambda x, y: _nn().mse_loss(x, y))
    pairs = x[:256] / 28, y[:256] / 28
    yield OpCall("info_nce", ops.info_nce, pairs, {"scale": 20.0})
    yield from _experts(rng, x[:512])


def _pointwise(x: np.ndarray) -> Iterator[OpCall]:
    yield OpCall("relu", ops.relu, (x,), {}, lambda x: x.relu())
    yield OpCall("relu_squared", ops.relu_squared, (x,), {}, lambda x: x.relu() ** 2)
    yield OpCall("gelu", ops.gelu, (x,), {}, lambda x: _nn().gelu(x))
    peer: Any = lambda x, approximate: _nn().gelu(x, approximate=approximate)  # noqa: E731
    yield OpCall("gelu, tanh", ops.gelu, (x,), {"approximate": "tanh"}, peer)
    yield OpCall("quick_gelu", ops.quick_gelu, (x,), {}, _quick)
    yield OpCall("silu", ops.silu, (x,), {}, lambda x: _nn().silu(x))
    yield OpCall("sigmoid", ops.sigmoid, (x,), {}, lambda x: x.sigmoid())
    yield OpCall("tanh", ops.tanh, (x,), {}, lambda x: x.tanh())
    yield OpCall("erf", ops.erf, (x,), {}, lambda x: x.erf())
    yield OpCall("softcap", ops.softcap, (x,), {"cap": 30.0}, lambda x, cap: cap * (x / cap).tanh())


def _attention(normal: Callable[..., np.ndarray]) -> Iterator[OpCall]:
    q, k, v = (normal(2, 12, 1024, 64) for _ in range(3))
    angles = np.outer(np.arange(1024), 1e4 ** -np.linspace(0, 1, 32)).astype(np.float32)
    yield OpCall("rope", ops.rope, (q,), {"cos": np.cos(angles), "sin": np.sin(angles)})
    peer: Any = lambda *qkv, causal: _nn().scaled_dot_product_attention(*qkv, is_causal=causal)  # noqa: E731
    yield OpCall("sdpa", ops.sdpa, (q, k, v), {"causal": True}, peer)
    short = tuple(a[:1, :, :256].copy() for a in (q, k, v))
    yield OpCall("shaw", ops.shaw, (*short, normal(33, 64), normal(33, 64)), {"causal": True})
    biases = normal(12, 64), normal(12, 64)
    relative = (*short, normal(12, 256, 64), *biases)
    yield OpCall("xl_attention", ops.xl_attention, relative, {"causal": True})
    options = {"key": xf.RandomKey(1), "n_buckets": 32, "chunk_len": 64, "causal": True}
    yield OpCall("lsh_attention", ops.lsh_attention, (q[:1], v[:1]), options)
    additive = (*(a[:, :, :128].copy() for a in short), normal(12, 64) / 8)
    yield OpCall("additive_attention", ops.additive_attention, additive, {"causal": True})
    gates = -np.abs(normal(2, 12, 1024)), np.abs(normal(2, 12, 1024)) / 4
    yield OpCall("gated_delta_rule", ops.gated_delta_rule, (q / 8, k / 8, v, *gates), {})
    conv = normal(2, 1024, 768), normal(4, 768)
    yield OpCall("causal_conv", ops.causal_conv, conv, {}, _depthwise)
    yield OpCall("log_decay", ops.log_decay, (normal(2, 1024, 12), normal(12)), {})


def _depthwise(x: Any, w: Any) -> Any:
    """torch's causal convolution of each channel. x: (B, T, C)   w: (L, C)"""
    padded = _nn().pad(x.mT, (len(w) - 1, 0))
    return _nn().conv1d(padded, w.T[:, None], groups=w.shape[1]).mT


def _experts(rng: np.random.Generator, x: np.ndarray) -> Iterator[OpCall]:
    n, n_experts, hidden = len(x), 8, 1024
    logits = rng.standard_normal((n, n_experts), dtype=np.float32)
    ids = np.argsort(-logits, axis=-1)[:, :2]
    shapes = (768, hidden), (768, hidden), (hidden, 768)
    maps = (rng.standard_normal((n_experts, *s), dtype=np.float32) / 28 for s in shapes)
    weights = rng.uniform(size=(n, 2)).astype(np.float32)
    yield OpCall("experts", ops.experts, (x, *maps, weights), {"ids": ids})
    yield OpCall("load_balancing", ops.load_balancing, (logits,), {"ids": ids})
    yield OpCall("router_z_loss", ops.router_z_loss, (logits,), {})


def _quick(x: Any) -> Any:
    return x * (1.702 * x).sigmoid()


def _nn() -> Any:
    import torch

    return torch.nn.functional


# ---- Contestants ----


class Calls(NamedTuple):
    """What a contestant runs, and how its results become arrays of NumPy."""

    forward: Callable[[], Any]
    both: Callable[[], Any]  # the result and the gradients, one sequence
    context: Callable[[], AbstractContextManager[None]] = nullcontext


def ours(case: OpCall, dys: Arrays, context: Callable[[], AbstractContextManager[None]]) -> Calls:
    """Calls of the op itself within a context."""
    return Calls(partial(_forward, case), partial(_both, case, dys), context)


def _forward(case: OpCall) -> Any:
    return case.op(*case.args, **case.options)


def _both(case: OpCall, dys: Arrays) -> list[Any]:
    result = case.op(*case.args, **case.options)
    if not dys:
        return [result]
    y, cache = result
    return [*tree.flatten((y, cache.backward(*dys))).values()]


def program(case: OpCall, dys: Arrays) -> Calls:
    """Calls of the op as a program. RuntimeError if it is not compiled."""

    def forward(args: Arrays, arrays: dict[str, Any]) -> Any:
        result = case.op(*args, **{**case.options, **arrays})
        return result[0] if dys else result  # a cache does not leave a program

    def both(args: Arrays, arrays: dict[str, Any], dys: Arrays) -> Any:
        return _both(case._replace(args=args, options={**case.options, **arrays}), dys)

    arrays = {name: x for name, x in case.options.items() if isinstance(x, np.ndarray)}
    first, second = xf.compile(forward), xf.compile(both)
    calls = Calls(
        partial(first, case.args, arrays),
        partial(second, case.args, arrays, dys),
        partial(xf.kernels, "numba"),
    )
    with warnings.catch_warnings(), calls.context():
        warnings.simplefilter("error", RuntimeWarning)
        calls.forward(), calls.both()
    return calls


def of_torch(case: OpCall, dys: Arrays) -> Calls:
    """Calls of torch's function with autograd."""
    import torch

    args = [torch.from_numpy(x).requires_grad_() for x in case.args]
    options = {
        name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x
        for name, x in case.options.items()
    }
    torch_dys = [torch.from_numpy(np.asarray(dy)) for dy in dys]
    peer: Any = case.peer

    def both() -> list[np.ndarray]:
        y = peer(*args, **options)
        grads = torch.autograd.grad(y, args, torch_dys)
        return [a.detach().numpy() for a in (y, *grads)]

    return Calls(lambda: peer(*args, **options), both)


def calls_of(name: str, case: OpCall, dys: Arrays) -> Calls:
    """The calls of a contestant."""
    if name == PEER:
        return of_torch(case, dys)
    if name == PROGRAM:
        return program(case, dys)
    return ours(case, dys, xf.reference_only if name == REFERENCE else nullcontext)


# ---- Measuring ----


def measure(case: OpCall, names: Sequence[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Compare, then time: by contestant its error and the summary of each work.

    Disagreement if a result or a gradient is wrong.
    """
    args = tuple(map(_float64, case.args))
    exact = case._replace(
        args=args, options={name: _float64(x) for name, x in case.options.items()}
    )
    with xf.reference_only():
        result = _forward(exact)
        outputs = result[0] if isinstance(result, tuple) else ()
        dys = tuple(map(_gradient, outputs if isinstance(outputs, tuple) else (outputs,)))
        wanted = _both(exact, dys)
    dys = tuple(dy.astype(np.float32) for dy in dys)
    running, results = dict[str, Calls](), dict[str, dict[str, Any]]()
    for name in names:
        if name == PEER and case.peer is None:
            continue
        running[name] = calls = calls_of(name, case, dys)
        with calls.context():
            pairs = zip(calls.both(), wanted, strict=True)
            error = max(_error(got, exactly) for got, exactly in pairs)
        if not error <= TOLERANCE:
            raise Disagreement(
                f"{case.name}: {name} is wrong: relative error {error:.1e}, allowed {TOLERANCE:.0e}"
            )
        results[name] = {"error": error}
    for work in (FORWARD, BOTH) if dys else (FORWARD,):
        turns = {name: partial(_timed_calls, calls, work) for name, calls in running.items()}
        seconds = harness.interleave(turns, rounds, lambda: None)
        for name, times in seconds.items():
            results[name][work] = harness.summary(times, seconds.get(PEER))
    return results


def _float64(x: Any) -> Any:
    is_real = isinstance(x, np.ndarray) and x.dtype == np.float32
    return x.astype(np.float64) if is_real else x


def _gradient(y: Any) -> np.ndarray:
    """A dy whose products with y do not cancel in a sum."""
    numbers = np.arange(y.size, dtype=np.float64)
    return np.reshape(0.5 + np.cos(numbers), y.shape)


def _error(got: Any, wanted: Any) -> float:
    """The relative error of one array, in the norm."""
    size = float(np.linalg.norm(np.ravel(wanted).astype(np.float64)))
    off = np.ravel(got).astype(np.float64) - np.ravel(wanted)
    return float(np.linalg.norm(off)) / max(size, 1e-30)


def _timed_calls(calls: Calls, work: str) -> list[float]:
    """The seconds of each call of one turn: consecutive calls for `TURN_SECONDS`, at most `MOST`.

    A first call is timed to choose their number, and left out. A call that is longer than
    `TURN_SECONDS` is the only one, and counts.

    work: `FORWARD` or `BOTH`
    """
    run = calls.forward if work == FORWARD else calls.both
    with calls.context():
        first = harness.timed(run)
        repeats = min(MOST, int(TURN_SECONDS / first[0]))
        return harness.timed(run, repeats) if repeats else first


# ---- The command ----


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON. Returns 1 if a contestant is wrong."""
    known = {case.name: case for case in cases()}
    parser = command.parser("benchmarks.ops", __doc__)
    parser.add_argument(
        "--op", action="append", metavar="NAME", help="repeatable (default: all of `xformer.ops`)"
    )
    command.add_rounds(parser, ROUNDS)
    command.add_out(parser)
    args = parser.parse_args(argv)
    for name in args.op or []:
        if name not in known:
            parser.error(f"--op must be one of {', '.join(known)}, got {name!r}")
    absent = {name: why for name in NAMES if (why := contestants.why_not(name)) is not None}
    names = [name for name in NAMES if name not in absent]
    packages = [*machine.PACKAGES, *["torch"] * (PEER in names), *["numba"] * (PROGRAM in names)]
    results = machine.describe(["numpy"], packages)
    results |= {"threads": machine.share_threads(), "load": machine.load()}
    results |= {"rounds": args.rounds, "absent": list(absent.values())}
    rows: dict[str, dict[str, Any]] = {name: {"name": name, "errors": {}} for name in names}
    for name in each(args.op or [*known], "ops", "ops"):
        try:
            times = measure(known[name], names, args.rounds)
        except Disagreement as wrong:
            print(f"benchmarks.ops: nothing is reported.\n{wrong}", file=sys.stderr)
            return 1
        for contestant, of_op in times.items():
            row = rows[contestant]
            row["errors"][name] = of_op.pop("error")
            row |= {f"{name}: {work}": summary for work, summary in of_op.items()}
    results["rows"] = list(rows.values())
    out = stored.path_of(results, "ops" if args.op is None else "ops-some", args.out)
    print(report.align(table(results)))
    print("\nMilliseconds, minimum (median).")
    stored.write(results, out)
    print(f"Written: {out}")
    return 0


def table(results: dict[str, Any]) -> list[list[str]]:
    """The cells of the table, line by line; the first line is the header.

    Each further line is an op and a work ("gelu: forward"), each column a contestant. A cell is
    "minimum (median)" in ms, or "-" if it was not measured.

    results: `results["rows"]` has a dict for each contestant, with its times for each op and work
    """
    rows = results["rows"]
    works = dict.fromkeys(key for row in rows for key in row if ": " in key)
    lines = [["op", *(row["name"] for row in rows)]]
    for work in works:
        times = [row.get(work) for row in rows]
        cells = [
            f"{report.digits(t['min_ms'])} ({report.digits(t['median_ms'])})" if t else "-"
            for t in times
        ]
        lines.append([work, *cells])
    return lines


if __name__ == "__main__":
    sys.exit(command.run(main))
