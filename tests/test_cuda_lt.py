"""Products by cuBLASLt: layouts, sums and biases, plans, streams, workspaces.

Linear maps made of them are in test_cuda_linear.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import cuda_shim
import numpy as np
import pytest
from cuda_shim import CublasLt, Fault
from cuda_shim.cublaslt_parts import COMPUTE_32F, COMPUTE_32F_FAST_TF32
from devices import bits, is_stand_in, placed
from libraries import ON_DEVICE, only
from nvidia import calling_cublaslt, require_algorithm
from stored import DTYPES, normal, on

from xformer import ops
from xformer.backends import Backend
from xformer.backends.cupy import cublaslt, lt_plan
from xformer.backends.cupy.cublaslt import multiply

pytestmark = only(*ON_DEVICE)

KINDS = [("float32", "float32")]
KINDS += [(stored, out) for stored in DTYPES for out in (stored, "float32")]


@pytest.fixture
def lt(library: Backend) -> Iterator[Any]:
    with calling_cublaslt(library) as found:
        yield found


@pytest.fixture
def fake(stand_in: Backend, lt: CublasLt) -> CublasLt:
    """The stand-in's cuBLASLt, for what it alone shows."""
    return lt


def laid_out(library: Backend, values: Any, dtype: Any, how: str) -> tuple[Any, Any]:
    """By rows or by columns, and with gaps of NaN between them; and all of that memory."""
    values = values.astype(dtype)
    turned = values.T if "columns" in how else values
    gap = (2, 1) if "gaps" in how else (0, 0)
    wide = np.full((turned.shape[0], turned.shape[1] + sum(gap)), np.nan, dtype)
    wide[:, gap[0] : wide.shape[1] - gap[1]] = turned
    held = placed(library, wide)
    part = held[:, gap[0] : wide.shape[1] - gap[1]]
    return part.T if "columns" in how else part, held


LAYOUTS = ("rows", "rows with gaps", "columns", "columns with gaps")


# ---- One product ----


@pytest.mark.parametrize(("stored", "out"), KINDS)
@pytest.mark.parametrize("sizes", [(3, 5, 7), (1, 8, 1), (1, 1, 1), (16, 1, 9), (7, 33, 16)])
def test_products(
    library: Backend, lt: Any, sizes: tuple[int, int, int], stored: str, out: str
) -> None:
    """Every layout of both factors and of the result; added, with a bias and with sums."""
    m, k, n = sizes
    kind, kind_out = (DTYPES.get(name, np.dtype(name)) for name in (stored, out))
    values = normal(1, m, k).astype(kind), normal(2, k, n).astype(kind)
    before, bias = normal(3, m, n).astype(kind_out), normal(4, n).astype(kind_out)
    wanted = values[0].astype("f8") @ values[1].astype("f8")
    sums_wanted = values[1].astype("f8").sum(axis=0)
    share = 2.0**-7 if out == "bfloat16" else 2.0**-10 if out == "float16" else 1e-5
    for how in itertools.product(LAYOUTS, repeat=3):
        a, b = (laid_out(library, x, kind, one)[0] for x, one in zip(values, how, strict=False))
        for add, extra in itertools.product((False, True), ("nothing", "bias", "sums")):
            if extra == "bias" and "columns" in how[2]:
                continue
            start = before if add else np.full((m, n), np.nan)
            y, held = laid_out(library, start, kind_out, how[2])
            given = {"bias": placed(library, bias.copy())} if extra == "bias" else {}
            if extra == "sums":
                given = {"sums": placed(library, np.full(n, np.nan, kind_out))}
            multiply(a, b, y, add=add, **given)
            exact = wanted + (before.astype("f8") if add else 0)
            exact = exact + (bias.astype("f8") if extra == "bias" else 0)
            got = library.to_numpy(y).astype("f8")
            assert np.allclose(got, exact, rtol=share, atol=4 * share)
            if extra == "sums":
                got = library.to_numpy(given["sums"]).astype("f8")
                assert np.allclose(got, sums_wanted, rtol=share, atol=4 * share)
            gaps = 3 * held.shape[0] if "gaps" in how[2] else 0
            assert np.isnan(library.to_numpy(held).astype("f8")).sum() == gaps
    require_algorithm(lt)


def test_what_cannot_be_read_where_it_lies(library: Backend, lt: Any) -> None:
    """Every second column, and rows that are one row."""
    for host in (
        normal(1, 4, 6)[:, ::2],
        np.broadcast_to(normal(1, 3), (4, 3)),
        normal(1, 4, 3)[::-1],
    ):
        x = placed(library, host)
        assert lt_plan.layout(x) is None
        assert np.array_equal(library.to_numpy(cublaslt.readable(x)), host)
        with pytest.raises(ValueError, match="cuBLASLt needs contiguous rows or columns, got"):
            lt_plan.matrix(x)
    for how in LAYOUTS:
        x, _ = laid_out(library, normal(1, 4, 3), "f4", how)
        assert cublaslt.readable(x) is x


def test_how_matrices_lie_is_worked_out_once(lt: CublasLt) -> None:
    """A step asks a thousand times. Whatever the description depends on makes it another."""
    held = np.zeros(64, "f4")
    x = cuda_shim.Array(held[:12].reshape(3, 4))
    assert lt_plan.matrix(x) is lt_plan.matrix(cuda_shim.Array(held[:12].reshape(3, 4)))
    assert lt_plan.layout(x) is lt_plan.layout(x)
    others = held[:12].reshape(3, 4).astype("f2"), held[1:13].reshape(3, 4), held[:12].reshape(4, 3)
    for other in (*others, held[:12].reshape(3, 4).T, held[:24].reshape(3, 8)[:, :4]):
        assert lt_plan.matrix(cuda_shim.Array(other)) != lt_plan.matrix(x)


# ---- Plans, streams, workspaces ----


def linear(library: Backend, rows: int = 3, *, bias: bool = True) -> None:
    x, w, b = (library.asarray(np.ones(s, np.float32)) for s in ((rows, 4), (4, 5), (5,)))
    y, cache = ops.linear(x, w, b if bias else None)
    cache.backward(y)


def test_plans_are_kept(library: Backend, fake: CublasLt, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kind; where there would be too many, all go, with what the library holds of them."""
    for module in (cublaslt, lt_plan):  # whatever memory the host gives
        monkeypatch.setattr(module, "aligned", lambda at: 4 if at else 0)
    linear(library, bias=False)
    first = len(fake.algorithms)
    linear(library, bias=False)
    assert len(fake.algorithms) == first == 3
    linear(library, 2, bias=False)
    assert len(fake.algorithms) == 6
    monkeypatch.setattr(cublaslt, "KEPT", 6)
    alive = len(fake.alive)
    for rows in (4, 5, 6, 7):
        linear(library, rows, bias=False)
    assert len(fake.alive) <= alive


def test_workspaces_go_back(library: Backend, fake: CublasLt) -> None:
    """A workspace is of the stream of its product, as large as its algorithm needs, and kept by
    nothing: the pool may give it to what comes later on that stream."""
    for fake.device, fake.stream in ((0, 7), (0, 8), (0, 7), (1, 7), (1, 9)):
        linear(library, 40)
    assert fake.lent == 5 * 1 and not fake.held  # of the products that sum over 40 rows
    assert {p.stream for p in fake.products} == {7, 8, 9}
    assert sum(isinstance(made, tuple) and made[0] == "handle" for made in fake.alive.values()) == 2


def test_alignment_is_told(library: Backend, lt: Any) -> None:
    """A product of the same shapes at other addresses has another plan, or the fake complains."""
    for shift in range(1, 9):
        held = normal(1, 200).astype("f4")
        hosts = [
            held[start : start + 16].reshape(4, 4) for start in (shift, 40 + 2 * shift, 90 + shift)
        ]
        hosts.append(held[150 + shift : 154 + shift])
        wanted = hosts[0] @ hosts[1] + hosts[3]
        a, b, y, bias = (placed(library, x) for x in hosts)
        multiply(a, b, y, bias=bias)
        assert np.allclose(library.to_numpy(y), wanted, rtol=1e-5, atol=1e-5)
    require_algorithm(lt)


def test_float32_is_rounded_where_asked_for(library: Backend, fake: CublasLt) -> None:
    a, y = cuda_shim.Array(normal(1, 4, 4).astype("f4")), cuda_shim.Array(np.empty((4, 4), "f4"))
    for fake.tf32 in (False, True, False):
        multiply(a, a, y)
    both = COMPUTE_32F, COMPUTE_32F_FAST_TF32
    assert [p.compute for p in fake.products] == [*both, COMPUTE_32F]
    fake.tf32 = True
    x = on(library, normal(1, 4, 4), np.float16)
    ops.linear(x, x)
    assert fake.products[-1].compute == COMPUTE_32F


@pytest.mark.parametrize("precision", ["float32", *DTYPES])
def test_the_same_bits(library: Backend, lt: Any, precision: str) -> None:
    """No parts of a sum are added up in the order in which they come, nor in two bytes."""
    dtype = DTYPES.get(precision, np.dtype("f4"))
    x, w, b = (on(library, normal(i, *s), dtype) for i, s in enumerate(((40, 64), (64, 16), (16,))))

    def step() -> list[bytes]:
        y, cache = ops.linear(x, w, b)
        return [bits(library, a) for a in (y, *cache.backward(y))]

    first = step()
    assert all(step() == first for _ in range(3))
    if is_stand_in(library):
        assert {p.scheme for p in lt.products} == {2}


# ---- The stand-in of cuBLASLt ----


@pytest.mark.parametrize(
    ("where", "change", "said"),
    [
        ("step", lambda x: x._replace(step=x.step + 1), "ends outside its array|differ"),
        ("transposition", lambda x: x._replace(as_it_is=not x.as_it_is), "do not fit|differ"),
        ("alignment", lambda x: x._replace(alignment=256), "aligned|differ"),
        ("type", lambda x: x._replace(type=14), "no such types|not bfloat16"),
    ],
)
def test_planted_mistakes(
    fake: CublasLt, where: str, change: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the description of the first matrix that is described."""
    right = lt_plan.matrix

    def wrong(x: Any) -> Any:
        described = right(x)
        return change(described) if x.shape == (4, 3) else described

    monkeypatch.setattr(cublaslt, "matrix", wrong)
    held = normal(1, 4, 7).astype("f4")[:, 1:4]
    a, b, y = (cuda_shim.Array(x) for x in (np.ones((5, 4), "f4"), held, np.empty((5, 3), "f4")))
    with pytest.raises((Fault, AssertionError), match=said):
        multiply(a, b, y)
        assert np.allclose(y.host, a.host @ b.host), "results differ"
