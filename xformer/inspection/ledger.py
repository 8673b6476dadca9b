"""The memory of a training step, by component, and the measured peak.

memory = ledger(model, batch=8, length=128)
print(memory.peak, measured_peak(model, batch=8, length=128))

On backend numba a step is a program with one arena: `program_ledger`.

All numbers are bytes of NumPy arrays, without Python and its libraries. Each step donates its
states to the next step, as the commands do.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from xformer import backends, optim
from xformer.backends.numpy.stand_in import Tally
from xformer.backends.numpy.threads import forget_scratch, scratch_nbytes
from xformer.base import tree
from xformer.base.choices import require_one_of
from xformer.dispatch.checks import require_sizes
from xformer.dispatch.shapes import FLOATING
from xformer.inspection.measure import arguments, saved_by_part, step_loss, stood_in
from xformer.models import EncoderDecoder
from xformer.ops._loss import one
from xformer.optim import Optimiser
from xformer.training.batch import Batch
from xformer.training.compiled_step import CompiledSteps
from xformer.training.config import TrainConfig
from xformer.training.loop import start, train
from xformer.training.loss import Loss, loss_of, segment_loss_of
from xformer.training.state import State

# glibc's malloc keeps some of the freed large arrays, up to a fifth of the total. With this
# threshold it returns arrays of at least so many bytes to the system at once.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
STACKS = ("encoder", "decoder")
STEPS = 3  # measured steps; from the second on, all memory is allocated


class Ledger(NamedTuple):
    """The memory of a training step in bytes."""

    params: int
    state: int  # of the optimiser
    saved: dict[str, int]  # saved for backward by each part of the model
    loss_work: int  # peak temporaries of the backward of the loss and the head
    layer_work: int  # peak temporaries of the backward of a layer, without its gradients
    update_work: int  # peak temporaries of the optimiser, without the arrays that it overwrites
    scratch: int  # scratch memory that NumPy's kernels keep between calls
    early: int = 0  # bytes of gradients that the saved set already includes
    segment_memory: int = 0  # a full memory of a model with memory_len

    @property
    def grads(self) -> int:
        """The gradients of all parameters."""
        return self.params

    @property
    def backward(self) -> int:
        """The peak of a loss and its backward. The cache is kept until backward ends."""
        work = max(self.loss_work, self.grads - self.early + self.layer_work)
        memories = 2 * self.segment_memory  # before the step and after it
        return self.params + self.state + memories + sum(self.saved.values()) + work

    @property
    def update(self) -> int:
        """The peak during the optimiser's update. Clipping overwrites the gradients."""
        memories = 2 * self.segment_memory
        return self.params + self.state + memories + self.grads + self.update_work

    @property
    def peak(self) -> int:
        """The peak of a step."""
        return max(self.backward, self.update) + self.scratch


class ProgramLedger(NamedTuple):
    """The bytes of a training step that is a program."""

    params: int  # overwritten by each step
    state: int  # of the optimiser; overwritten by each step
    arena: int  # gradients, arrays saved for backward, and other temporaries
    inputs: int  # a batch and its numbers
    scratch: int  # scratch memory of threads for matmuls

    @property
    def peak(self) -> int:
        """The peak of a step; the program itself takes some MB more of Python's memory."""
        return sum(self)


def ledger(
    model: Any,
    *,
    batch: int,
    length: int,
    dtype: str = "float32",
    optimiser: str = "adamw",
) -> Ledger:
    """The memory of a training step on `batch` sequences of `length` tokens.

    Dropout is as configured. A model with memory_len reads a segment of `length` tokens after a
    full memory, as in `training.segment_loss_of`. Parameters, state and saved set are computed
    without allocating them. The temporaries of ops are measured, on a model of one layer with the
    embedding and the head.

    ValueError for sizes below 1, another dtype or optimiser, and a model without a loss.
    """
    batch, length = _sizes(model, batch, length, dtype, optimiser)
    pair = TrainConfig(steps=1, optimiser=optimiser).chosen_optimiser()
    params = stood_in(model, dtype, Tally())
    forget_scratch()
    work = [_backward_work(cut, batch, length, dtype) for cut in _one_layer_of_each(model)]
    loss_work, layer_work, early = (max(kind) for kind in zip(*work, strict=True))
    update_work = _update_work(model, dtype, pair, tree.nbytes(params))
    n_remembered = 0  # tokens of the segment memory
    if not isinstance(model, EncoderDecoder) and model.memory_len is not None:
        n_remembered = len(model.blocks) * batch * model.memory_len
    return Ledger(
        tree.nbytes(params),
        tree.nbytes(pair.init(params)),
        saved_by_part(model, batch, length, dtype),
        loss_work,
        layer_work,
        update_work,
        scratch_nbytes(),
        early,
        n_remembered * model.blocks[0].d_model * np.dtype(dtype).itemsize,
    )


def measured_peak(
    model: Any,
    *,
    batch: int,
    length: int,
    dtype: str = "float32",
    optimiser: str = "adamw",
) -> int | None:
    """The measured peak in bytes of a few steps of `training.train` in a new process.

    The memory of the process before the steps is subtracted. Its malloc returns freed arrays to the
    system at once. None if the system does not report the memory (outside Linux).

    batch, length: the number of sequences, and the tokens of each.

    ValueError for sizes below 1, another dtype or optimiser, and a model without a loss.
    RuntimeError if the process fails.
    """
    batch, length = _sizes(model, batch, length, dtype, optimiser)
    model = replace(model, hf_config=None)
    task = pickle.dumps((model, batch, length, dtype, optimiser))
    command = [sys.executable, "-m", "xformer.inspection.ledger"]
    done = subprocess.run(command, input=task, env=os.environ | MALLOC, capture_output=True)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise RuntimeError(f"measured_peak: the process that trains failed: {last}")
    peak: int | None = pickle.loads(done.stdout)
    return peak


def program_ledger(
    model: Any,
    *,
    batch: int,
    length: int,
    dtype: str = "float32",
    optimiser: str = "adamw",
) -> ProgramLedger:
    """The memory of a step of `training.train` on backend numba, with donated states.

    The step is recorded but not run, for the number of threads of NumPy's BLAS. Parameters and
    state take no memory.

    batch, length: the number of sequences, and the tokens of each.

    ValueError for sizes below 1, another dtype or optimiser, and a model without a loss. Unusable
    without numba. TypeError for a step that cannot be recorded.
    """
    if (why := backends.unavailable_reason("numba")) is not None:
        raise backends.Unusable(why)
    batch, length = _sizes(model, batch, length, dtype, optimiser)
    config = TrainConfig(steps=1, optimiser=optimiser)
    pair = config.chosen_optimiser()
    like = stood_in(model, dtype, Tally())

    def unmade(leaf: Any) -> Any:  # the system allocates the memory of zeros when it is accessed
        return np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, np.ndarray) else leaf

    params, state = tree.map(unmade, (like, pair.init(like)))
    first = Same(arguments(model, batch, length, dtype)[1]).batch(0)
    steps = CompiledSteps(loss_of(model), config, backends.get("numpy"), pair, None)
    program, inputs = steps.recorded(State(params, state, None), [first], 1e-3)
    sizes = tree.nbytes(params), tree.nbytes(state)
    input_bytes = sum(x.nbytes for x in inputs) - sum(sizes)
    return ProgramLedger(*sizes, program.plan.nbytes, input_bytes, program.scratch_nbytes)


def _sizes(model: Any, batch: int, length: int, dtype: str, optimiser: str) -> tuple[int, ...]:
    """batch and length as ints. Raises as `ledger` does."""
    sizes = require_sizes("ledger", 1, batch=batch, length=length)
    if dtype not in FLOATING:
        raise ValueError(f"ledger: dtype must be {' or '.join(FLOATING)}, got {dtype!r}")
    require_one_of("ledger: optimiser", optimiser, optim.OPTIMISERS)
    if arguments(model, 1, 1, dtype)[1] is None:
        raise ValueError(f"ledger: the model must have a loss, got {model!r:.60}")
    return sizes


def _one_layer_of_each(model: Any) -> Iterator[Any]:
    """Copies of `model` with one layer, one copy for each kind of layer."""
    if isinstance(model, EncoderDecoder):
        kinds = (dict.fromkeys(model.encoder), dict.fromkeys(model.decoder))
        first = model.encoder[0], model.decoder[0]
        for pair in zip_longest(*kinds):
            encoder, decoder = (layer or usual for layer, usual in zip(pair, first, strict=True))
            yield replace(model, encoder=(encoder,), decoder=(decoder,))
    else:
        for i in _kinds(model):
            routed = {"load_balancing_weight": 0.0, "router_z_weight": 0.0}
            changes = {} if model.blocks[i].experts else routed
            yield model.with_layers([i], n_shared_layer_groups=None, **changes)


def _kinds(model: Any) -> list[int]:
    """The first layer of each kind: with other options of the block, or another RoPE."""
    rotary = model.rotary if isinstance(model.rotary, tuple) else (model.rotary,)
    first: dict[Any, int] = {}
    for i, config in enumerate(model.blocks):
        first.setdefault((config, rotary[i % len(rotary)]), i)
    return list(first.values())


def _backward_work(model: Any, batch: int, length: int, dtype: str) -> tuple[int, int, int]:
    """loss_work, layer_work and early of a `Ledger`, for a model of one layer."""
    params = model.init(0, "numpy", dtype)
    _, examples = arguments(model, batch, length, dtype)
    step_loss(model, params, examples)[1].backward()  # allocates the scratch memory
    with _traced():
        loss, cache = step_loss(model, params, examples)
        cached = getattr(cache, "tokens", cache).model  # the router losses need hardly any memory
        top, at_loss = _peak(getattr(cached, "decode", cached).head.backward, one(loss))
        done = SimpleNamespace(backward=lambda dloss: top)  # a backward that starts after the head
        if hasattr(cached, "decode"):
            cached = cached._replace(decode=cached.decode._replace(head=done))
        else:
            cached = cached._replace(head=done)
        grads, at_layer = _peak(cached.backward, one(loss))
        new = tree.nbytes(grads) - (early := _held_bytes(grads, cache))
        return at_loss, at_layer + tree.nbytes(top) - _held_bytes(top, cache) - new, early


def _update_work(model: Any, dtype: str, optimiser: Optimiser, n_bytes: int) -> int:
    """update_work of a `Ledger`, for `n_bytes` of parameters.

    Some optimisers need temporaries for one parameter at a time, some for all together, and some
    return new arrays. So it is extrapolated from models with one and two layers of each kind.
    """
    sizes, work = [], []
    for times in (1, 2):
        params = _shortened(model, times).init(0, "numpy", dtype)
        state, grads = optimiser.init(params), tree.map(np.zeros_like, params)
        step = partial(optimiser.step, lr=1e-3, donate=True)
        params, state = step(params, grads, state)  # allocates the scratch memory
        with _traced():
            new, most = _peak(step, params, grads, state)
        sizes.append(tree.nbytes(params))
        work.append(most)
        del params, state, grads, new
    slope = (work[1] - work[0]) / (sizes[1] - sizes[0])
    return work[0] + max(int(slope * (n_bytes - sizes[0])), 0)


def _shortened(model: Any, times: int) -> Any:
    """A copy of `model` with each kind of its layers, `times` times."""
    if isinstance(model, EncoderDecoder):
        kinds = [tuple(dict.fromkeys(getattr(model, name))) * times for name in STACKS]
        return replace(model, encoder=kinds[0], decoder=kinds[1])
    return model.with_layers(_kinds(model) * times, n_shared_layer_groups=None)


@contextmanager
def _traced() -> Iterator[None]:
    """A context in which allocations are counted."""
    tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        yield
    finally:
        if not tracing:
            tracemalloc.stop()


def _peak(step: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """The result of a step, and its peak in bytes."""
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    result = step(*args)
    return result, tracemalloc.get_traced_memory()[1] - before


def _held_bytes(grads: Any, cache: Any) -> int:
    """Bytes of the gradients that share memory with the cache."""
    held = [a for a in tree.flatten(cache).values() if isinstance(a, np.ndarray)]
    arrays = tree.flatten(grads).values()
    return tree.nbytes([g for g in arrays if any(np.may_share_memory(g, a) for a in held)])


class Same:
    """A source for `training.train` that always returns the same batch."""

    def __init__(self, arrays: tuple[np.ndarray, ...]) -> None:
        self.only = Batch(arrays, {}, arrays[-1].size, arrays[-1].size)

    def batch(self, i: int) -> Any:
        """The batch, for every i."""
        return self.only


def step_loss_of(model: Any) -> Loss:
    """The loss that the ledger is about: after a segment memory, if the model has a memory_len."""
    is_plain = getattr(model, "memory_len", None) is None
    return loss_of(model) if is_plain else segment_loss_of(model)


def steps_of(model: Any, length: int) -> int:
    """The steps to measure: the last ones have a full segment memory."""
    return STEPS + -(-(getattr(model, "memory_len", None) or 0) // length)


def _measure(model: Any, batch: int, length: int, dtype: str, optimiser: str) -> int | None:
    """The peak of training minus the memory before it, for a process that does nothing else."""
    backend = backends.get("numpy")

    def trained(model: Any, batch: int, length: int, steps: int) -> None:
        config = TrainConfig(steps=steps, batch_size=batch, optimiser=optimiser)
        source = Same(arguments(model, batch, length, dtype)[1])
        loss = step_loss_of(model)
        # The first state gets no name here, as a name would keep it until the end.
        for _ in train(
            loss,
            start(model.init(0, "numpy", dtype), config, loss=loss),
            source,
            config,
            backend,
            donate=True,
        ):
            pass

    trained(next(_one_layer_of_each(model)), 1, 1, 1)  # imports what is imported lazily
    before = backend.memory().in_use
    trained(model, batch, length, steps_of(model, length))
    peak = backend.memory().peak
    return None if before is None or peak is None else peak - before


if __name__ == "__main__":
    sys.stdout.buffer.write(pickle.dumps(_measure(*pickle.load(sys.stdin.buffer))))
