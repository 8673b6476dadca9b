"""Programs: whatever the catalogue has is recorded, and a run gives what the references give."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="needs extra numba")

from xformer import backends, optim, reference_only, tree
from xformer.backends import Backend
from xformer.backends.numba.program import namespace, program
from xformer.backends.numba.program.plan import waits
from xformer.backends.numba.program.run import Recorded, gap_free, layout_of
from xformer.backends.numba.program.traced import Traced, Unrecorded
from xformer.backends.numpy import threads
from xformer.proofs import catalogue
from xformer.proofs.catalogue import Case

CASES = catalogue.cases()
MODELS = [case for case in CASES if case.group == "models"]
TOLERANCE = {"float64": 1e-12, "float32": 2e-5}  # of the largest number of a case


class Building(Backend):
    """NumPy for a case that is built: `made` is asked for each array that comes from the host."""

    made: Callable[[np.ndarray], Any]
    values: dict[int, np.ndarray]

    def _from_host(self, host: np.ndarray) -> Any:
        return self.made(host)

    def to_numpy(self, array: Any) -> np.ndarray:
        return self.values.get(id(array), array)


def building(made: Callable[[np.ndarray], Any], values: dict[int, np.ndarray], xp: Any) -> Building:
    numpy = backends.get("numpy")
    own = Building("numpy", xp, None, numpy.dtypes, numpy.version)
    vars(own).update(made=made, values=values)
    return own


def whole(case: Case, backend: Backend, dtype: str, gradients: Sequence[Any] | None) -> list[Any]:
    """What a case gives, and the gradients of all of its arrays. gradients: of what it gives."""
    fn, args = case.build(backend, dtype)
    y, cache = fn(*args)
    flat = tree.flatten({"": y})
    if gradients is None:
        rng = np.random.default_rng(1)
        gradients = [rng.normal(size=x.shape).astype(dtype) for x in flat.values()]
    dy = tree.unflatten({"": y}, dict(zip(flat, gradients, strict=True)))[""]
    # Not by isinstance: in a program a scalar does not say what it is.
    grads = cache.backward(*dy) if issubclass(type(dy), tuple) else cache.backward(dy)
    return [*flat.values(), *tree.flatten({"": grads}).values(), gradients]


class Both:
    """A case by the references, and recorded."""

    def __init__(self, case: Case, dtype: str, threads: int = 2) -> None:
        hosts: list[np.ndarray] = []

        def made(host: np.ndarray) -> np.ndarray:
            hosts.append(np.array(host))
            return hosts[-1]

        with reference_only():
            *self.wanted, dy = whole(
                case, building(made, {}, backends.get("numpy").xp), dtype, None
            )
        n = len(hosts)

        def fn(*arrays: Traced) -> list[Any]:
            values = {id(x): host for x, host in zip(arrays, hosts, strict=False)}
            inputs = iter(arrays[:n])
            backend = building(lambda host: next(inputs), values, namespace)
            return whole(case, backend, dtype, arrays[n:])[:-1]

        self.fn, self.inputs = fn, [gap_free(x) for x in (*hosts, *dy)]
        self.recorded = Recorded(fn, [layout_of(x) for x in self.inputs], threads)
        # Gradients of what softmax does not depend on are rounding: of others' largest number.
        largest = max(float(abs(x).max(initial=0)) for x in self.wanted)
        self.tolerance = TOLERANCE[dtype] * largest

    def require(self, found: Sequence[np.ndarray]) -> None:
        for got, wanted in zip(found, self.wanted, strict=True):
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
            np.testing.assert_allclose(got, wanted, rtol=0, atol=self.tolerance)


# They sort, look for a largest token, or multiply arrays that both broadcast: one instruction each.
AS_PYTHON = re.compile(r"^lsh_attention|^(pool|splade): max|gated DeltaNet")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.group}-{case.name}")
def test_a_run_gives_what_the_references_give(case: Case, dtype: str) -> None:
    both = Both(case, dtype)
    for _ in range(2):
        both.require(both.recorded(*both.inputs))
    if dtype == "float32" and not AS_PYTHON.search(case.name):
        require_native(both.recorded)


def require_native(recorded: Recorded) -> None:
    """No instruction runs as Python."""
    assert "; 0 run as Python" in recorded.explain(), recorded.explain()


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_no_step_of_a_model_runs_as_python(case: Case) -> None:
    """A step of AdamW of all that it gives, gradients among them; recorded, and not run."""
    both = Both(case, "float32")

    def step(t: Traced, *arrays: Traced) -> list[Any]:
        own = tuple(x for x in both.fn(*arrays) if not x.is_constant)
        new, state = optim.adamw(own, own, optim.AdamState(t, own, own), lr=1e-3)
        return [*new, *state.m, *state.v]

    layouts = [layout_of(x) for x in (np.array(3), *both.inputs)]
    recorded = Recorded(step, layouts, 2, numbers=[0])
    if not AS_PYTHON.search(case.name):
        require_native(recorded)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_any_number_of_threads(case: Case, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece for each of them, and twice the same bits."""
    monkeypatch.setattr(program, "WORTH", 0)
    both = Both(case, "float32", threads)
    first, second = both.recorded(*both.inputs), both.recorded(*both.inputs)
    both.require(first)
    for got, again in zip(first, second, strict=True):
        np.testing.assert_array_equal(got, again)


def test_a_function_without_its_threads() -> None:
    """Where another thread of the program has them all, the caller does all pieces."""
    x = np.arange(3e5)
    run = Recorded(lambda x: [namespace.exp(-x) + x * 2], [layout_of(x)], 2)
    (wanted,) = run(x)
    with threads._pool() as has_pool:
        assert has_pool
        with ThreadPoolExecutor(3) as pool:
            for (found,) in pool.map(lambda _: run(x), range(6)):
                np.testing.assert_array_equal(found, wanted)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_in_the_child_of_a_fork() -> None:
    x = np.arange(3e5)
    run = Recorded(lambda x: [namespace.exp(-x) + x * 2], [layout_of(x)], 2)
    (wanted,) = run(x)
    child = os.fork()
    if not child:
        try:
            os._exit(0 if np.array_equal(run(x)[0], wanted) else 1)
        finally:
            os._exit(2)  # whatever it raised: two processes would run the other tests
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_error_in_a_run_leaves_the_program_usable() -> None:
    """Ctrl-C too, which Python raises between two instructions."""
    raised: list[type[BaseException]] = [KeyboardInterrupt, ValueError]

    def fail(out: np.ndarray, x: np.ndarray) -> None:
        if raised:
            raise raised.pop()
        np.copyto(out, x)

    def fn(x: Traced) -> list[Traced]:
        assert x.program is not None
        out = x.program.fresh(x.shape, x.dtype)
        x.program.emit("fail", [out], [x * 2], run=fail)
        return [out + 1]

    x = np.ones(10_000)
    run = Recorded(fn, [layout_of(x)], 2)
    for error in tuple(reversed(raised)):
        with pytest.raises(error):
            run(x)
    np.testing.assert_array_equal(run(x)[0], np.full(10_000, 3.0))


def test_a_signal_handler_that_computes() -> None:
    """It has an arena of its own, and does without the other threads."""
    x = np.arange(2e5)
    run = Recorded(lambda x: [namespace.exp(-x) + x * 2], [layout_of(x)], 2)
    (wanted,) = run(x)
    found: list[np.ndarray] = []
    before = signal.signal(signal.SIGALRM, lambda *_: found.append(run(x)[0]))
    try:
        while len(found) < 20:
            signal.setitimer(signal.ITIMER_REAL, 0.0005)  # once
            np.testing.assert_array_equal(run(x)[0], wanted)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for own in found:
        np.testing.assert_array_equal(own, wanted)


def record(fn: Callable[..., Any], *arrays: np.ndarray) -> Recorded:
    return Recorded(fn, [layout_of(x) for x in arrays])


def test_new_values() -> None:
    x = np.arange(6.0).reshape(2, 3)
    run = record(lambda x: [x * 2 + 1, namespace.sum(x, axis=0)], x)
    for scale in (1.0, -3.0):
        doubled, sums = run(scale * x)
        np.testing.assert_array_equal(doubled, scale * x * 2 + 1)
        np.testing.assert_array_equal(sums, scale * x.sum(0))


def test_results_are_new_arrays() -> None:
    x = np.ones(3)
    run = record(lambda x: [x, x + 1, x[::-1], namespace.ones((2,))], x)
    first = run(x)
    for result in first:
        result += 7
    again = run(x)
    np.testing.assert_array_equal(x, 1)
    np.testing.assert_array_equal(np.concatenate(again), [1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1])


def test_layouts() -> None:
    """Transposed arrays are read as they lie, gaps are copied, and other layouts are refused."""
    x = np.arange(6.0).reshape(2, 3)
    run = record(lambda x: [x + 1], x.T)
    np.testing.assert_array_equal(run(x.T)[0], x.T + 1)
    gaps = x[:, :2]
    np.testing.assert_array_equal(
        record(lambda x: [x + 1], gaps.copy())(gap_free(gaps))[0], gaps + 1
    )
    with pytest.raises(ValueError, match="other layouts"):
        run(x)


@pytest.mark.parametrize("shape", [(-1, 4), (4, 2), (-1, -1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_shape_that_does_not_fit(shape: tuple[int, ...], transposed: bool) -> None:
    x = np.arange(6.0).reshape(2, 3)
    with pytest.raises(ValueError) as wanted:
        x.reshape(shape)
    with pytest.raises(ValueError, match=re.escape(str(wanted.value))):
        record(lambda x: [namespace.reshape(x.T if transposed else x, shape)], x)


def test_a_view_or_an_error() -> None:
    x = np.arange(6.0).reshape(2, 3)
    run = record(lambda x: [namespace.reshape(x, (3, 2), copy=False) + 1], x)
    np.testing.assert_array_equal(run(x)[0], x.reshape(3, 2) + 1)
    with pytest.raises(ValueError, match="Unable to avoid creating a copy"):
        record(lambda x: [namespace.reshape(x.T, (6,), copy=False)], x)


def test_what_nobody_needs_is_left_out() -> None:
    run = record(lambda x: [x + 1, namespace.exp(x)][:1], np.ones(3))
    assert [one.name for one in run.code] == ["add"]


def test_memory_is_used_again() -> None:
    """Of a chain two arrays are alive at a time."""

    def chain(x: Traced) -> list[Traced]:
        for _ in range(20):
            x = namespace.exp(x)
        return [x]

    x = np.zeros(1000)
    assert record(chain, x).plan.nbytes <= 2 * 8064


def test_values_are_not_known() -> None:
    with pytest.raises(Unrecorded, match="value of an array"):
        record(lambda x: [x] if x[0] > 0 else [-x], np.ones(3))
    with pytest.raises(Unrecorded, match="vecdot"):
        record(lambda x: [namespace.vecdot(x, x)], np.ones(3))
    with pytest.raises(Unrecorded, match="index"):
        record(lambda x: [x[x > 0]], np.ones(3))


def test_ids_are_checked_in_each_run() -> None:
    from xformer import ops

    table, wrong = np.ones((5, 2)), np.array([1, 5])
    run = record(lambda table, at: [ops.embedding(table, ids=at)[0]], table, wrong)
    with pytest.raises(ValueError, match=r"ids must lie in \[0, 5\), got ids from 1 to 5"):
        run(table, wrong)
    assert run(table, wrong - 1)[0].shape == (2, 2)


def test_nothing_goes_on_before_a_check_is_done() -> None:
    """A kernel on another thread would read a row that is not there."""
    from xformer import ops

    table, ids = np.ones((5, 2), np.float32), np.array([1, 4])
    run = record(lambda table, at: [ops.embedding(table, ids=at)[0]], table, ids)
    checks = [one.raises is not None for one in run.code]
    assert any(checks) and not checks[-1]
    marks = waits(run.code, run.plan.offsets)
    assert all(after for check, after in zip(checks, marks[1:], strict=False) if check)


def test_arrays_of_two_programs() -> None:
    kept: list[Traced] = []

    def keep(x: Traced) -> list[Traced]:
        kept.append(x)
        return [x + kept[0]]

    record(keep, np.ones(3))
    with pytest.raises(ValueError, match="two programs"):
        record(keep, np.ones(3))


def test_listing() -> None:
    run = record(lambda x: [namespace.exp(x) @ x], np.ones((2, 2), np.float32))
    lines = str(run).splitlines()
    assert lines[0].startswith("2 instructions, 64 bytes")
    assert [line.split()[0] for line in lines[1:]] == ["exp", "matmul"]
