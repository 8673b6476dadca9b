"""Products in tiles: of any sizes and layouts, and nobody reads or writes beside the matrices."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import slow_but

from xformer.base.typing import Array

pytest.importorskip("numba", reason="extra numba is not installed")
from xformer.backends.numba import matmul, registers, tile, tuning, vectors

KNOWN = pytest.mark.skipif(not registers.USABLE, reason="tiles are for x86-64 with AVX2 or AVX-512")
Layout = Callable[[Array], Array]
LAYOUTS: dict[str, Layout] = {
    "rows": np.ascontiguousarray,
    "columns": np.asfortranarray,
    "rows of more": lambda a: np.hstack([a, a])[:, : a.shape[1]],
    "columns of more": lambda a: np.asfortranarray(np.vstack([a, a]))[: len(a)],
}
APART = 700  # numbers from row to row, so that a panel is not near
HIGH, WIDE, DEEP = (1, 3, 4, 5, 12, 13, 31, 47), (1, 15, 16, 31, 32, 33, 70), (1, 2, 16, 31, 40)
LARGE = (
    (3, 1100, 20),
    (14, 40, 900),
    (191, 100, 600),
    (192, 70, 513),
    (193, 300, 600),
    (250, 70, 390),  # the most numbers that go by a panel together, and more
    (255, 70, 390),
    (383, 40, 130),  # the most tiles, and more
    (385, 70, 130),
    (13, 1057, 513),
    (14, 1040, 512),
)


def drawn(n: int, m: int, k: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng((n, m, k))
    return tuple(rng.normal(size=s).astype(np.float32) for s in ((n, k), (k, m), (n, m)))  # type: ignore[return-value]


def require_product(got: Array, x: Array, w: Array, y: Array, scale: float, keep: bool) -> None:
    """Within the bound of any order of summation: K roundings of the sum of |x w|."""
    exact = scale * (x.astype(np.float64) @ w) + (y if keep else 0)
    sizes = abs(scale) * (np.abs(x).astype(np.float64) @ np.abs(w)) + np.abs(y)
    bound = (len(w) + 3) * np.finfo(np.float32).eps / 2 * sizes
    assert got.shape == exact.shape and (np.abs(got - exact) <= bound).all()
    assert (
        np.sqrt(np.mean((got - exact) ** 2))
        <= 2e-7 * len(w) ** 0.5 * np.sqrt(np.mean(exact**2)) + 1e-30
    )


@KNOWN
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("w_lies", LAYOUTS)
@pytest.mark.parametrize("x_lies", LAYOUTS)
def test_products_of_any_size(x_lies: str, w_lies: str, keep: bool) -> None:
    for n, m, k in (*itertools.product(HIGH, WIDE, DEEP), *LARGE):
        x, w, y = drawn(n, m, k)
        for out in (y.copy(), LAYOUTS["rows of more"](y)):
            beside = out.base.copy() if out.base is not None else None
            run(0.5, LAYOUTS[x_lies](x), LAYOUTS[w_lies](w), keep, out)
            require_product(out, x, w, y, 0.5, keep)
            if beside is not None:
                assert np.array_equal(out.base[:, m:], beside[:, m:])


@KNOWN
@pytest.mark.parametrize("order", ["C", "F"])
def test_panels_that_are_not_near_are_copied(order: str) -> None:
    """w by rows for many rows, x by columns for many columns."""
    x, w, y = drawn(205, 207, 513)
    far = [np.zeros((APART, APART), np.float32, order)[: len(a), : a.shape[1]] for a in (x, w)]
    for own, a in zip(far, (x, w), strict=True):
        own[:] = a
        assert tile.NEAR < 257 * APART * 4  # 513 is done in 257 and 256
        assert x.shape[0] > tile.FEW_ROWS and w.shape[1] > tile.FEW_COLUMNS
    run(1.0, *far, True, out := y.copy())
    require_product(out, x, w, y, 1.0, True)


def run(scale: float, x: Array, w: Array, keep: bool, y: Array) -> None:
    """By tiles, however small."""
    places = [number for a in (x, w) for number in (a.ctypes.data, *a.strides)]
    memory = np.full(tile.SIZE + 64, np.nan, np.float32)  # what is not written is not read
    memory[tile.SIZE :] = 7
    own = y.ctypes.data, y.strides[0], *y.shape, x.shape[1]
    whole, real = ctypes.c_int64, ctypes.c_float
    multiply = ctypes.CFUNCTYPE(None, whole, real, *(whole,) * 12)(tile.compiled())
    multiply(memory.ctypes.data, scale, *places, keep, *own)
    assert (memory[tile.SIZE :] == 7).all()


@KNOWN
def test_no_terms() -> None:
    x, w, y = (
        np.empty((5, 0), np.float32),
        np.empty((0, 40), np.float32),
        np.ones((5, 40), np.float32),
    )
    run(1.0, x, w, True, y)
    assert (y == 1).all()
    run(1.0, x, w, False, y)
    assert (y == 0).all()


@KNOWN
def test_what_is_not_finite_stays_in_its_row_and_column() -> None:
    x, w, y = drawn(30, 50, 20)
    x[7, 3], w[4, 9] = np.nan, np.inf
    run(1.0, x, w, False, y)
    wrong = ~np.isfinite(y)
    assert wrong[7].all() and wrong[:, 9].all() and wrong.sum() == 30 + 50 - 1


@KNOWN
@pytest.mark.skipif(sys.platform != "linux", reason="pages are protected by Linux's mprotect")
def test_nothing_is_read_or_written_behind_the_matrices(tmp_path: object) -> None:
    """Each ends where a page begins that nobody may touch."""
    code = """
import ctypes, itertools, mmap, sys
import numpy as np
from test_numba_tile import LAYOUTS, drawn, require_product, run

PAGE = mmap.PAGESIZE

def at_the_end(a, by_rows):
    nbytes = -(-a.nbytes // PAGE) * PAGE
    memory = mmap.mmap(-1, nbytes + PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + nbytes), PAGE, 0) == 0
    flat = np.frombuffer(memory, np.float32, a.size, nbytes - a.nbytes)
    own = flat.reshape(a.shape) if by_rows else flat.reshape(a.shape[::-1]).T
    own[:] = a
    return own

for n, m, k in itertools.product((1, 4, 11, 13, 24), (5, 16, 32, 45, 100), (3, 16, 17, 513, 400)):
    x, w, y = drawn(n, m, k)
    for x_by_rows, w_by_rows in itertools.product((True, False), repeat=2):
        out = at_the_end(y, True)
        run(1.0, at_the_end(x, x_by_rows), at_the_end(w, w_by_rows), True, out)
        require_product(out, x, w, y, 1.0, True)
print("done")
"""
    folder = os.path.dirname(__file__)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([folder, *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == "done\n", done.stderr[-2000:]


@pytest.mark.parametrize("features", slow_but(["+sse2"], ["+avx2,+fma,+sse4.2,+avx", "+sse2"]))
def test_other_vectors(features: str) -> None:
    """Half as wide; and without any that are known, BLAS's product."""
    if not registers.USABLE:
        pytest.skip("tiles are for x86-64 with AVX2 or AVX-512")
    code = """
import itertools
import numpy as np
from test_numba_tile import LARGE, LAYOUTS, drawn, matmul, registers, require_product, run, tile
known = registers.USABLE
for n, m, k in itertools.product((1, 5, 6, 7, 14, 120), (3, 16, 19, 120), (1, 9, 120)):
    x, w, y = drawn(n, m, k)
    for a, b in itertools.product(LAYOUTS.values(), repeat=2):
        out = y.copy()
        memory = np.empty(tile.SIZE, np.float32)
        by = matmul.sgemm(), tile.compiled() if known else 0, memory
        matmul.add_product(by, np.float32(0.5), a(x), b(w), True, out)
        require_product(out, x, w, y, 0.5, True)
for n, m, k in LARGE if known else ():
    x, w, y = drawn(n, m, k)
    for a, b in itertools.product(LAYOUTS.values(), repeat=2):
        for keep in (False, True):
            run(0.5, a(x), b(w), keep, out := y.copy())
            require_product(out, x, w, y, 0.5, keep)
print(known, registers.LANES)
"""
    folder = os.path.dirname(__file__)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([folder, *sys.path])}
    env |= {"NUMBA_CPU_FEATURES": features, "NUMBA_CPU_NAME": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    wanted = "True 8\n" if "avx2" in features else "False 4\n"
    assert done.stdout == wanted, done.stderr[-2000:]


@pytest.mark.slow
@KNOWN
def test_other_cores(tmp_path: Path) -> None:
    """What is copied, and how many rows are read at once, where a core is AMD's, and where not."""
    name = "graniterapids" if tuning.AMD else "znver4"
    code = f"""
import itertools, numba
import llvmlite.binding as binding
own = binding.get_host_cpu_name
binding.get_host_cpu_name = lambda: {name!r}
from xformer.backends.numba import tuning
binding.get_host_cpu_name = own  # loops are compiled for this machine
import test_numba_tile as tests
for n, m, k in tests.LARGE:
    x, w, y = tests.drawn(n, m, k)
    for a, b in itertools.product(tests.LAYOUTS.values(), repeat=2):
        tests.run(0.5, a(x), b(w), True, out := y.copy())
        tests.require_product(out, x, w, y, 0.5, True)
tests.test_vectors()
print(tuning.AMD, tests.tile.FEW_ROWS > 0)
"""
    folder = os.path.dirname(__file__)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([folder, *sys.path])}
    env |= {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == f"{not tuning.AMD} {not tuning.AMD}\n", done.stderr[-2000:]


def test_vectors() -> None:
    """Of any number of rows, of contiguous ones and of some that are parts of longer ones."""
    for n, m in itertools.product((1, 3, 7, 8, 9, 16, 30), (1, 3, 4, 5, 17, 100)):
        x, w, y = drawn(1, m, n)
        for lies in ("rows", "rows of more"):
            own = LAYOUTS[lies](w)
            out = np.full(m, np.nan, np.float32)
            vectors.vector_matrix(x[0], own.ctypes.data, own.strides[0] // 4, out)
            require_product(out[None], x, w, y, 1, False)
            out = np.full(n, np.nan, np.float32)
            vectors.matrix_vector(own.ctypes.data, own.strides[0] // 4, y[0], out)
            require_product(out[None], y, w.T, x, 1, False)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60)),
    lies=st.tuples(st.sampled_from([*LAYOUTS]), st.sampled_from([*LAYOUTS])),
    keep=st.booleans(),
)
def test_products_of_loops(sizes: tuple[int, int, int], lies: tuple[str, str], keep: bool) -> None:
    """By tiles or BLAS, as `add_product` chooses."""
    x, w, y = drawn(*sizes)
    out = y.copy()
    factors = LAYOUTS[lies[0]](x), LAYOUTS[lies[1]](w)
    memory = np.empty(tile.SIZE, np.float32)
    by = matmul.sgemm(), tile.compiled() if registers.USABLE else 0, memory
    matmul.add_product(by, np.float32(2), *factors, keep, out)
    require_product(out, x, w, y, 2, keep)
