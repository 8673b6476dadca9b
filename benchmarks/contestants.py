"""The contestants: this library on each backend, and PyTorch (the peer).

- "<backend> kernel": this library with the kernels of a backend
- "<backend> reference": this library without kernels (`reference_only`)
- "numba program": each call replays a recorded program (`benchmarks.programs`)
- "jax jit": the whole step under `jax.jit`
- "cupy graph": each step is one CUDA graph
- "cupy deterministic": "cupy kernel" with results that repeat bit for bit
- "torch eager": the same model in PyTorch (`benchmarks.eager`)
- "torch cudnn": "torch eager" with attention by cuDNN
- "torch compile": "torch eager" under `torch.compile`
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
from xformer import backends, dispatch, inference, optim, reference_only
from xformer.base import tree
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
    """What a contestant can run: forward; forward and backward; and a step of AdamW.

    It computes in float32, or with weights and activations in the precision of its shape.
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
        # Copies: steps overwrite the parameters, and all contestants share `weights`.
        params = shape.parameters(weights)
        self.params = tree.map(lambda w: backend.asarray(np.array(w, dtype)), params)
        self.feed = Feed(shape, backend)
        self.state = optim.adamw_init(tree.trained(self.params)) if shape.training else None

    def forward(self) -> Any:
        """Return the loss with the cache for backward; for inference, the pooled hidden states."""
        with self.context():
            if self.shape.training:
                return self._loss()
            return self._pooled()

    def backward(self) -> tuple[Any, Any]:
        """Return the loss and its gradients."""
        with self.context():
            loss, cache = self._loss()
            return loss, cache.backward()

    def step(self) -> Any:
        """Run a step of AdamW; return the loss before it."""
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
        """Return the output of inference as a NumPy array."""
        return self.backend.to_numpy(self.forward())

    def gradients(self) -> tuple[float, dict[str, np.ndarray]]:
        """Return the loss, and its gradients as NumPy arrays by dotted name."""
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
    """`Ours` with the steps of `train(compiled=True)`: each step launches one CUDA graph."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        shape, backend, self.state = self.shape, self.backend, None
        options: Any = {"eval_every": NEVER, "clip": None, "diverged": None}
        config = TrainConfig(NEVER, shape.batch, precision=shape.precision, **options)
        adamw = optim.Optimiser(optim.adamw_init, optim.adamw)
        arguments = start(self.params, config, adamw), self, config, backend
        options = {"optimiser": adamw, "schedule": lambda step: LR, "donate": True}
        self._steps = train(loss_of(shape.model), *arguments, compiled=True, **options)
        arrays = shape.data(backends.get("numpy"))
        self._batch = Batch(arrays, {}, arrays[-1].size, arrays[0].size)

    def batch(self, i: int) -> Batch:
        """Return the same batch for every step `i`; `train` calls it."""
        return self._batch

    def step(self) -> Any:
        """Run a step of AdamW; return the loss before it."""
        with self.context():
            step = next(self._steps)
        self.params = step.params
        return step.loss


class Jitted(Ours):
    """This library under `jax.jit`: forward, backward and step are each one compiled function."""

    def __init__(self, shape: Shape, weights: Any, backend: backends.Backend) -> None:
        super().__init__(shape, weights, backend)
        self.data = self.feed.batches[0].arrays
        import jax

        # On a GPU JAX's default precision rounds to TF32.
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
        # As training loops in JAX do: the new parameters and state reuse the memory of the old.
        self._step = jax.jit(step, donate_argnums=(0, 1))

    def forward(self) -> Any:
        """Return the loss or, for inference, the pooled hidden states; nothing is saved."""
        return self._forward(self.params, *self.data)

    def backward(self) -> tuple[Any, Any]:
        """Return the loss and its gradients."""
        loss, grads = self._backward(self.params, *self.data)
        return loss, grads

    def step(self) -> Any:
        """Run a step of AdamW; return the loss before it."""
        loss, self.params, self.state = self._step(self.params, self.state, *self.data)
        return loss


PROGRAM = "numba program"
GATE = (PEER, "numpy kernel", "numba kernel", PROGRAM)  # `benchmarks.gate`


def names() -> list[str]:
    """Return the names of all contestants, installed or not; the peer is first."""
    listed = list(TORCH)
    for name in backends.NAMES:
        if name != "array-api-strict":
            listed.append(f"{name} kernel")
        listed += [GRAPH, DETERMINISTIC] if name == "cupy" else []
        listed += [JITTED] if name == "jax" else []
        listed += [PROGRAM] if name == "numba" else []
        # Without kernels the backends on NumPy equal "numpy reference".
        listed += [f"{name} reference"] if name not in backends.ON_NUMPY else []
    return listed


def why_not(name: str) -> str | None:
    """Return why a contestant cannot run on this machine; None if it can."""
    if name in TORCH and importlib.util.find_spec("torch") is None:
        return f"{name}: torch is not installed"
    if name == CUDNN and not importlib.import_module("torch").cuda.is_available():
        return f"{name}: torch sees no CUDA device"
    if name == COMPILED and not os.environ.get("CXX") and not any(map(shutil.which, COMPILERS)):
        return f"{name}: there is no C++ compiler ({' or '.join(COMPILERS)})"
    if name in TORCH:
        return None
    lt = backends.beside("cupy").get("cuBLASLt") if name == GRAPH else None
    if lt is not None and not lt.isdigit():  # a version, or a reason; None without CuPy
        return f"{name}: products by cuBLAS cannot be captured, and {lt}"
    library, _, variant = name.rpartition(" ")
    why = backends.unavailable_reason(library)
    arrays = "numba" if library in backends.ON_NUMPY else library
    if why is not None:
        return f"{name}: {why}"
    if variant == "reference" or any(op.import_kernels(arrays) for op in dispatch.ops()):
        return None
    return f"{name}: backend {library} has no kernels"


def default(shape: Shape) -> list[str]:
    """Return the contestants that run by default: the fast ones that fit into memory.

    References and "jax kernel" (without `jax.jit`) are not among them: they show that results
    are right, not that they are fast.
    """
    slow = "jax kernel", CUDNN, DETERMINISTIC, PROGRAM
    fast = [n for n in names() if not n.endswith("reference") and n not in slow]
    if not shape.scores_fit:
        fast = [n for n in fast if n in (PEER, COMPILED, *(f"{n} kernel" for n in CPU))]
    return [name for name in fast if why_not(name) is None]


def make(name: str, shape: Shape, weights: Any) -> Contestant:
    """Return the contestant `name` with the initial `weights` of `shape`."""
    if name in TORCH:
        from benchmarks.eager import Eager

        return Eager(shape, weights, compiled=name == COMPILED, cudnn=name == CUDNN)
    library, _, variant = name.rpartition(" ")
    backend = backend_of(library, shape.device)
    if variant == "jit":
        return Jitted(shape, weights, backend)
    by_name: Any = {"reference": reference_only, "deterministic": backend.deterministic}
    by_name["graph"] = partial(capturing, shape.device)
    contestant, context = (
        Captured if variant == "graph" else Ours,
        by_name.get(variant, nullcontext),
    )
    if name == PROGRAM:
        from benchmarks.programs import Programs

        contestant = Programs
    contexts = [context]
    if library in backends.ON_NUMPY:
        contexts.append(backend.active)
    if shape.tf32:
        from xformer.backends.cupy import tf32

        contexts.append(tf32)
    return contestant(shape, weights, backend, partial(within, contexts))


@contextmanager
def within(contexts: Sequence[Callable[[], AbstractContextManager[None]]]) -> Iterator[None]:
    """Enter all contexts, in this order."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def backend_of(library: str, device: str | None) -> backends.Backend:
    """Return the backend of `library` for the device of a shape.

    device: STAND_IN gives CuPy's stand-in on the CPU. Another device applies to torch only; CuPy
    uses its current device, and JAX a GPU if it finds one.
    """
    if (library, device) == ("cupy", STAND_IN):
        sys.path.append(str(Path(__file__).parents[1] / "tests"))
        import cuda_shim

        return cuda_shim.backend()
    return backends.get(library, torch_device(device) if library == "torch" else None)


@contextmanager
def capturing(device: str | None) -> Iterator[None]:
    """Within this context, raise RuntimeWarning if a step cannot be captured as a CUDA graph.

    The library only warns about it. Other warnings stay warnings.
    device: of a shape; for STAND_IN, a stand-in of cuBLASLt computes the matmuls
    """
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("error", r"backend \S+: no graph: ", RuntimeWarning)
        if device == STAND_IN:
            import cuda_shim

            stack.enter_context(cuda_shim.calling(cuda_shim.CublasLt()))
        yield


def torch_device(device: str | None) -> str | None:
    """Return torch's device for the device of a shape: None for the stand-in."""
    return None if device == STAND_IN else device


def judge(shape: Shape, weights: Any) -> Contestant:
    """Return the float64 model that every contestant must agree with: see `judge_of`."""
    if judge_of(shape) == PEER:
        from benchmarks.eager import Judge

        return Judge(shape, weights)
    return Ours(shape, weights, backends.get("numpy"), reference_only, "float64")


def judge_of(shape: Shape) -> str:
    """Return the name of the judge: the peer, or NumPy's reference if the peer cannot judge.

    The peer cannot judge without torch, models of transformers (parts of them compute in float32
    whatever the dtype) and dropout (torch draws different masks).
    """
    peer_judges = shape.peer == EAGER and not shape.dropout and why_not(PEER) is None
    return PEER if peer_judges else "numpy reference"


def is_judged(name: str, shape: Shape) -> bool:
    """Whether `name` computes what the judge computes: with dropout torch draws other masks."""
    return not (shape.dropout and name in TORCH)
