"""Who takes part: this library on each backend, and the peers.

A contestant is named "<backend> kernel", "<backend> reference" (where no kernel may run),
"numba program" (each call a run of what was recorded, `benchmarks.programs`),
"jax jit" (the whole step under `jax.jit`), "cupy graph" (a step is one CUDA graph),
"cupy deterministic" (bit for bit the same each time), "torch eager" (`benchmarks.eager`),
"torch cudnn" (its attention by cuDNN) or "torch compile" (the same under `torch.compile`).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.feed import Feed
from benchmarks.shapes import EAGER, STAND_IN, Shape
from xformer import backends, dispatch, inference, optim, reference_only, tree
from xformer.training import Batch, TrainConfig, loss_of, start, train

LR = 3e-4
CPU = backends.WITH_NUMPY
PEER, COMPILED, JITTED = "torch eager", "torch compile", "jax jit"
CUDNN, OURS_ON_GPU = "torch cudnn", "cupy kernel"
GRAPH, DETERMINISTIC = "cupy graph", "cupy deterministic"
TORCH = (PEER, COMPILED, CUDNN)
NEVER = 10**9  # steps
COMPILERS = ("g++", "clang++")


class Contestant(Protocol):
    """What is measured: forward; forward and backward; and a step of AdamW.

    In float32, or with weights and activations in the precision of a shape.
    """

    backend: backends.Backend

    def forward(self) -> Any: ...

    def backward(self) -> Any: ...

    def step(self) -> Any: ...

    def output(self) -> np.ndarray: ...

    def gradients(self) -> tuple[float, dict[str, np.ndarray]]: ...


class Ours:
    """This library, called as a training loop calls it."""

    def __init__(
        self,
        shape: Shape,
        weights: Any,
        backend: backends.Backend,
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
        dtype: str = "float32",
    ) -> None:
        self.shape, self.backend, self.context = shape, backend, context
        # Copies, since steps write over them, and the weights are those of every contestant.
        given = shape.parameters(weights)
        self.params = tree.map(lambda w: backend.asarray(np.array(w, dtype)), given)
        self.feed = Feed(shape, backend)
        self.state = optim.adamw_init(tree.trained(self.params)) if shape.training else None

    def forward(self) -> Any:
        """The loss, with the cache that backward needs; what is not for training alone."""
        with self.context():
            if self.shape.training:
                return self._loss()
            return self._pooled()

    def backward(self) -> tuple[Any, Any]:
        """The loss and its gradients."""
        with self.context():
            loss, cache = self._loss()
            return loss, cache.backward()

    def step(self) -> Any:
        """The loss before a step of AdamW."""
        with self.context():
            loss, grads = self.backward()
            options: Any = {"lr": LR, "donate": True}
            if self.shape.lora_rank is None:
                self.params, self.state = optim.adamw(self.params, grads, self.state, **options)
                return loss
            trained = tree.trained(self.params)
            trained, self.state = optim.adamw(trained, grads, self.state, **options)
            self.params = tree.join(self.params, trained)
            return loss

    def output(self) -> np.ndarray:
        """What comes out of a shape that is not for training, on the host."""
        return self.backend.to_numpy(self.forward())

    def gradients(self) -> tuple[float, dict[str, np.ndarray]]:
        """The loss and its gradients by dotted name, on the host."""
        loss, grads = self.backward()
        return float(loss), tree.flatten(tree.map(self.backend.to_numpy, grads))

    def _loss(self) -> Any:
        weights = self.backend.cast_params(self.params, self.shape.precision)
        arrays, options = self.feed.next()
        return self.shape.model.loss(weights, *arrays, **options)

    @inference()
    def _pooled(self) -> Any:
        arrays, options = self.feed.next()
        y, _ = self.shape.model.pooled(self.params, *arrays, **options)
        return y


class Captured(Ours):
    """The same, whose steps are those of `train(compiled=True)`: each a launch of a CUDA graph."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        shape, backend, self.state = self.shape, self.backend, None
        options: Any = {"eval_every": NEVER, "clip": None, "diverged": None}
        config = TrainConfig(NEVER, shape.batch, precision=shape.precision, **options)
        adamw = optim.Optimiser(optim.adamw_init, optim.adamw)
        given = start(self.params, config, adamw), self, config, backend
        options = {"optimiser": adamw, "schedule": lambda step: LR, "donate": True}
        self._steps = train(loss_of(shape.model), *given, compiled=True, **options)
        arrays = shape.data(backends.get("numpy"))
        self._batch = Batch(arrays, {}, arrays[-1].size, arrays[0].size)

    def batch(self, i: int) -> Batch:
        """The same each time; as the source of `train`."""
        return self._batch

    def step(self) -> Any:
        """The loss before a step of AdamW."""
        with self.context():
            found = next(self._steps)
        self.params = found.params
        return found.loss


class Jitted(Ours):
    """The same under `jax.jit`: each of the three one compiled function."""

    def __init__(self, shape: Shape, weights: Any, backend: backends.Backend) -> None:
        super().__init__(shape, weights, backend)
        self.data = self.feed.batches[0].arrays
        import jax

        # On a GPU JAX rounds to TF32 unless it is told not to.
        jax.config.update(
            "jax_default_matmul_precision", "tensorfloat32" if shape.tf32 else "highest"
        )
        model = shape.model

        def forward(params: Any, *data: Any) -> Any:
            return (
                model.loss(params, *data)[0] if shape.training else model.pooled(params, *data)[0]
            )

        def backward(params: Any, *data: Any) -> tuple[Any, Any]:
            loss, cache = model.loss(params, *data)
            return loss, cache.backward()

        def step(params: Any, state: Any, *data: Any) -> tuple[Any, Any, Any]:
            loss, grads = backward(params, *data)
            return loss, *optim.adamw(params, grads, state, lr=LR)

        self._forward, self._backward = jax.jit(forward), jax.jit(backward)
        # As a loop of JAX has it: what is replaced gives its memory.
        self._step = jax.jit(step, donate_argnums=(0, 1))

    def forward(self) -> Any:
        """The loss alone: what backward would need is not computed."""
        return self._forward(self.params, *self.data)

    def backward(self) -> tuple[Any, Any]:
        """The loss and its gradients."""
        loss, grads = self._backward(self.params, *self.data)
        return loss, grads

    def step(self) -> Any:
        """The loss before a step of AdamW."""
        loss, self.params, self.state = self._step(self.params, self.state, *self.data)
        return loss


PROGRAM = "numba program"
GATE = (PEER, "numpy kernel", "numba kernel", PROGRAM)  # `benchmarks.gate`


def names() -> list[str]:
    """Every contestant that there is; the peer comes first."""
    found = list(TORCH)
    for name in backends.NAMES:
        if name != "array-api-strict":
            found.append(f"{name} kernel")
        found += [GRAPH, DETERMINISTIC] if name == "cupy" else []
        found += [JITTED] if name == "jax" else []
        found += [PROGRAM] if name == "numba" else []
        found += [f"{name} reference"] if name not in backends.ON_NUMPY else []  # that is NumPy's
    return found


def why_not(name: str) -> str | None:
    """Why a contestant cannot take part here, or None where it can."""
    if name in TORCH and importlib.util.find_spec("torch") is None:
        return f"{name}: torch is not installed"
    if name == CUDNN and not importlib.import_module("torch").cuda.is_available():
        return f"{name}: torch sees no CUDA device"
    if name == COMPILED and not os.environ.get("CXX") and not any(map(shutil.which, COMPILERS)):
        return f"{name}: there is no C++ compiler ({' or '.join(COMPILERS)})"
    if name in TORCH:
        return None
    lt = backends.beside("cupy").get("cuBLASLt") if name == GRAPH else None
    if lt is not None and not lt.isdigit():  # None without CuPy, which is named below
        return f"{name}: products by cuBLAS cannot be captured, and {lt}"
    library, _, how = name.rpartition(" ")
    why = backends.unavailable_reason(library)
    arrays = "numba" if library in backends.ON_NUMPY else library
    if why is not None:
        return f"{name}: {why}"
    if how == "reference" or any(op.import_kernels(arrays) for op in dispatch.ops()):
        return None
    return f"{name}: backend {library} has no kernels"


def default(shape: Shape) -> list[str]:
    """Who takes part unless others are named: all that are as fast as they can be, and fit.

    Without `jax.jit`, and without kernels, the libraries show that code is right.
    """
    slow = "jax kernel", CUDNN, DETERMINISTIC, PROGRAM
    fast = [n for n in names() if not n.endswith("reference") and n not in slow]
    if not shape.scores_fit:
        fast = [n for n in fast if n in (PEER, COMPILED, *(f"{n} kernel" for n in CPU))]
    return [name for name in fast if why_not(name) is None]


def make(name: str, shape: Shape, weights: Any) -> Contestant:
    """The contestant of that name, at the start of its training."""
    if name in TORCH:
        from benchmarks.eager import Eager

        return Eager(shape, weights, compiled=name == COMPILED, cudnn=name == CUDNN)
    library, _, how = name.rpartition(" ")
    backend = backend_of(library, shape.device)
    if how == "jit":
        return Jitted(shape, weights, backend)
    contexts: Any = {"reference": reference_only, "deterministic": backend.deterministic}
    contexts["graph"] = partial(capturing, shape.device)
    kind, context = Captured if how == "graph" else Ours, contexts.get(how, nullcontext)
    if name == PROGRAM:
        from benchmarks.programs import Programs

        kind = Programs
    entered = [context]
    if library in backends.ON_NUMPY:
        entered.append(backend.active)
    if shape.tf32:
        from xformer.backends.cupy import tf32

        entered.append(tf32)
    return kind(shape, weights, backend, partial(within, entered))


@contextmanager
def within(contexts: Sequence[Callable[[], AbstractContextManager[None]]]) -> Iterator[None]:
    """All of these."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def backend_of(library: str, device: str | None) -> backends.Backend:
    """A library's backend; CuPy's stand-in where that is the device, torch's where it is another.

    Others have their usual device: CuPy the current one, JAX a GPU where it sees one.
    """
    if (library, device) == ("cupy", STAND_IN):
        sys.path.append(str(Path(__file__).parents[1] / "tests"))
        import cuda_shim

        return cuda_shim.backend()
    return backends.get(library, torch_device(device) if library == "torch" else None)


@contextmanager
def capturing(device: str | None) -> Iterator[None]:
    """Within it an error where there is no graph; on the stand-in, too, products are by cuBLASLt.

    Other warnings are none: a graph with another kernel in it is still a graph.
    """
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("error", r"backend \S+: no graph: ", RuntimeWarning)
        if device == STAND_IN:
            import cuda_shim

            stack.enter_context(cuda_shim.calling(cuda_shim.CublasLt()))
        yield


def torch_device(device: str | None) -> str | None:
    """Where torch is on that device of a shape."""
    return None if device == STAND_IN else device


def judge(shape: Shape, weights: Any) -> Contestant:
    """What every contestant must agree with, in float64: see `judge_of`."""
    if judge_of(shape) == PEER:
        from benchmarks.eager import Judge

        return Judge(shape, weights)
    return Ours(shape, weights, backends.get("numpy"), reference_only, "float64")


def judge_of(shape: Shape) -> str:
    """Who judges: the peer; NumPy's reference without it, and where the peer cannot.

    transformers computes parts of a model in float32 whatever its type, and torch draws other
    dropout masks.
    """
    able = shape.peer == EAGER and not shape.dropout and why_not(PEER) is None
    return PEER if able else "numpy reference"


def is_judged(name: str, shape: Shape) -> bool:
    """Whether a contestant computes what the judge computes: torch draws other dropout masks."""
    return not (shape.dropout and name in TORCH)
