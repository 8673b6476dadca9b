"""NVIDIA's libraries, and graphs, in tests: on the stand-in those of `cuda_shim`, else NVIDIA's.

Each context yields what keeps account of what is asked for. On a GPU a test that needs a library
which is missing, or a device that has no plan, is skipped with the sentence that says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import cuda_shim
import pytest
from cuda_shim.cublaslt_parts import Epilogue
from cuda_shim.graph import Graph
from devices import array_type, is_stand_in

from xformer.backends import Backend
from xformer.backends.cupy import cublaslt, cudnn, sdpa_cudnn
from xformer.backends.cupy.module import driver_of

LEFT_OUT = "the test leaves it out"


# ---- cuBLASLt ----


class WatchedLt:
    """NVIDIA's cuBLASLt. products: what was asked for, though a GPU may have no algorithm for it.

    What then is made in its place is none of them; of an algorithm that a test takes away it is.
    A failure is an AssertionError: the product that is made in its place has the right values too.
    """

    def __init__(self, lacks: Sequence[int]) -> None:
        self.products: list[Any] = []
        self.lacking: list[str] = []  # products that have no algorithm
        self.failure: BaseException | None = None
        self._lacks = {Epilogue(e).name for e in lacks}
        self._ran, self._plan = cublaslt._ran, cublaslt._plan
        self._now: Any = None

    def ran(self, a: Any, b: Any, out: Any, *args: Any, add: bool = False, **rest: Any) -> bool:
        """As `cublaslt._ran`."""
        is_in_place = self._now is not None and self._now.found is None and not self._now.several
        batch = rest.get("batch")
        self._now = SimpleNamespace(beta=int(add), found=..., several=batch is not None)
        self._now.is_planned = False
        if not is_in_place:
            self.products.append(self._now)
        is_started = self._ran(a, b, out, *args, add=add, **rest)
        assert self._now.is_planned, "cuBLASLt was not asked"
        return is_started

    def plan(self, lt: Any, key: Any, pointed: Any) -> Any:
        """As `cublaslt._plan`."""
        _, of, name, *_ = key
        self._now.is_planned = True
        if name in self._lacks:
            self.products.remove(self._now)
            return None
        self._now.epilogue, self._now.count = Epilogue[name], of[2].batch
        self._now.found = self._plan(lt, key, pointed)
        if self._now.found is None:
            sizes = ", ".join(f"{m.rows} x {m.columns}" for m in of)
            self.lacking.append(f"{name} of {sizes}, types {[m.type for m in of]}")
        return self._now.found

    def fail(self, lt: Any, key: Any, error: Exception) -> None:
        """In the place of `cublaslt._fail`."""
        self.failure = error
        raise AssertionError(f"cuBLASLt has failed: {type(error).__name__}: {error}") from error


def calling_cublaslt(library: Backend, lacks: Sequence[int] = ()) -> AbstractContextManager[Any]:
    """Products are cuBLASLt's. lacks: epilogues for which it says that it has no algorithm."""
    if is_stand_in(library):
        return cuda_shim.calling(cuda_shim.CublasLt(lacks))
    why = driver_of(array_type(library)).CUBLASLT.library()
    if isinstance(why, str):
        pytest.skip(why)
    return _watched_lt(lacks)


@contextmanager
def _watched_lt(lacks: Sequence[int]) -> Iterator[WatchedLt]:
    """A failure before it is forgotten within, as are the kinds of products that had no plan."""
    with pytest.MonkeyPatch.context() as patch:
        lt = WatchedLt(lacks)
        patch.setattr(cublaslt, "_state", cublaslt.State())
        for name, watched in {"_ran": lt.ran, "_plan": lt.plan, "_fail": lt.fail}.items():
            patch.setattr(cublaslt, name, watched)
        yield lt
    assert lt.failure is None, f"cuBLASLt has failed: {lt.failure}"  # where it was caught


def asked(lt: Any) -> list[str]:
    """The epilogues of the products since it was last called, + where they are added up."""
    found = [f"{p.epilogue.name}{'+' if p.beta else ''}" for p in lt.products]
    lt.products.clear()
    return found


def asked_each_time(library: Backend, lt: Any) -> list[str]:
    """As `asked`, of one run of what `devices.repeated` makes: on a GPU twice the same."""
    found = asked(lt)
    if is_stand_in(library):
        return found
    once = found[: len(found) // 2]
    assert found == once + once
    return once


def several(lt: Any) -> list[int]:
    """How many products each is at once."""
    return [p.count if isinstance(lt, WatchedLt) else p.layouts[2].count for p in lt.products]


def require_algorithm(lt: Any) -> None:
    """Skip where a GPU has no algorithm: what was made was made by launches of their own."""
    if isinstance(lt, WatchedLt) and lt.lacking:
        pytest.skip(f"on this GPU cuBLASLt has no algorithm for {'; '.join(lt.lacking)}")


def by_cublas(library: Backend) -> AbstractContextManager[None]:
    """Products are cuBLAS's, as where the bindings of cuBLASLt are missing."""
    return _left_out(library, "CUBLASLT")


def why_by_cublas(library: Backend) -> str:
    """What is said of cuBLASLt within `by_cublas`."""
    return cuda_shim.calling.why_not if is_stand_in(library) else LEFT_OUT


# ---- cuDNN ----


class WatchedCudnn:
    """NVIDIA's cuDNN. calls: each with its name, sdpa or sdpa_backward."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self._ran = sdpa_cudnn.ran

    def ran(self, kind: Any, arrays: dict[int, Any]) -> bool:
        """As `cudnn.ran`, which a test on a GPU must not fall back from."""
        assert self._ran(kind, arrays), "cuDNN has failed"
        self.calls.append(SimpleNamespace(name="sdpa_backward" if kind.backward else "sdpa"))
        return True


def calling_cudnn(library: Backend) -> AbstractContextManager[Any]:
    """Attention is cuDNN's, where it takes it."""
    if is_stand_in(library):
        return cuda_shim.calling_cudnn(cuda_shim.Cudnn())
    why = driver_of(array_type(library)).CUDNN.library()
    if isinstance(why, str):
        pytest.skip(why)
    return _watched_cudnn()


@contextmanager
def _watched_cudnn() -> Iterator[WatchedCudnn]:
    """Kinds of attention that cuDNN refused or failed at before are asked for again."""
    with pytest.MonkeyPatch.context() as patch:
        watched, before = WatchedCudnn(), cudnn._state
        patch.setattr(cudnn, "_state", cudnn.State())
        plans = {key: plan for key, plan in before.plans.items() if not isinstance(plan, str)}
        cudnn._state.handles, cudnn._state.plans = before.handles, plans
        patch.setattr(sdpa_cudnn, "ran", watched.ran)
        yield watched


def without_cudnn(library: Backend) -> AbstractContextManager[None]:
    """Attention is the library's own, as where cuDNN is missing."""
    return _left_out(library, "CUDNN")


def why_without_cudnn(library: Backend) -> str:
    """What is said of cuDNN within `without_cudnn`."""
    return cuda_shim.calling_cudnn.why_not if is_stand_in(library) else LEFT_OUT


def _left_out(library: Backend, name: str) -> AbstractContextManager[None]:
    return nullcontext() if is_stand_in(library) else _missing(name, array_type(library))


@contextmanager
def _missing(name: str, arrays: type) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        runtime = getattr(driver_of(arrays), name)
        patch.setattr(driver_of(arrays), name, runtime._replace(library=lambda: LEFT_OUT))
        yield


# ---- Graphs ----


@contextmanager
def counted_graphs(library: Backend) -> Iterator[list[Any]]:
    """Those that are made, with `launches`; products are by cuBLASLt, which can be captured."""
    made: list[Any] = []
    kind = Graph if is_stand_in(library) else _counted()

    def noted() -> Any:
        made.append(kind())
        return made[-1]

    with pytest.MonkeyPatch.context() as patch, calling_cublaslt(library):
        patch.setattr(driver_of(array_type(library)), "Graph", noted)
        yield made


def _counted() -> type:
    from xformer.backends.cupy import driver

    class Counted(driver.Graph):
        launches = 0

        def launch(self) -> None:
            self.launches += 1
            super().launch()

    return Counted


def memories(library: Backend, graphs: list[Any]) -> Callable[[], int]:
    """Counts what is still there: arrays of the stand-in's graphs, or all memory pools of CuPy."""
    if not is_stand_in(library):
        from xformer.backends.cupy import driver

        return lambda: len(driver.pools())
    held = [weakref.ref(memory) for graph in graphs for memory in graph.pool]
    return lambda: sum(memory() is not None for memory in held)
