"""The CUDA stand-in itself: planted mistakes are reported, right kernels are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cuda_shim
import numpy as np
import pytest
from cuda_shim import Array, Fault
from libraries import STAND_IN, only

from xformer import ops, reference_only
from xformer.backends import Backend
from xformer.backends.cupy.module import Source, launch

PLANTED = Source(str(Path(cuda_shim.__file__).with_name("planted.py")))
X = np.arange(128, dtype=np.float32)


def run(
    name: str, *args: Any, grid: Any = (1,), block: Any = (64,), shared: int = 0, times: int = 1
) -> None:
    """`name` of planted.cu, each time with other orders of blocks and threads."""
    like = next(a for a in args if isinstance(a, Array))
    for _ in range(times):
        launch(PLANTED, name, like, grid=grid, block=block, args=args, shared=shared)


@pytest.fixture
def x(library: Backend) -> Array:
    return library.asarray(X)


@pytest.fixture
def y(library: Backend) -> Array:
    return library.asarray(np.zeros(128, np.float32))


on_stand_in = only(STAND_IN)


# ---- What is right passes, whatever the order ----


@on_stand_in
def test_barriers_and_shared_memory(library: Backend, x: Array, y: Array) -> None:
    run("reverse", x, y, grid=(2,), times=5)
    wanted = np.concatenate([X[:64][::-1], X[64:][::-1]])
    assert np.array_equal(library.to_numpy(y), wanted)


@on_stand_in
def test_warps(library: Backend, x: Array, y: Array) -> None:
    run("warp_reverse", x, y, times=5)
    wanted = np.concatenate([X[:32][::-1], X[32:64][::-1]])
    assert np.array_equal(library.to_numpy(y)[:64], wanted)
    run("shuffled", x, y, block=(32,), times=5)
    row = X[:32]
    below, above = np.roll(row, 1), np.roll(row, -1)
    below[0], above[-1] = row[0], row[-1]  # the own value where there is no such lane
    wanted = row.sum() + 1000 * below + 2000 * above + 4000 * row[3] + 1
    assert np.array_equal(library.to_numpy(y)[:32], wanted)
    run("some_lanes", x, y, block=(32,), times=5)
    assert np.array_equal(library.to_numpy(y)[:8], X[[1, 0, 3, 2, 5, 4, 7, 6]])
    assert np.array_equal(library.to_numpy(y)[8:32], [*X[9:32], X[31]])


@on_stand_in
def test_atomic_additions(library: Backend, y: Array) -> None:
    run("counted", y, 50, grid=(3,), times=2)
    assert library.to_numpy(y)[0] == 300


@on_stand_in
def test_dynamic_shared_memory(library: Backend, x: Array, y: Array) -> None:
    run("dynamic", x, y, 100, shared=400)
    assert np.array_equal(library.to_numpy(y)[:100], X[:100][::-1])
    with pytest.raises(Fault, match=r"outside shared memory"):
        run("dynamic", x, y, 101, shared=400)


@on_stand_in
def test_threads_in_two_dimensions(library: Backend, x: Array, y: Array) -> None:
    """threadIdx.x is all that the kernel looks at: the rows of the block collide."""
    with pytest.raises(Fault, match=r"race in shared memory"):
        run("reverse", x, y, block=(64, 2))


# ---- What is wrong is reported ----

FAULTS = {
    "missing_barrier": r"(race in shared memory: (reads what was written|writes what was read) by"
    r"|reads shared memory that the block has not written)",
    "write_after_read": r"race in shared memory: (writes what was read|reads what was written) by",
    "same_place": r"race in shared memory: writes what was written by thread",
    "warp_without_barrier": r"race in shared memory",
    "unwritten": r"reads shared memory that the block has not written",
    "divergent": r"deadlock: .* waits at __syncthreads in planted.cu line \d+, .* has left",
    "two_barriers": r"different barriers: .* line \d+, .* line \d+",
    "lane_away": r"deadlock: .* waits (in __shfl_xor_sync|at __syncthreads)",
    "lane_left": r"__shfl_down_sync reads lane 20, which does not take part",
    "not_in_mask": r"__shfl_xor_sync: its mask lacks the calling lane",
    "shared_behind": r"out of bounds: writes 4 bytes outside shared memory",
    "atomic_and_plain": r"race in global memory",
    "counted_plainly": r"race in global memory",
    "misaligned": r"misaligned address of 8 bytes",
}


@on_stand_in
@pytest.mark.parametrize("name", FAULTS)
def test_faults(library: Backend, x: Array, y: Array, name: str) -> None:
    args = (y,) if name in ("same_place", "unwritten", "shared_behind") else (x, y)
    args = (y,) if name in ("atomic_and_plain", "counted_plainly") else args
    for _ in range(5):  # in every order
        with pytest.raises(Fault, match=f"^{name}, block .*, thread .*: {FAULTS[name]}"):
            run(name, *args)


@on_stand_in
def test_message_names_the_line(library: Backend, x: Array, y: Array) -> None:
    source = PLANTED.path.read_text(encoding="utf-8").splitlines()
    line = 1 + source.index("    y[threadIdx.x + 1] = x[threadIdx.x];")
    message = rf"behind argument 1 \(planted\.cu line {line}\)$"
    with pytest.raises(Fault, match=message):
        run("write_behind", x, y[:64])


@on_stand_in
def test_out_of_bounds(library: Backend, x: Array, y: Array) -> None:
    """The bounds are those of the views that are passed, not of the memory they lie in."""
    run("write_behind", x, y)
    with pytest.raises(Fault, match=r"thread \(63, 0, 0\): out of bounds: writes 4 bytes, 0 bytes"):
        run("write_behind", x, y[:64])
    with pytest.raises(Fault, match=r"out of bounds: reads 4 bytes, 4 bytes before argument 0"):
        run("read_before", x, y)
    run("dynamic_behind", y, shared=256)
    with pytest.raises(Fault, match=r"writes 4 bytes outside shared memory"):
        run("dynamic_behind", y, shared=252)


@on_stand_in
def test_blocks_do_not_share(library: Backend, x: Array, y: Array) -> None:
    run("blocks_collide", y)
    with pytest.raises(Fault, match=r"race in global memory: writes .* another block"):
        run("blocks_collide", y, grid=(2,))
    with pytest.raises(Fault, match=r"race in global memory: .* another block"):
        run("block_reads_another", x, y, grid=(2,))
    run("left_over", y)
    with pytest.raises(Fault, match=r"shared memory that the block has not written"):
        run("left_over", y, grid=(2,))


# ---- Launches ----


@on_stand_in
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (lambda x, y, i: (x, 1, 2.0), "takes 4 arguments, got 3"),
        (lambda x, y, i: (x, 1.0, 2.0, y), "argument 1 must be i:q, got r:f"),
        (lambda x, y, i: (x, 1, 2, y), "argument 2 must be r:f, got i:q"),
        (lambda x, y, i: (x, 1, 2.0, i), "argument 3 must be p:f, got p:q"),
        (lambda x, y, i: (1, x, 2.0, y), "argument 0 must be p:f, got i:q"),
    ],
)
def test_arguments_are_compared(
    library: Backend, x: Array, y: Array, args: Any, message: str
) -> None:
    ids = library.asarray(np.arange(128))
    run("takes", x, 3, 2.0, y)
    assert np.array_equal(library.to_numpy(y)[:64], 2 * X[:64] + 3)
    with pytest.raises(Fault, match=f"^takes: {message}$"):
        run("takes", *args(x, y, ids))


@on_stand_in
def test_lists(library: Backend, x: Array, y: Array) -> None:
    """Each array of a list may be read, and no more; what it is and how many are compared."""
    run("one_of_two", [x[:5], x[100:]], [5, 28], y, grid=(2,), times=3)
    wanted = np.zeros(128)
    wanted[:5], wanted[64:92] = X[:5], X[100:]
    assert np.array_equal(library.to_numpy(y), wanted)
    run("one_of_two", [x[:5], None], [5, 0], y, grid=(2,))
    for pair, sizes, message in (
        ([x[:5], x[100:]], [5, 29], r"reads 4 bytes, 0 bytes behind argument 0\[1\]"),
        ([x[:5], x[100:]], [6, 28], r"reads 4 bytes, 0 bytes behind argument 0\[0\]"),
        ([x[:5], None], [5, 1], r"out of bounds: reads 4 bytes, .* argument 0\[1\]"),
        ([x], [5], "argument 0 must be a list of 2 of p:f, got a list of 1"),
        (x, [5, 28], "argument 0 must be a list of 2 of p:f, got p:f"),
        ([x, library.asarray(np.arange(3))], [5, 3], r"argument 0\[1\] must be p:f, got p:q"),
        ([x, x], [5, 2.0], r"argument 1\[1\] must be i:q, got r:f"),
        ([5, x], [5, 2], r"argument 0\[0\] must be p:f, got i:q"),
    ):
        with pytest.raises(Fault, match=message):
            run("one_of_two", pair, sizes, y, grid=(2,))
    with pytest.raises(Fault, match="argument 3 must be p:f, got a list of 1"):
        run("takes", x, 3, 2.0, [y])


@on_stand_in
def test_geometry(library: Backend, x: Array, y: Array) -> None:
    run("takes", None, 3, 2.0, y, grid=(0,))  # nothing is launched
    for options, message in (
        ({"block": (1025,)}, "no device has such a block"),
        ({"block": (32, 33)}, "no device has such a block"),
        ({"grid": (1, 65536)}, "no device has such a grid"),
        ({"shared": 100 << 10}, "wants 102400 bytes of shared memory"),
    ):
        with pytest.raises(Fault, match=message):
            run("reverse", x, y, **options)
    with pytest.raises(Fault, match=r"^no kernel is called nothing$|nothing: no kernel is called"):
        run("nothing", x, y)


def test_macros_are_the_sources() -> None:
    source = Source("glu.py", WIDE=(0, 1))
    assert source.options("float64", {"WIDE": 1}) == ("-std=c++17", "-DREAL=double", "-DWIDE=1")
    for macros in ({}, {"WIDE": 2}, {"WIDE": 1, "TILE": 3}):
        with pytest.raises(ValueError, match=r"^glu\.cu is compiled with .*, got "):
            source.options("float32", macros)


# ---- Arrays ----


@on_stand_in
def test_arrays_do_not_leave_the_device_unasked(library: Backend, x: Array) -> None:
    with pytest.raises(TypeError, match="implicit conversion"):
        np.asarray(x)
    for mixed in (lambda: x + X, lambda: X + x, lambda: library.xp.stack([x, x]) @ X):
        with pytest.raises(TypeError):
            mixed()
    with pytest.raises(TypeError, match=r"must be an array of cuda_shim, got one of numpy"):
        ops.glu(x, X)
    with pytest.raises(ValueError, match="there is one device"):
        library.xp.zeros(3, device="cuda:1")
    unwritten = library.xp.empty((2, 3), dtype=library.xp.float32)
    assert np.isnan(library.to_numpy(unwritten)).all()
    assert library.xp.sum(x).shape == ()
    assert isinstance(library.xp.sum(x), Array)


@on_stand_in
def test_reference_runs_on_them(library: Backend, x: Array) -> None:
    with reference_only():
        y, cache = ops.softmax(x)
    assert isinstance(y, Array)
    assert "cupy" not in type(cache).__module__
    y, cache = ops.softmax(x)
    assert "cupy" in type(cache).__module__
