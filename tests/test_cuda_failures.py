"""NVIDIA's libraries and captures that fail: the next kernel's numbers, a sentence, a run goes on.

On the stand-in, whose cuBLASLt, cuDNN and graphs raise what a test names.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
from cuda_shim import CublasLt, Cudnn, calling, calling_cudnn
from cuda_shim.cublaslt_parts import Epilogue, cuBLASLtError
from cuda_shim.cudnn_graph import cudnnGraphNotSupportedError
from cuda_shim.graph import Graph
from libraries import STAND_IN, only
from test_cuda_graphs import CONFIG, GPT, run

from xformer import explain, layers, ops, tree
from xformer.backends import Backend
from xformer.backends.cupy import captured as on_cupy
from xformer.backends.cupy import cublaslt
from xformer.backends.cupy import cudnn as by_cudnn
from xformer.backends.cupy.module import driver_of
from xformer.dispatch import inference
from xformer.training import loss_of

pytestmark = only(STAND_IN)

BF16 = np.dtype(pytest.importorskip("ml_dtypes", reason="ml_dtypes is missing").bfloat16)
INVALID_VALUE, EXECUTION_FAILED, NOT_INITIALIZED = 7, 13, 1


class OutOfMemoryError(MemoryError):
    """As CuPy's."""


def arrays(library: Backend, *shapes: tuple[int, ...], dtype: Any = BF16) -> list[Any]:
    rng = np.random.default_rng(1)
    found = [library.asarray(rng.normal(size=shape).astype("f4")) for shape in shapes]
    return [library.xp.astype(x, dtype) for x in found]


def same(got: Any, wanted: Any) -> bool:
    """Bits, of trees."""
    pairs = zip(*(tree.flatten(x).values() for x in (got, wanted)), strict=True)
    return all(a is b is None or a.host.tobytes() == b.host.tobytes() for a, b in pairs)


# ---- Products ----


def linear_step(library: Backend, dtype: Any) -> Any:
    y, cache = ops.linear(*arrays(library, (40, 6), (6, 5), (5,), dtype=dtype))
    return y, cache.backward(y)


SUCH = "such products are made in another way from now on"
ALL = "products are by cuBLAS from now on"
LT_FAILURES: dict[str, dict[str, BaseException]] = {
    "handle, attribute": {"create": AttributeError("no create")},
    "handle, status": {"create": cuBLASLtError(NOT_INITIALIZED)},
    "descriptor, type": {"matmul_desc_create": TypeError("takes 3 arguments")},
    "layout, status": {"matrix_layout_create": cuBLASLtError(INVALID_VALUE)},
    "attribute, status": {"matmul_desc_set_attribute": cuBLASLtError(INVALID_VALUE)},
    "preference, value": {"matmul_preference_create": ValueError("no such thing")},
    "heuristics, value": {"matmul_algo_get_heuristic": cuBLASLtError(INVALID_VALUE)},
    "heuristics, driver": {"matmul_algo_get_heuristic": RuntimeError("cudaErrorUnknown")},
    "product, value": {"matmul": cuBLASLtError(INVALID_VALUE)},
    "product, execution": {"matmul": cuBLASLtError(EXECUTION_FAILED)},
    "product, type": {"matmul": TypeError("an integer is required")},
}


@pytest.mark.parametrize("dtype", [np.dtype("f4"), BF16], ids=str)
@pytest.mark.parametrize("name", LT_FAILURES)
def test_products_go_on_by_cublas(library: Backend, name: str, dtype: Any) -> None:
    """The bits of the kernel by cuBLAS, and one sentence however many products fail.

    Two where it first seems to be the epilogue's fault, and then the plain product fails too.
    """
    wanted = linear_step(library, dtype)
    with calling(CublasLt(raises=LT_FAILURES[name])) as lt:
        with pytest.warns(RuntimeWarning) as said:
            assert same(linear_step(library, dtype), wanted)
        (error,) = LT_FAILURES[name].values()
        sentences = [str(each.message) for each in said]
        assert all(f"cuBLASLt failed ({type(error).__name__}: {error})" in s for s in sentences)
        ends = [sentence.partition("; ")[2] for sentence in sentences]
        assert ends in ([SUCH], [ALL], [SUCH, ALL]) and len(set(ends)) == len(ends)
        assert (ends[-1] == ALL) == bool(cublaslt._state.failure)
        assert same(linear_step(library, dtype), wanted)  # without a word
        error.with_traceback(None)  # whose frames hold what they were given
        handles = [made for made in lt.alive.values() if isinstance(made, tuple)]
        assert not lt.held and len(lt.alive) == len(handles) <= 1  # descriptors are freed


def test_a_broken_library_is_not_asked_again(library: Backend) -> None:
    with calling(CublasLt(raises={"create": TypeError("no")})):
        with pytest.warns(RuntimeWarning, match="products are by cuBLAS from now on"):
            linear_step(library, np.dtype("f4"))
        said = explain(ops.linear, *arrays(library, (3, 4), (4, 5)))
        assert "linear_lt.linear: cuBLASLt failed (TypeError: no); products are by" in said
        assert "cupy.linear.linear" in said.splitlines()[0]


class Failing(CublasLt):
    """Products with an epilogue of one of these names fail when they run."""

    names: tuple[str, ...] = ()

    def matmul(self, *args: Any) -> None:
        operation = self.alive[args[1]]
        if any(operation[7] == Epilogue[name] for name in self.names):
            self.asked += 1
            raise cuBLASLtError(INVALID_VALUE)
        super().matmul(*args)

    asked = 0


@pytest.mark.parametrize("names", [("BIAS",), ("BGRADA", "BGRADB")])
def test_an_epilogue_that_fails_is_left_out(library: Backend, names: Any) -> None:
    """The product goes on by cuBLASLt, and each kind with that epilogue is asked for once."""
    with calling(Failing()) as lt:
        lt.names = names
        with pytest.warns(RuntimeWarning, match="such products are made in another way") as said:
            first = linear_step(library, np.dtype("f4"))
        assert len(said) == lt.asked == 1
        assert {p.epilogue for p in lt.products} >= {Epilogue.DEFAULT}
        assert same(linear_step(library, np.dtype("f4")), first)
        refused = [key for key, plan in cublaslt._state.plans.items() if plan is None]
        assert lt.asked == len(refused)  # addresses may be aligned otherwise: another kind
    for got, wanted in zip(first[1], linear_step(library, np.dtype("f4"))[1], strict=True):
        assert np.allclose(got.host, wanted.host, rtol=1e-5, atol=1e-5)


def composites(library: Backend) -> Any:
    """A feed-forward network, several maps of one x, a head: both ways."""
    x, up, b, down = arrays(library, (40, 8), (8, 16), (16,), (16, 8))
    params = layers.FeedForwardParams(layers.LinearParams(up, b), layers.LinearParams(down, None))
    y, cache = layers.feed_forward(x, params, activation="gelu_tanh")
    found = [y, *cache.backward(y)]
    several = library.cast_params(
        tuple(layers.LinearParams(*(library.xp.astype(a, np.float32) for a in arrays(
            library, (8, 8), (8,)))) for _ in range(3)),
        "bfloat16",
    )  # fmt: skip
    with inference():
        found.append(layers.linear_many(x, several)[0])
    ys, cache = layers.linear_many(x, several)
    found.append(cache.backward(*ys))
    ids = library.asarray(np.arange(40) % 16)
    loss, cache = ops.linear_cross_entropy(x, up, b, targets=ids)
    return [*found, loss, cache.backward(library.xp.ones_like(loss))]


@pytest.mark.parametrize("function", ["matmul", "matmul_algo_get_heuristic", "create"])
def test_composites_go_on(library: Backend, function: str) -> None:
    wanted = composites(library)
    lt = CublasLt(raises={function: cuBLASLtError(INVALID_VALUE)})
    with calling(lt), pytest.warns(RuntimeWarning) as said:
        got = composites(library)
    assert len(said) == 1
    for a, b in zip(*(tree.flatten(x).values() for x in (got, wanted)), strict=True):
        # Where the library fails at a product, GELU is rounded once more before it.
        close = np.allclose(a.host.astype("f4"), b.host.astype("f4"), rtol=2e-2, atol=2e-2)
        assert a is b is None or close


def test_too_little_memory_is_the_users(library: Backend) -> None:
    """No way of making products does without memory."""
    with calling(CublasLt()) as lt:
        lt.allocate = lambda size: (_ for _ in ()).throw(MemoryError("out of memory"))  # type: ignore
        with pytest.raises(MemoryError):
            linear_step(library, np.dtype("f4"))


def test_bad_shapes_are_the_users(library: Backend) -> None:
    x, w = arrays(library, (3, 4), (5, 6))
    with (
        calling(CublasLt(raises={"matmul": TypeError("no")})),
        pytest.raises(ValueError, match="w must"),
    ):
        ops.linear(x, w)


# ---- Attention ----


def sdpa_step(library: Backend) -> Any:
    q, k, v = arrays(library, (1, 2, 64, 8), (1, 1, 64, 8), (1, 1, 64, 8))
    ctx, cache = ops.sdpa(q, k, v, causal=True)
    return ctx, cache.backward(ctx)


def raising(error: Exception) -> Any:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    return fails


ERROR = RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")
CUDNN_FAILURES: dict[str, dict[str, BaseException]] = {
    "handle": {"create_handle": RuntimeError("CUDNN_STATUS_NOT_INITIALIZED")},
    "stream": {"set_stream": TypeError("incompatible function arguments")},
    "graph": {"pygraph": TypeError("incompatible constructor arguments")},
    "tensor": {"tensor": TypeError("incompatible function arguments")},
    "forward's node": {"sdpa": TypeError("incompatible function arguments")},
    "backward's node": {"sdpa_backward": TypeError("incompatible function arguments")},
    "validation": {"validate": ValueError("The dim for q is invalid")},
    "operation": {"build_operation_graph": RuntimeError("CUDNN_STATUS_BAD_PARAM")},
    "heuristics": {"create_execution_plans": AttributeError("no such thing")},
    "plan": {"build_plans": RuntimeError("nvrtc")},
    "workspace": {"get_workspace_size": RuntimeError("no plan")},
    "execution": {"execute": ERROR},
    "execution of backward": {"sdpa_backward.execute": ERROR},
    "arguments of execution": {"execute": TypeError("incompatible function arguments")},
}


@pytest.mark.parametrize("name", CUDNN_FAILURES)
def test_attention_goes_on_by_the_next_kernel(library: Backend, name: str) -> None:
    """The bits of flash: wholly, or only of the gradients where backward's execution fails."""
    wanted = sdpa_step(library)
    assert "flash.sdpa" in explain(ops.sdpa, *arrays(library, *[(1, 1, 64, 8)] * 3)).splitlines()[0]
    with calling_cudnn(Cudnn(raises=CUDNN_FAILURES[name])) as cudnn:
        with pytest.warns(RuntimeWarning) as said:
            ctx, grads = sdpa_step(library)
        (error,) = CUDNN_FAILURES[name].values()
        sentences = [str(each.message) for each in said]
        assert len(sentences) == 1 and f"failed ({type(error).__name__}: {error})" in sentences[0]
        if name == "execution of backward":
            assert [call.name for call in cudnn.calls] == ["sdpa"]
            again, wanted_again = sdpa_step(library), sdpa_step(library)
            assert same(again, wanted_again)
            assert all(
                np.allclose(a.host.astype("f4"), b.host.astype("f4"), rtol=3e-2, atol=3e-2)
                for a, b in zip(grads[:3], wanted[1][:3], strict=True)
            )
            assert len(cudnn.calls) == 1  # not asked again, not even forward
        else:
            assert same((ctx, grads), wanted) and not cudnn.calls
            assert same(sdpa_step(library), wanted)  # without a word
        q, k, v = arrays(library, (1, 2, 64, 8), (1, 1, 64, 8), (1, 1, 64, 8))
        said_of = explain(ops.sdpa, q, k, v, causal=True)
        assert f"failed ({type(error).__name__}: {error}); such attention is left to" in said_of


def test_each_failure_of_attention_is_said(library: Backend) -> None:
    """Of errors of one type whose texts begin otherwise, but for numbers in them."""
    texts = "no argument scale", "no argument 0x7f10", "no argument 0x7f20", "no such class"
    with calling_cudnn(Cudnn()) as cudnn, pytest.warns(RuntimeWarning) as said, inference():
        for i, text in enumerate(texts):
            cudnn.pygraph = raising(TypeError(text))  # type: ignore[assignment,method-assign]
            ops.sdpa(*arrays(library, *[(1, 1 + i, 64, 8)] * 3))
    sentences = [str(each.message).partition("; ")[0] for each in said]
    assert [s.rpartition(": ")[2] for s in sentences] == [f"{texts[i]})" for i in (0, 1, 3)]


@pytest.mark.parametrize("function", ["create_handle", "pygraph", "execute"])
def test_too_little_memory_for_attention_is_the_users(library: Backend, function: str) -> None:
    """And forgotten: what frees memory may ask again."""
    with calling_cudnn(Cudnn(raises={function: OutOfMemoryError("out of memory")})):
        for _ in range(2):
            with pytest.raises(MemoryError):
                sdpa_step(library)


def test_a_refusal_is_no_failure(library: Backend) -> None:
    """`explain` alone says it; and so of a package that has no such error."""
    with calling_cudnn(Cudnn(lacks=["sdpa"])), warnings.catch_warnings():
        warnings.simplefilter("error")
        sdpa_step(library)
    with calling_cudnn(Cudnn(lacks=["sdpa"])) as cudnn:
        cudnn.cudnnGraphNotSupportedError = property()  # type: ignore[assignment]
        with pytest.warns(RuntimeWarning, match="a plan of cuDNN failed"):
            sdpa_step(library)
    assert issubclass(cudnnGraphNotSupportedError, Exception)


def test_backward_that_fails_stays_deterministic(library: Backend) -> None:
    """It is asked for as forward was, also outside of the context."""
    with calling_cudnn(Cudnn(raises={"sdpa_backward.execute": ERROR})) as cudnn:
        q, k, v = arrays(library, (1, 2, 64, 8), (1, 1, 64, 8), (1, 1, 64, 8))
        with library.deterministic():
            ctx, cache = ops.sdpa(q, k, v)
        with pytest.warns(RuntimeWarning, match="attention by cuDNN failed"):
            first = cache.backward(ctx)
        assert same(cache.backward(ctx), first) and len(cudnn.calls) == 1


# ---- Captures ----


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


class CompileException(Exception):
    """As CuPy's: it is no RuntimeError."""


ERRORS = [
    CUDARuntimeError("cudaErrorStreamCaptureInvalidated"),
    CompileException("nvrtc: error"),
    OutOfMemoryError("Out of memory allocating 5 bytes"),
    TypeError("Unsupported type"),
    AttributeError("no attribute"),
    ValueError("not supported"),
    NotImplementedError(""),
]


@pytest.fixture
def made(library: Backend, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the next graphs raise, and where: ("end" or "launch", error); then graphs."""
    plan: list[Any] = [{}]
    (of,) = {type(library.asarray([1.0]))}

    def noted() -> Graph:
        plan.append(Graph(plan[0]))
        return plan[-1]

    monkeypatch.setattr(driver_of(of), "Graph", noted)
    return plan


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("where", ["within", "end", "launch"])
def test_steps_go_on_call_by_call(
    library: Backend, made: list[Any], where: str, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers and bits of all steps and of the last state; one sentence."""
    with calling(CublasLt()):
        wanted = run(library, CONFIG, False)
        of, calls = type(loss_of(GPT)).of, []

        def fails(self: Any, params: Any, inputs: Any, key: Any) -> Any:
            found = of(self, params, inputs, key)
            calls.append(1)
            if len(calls) == 2:  # where it is recorded
                raise error
            return found

        if where == "within":
            monkeypatch.setattr(type(loss_of(GPT)), "of", fails)
        else:
            made[0] = {where: error}
        with pytest.warns(RuntimeWarning) as said:
            assert run(library, CONFIG, True) == wanted
        (sentence,) = [str(each.message) for each in said]
        assert sentence.endswith(f"{error or type(error).__name__}; steps are made call by call")
        assert made[1].launches == 0


def counted(library: Backend, fails: dict[int, BaseException]) -> Any:
    """A captured step that adds its input; the calls of these numbers raise."""
    calls: list[int] = []

    def step(state: Any, inputs: Any) -> Any:
        calls.append(1)
        y = state["a"] + inputs["x"]
        if error := fails.get(len(calls)):
            raise error
        return {"a": y}, (y,)

    return on_cupy.Captured(step, library)


def value(state: Any) -> float:
    return float(state["a"].host[0])


def test_an_interrupt_ends_the_run(library: Backend, made: list[Any]) -> None:
    """In a capture; the state is whole, and the next call records anew."""
    call = counted(library, {2: KeyboardInterrupt()})
    state = {"a": library.asarray(np.zeros(3))}
    state, _ = call(state, {"x": 1.0})
    with pytest.raises(KeyboardInterrupt):
        call(state, {"x": 1.0})
    assert value(state) == 1
    state, _ = call(state, {"x": 1.0})
    assert value(state) == 2 and made[1].launches == 1


def test_a_steps_own_error_is_raised(library: Backend, made: list[Any]) -> None:
    """Behind the capture the step is made as it is, which raises it again."""
    call = counted(library, {n: ValueError("bad shapes") for n in (2, 3)})
    state, _ = call({"a": library.asarray(np.zeros(3))}, {"x": 1.0})
    with (
        pytest.warns(RuntimeWarning, match="bad shapes; steps are made call by call"),
        pytest.raises(ValueError, match="bad shapes"),
    ):
        call(state, {"x": 1.0})
    assert value(state) == 1
    assert value(call(state, {"x": 1.0})[0]) == 2  # call by call


def test_an_error_in_the_first_call(library: Backend, made: list[Any]) -> None:
    """Is raised; the next call begins anew."""
    call = counted(library, {1: OutOfMemoryError("too little")})
    state = {"a": library.asarray(np.zeros(3))}
    with pytest.raises(MemoryError, match="too little"):
        call(state, {"x": 1.0})
    for wanted in (1, 2, 3):
        state, _ = call(state, {"x": 1.0})
        assert value(state) == wanted
    assert len(made) == 3 and made[2].launches == 2


# ---- What is kept ----


def test_a_graph_that_is_gone_leaves_nothing(library: Backend, made: list[Any]) -> None:
    """Of cuBLASLt's and cuDNN's workspaces, and of the graph's memory."""
    with calling(CublasLt()) as lt, calling_cudnn(Cudnn()) as cudnn:
        q, w = arrays(library, (1, 1, 64, 8), (8, 8))

        def step(state: Any, inputs: Any) -> Any:
            y, _ = ops.linear(state["a"], w)
            return {"a": ops.sdpa(y, y, q)[0]}, (y,)

        call = on_cupy.Captured(step, library)
        state = {"a": q.copy()}
        for _ in range(3):
            state, results = call(state, {"x": 1.0})
        pool = [weakref.ref(x) for x in made[1].pool]
        assert cudnn.calls and pool
        del call, state, results
        made.clear()
        gc.collect()
        assert not lt.held and not cudnn.held
        assert not any(x() is not None for x in pool)


def test_plans_of_a_graph_stay_with_it(library: Backend, made: list[Any]) -> None:
    """Others may drive them out: the graph's launches need the code that a plan has loaded."""
    with calling_cudnn(Cudnn()):
        (q,) = arrays(library, (1, 1, 64, 8))
        call = on_cupy.Captured(
            lambda state, _: ({"a": ops.sdpa(state["a"], q, q)[0]}, ()), library
        )
        state = {"a": q.copy()}
        for _ in range(2):
            state, _ = call(state, {"x": 1.0})
        plans = [weakref.ref(plan.graph) for plan in by_cudnn._state.plans.values()]
        by_cudnn._state.plans.clear()
        gc.collect()
        alive = sum(plan() is not None for plan in plans)
        assert alive == 1  # forward's: backward's was planned, and not run
        del call
        made.clear()
        gc.collect()
        assert not any(plan() is not None for plan in plans)


def test_what_threads_leave(library: Backend) -> None:
    """Handles serve the next thread, descriptors are freed; so nothing grows with threads."""
    with calling(CublasLt()) as lt, calling_cudnn(Cudnn()) as cudnn:
        handles: list[Any] = []
        create = cudnn.create_handle
        cudnn.create_handle = lambda: handles.append(create()) or handles[-1]  # type: ignore

        def work() -> None:
            linear_step(library, np.dtype("f4"))
            sdpa_step(library)

        for _ in range(3):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            gc.collect()
        assert [made[0] for made in lt.alive.values()] == ["handle"] and len(handles) == 1
        work()
        assert len(cublaslt._state.plans) > 0 and len(handles) == 1
