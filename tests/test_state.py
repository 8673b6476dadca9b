"""Checkpoints of a run: bit for bit what was written, or an error that says what is wrong."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hostile import files_of_at_most
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save_file

from xformer import GPT, backends, tree
from xformer.backends import Backend
from xformer.training import CheckpointError, State, checkpoint, read_state, write_state

NUMPY = backends.get("numpy")
MODEL = {"name": "GPT", "n_layers": 2, "position_mode": "add"}
ABOUT = {"model": MODEL, "data": "0f", "betas": [0.9, 0.95]}
DTYPES = ("bool", "int8", "uint8", "int16", "int32", "uint32", "int64", "float32", "float64")


class Pair(NamedTuple):
    a: Any
    b: Any


def arrays() -> st.SearchStrategy[np.ndarray]:
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
    return st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, shapes))


def trees() -> st.SearchStrategy[Any]:
    numbers = st.one_of(st.integers(), st.floats(), st.booleans())
    leaves = st.one_of(arrays(), arrays().map(tree.Frozen), numbers, st.none())
    names = st.text(st.characters(exclude_characters=".", codec="utf-8"), max_size=4)
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.builds(Pair, inner, inner),
            st.dictionaries(names, inner, max_size=3),
        ),
        max_leaves=8,
    )


def same(a: Any, b: Any) -> bool:
    """Bit for bit, types and shapes and the sign of a zero too."""
    if isinstance(a, tree.Frozen):
        return isinstance(b, tree.Frozen) and same(a.value, b.value)
    if isinstance(a, np.ndarray):
        facts = [(x.dtype, x.shape, x.tobytes()) for x in (a, b)]
        return facts[0] == facts[1]
    return type(a) is type(b) and repr(a) == repr(b)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=trees())
def test_it_comes_back_bit_for_bit(content: Any, tmp_path: Path) -> None:
    state = Pair(content, 0)
    write_state(tmp_path / "a", state, NUMPY, ABOUT)
    saved = read_state(tmp_path / "a")
    saved.require(ABOUT)
    back = saved.restored(state, NUMPY)
    before, after = tree.flatten(state), tree.flatten(back)
    assert list(before) == list(after) and type(back) is Pair
    for name, leaf in before.items():
        assert same(leaf, after[name]), name
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_it_comes_back_on_every_library(library: Backend, tmp_path: Path) -> None:
    host = {"w": np.arange(6.0).reshape(2, 3), "n": np.asarray(3), "b": np.asarray([True, False])}
    state = State(tree.map(library.asarray, host), (library.asarray([0.5]),), None, 3, 6, best=0.1)
    write_state(tmp_path / "a", state, library)
    back = read_state(tmp_path / "a").restored(state, library)
    assert back[2:] == state[2:] or math.isnan(back.first)
    for name, leaf in tree.flatten(back[:2]).items():
        old = tree.flatten(state[:2])[name]
        assert type(leaf) is type(old) and leaf.dtype == old.dtype
        assert same(np.asarray(library.to_numpy(leaf)), np.asarray(library.to_numpy(old))), name
    elsewhere = read_state(tmp_path / "a").restored(state, NUMPY)
    assert all(same(elsewhere.params[name], host[name]) for name in host)


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i2", ">u8", "?"])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)])
def test_other_byte_orders_come_back_as_native_numbers(
    dtype: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    host = np.asarray(np.arange(math.prod(shape)).reshape(shape) * 3 - 2, dtype, order="F")
    state = {"w": host, "scalar": host.dtype.type(5)}
    write_state(tmp_path / "a", state, NUMPY)
    back = read_state(tmp_path / "a").restored(state, NUMPY)
    for name, leaf in back.items():
        assert same(leaf, np.asarray(state[name], host.dtype.newbyteorder("="))), name


@pytest.mark.parametrize(
    ("leaf", "got"),
    [
        *((np.ones(2, dtype), dtype) for dtype in ("float16", "complex64", "complex128", "object")),
        (np.asfortranarray(np.ones((2, 3), ">f2")), "float16"),
        (np.asarray(["2020-01-01"], "M8[D]"), "datetime64"),
        (np.zeros(2, [("a", "f4")]), "void"),
        (np.ma.masked_array([1.0, 2.0], [False, True]), "MaskedArray"),
        ("adam", "str"),
        (1j, "complex"),
        ({1, 2}, "set"),
    ],
    ids=str,
)
def test_what_would_not_come_back_is_refused(leaf: Any, got: str, tmp_path: Path) -> None:
    wanted = "arrays of bool, integers, float32 or float64 can be"
    state = State({"w": np.ones(2)}, {"m": leaf}, None)
    with pytest.raises(TypeError, match=f"m cannot be stored: {wanted}, got {got}"):
        write_state(tmp_path / "a", state, NUMPY)
    assert list(tmp_path.iterdir()) == []


def test_bfloat16_is_refused(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    with pytest.raises(TypeError, match=r"w cannot be stored: .* got bfloat16"):
        write_state(tmp_path / "a", {"w": np.ones(2, ml_dtypes.bfloat16)}, NUMPY)


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_a_name_that_a_file_cannot_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"safetensors' own|is no Unicode text"):
        write_state(tmp_path / "a", {name: np.ones(2)}, NUMPY)
    assert list(tmp_path.iterdir()) == []
    state = {name: 2}  # a number is no tensor of the file
    write_state(tmp_path / "a", state, NUMPY)
    assert read_state(tmp_path / "a").restored(state, NUMPY) == state


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "step-00000003.safetensors"
    params = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(3)}
    write_state(path, State(params, (params, 3), None, step=3), NUMPY, ABOUT)
    return path


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_bit_that_is_wrong_is_noticed(data: st.DataObject, saved: Path) -> None:
    content = bytearray(saved.read_bytes())
    bad = saved.with_name("bad")
    i = data.draw(st.integers(0, 8 * len(content) - 1))
    content[i // 8] ^= 1 << i % 8
    bad.write_bytes(content)
    with pytest.raises(CheckpointError, match="bad "):
        read_state(bad)


def test_a_file_cut_anywhere_is_noticed(saved: Path) -> None:
    content, bad = saved.read_bytes(), saved.with_name("bad")
    for n in range(len(content)):
        bad.write_bytes(content[:n])
        with pytest.raises(CheckpointError, match="bad "):
            read_state(bad)


def test_another_file_is_refused(tmp_path: Path) -> None:
    save_file({"w": np.zeros(3)}, tmp_path / "plain")
    with pytest.raises(
        CheckpointError, match="plain is no checkpoint of a run: it lacks 'xformer'"
    ):
        read_state(tmp_path / "plain")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        read_state(tmp_path / "absent")


def test_a_file_that_may_not_be_read_is_not_damaged(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a checkpoint, and of a model. Root may read all, so the system's answer is a stand-in."""
    gpt = GPT(vocab_size=3, n_layers=1, d_model=2, n_heads=1, max_len=2)
    checkpoint.save(tmp_path / "model", gpt, gpt.init(seed=0), "numpy")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="denied"):
        read_state(saved)
    with pytest.raises(PermissionError, match="denied"):
        checkpoint.inspect(tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": MODEL | {"n_layers": 3}}, "of another run: model.n_layers is 2 there, 3"),
        ({"model": {"name": "GPT"}}, "model.n_layers is 2 there, absent here"),
        ({"data": "1e"}, 'data is "0f" there, "1e" here'),
        ({"seed": 1}, "seed is absent there, 1 here"),
        ({"betas": (0.9, 0.99)}, r"betas is \[0.9, 0.95\] there, \[0.9, 0.99\] here"),
    ],
)
def test_another_run_is_named(saved: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_state(saved).require(ABOUT | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": np.zeros((2, 4), np.float32)}, r"params.w is float32 \(2, 3\) there, .* \(2, 4\) h"),
        ({"w": np.zeros((2, 3))}, r"params.w is float32 \(2, 3\) there, float64 \(2, 3\) here"),
        ({"c": np.zeros(1)}, r"params.c is absent there, float64 \(1,\) here"),
        ({"b": None}, r"params.b is float64 \(3,\) there, absent here"),
        ({"b": 1}, r"params.b is float64 \(3,\) there, a Python int here"),
        ({"w": None, "b": None, "c": 1, "d": 2}, "; and 1 more"),
    ],
)
def test_another_architecture_is_named(saved: Path, change: dict[str, Any], message: str) -> None:
    params = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3)}
    before = saved.read_bytes()
    with pytest.raises(ValueError, match=message):
        read_state(saved).restored(State(params | change, (params, 3), None), NUMPY)
    assert saved.read_bytes() == before


def test_a_file_too_large_to_write_leaves_the_old_one(saved: Path) -> None:
    before = saved.read_bytes()
    message = r"step-00000003\.safetensors cannot be written: .*large"
    with files_of_at_most(2000), pytest.raises(OSError, match=message):
        write_state(saved, State({"w": np.zeros(1000)}, None, None), NUMPY)
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]
