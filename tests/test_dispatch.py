"""Which implementation of an op runs, and when the backend of a library is imported."""

from __future__ import annotations

import functools
import importlib
import json
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import array_api_strict
import numpy as np
import pytest
from hanging import SECONDS
from libraries import parameters

import xformer
from xformer import backends, dispatch, ops
from xformer.backends import Backend
from xformer.dispatch.shapes import shapes

X = np.ones((2, 3))


class Cache(NamedTuple):
    x: Any

    def backward(self, dy: Any) -> Any:
        return dy


@pytest.fixture
def op() -> Iterator[dispatch.Overridable]:
    """A new op, which leaves the registry again."""

    @xformer.overridable
    @shapes("x (N, D)  y (D)")
    def probe(x: Any, y: Any = None, *, mode: str = "a") -> tuple[Any, Cache]:
        """Says who ran."""
        return f"reference {mode}", Cache(x)

    yield probe
    dispatch.op._ops.remove(probe)


def test_reference_runs_without_kernels(op: Any) -> None:
    y, cache = op(X, mode="b")
    assert y == "reference b"
    assert cache.x is X
    assert op.__doc__ == "Says who ran."
    assert repr(op) == "<op probe, kernels: none>"
    assert op in dispatch.ops()


def test_kernel_runs_for_arrays_of_its_library_only(op: Any) -> None:
    @xformer.kernel(op, "numpy")
    def fast(x: Any, y: Any = None, *, mode: str = "a") -> tuple[Any, Cache]:
        return f"kernel {mode}", Cache(x)

    assert op(X, mode="b")[0] == "kernel b"
    assert op(x=X)[0] == "kernel a"  # also where the first array is given by name
    assert op(array_api_strict.asarray(X))[0] == "reference a"
    assert repr(op) == "<op probe, kernels: numpy>"
    assert op.reference(X)[0] == "reference a"


def test_kernels_are_asked_in_order_the_last_registered_first(op: Any) -> None:
    asked = []

    def kernel(name: str, why_not: str | None) -> None:
        def unsupported(x: Any, y: Any = None, *, mode: str = "a") -> str | None:
            asked.append((name, mode))
            return why_not

        @xformer.kernel(op, "numpy", unsupported=unsupported)
        def run(x: Any, y: Any = None, *, mode: str = "a") -> tuple[str, Cache]:
            return name, Cache(x)

    kernel("first", None)
    kernel("second", None)
    kernel("third", "too tall")
    assert op(X, mode="b")[0] == "second"
    assert asked == [("third", "b"), ("second", "b")]


def test_kernel_without_unsupported_takes_everything(op: Any) -> None:
    @xformer.kernel(op, "numpy", unsupported=lambda x, y=None, mode="a": "never")
    def older(x: Any) -> tuple[str, Cache]:
        raise AssertionError("it said that it cannot")

    assert op(X)[0] == "reference a"

    @xformer.kernel(op, "numpy")
    def newer(x: Any) -> tuple[str, Cache]:
        return "newer", Cache(x)

    assert op(X)[0] == "newer"


def test_bad_shapes_get_the_error_of_the_op_whatever_a_kernel_says(op: Any) -> None:
    def never_asked(x: Any, y: Any = None, mode: str = "a") -> str | None:
        raise AssertionError("arguments are checked first")

    @xformer.kernel(op, "numpy", unsupported=never_asked)
    def fast(x: Any, y: Any = None) -> tuple[str, Cache]:
        return "kernel", Cache(x)

    with pytest.raises(ValueError, match=r"^probe: y must be \(D,\) with D = 3 \(from x\), got"):
        op(X, np.ones(4))
    with pytest.raises(TypeError, match=r"^probe: x must be an array, got list$"):
        op([[1.0]])


def test_reference_only(op: Any) -> None:
    @xformer.kernel(op, "numpy")
    def fast(x: Any) -> tuple[str, Cache]:
        return "kernel", Cache(x)

    with xformer.reference_only():
        assert op(X)[0] == "reference a"
        with xformer.reference_only():
            pass
        assert op(X)[0] == "reference a"
        assert "fast: not run, reference_only() is active" in xformer.explain(op, X)
    assert op(X)[0] == "kernel"
    with pytest.raises(ZeroDivisionError), xformer.reference_only():
        raise ZeroDivisionError
    assert op(X)[0] == "kernel"


def test_reference_only_of_some_ops(op: Any) -> None:
    """Inside and outside of others, which add to it."""

    @xformer.kernel(op, "numpy")
    def fast(x: Any) -> tuple[str, Cache]:
        return "kernel", Cache(x)

    with xformer.reference_only(xformer.ops.scale):
        assert op(X)[0] == "kernel"
        with xformer.reference_only(op):
            assert op(X)[0] == "reference a"
            assert "fast: not run, reference_only() is active" in xformer.explain(op, X)
            with xformer.reference_only(xformer.ops.gelu):
                assert op(X)[0] == "reference a"
        assert op(X)[0] == "kernel"
    with xformer.reference_only(), xformer.reference_only(xformer.ops.scale):
        assert op(X)[0] == "reference a"
    assert op(X)[0] == "kernel"


def test_reference_only_of_a_name() -> None:
    wrong: Any = "linear"
    with (
        pytest.raises(TypeError, match=r"reference_only: ops must be ops, .*, got 'linear'"),
        xformer.reference_only(wrong),
    ):
        pass


def test_explain(op: Any) -> None:
    assert xformer.explain(op, X).splitlines() == [
        "probe on numpy: the reference",
        "- no kernel is registered for numpy",
    ]

    @xformer.kernel(op, "numpy")
    def third(x: Any, y: Any = None) -> tuple[str, Cache]:
        return "third", Cache(x)

    @xformer.kernel(op, "numpy")
    def second(x: Any, y: Any = None) -> tuple[str, Cache]:
        return "second", Cache(x)

    @xformer.kernel(op, "numpy", unsupported=lambda x, y=None: "x is not square")
    def first(x: Any, y: Any = None) -> tuple[str, Cache]:
        return "first", Cache(x)

    here = __name__
    for text in (xformer.explain(op, X), xformer.explain(op, x=X)):
        assert text.splitlines() == [
            f"probe on numpy: {here}.second",
            f"- {here}.first: x is not square",
            f"- {here}.third: not asked, {here}.second comes first",
        ]
    assert op(X)[0] == "second"  # explain tells what happens
    assert "on array_api_strict: the reference" in xformer.explain(op, array_api_strict.asarray(X))


def test_every_op_says_who_runs(library: Backend) -> None:
    x = library.asarray(np.ones((2, 3)), "float32")
    text = xformer.explain(ops.erf, x)
    kernels = ops.erf.import_kernels(dispatch.library_of(type(x)))
    assert ("the reference" in text) == (not kernels), text


def test_an_empty_list_says_nothing_of_later_ones() -> None:
    op = dispatch.Overridable(lambda leaves: "reference", backward=False)
    xformer.kernel(op, "numpy")(lambda leaves: "kernel")
    assert [op(leaves) for leaves in ([X], [], [X])] == ["kernel", "reference", "kernel"]


def test_ops_and_caches_are_pickled(library: Backend) -> None:
    for op in dispatch.ops():
        if not op.__name__.startswith("probe"):
            assert pickle.loads(pickle.dumps(op)) is op
    x, w = (library.asarray(np.ones(shape), "float32") for shape in ((2, 3), (3, 4)))
    y, cache = ops.linear(x, w)
    copy = pickle.loads(pickle.dumps(cache))
    assert type(copy) is type(cache)
    for a, b in zip(cache.backward(y)[:2], copy.backward(y)[:2], strict=True):
        assert np.array_equal(library.to_numpy(a), library.to_numpy(b))


def test_kernel_has_the_signature_of_its_op() -> None:
    importlib.import_module("xformer.models")  # for its ops
    for op in dispatch.ops():
        wanted = parameters(op)
        for name in backends.available():
            op.import_kernels(name)
        for kernel in (k for kernels in op.kernels.values() for k in kernels):
            if kernel.run.__module__ != __name__:
                assert parameters(kernel.run) == wanted, kernel.run
                # numba's takes the arguments of every op.
                if kernel.unsupported is not None and kernel.library != "numba":
                    assert parameters(kernel.unsupported) == wanted, kernel.unsupported


# ---- Which library, and when its backend is imported ----


class Unknown:
    """An array of a library that has no backend: NumPy behind another name."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.dtype, self.shape, self.ndim = values.dtype, values.shape, values.ndim

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return types.SimpleNamespace(
            __name__="unknown",
            tanh=lambda x: Unknown(np.tanh(x.values)),
        )


def test_unknown_library_runs_the_reference() -> None:
    y, _ = ops.tanh(Unknown(X))
    assert isinstance(y, Unknown)
    assert np.array_equal(y.values, np.tanh(X))
    assert "tanh on test_dispatch: the reference" in xformer.explain(ops.tanh, Unknown(X))


def test_subclass_belongs_to_the_library_of_its_base() -> None:
    class Mine(np.ndarray):
        pass

    assert dispatch.library_of(Mine) == "numpy"
    x = X.view(Mine)
    assert "numpy.index_add" in xformer.explain(ops.index_add, x, X, ids=np.array([0, 1]))
    assert np.array_equal(ops.linear(x, np.ones((3, 4)))[0], np.full((2, 4), 3.0))


def python(code: str, folder: Path) -> Any:
    """What `code` prints, read as JSON; run in a new interpreter in `folder`."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_backend_is_imported_when_its_arrays_arrive(tmp_path: Path) -> None:
    code = """
import json, sys, numpy as np, array_api_strict, xformer
def loaded():
    here = [m for m in sys.modules if m.startswith("xformer.backends.") and m.count(".") == 2]
    big = {"torch", "jax", "cupy"} & {*sys.modules}
    return sorted(m.rpartition(".")[2] for m in here), sorted(big)
steps = [loaded()]
xformer.ops.tanh(np.ones(3))
steps.append(loaded())
xformer.ops.tanh(array_api_strict.ones(3))
steps.append(loaded())
print(json.dumps(steps))
"""
    at_first, numpy, strict = python(code, tmp_path)
    assert at_first == [[], []]
    assert numpy == [["numpy"], []]
    assert strict == [["array_api_strict", "numpy"], []]


def test_kernels_of_a_backend_are_imported_with_their_op(tmp_path: Path) -> None:
    code = """
import json, sys, numpy as np, xformer
def loaded():
    return sorted(m for m in sys.modules if m.startswith("xformer.backends.numpy."))
x = np.ones((2, 3), np.float32)
xformer.ops.tanh(x)
before = loaded()
@xformer.kernel(xformer.ops.gelu, "numpy")
def mine(x, *, approximate="none"):
    return "mine", None
said = [xformer.ops.gelu(x)[0], xformer.explain(xformer.ops.gelu, x)]
print(json.dumps([before, said, loaded(), "xformer.optim" in sys.modules]))
"""
    before, (mine, said), more, optim = python(code, tmp_path)
    assert before == []
    assert mine == "mine"  # registered before the backend's own had been asked for
    assert "numpy.gelu.gelu: not asked, __main__.mine comes first" in said
    assert "xformer.backends.numpy.gelu" in more
    assert not optim


def test_a_kernel_comes_first_whoever_imports_the_backend_s_own(tmp_path: Path) -> None:
    code = """
import json, numpy as np, xformer
x, ids = np.ones((2, 3)), np.array([0, 1])
xformer.ops.tanh(x)
@xformer.kernel(xformer.ops.index_add, "numpy")
def mine(x, y, *, ids):
    return "mine", None
xformer.ops.embedding(x, ids=ids)  # whose kernel imports that of index_add
print(json.dumps(xformer.ops.index_add(x, x, ids=ids)[0]))
"""
    assert python(code, tmp_path) == "mine"


def test_every_kernel_is_found_by_the_name_of_its_op(tmp_path: Path) -> None:
    code = """
import importlib, json, pkgutil, xformer
from xformer import backends, dispatch, generation, layers, models, ops, optim, pretrained
for package in generation, layers, models, ops, optim:
    for file in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{file.name}")
found = {}
for library in ("numpy", "torch", "jax"):
    if backends.unavailable_reason(library) is None:
        by_name = {op.__name__: len(op.import_kernels(library)) for op in dispatch.ops()}
        package = importlib.import_module(f"xformer.backends.{library}")
        for file in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"xformer.backends.{library}.{file.name}")
        found[library] = by_name, {op.__name__: len(op.kernels[library]) for op in dispatch.ops()}
print(json.dumps(found))
"""
    found = python(code, tmp_path)
    assert sum(found["numpy"][0].values()) > 20
    for by_name, all_files in found.values():
        assert by_name == all_files


def test_a_child_of_a_fork_imports_kernels_though_a_thread_of_its_parent_did(
    tmp_path: Path,
) -> None:
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    code = """
import importlib.abc, importlib.machinery, json, os, signal, sys, threading, numpy as np, xformer
xformer.ops.tanh(np.ones(3))
held, done = threading.Event(), threading.Event()
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "xformer.backends.numpy.layer_norm":
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            spec.loader.exec_module = lambda module: (held.set(), done.wait())
            return spec
sys.meta_path.insert(0, Slow())
threading.Thread(target=lambda: xformer.ops.layer_norm(np.ones((2, 3)), np.ones(3))).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(300)
    xformer.ops.gelu(np.ones(3))
    os._exit(0)
status = os.waitpid(child, 0)[1]
done.set()
print(json.dumps(status))
"""
    assert python(code, tmp_path) == 0


def test_a_reference_without_a_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must have a __name__, got functools\.partial"):
        dispatch.overridable(functools.partial(lambda x, y: x, y=1))


# The first is imported by every backend, the second by the kernels of gelu.
@pytest.mark.parametrize("missing", ["dispatch.backend", "backends.numpy.logistic"])
def test_backend_that_cannot_be_imported_raises_every_time(missing: str, tmp_path: Path) -> None:
    code = f"""
import json, sys, numpy as np, xformer
sys.modules["xformer.{missing}"] = None  # importing it raises ImportError
said = []
for _ in range(2):
    try:
        xformer.ops.gelu(np.ones(3))
    except ImportError as error:
        said.append(str(error))
print(json.dumps(said))
"""
    said = python(code, tmp_path)
    assert len(said) == 2
    assert all(missing in text for text in said), said
