"""Products by MKL: those of NumPy to rounding, in any layout, and only where asked for."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xformer as xf
from xformer import backends, tree
from xformer.backends.numpy import products

pytest.importorskip("numba", reason="extra mkl is not installed: it brings numba")
if why := backends.unavailable_reason("mkl"):
    pytest.skip(f"extra mkl is not installed: {why}", allow_module_level=True)
from xformer.backends.mkl import gemm

gemm.run_on_one_thread()  # as `kernels("mkl")` does
Layout = Callable[[np.ndarray], np.ndarray]
LAYOUTS: dict[str, Layout] = {
    "rows": np.ascontiguousarray,
    "columns": np.asfortranarray,
    "rows of more": lambda a: np.concatenate([a, a], axis=1)[:, : a.shape[1]],
    "columns of more": lambda a: np.asfortranarray(np.concatenate([a, a]))[: len(a)],
    "every second": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "backwards": lambda a: np.ascontiguousarray(a[::-1])[::-1],
}
BY_MKL = list(LAYOUTS)[:4]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who computed each product."""
    seen: list[str] = []

    def noted(who: str, run: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            seen.append(who)
            return run(*args, **options)

        return call

    for char, function in gemm.GEMM.items():
        monkeypatch.setitem(gemm.GEMM, char, noted("mkl", function))
    monkeypatch.setattr(gemm, "by_numpy", noted("numpy", gemm.by_numpy))
    monkeypatch.setattr(gemm, "SMALL", 0)
    return seen


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("out", LAYOUTS)
@pytest.mark.parametrize("w", LAYOUTS)
@pytest.mark.parametrize("x", LAYOUTS)
def test_products(x: str, w: str, out: str, add: bool, dtype: str, calls: list[str]) -> None:
    """Within twice the error of NumPy's, against float64 (float64 itself to its rounding)."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.normal(size=size).astype(dtype) for size in ((37, 53), (53, 29), (37, 29)))
    exact = a.astype(np.float64) @ b + (c if add else 0)
    plain, got = c.copy(), LAYOUTS[out](c.copy())
    gemm.by_numpy(a, b, plain, add=add)
    calls.clear()
    gemm.multiply(LAYOUTS[x](a), LAYOUTS[w](b), got, add=add)
    assert calls == ["mkl" if {x, w, out} <= set(BY_MKL) else "numpy"]
    tiny = 2 * np.finfo(dtype).eps * np.abs(exact).max()
    assert np.abs(got - exact).max() <= 2 * np.abs(plain - exact).max() + 2 * tiny


@pytest.mark.parametrize(("n", "i", "o"), [(1, 5, 7), (5, 1, 7), (5, 7, 1), (0, 5, 7), (5, 0, 7)])
def test_vectors_and_nothing_are_numpys(n: int, i: int, o: int, calls: list[str]) -> None:
    rng = np.random.default_rng(0)
    x, w, out = rng.normal(size=(n, i)), rng.normal(size=(i, o)), rng.normal(size=(n, o))
    wanted = out + x @ w
    gemm.multiply(x, w, out, add=True)
    assert calls == ["numpy"] and np.allclose(out, wanted, rtol=1e-13)


def test_other_types_are_numpys(calls: list[str]) -> None:
    x, w = np.ones((3, 4), np.float32), np.ones((4, 5))
    gemm.multiply(x, w, out := np.empty((3, 5)))
    gemm.multiply(np.ones((3, 4), int), np.ones((4, 5), int), whole := np.empty((3, 5), int))
    assert calls == ["numpy"] * 2 and (out == 4).all() and (whole == 4).all()
    gemm.multiply(w.T, np.ones((4, 3), np.float32), other := np.empty((5, 3)))
    assert calls == ["numpy"] * 3 and (other == 4).all()


@pytest.mark.parametrize(("n", "fits"), [(2**31 - 1, True), (2**31, False)])
def test_sizes_beyond_an_int_are_numpys(n: int, fits: bool) -> None:
    """Of arrays that take no memory: a failure must not show them, since they cannot be read."""
    apart = np.lib.stride_tricks.as_strided(np.zeros(2), (2, 2), (8 * n, 8))
    long = np.lib.stride_tricks.as_strided(np.zeros(2), (n, 2), (16, 8))
    found = [gemm.layout(a) for a in (apart, apart.T, long)]
    wanted = [(gemm.AS_IT_IS, n), (gemm.TRANSPOSED, n), (gemm.AS_IT_IS, 2)]
    assert found == (wanted if fits else [None] * 3)


def test_a_few_rows_that_are_many(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Within inference(), where several threads pay for them."""
    monkeypatch.setattr(products, "WORTH", 0)
    w = np.ones((300, 400), np.float32)
    with xf.kernels("mkl"), xf.inference():
        for n in (17, 128):
            assert (xf.ops.linear(np.ones((n, 300), np.float32), w)[0] == 300).all()
    assert calls and set(calls) == {"mkl"}


def test_small_ones_are_numpys(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "SMALL", products.SMALL)
    for size, who in ((64, "numpy"), (65, "mkl")):
        square = np.ones((size, size), np.float32)
        gemm.multiply(square, square, np.empty_like(square))
        assert calls.pop() == who


def test_nan_comes_through() -> None:
    x = np.full((80, 80), np.nan)
    gemm.multiply(x, x, out := np.zeros((80, 80)))
    assert np.isnan(out).all()


def test_a_model_learns_the_same(calls: list[str]) -> None:
    gpt = xf.GPT(vocab_size=31, n_layers=2, d_model=32, n_heads=2, max_len=16)
    params = gpt.init(0, dtype="float64")
    ids = np.random.default_rng(0).integers(0, 31, (4, 17))

    def grads() -> dict[str, Any]:
        _, cache = gpt.loss(params, ids[:, :-1], ids[:, 1:])
        return tree.flatten(cache.backward())

    wanted = grads()
    assert not calls  # nobody has asked
    backends.get("mkl")
    assert grads().keys() == wanted.keys() and not calls
    with xf.kernels("mkl"):
        found = grads()
    assert calls.count("mkl") > 20
    for name, grad in wanted.items():
        np.testing.assert_allclose(found[name], grad, rtol=1e-9, atol=1e-12, err_msg=name)


def test_the_backend_is_numpys_by_another_name() -> None:
    mkl = backends.get("mkl")
    assert (mkl.name, mkl.version) == ("mkl", importlib.metadata.version("mkl"))
    assert type(mkl.asarray([1.0])) is np.ndarray and mkl.dtypes == ("float32", "float64")


def test_without_the_package_it_says_what_to_install() -> None:
    code = """
import importlib.metadata
def files(name): raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.files = files
import xformer
print(xformer.backends.unavailable_reason("mkl"))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "the package mkl is not installed" in said.stdout
    assert "pip install 'xformer-array[mkl]'" in said.stdout


def said_by(code: str) -> str:
    """What a process of its own prints."""
    lines = f"import ctypes, importlib.metadata, xformer\n{code}"
    run = [sys.executable, "-W", "error", "-c", lines]
    env = os.environ | {"OPENBLAS_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    return subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ("None", "lists no mkl_rt among its files"),
        ("[]", "lists no mkl_rt among its files"),
        ("[Missing()]", "MKL cannot be loaded: nowhere/mkl_rt.so"),
    ],
)
def test_where_it_cannot_be_loaded_it_says_why(listed: str, message: str) -> None:
    said = said_by(f"""
class Missing:
    name = "mkl_rt.so"
    def locate(self): return "nowhere/mkl_rt.so"
importlib.metadata.files = lambda name: {listed}
print(xformer.backends.unavailable_reason("mkl"), "mkl" in xformer.backends.available())
""")
    assert said.startswith("backend mkl cannot be used: ") and message in said
    assert "pip install 'xformer-array[mkl]' False" in said


LIBRARY = """
found = next(path for path in importlib.metadata.files("mkl") if "mkl_rt" in path.name)
library = ctypes.CDLL(str(found.locate()))
"""


def test_mkl_with_threads_of_its_own_is_refused() -> None:
    """Of which each of ours would start more."""
    said = said_by(f"""
{LIBRARY}
library.MKL_Set_Threading_Layer(0)
library.MKL_Get_Max_Threads()
from xformer.backends.numpy import products
try:
    with xformer.kernels("mkl"):
        pass
except xformer.backends.Unusable as error:
    print(error, products.chosen_product() is products.by_numpy)
""")
    assert "MKL already uses several threads" in said and said.endswith("True\n")


USED = "get('mkl').active().__enter__()"


@pytest.mark.parametrize(
    ("ask", "n"),
    [pytest.param("available()", 2, marks=pytest.mark.slow), ("get('mkl')", 2), (USED, 1)],
)
def test_who_only_asks_keeps_its_threads(ask: str, n: int) -> None:
    said = said_by(f"""
xformer.backends.{ask}
{LIBRARY}
library.MKL_Set_Num_Threads(2)
print(library.MKL_Get_Max_Threads())
""")
    assert said == f"{n}\n"


def test_it_is_not_taken_for_numpys() -> None:
    """Where NumPy's own is not in NumPy's folder, all that there are count."""
    said = said_by("""
from xformer.backends.numpy import threads
class Elsewhere:
    __file__ = "/elsewhere/numpy/__init__.py"
threads.np = Elsewhere
xformer.backends.get("mkl")
print(threads.n_threads())
""")
    assert said == "2\n"
