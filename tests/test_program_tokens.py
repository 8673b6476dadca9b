"""Programs of tokens: no instruction runs as Python, columns are written in place, in rounds."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from array_api_compat import array_namespace

pytest.importorskip("numba", reason="needs extra numba")

from causal_models import NAMES, UNPADDED, V, causal
from programs import THREADS, judged, names, record

from xformer import tree
from xformer.backends.numba.program import namespace
from xformer.backends.numba.program.compiled import Compiled
from xformer.backends.numba.program.run import Recorded, layout_of
from xformer.backends.numba.program.traced import constant
from xformer.layers.kv_cache import KVCache, append
from xformer.layers.rope_config import RopeConfig
from xformer.layers.rope_tables import cos_sin
from xformer.ops.greedy import greedy

INTEGERS = np.array([[-5, 0, 7, 2**40], [3, 3, -(2**62), 1]])
REALS = np.array([[np.nan, -np.inf, 0.0, 1.5], [np.inf, -0.0, 2.0, 3.0]])
WRITTEN = [name for name in NAMES if name != "shaw"]  # which is not compiled
PADDED = {*WRITTEN} - {*UNPADDED}
# Ids of a row's first experts, the bias of one query, the vector of a position beside a token's.
COPIED = (
    *("mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "qwen3_5_text"),
    *("relative bias", "concatenated positions"),
)
BOOLS = np.array([[True, False, True, True], [False, False, True, False]])


def state_of(name: str, texts: int, masked: bool) -> tuple[Any, Any, Any, np.ndarray]:
    model, params = causal(name)
    params = tree.map(lambda p: p.astype(np.float32), params)
    ids = np.random.default_rng(0).integers(0, V, (texts, 4))
    mask = np.ones((texts, 4), np.bool_)
    mask[0, 0] = not masked
    _, state = model.decode(params, ids, model.init_state(), mask=mask if masked else None)
    return model, params, state.preallocate(10), ids[:, :1]


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize("is_greedy", [True, False])
def test_nothing_runs_as_python(name: str, texts: int, is_greedy: bool) -> None:
    """Of padded texts, too; and each kernel gives what NumPy gives."""
    model, params, state, ids = state_of(name, texts, masked=texts > 1 and name in PADDED)

    def token(params: Any, state: Any, ids: Any) -> Any:
        logits, state = model.decode(params, ids, state)
        return state, logits, greedy(logits) if is_greedy else None

    own = tree.map(lambda a: np.array(a) if hasattr(a, "dtype") else a, state)
    compiled = Compiled(token, (1,))
    wanted = token(params, state, ids)
    found = compiled(params, own, ids)
    assert "; 0 run as Python" in compiled.explain(), compiled.explain()
    for got, right in zip(*(tree.flatten(x).values() for x in (found, wanted)), strict=True):
        largest = float(np.abs(right).max(initial=1))
        np.testing.assert_allclose(got, right, rtol=0, atol=2e-5 * largest)
    assert found[0].kv_cache[0].k is own.kv_cache[0].k
    (recorded, _), *_ = compiled.programs.values()
    assert name in COPIED or "copy" not in names(recorded)


def test_rounds_are_calls() -> None:
    """Each is given what the last one has made, where it lies; and else by calls."""

    def step(rate: Any, state: Any, other: Any) -> Any:
        x, n = state
        return (x * 2 + other, n + 1), array_namespace(x).sum(x)

    def apart(rate: Any, state: Any, other: Any) -> Any:
        return list(step(rate, state, other)[0]), 0.0

    for fn, calls in ((step, 1), (apart, 6)):
        compiled = Compiled(fn, (1,))
        with patch.object(compiled, "_read", wraps=compiled._read) as read:
            (x, n), _ = compiled.repeated(5, 1.0, (np.arange(6.0), np.array(3)), np.ones(6))
        np.testing.assert_array_equal(x, 32 * np.arange(6.0) + 31)
        assert n == 8 and read.call_count == calls


def test_a_check_that_fails_in_a_round() -> None:
    """Says what it has seen; nothing that waited for it is written."""
    from xformer import ops

    def step(ids: Any, table: Any, total: Any) -> Any:
        rows, _ = ops.embedding(table, ids=ids + 1)
        return ids + 1, total + namespace.sum(rows)

    table = np.ones((5, 2), np.float32)
    compiled = Compiled(step, (0,))
    total = np.zeros((), np.float32)
    with pytest.raises(ValueError, match=r"ids must lie in \[0, 5\), got ids from 1 to 5"):
        compiled.repeated(7, np.zeros((1, 1), np.int64), table, total)
    (found, _) = compiled.repeated(3, np.zeros((1, 1), np.int64), table, total)
    assert found.tolist() == [[3]]


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("new", [1, 4])
def test_append(threads: int, new: int) -> None:
    """In the place of what is donated; a column that is not there is not written."""
    rng = np.random.default_rng(0)
    k, v = (rng.normal(size=(3, 5, new, n)).astype(np.float32) for n in (7, 4))
    old = [rng.normal(size=(3, 5, 11, n)).astype(np.float32) for n in (7, 4)]

    def fn(k: Any, v: Any, old_k: Any, old_v: Any, at: Any) -> Any:
        kv_cache = append(k, v, kv_cache=KVCache(old_k, old_v, write_index=at))
        return [kv_cache.k, kv_cache.v]

    arrays = k, v, *old, np.array(6)
    run = judged(fn, arrays, threads)
    assert names(run) == ["append"]
    over = Recorded(fn, [layout_of(x) for x in arrays], threads, donated=(2, 3))
    own = [np.array(x) for x in old]
    wanted = run(*arrays)
    for got, right, mine in zip(over(k, v, *own, np.array(6)), wanted, own, strict=True):
        assert got is mine
        np.testing.assert_array_equal(got, right)
    for column in (-new, 11, -(2**63), 2**63 - 1):
        for got, before in zip(run(*arrays[:-1], np.array(column)), old, strict=True):
            np.testing.assert_array_equal(got, before)
    if new > 1:
        for column in (-2, 9):
            own = slice(max(column, 0), column + new)
            part = slice(max(-column, 0), 11 - column)
            found = run(*arrays[:-1], np.array(column))
            for got, before, one in zip(found, old, (k, v), strict=True):
                before[:, :, own] = one[:, :, part]
                np.testing.assert_array_equal(got, before)


@pytest.mark.parametrize("threads", THREADS)
def test_likeliest(threads: int) -> None:
    """The first of the largest; -1 of what is no number, or infinite."""
    logits = np.random.default_rng(0).normal(size=(7, 301)).astype(np.float32)
    logits[1, [40, 200]] = 9.0
    logits[2, 3], logits[3, 300], logits[4] = np.nan, np.inf, -np.inf
    logits[5, 0] = -np.inf
    run = record(lambda x: [greedy(x)], [logits], threads)
    assert names(run) == ["greedy"]
    got = run(logits)[0]
    np.testing.assert_array_equal(got, greedy(logits))
    assert got[1] == 40 and (got[2:5] == -1).all()


@pytest.mark.parametrize("shape", [(1,), (37,), (3, 29)])
def test_turns(shape: tuple[int, ...]) -> None:
    config = RopeConfig(16, theta=500.0)
    positions = np.random.default_rng(0).integers(0, 9000, shape)

    def fn(positions: Any) -> Any:
        return cos_sin(positions, config=config, length=1, dtype=np.float32)

    run = record(fn, [positions], 3)
    assert names(run) == ["cos_sin"]
    for got, wanted in zip(run(positions), fn(positions), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-7)


UNARY = ["negative", "abs", "isfinite", "bitwise_invert", "logical_not"]
ARITHMETIC = ["add", "subtract", "multiply", "maximum", "minimum"]
BITS = ["bitwise_and", "bitwise_or", "bitwise_xor"]
COMPARED = ["less", "less_equal", "greater", "greater_equal", "equal", "not_equal"]
PAIRS = [
    (INTEGERS, INTEGERS[::-1].copy()),
    (INTEGERS.astype(np.int32), INTEGERS[:1]),
    (INTEGERS, 3),
]


@pytest.mark.parametrize("name", [*ARITHMETIC, *BITS, *COMPARED])
def test_whole_numbers(name: str) -> None:
    for x, z in PAIRS:
        same(name, x, z, native=np.result_type(x, z) == x.dtype or name not in BITS)


@pytest.mark.parametrize("name", [*BITS, "logical_and", "logical_or", "logical_xor", "equal"])
def test_booleans(name: str) -> None:
    same(name, BOOLS, ~BOOLS[:, ::-1])
    same(name, BOOLS[:1], BOOLS.T.copy().T)


@pytest.mark.parametrize("name", COMPARED)
def test_real_numbers_are_compared(name: str) -> None:
    same(name, REALS, REALS[:, ::-1].copy())
    same(name, REALS.astype(np.float32), REALS.astype(np.float32)[:1])
    same(name, REALS.astype(np.float32), 1.5)


def test_one_operand() -> None:
    for x in (REALS, REALS.astype(np.float32)):
        same("isfinite", x)
    same("negative", INTEGERS)
    same("bitwise_invert", INTEGERS)
    same("bitwise_invert", BOOLS)
    same("logical_not", BOOLS)
    same("cos", REALS[1:, 1:])
    same("sin", REALS[1:, 1:])


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float32, np.float64, np.uint8])
def test_conversions(dtype: Any) -> None:
    """And those from real numbers to whole ones run on NumPy."""
    for x in (INTEGERS[:, :3] % 100, BOOLS, REALS[1:, 1:], REALS[1:, 1:].astype(np.float32)):
        run = record(lambda x: [namespace.astype(x, dtype)], [x])
        np.testing.assert_array_equal(run(x)[0], x.astype(dtype))
        if x.dtype.kind in "ib" or np.dtype(dtype).kind == "f":
            assert not names(run, native=False)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.bool_])
def test_where(dtype: Any) -> None:
    """Over what it chooses from, too."""
    a, b = np.array([1, 0, 1, 1], dtype), np.array([[0, 1, 0, 0], [1, 1, 0, 1]], dtype)
    wanted = np.where(BOOLS, a, b)
    run = record(lambda *given: [namespace.where(*given)], [BOOLS, a, b])
    assert names(run) == ["where"]
    np.testing.assert_array_equal(run(BOOLS, a, b)[0], wanted)
    for which in (1, 2):
        arrays = [BOOLS, np.broadcast_to(a, b.shape).copy(), b.copy()]
        layouts = [layout_of(x) for x in arrays]
        over = Recorded(lambda *given: [namespace.where(*given)], layouts, 2, donated=(which,))
        (got,) = over(*arrays)
        assert got is arrays[which]
        np.testing.assert_array_equal(got, wanted)


def test_sums_of_whole_numbers() -> None:
    x = np.random.default_rng(0).integers(-9, 9, (5, 3, 700))
    fns = (
        lambda x: [namespace.sum(x, axis=2, keepdims=True, dtype=np.int64)],
        lambda x: [namespace.max(x, axis=(1, 2))],
        lambda x: [namespace.min(x)],
    )
    wanted = x.sum(2, keepdims=True), x.max((1, 2)), x.min()
    for fn, right in zip(fns, wanted, strict=True):
        run = record(fn, [x], 3)
        assert not names(run, native=False)
        np.testing.assert_array_equal(run(x)[0], right)


def same(name: str, *arrays: Any, native: bool = True) -> None:
    """The instruction gives what NumPy gives, by a kernel."""
    given = [x for x in arrays if isinstance(x, np.ndarray)]
    fn = getattr(namespace, name)
    run = record(lambda *xs: [fn(*xs, *arrays[len(xs) :])], given)
    assert native == (not names(run, native=False)), names(run, native=False)
    with np.errstate(all="ignore"):
        wanted = getattr(namespace.xp, name)(*arrays)
    got = run(*given)[0]
    assert got.dtype == wanted.dtype
    np.testing.assert_allclose(got, wanted, rtol=1e-15, atol=0)


def test_constants_that_move() -> None:
    """Their address is that of the run, their layout that of the recording."""
    own, x = np.arange(4.0), np.ones(4)
    run = record(lambda x: [x + constant(own)], [x])
    np.testing.assert_array_equal(run(x)[0], own + 1)
    own.resize((1 << 20,), refcheck=False)
    with pytest.raises(ValueError, match="another layout"):
        run(x)
    own.resize((4,), refcheck=False)
    own[:] = 7
    np.testing.assert_array_equal(run(x)[0], np.full(4, 8.0))
