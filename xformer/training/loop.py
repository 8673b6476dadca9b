"""The training loop, for any loss and any backend."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from xformer import backends, inference, ops, optim
from xformer.backends import Backend
from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.compiling import Forward
from xformer.distributed.world import Alone, World
from xformer.generation.prefix import backend_of_params
from xformer.models.precision import require_reducible
from xformer.optim import LossScale, Optimiser, Schedule
from xformer.optim.accumulate import shares, weighted
from xformer.optim.loss_scale import Scaled
from xformer.training.batch import Batch, as_batch
from xformer.training.compiled_step import CompiledSteps, Reduce, why_not_compiled
from xformer.training.config import TrainConfig
from xformer.training.diverged import Diverged, is_finite, quiet, require_sound
from xformer.training.loss import ArrayLoss, Loss, SegmentLoss
from xformer.training.state import State

KEPT = 8  # losses whose programs are kept
MEMORY = 0.95  # decay of the running mean of losses: about twenty steps


class Batches(Protocol):
    """A provider of batches. Every `Source` is one."""

    def batch(self, i: int, /) -> Batch | tuple[np.ndarray, ...]:
        """Batch number i of an endless sequence.

        A tuple of arrays is a Batch without masks; all elements of the last array are targets.
        """


class Step(NamedTuple):
    """The results of a training step."""

    step: int  # from 1
    loss: float  # nats per target of its batches
    norm: float  # of the gradients, before clipping
    lr: float
    tokens: int  # read since the start
    seconds: float  # since the start, with validation
    memory: int | None  # peak memory in bytes; None if the system does not report it
    validation: float | None  # nats per target; None if it was not measured
    state: State  # after the step; if states are donated, valid until the next step
    processes: int = 1  # that made the step together
    measures: Mapping[str, float] | None = None  # of a validation, beside the loss

    @property
    def params(self) -> Any:
        """All parameters after the step."""
        return self.state.params


def start(
    params: Any,
    config: TrainConfig,
    optimiser: Optimiser | None = None,
    loss: Loss | None = None,
) -> State:
    """The state before the first step.

    optimiser: None: the optimiser of config
    loss: needed if it is a `segment_loss_of(model)`: the state then has an empty segment memory
    ValueError if all parameters are frozen, and for a precision that their backend does not have.
    """
    trained = tree.trained(params)
    if not tree.flatten(trained):
        raise ValueError("train: all parameters are frozen")
    optimiser = optimiser or config.chosen_optimiser()
    backend = backend_of_params(trained)
    if config.precision is not None:
        backend.require_precision(config.precision)
    with backend.active():
        optimiser_state = optimiser.init(trained)
    scale = LossScale() if config.precision == "float16" else None
    average = None if config.ema is None else trained
    state = State(params, optimiser_state, average, loss_scale=scale)
    if isinstance(loss, SegmentLoss):
        with backend.active():
            state = state._replace(memory=loss.model.init_memory(params, config.batch_size))
    return state


def train(
    loss: Loss,
    state: State,
    source: Batches,
    config: TrainConfig,
    backend: str | Backend,
    *,
    held_out: Iterable[Batch | tuple[np.ndarray, ...]] = (),
    optimiser: Optimiser | None = None,
    schedule: Schedule | None = None,
    donate: bool = False,
    deterministic: bool = False,
    compiled: bool | None = None,
    reduce: Reduce | None = None,
    world: World | None = None,
) -> Iterator[Step]:
    """Yield a `Step` after each training step. A generator: each `next` runs one step.

    It ends after step config.steps, or after config.patience validations in a row without a lower
    loss. Diverged ends it too. Validation uses the moving average of the weights if there is one.

    A state determines everything after it: resumed from it, training gives the same losses, bit for
    bit on NumPy, up to rounding on every backend. A device is synchronised once a step, for loss
    and norm, after all work of the step has been started.

    loss: what to minimise, such as `loss_of(model)`
    state: of `start`, or of a checkpoint
    source: the batches: a `Source`, or an object with a method batch(i) (`Batches`)
    config: steps, gradient accumulation, clipping, validation, precision (`TrainConfig`)
    backend: the backend to train on, which holds the arrays of state
    held_out: batches to validate on, every config.eval_every steps and after the last step
    optimiser, schedule: used instead of the ones in config
    donate: the next step may overwrite the arrays of a state, and so needs no memory for a second
        one. Copy what you need later. Nothing else may refer to these arrays. On a device, a step
        that raises Diverged may have overwritten its state.
    deterministic: the same bits on every device (`Backend.deterministic`), which may be slower
    compiled: compile the step (`xformer.compile`). True: a RuntimeWarning says why if it is not
        possible; it needs donate. None: compiled if numba's kernels run in float32, states are
        donated, reduce is None and the process is alone.
    world: the processes that train together (`xformer.world`); None: this one alone. Each has the
        same arguments and computes the same number of whole batches of each step. The steps are
        those of one process: bit for bit if config.accumulate / world.size is a power of two and
        each process has as many threads, otherwise up to rounding. All processes yield the same
        steps, except for seconds and memory.
    reduce: instead of world, for an engine of your own: a function that averages gradients over
        processes, called once a step (`optim.reduced`). Each process has its own batches, of
        equally many targets, the same first state, and for dropout its own config.seed. Loss and
        tokens are those of the process alone, which may raise Diverged alone.

    With config.accumulate, a step has the gradients of one large batch, up to rounding; but each
    batch has its own dropout masks. With config.precision, weights are rounded once a step, and the
    state stays float32. If gradients overflow float16, the step is repeated with the next batches
    and a lower loss scale.

    Diverged if the loss or a gradient is not finite, or the loss has grown too much. ValueError for
    compiled without donate, for a loss with a segment memory if the state has none, for a model
    that cannot be trained in config.precision, and if the processes cannot share the batches of a
    step (`require_shares`).
    """
    if not callable(getattr(source, "batch", None)):
        raise TypeError(
            f"train: source must have a method batch(i), such as training.Windows, "
            f"got {type(source).__name__}"
        )
    require_reducible("train", getattr(loss, "model", None), config.precision)
    world, backend = world or Alone(), backends.get(backend)
    require_shares(config, world, loss)
    if reduce is not None and world.size > 1:
        raise ValueError("train: world and reduce exclude each other")
    if isinstance(loss, SegmentLoss) != (state.memory is not None):
        raise ValueError(
            "train: a loss with a segment memory and a state with one need each other: "
            "start(params, config, loss=loss)"
        )
    optimiser = optimiser or config.chosen_optimiser()
    schedule = schedule or config.learning_rate()
    held_out = list(held_out) if isinstance(held_out, Iterator) else held_out
    if compiled and not donate:
        raise ValueError("train: compiled steps write over their states: they need donate=True")
    step: Any = _Steps(loss, source, config, backend, optimiser, donate, reduce, world)
    dtypes = {leaf.dtype for leaf in tree.flatten(tree.trained(state.params)).values()}
    is_default = donate and reduce is None and world.size == 1
    is_default = is_default and all(map(backend.records, dtypes))
    if is_default if compiled is None else compiled:
        why = why_not_compiled(loss, config, backend, world)
        if why is None:
            calls = CompiledSteps(loss, config, backend, optimiser, reduce)
            step = partial(_compiled, calls, source, config)
        elif compiled:
            warnings.warn(f"train: steps are not compiled: {why}", RuntimeWarning, stacklevel=2)
    begun = time.perf_counter() - state.seconds
    if donate and state.ema is not None:  # initially it may be the parameters themselves
        with backend.active():
            copied = tree.map(lambda a: array_namespace(a).asarray(a, copy=True), state.ema)
            state = state._replace(ema=copied)
    while state.step < config.steps and not is_stale(state, config):
        lr = schedule(state.step + 1)
        with (
            backend.active(),
            backend.deterministic() if deterministic else nullcontext(),
            quiet(),
        ):
            state, value, norm = step(state, lr)
        validation = None
        if state.step % config.eval_every == 0 or state.step == config.steps:
            with backend.active():
                weights = backend.cast_params(state.averaged, config.precision)
            options: Any = {"compiled": compiled, "world": world}
            validation = evaluate(loss, weights, held_out, backend, **options)
            del weights
            state = _judged(state, validation)
        state = state._replace(seconds=time.perf_counter() - begun)
        numbers = state.tokens, state.seconds, backend.memory().peak
        yield Step(state.step, value, norm, lr, *numbers, validation, state, world.size)


def evaluate(
    loss: Loss,
    params: Any,
    batches: Iterable[Batch | tuple[np.ndarray, ...]],
    backend: str | Backend,
    *,
    compiled: bool | None = None,
    world: World | None = None,
) -> float | None:
    """The mean loss in nats over the targets of all batches, without dropout.

    A segment memory is empty at first.

    The result is None if the batches have no targets.

    compiled: False: never. None or True: an `ArrayLoss` is compiled if the backend records programs
        (`Backend.records`)
    world: all its processes call this with the same batches. Each computes every n-th batch, n the
        number of processes, and all return the same bits as one process. ValueError for a loss with
        a segment memory, whose batches cannot be shared.
    """
    world, backend = world or Alone(), backends.get(backend)
    _require_independent("evaluate", loss, world)
    sums: list[float] = []  # of the losses of the targets of this process's batches
    count, memory = 0, None
    for i, each in enumerate(batches):
        batch = as_batch(f"evaluate: held-out batch {i}", each)
        count += batch.n_targets
        if i % world.size != world.rank:
            continue
        with backend.active(), inference():
            if isinstance(loss, SegmentLoss):
                mean, _, memory = loss.after(memory, params, batch, backend)
            elif isinstance(loss, ArrayLoss) and compiled is not False:
                inputs = tree.map(backend.asarray, loss.inputs(batch))
                mean = _forward(loss)(params, inputs)
            else:
                mean, _ = loss(params, batch, backend)
            sums.append(float(backend.to_numpy(mean)) * batch.n_targets)
    of_all = itertools.zip_longest(*world.gather(sums))  # in the order of the batches
    total = 0.0
    for x in itertools.chain.from_iterable(of_all):
        total += 0.0 if x is None else x  # not sum(), whose rounding differs with Python's version
    return total / count if count else None


def require_shares(config: TrainConfig, world: World, loss: Loss | None = None) -> None:
    """ValueError unless the processes of `world` can share the batches of a step.

    Each takes the same number of whole batches. A loss with a segment memory reads each batch after
    the one before, which cannot be shared.
    """
    _require_independent("train", loss, world)
    if config.accumulate % world.size == 0:
        return
    hint = f"the number of batches a step must be a multiple of {world.size}"
    each, rest = divmod(config.batch_size * config.accumulate, world.size)
    if rest == 0:
        hint = f"{world.size} batches of {each} are the same step (batch {each}, accumulate "
        hint += f"{world.size})"
    batches = "1 batch" if config.accumulate == 1 else f"{config.accumulate} batches"
    raise ValueError(
        f"train: {batches} a step cannot be shared by {world.size} processes, which take whole "
        f"batches: {hint}"
    )


def _require_independent(what: str, loss: Loss | None, world: World) -> None:
    if isinstance(loss, SegmentLoss) and world.size > 1:
        raise ValueError(
            f"{what}: {world.size} processes cannot share the batches of a model with a segment "
            "memory: each batch is read after the one before"
        )


@lru_cache(KEPT)
def _forward(loss: ArrayLoss) -> Forward:
    """The mean loss of a batch's inputs, compiled for each shape."""

    def mean(params: Any, inputs: Any) -> Array:
        return loss.of(params, inputs, None)[0]

    return Forward(mean)


def is_stale(state: State, config: TrainConfig) -> bool:
    """Whether config.patience validations have not improved."""
    return config.patience is not None and state.stale >= config.patience


@dataclass(frozen=True)
class _Steps:
    """The steps of `train` that are not compiled. The fields are its arguments."""

    loss: Loss
    source: Batches
    config: TrainConfig
    backend: Backend
    optimiser: Optimiser
    donate: bool
    reduce: Reduce | None
    world: World

    def __call__(self, state: State, lr: float) -> tuple[State, float, float]:
        """The state after a step, its loss and its gradient norm. Diverged if training diverged."""
        state, value, grads = self._gradients(state)
        clip = math.inf if self.config.clip is None else self.config.clip
        clipped, norm = optim.clip_by_global_norm(grads, max_norm=clip, donate=self.donate)

        def checked() -> tuple[float, float]:
            both = array_namespace(value, norm).stack([value, norm])  # one synchronisation
            loss_number, norm_number = self.backend.to_numpy(both).tolist()
            with_loss = _with_loss(state, loss_number)
            require_sound(with_loss, loss_number, norm_number, grads, self.config, lr)
            return loss_number, norm_number

        # If reading synchronises, all work is started first, and a donated state may be lost.
        numbers = None if self.backend.defers else checked()
        params, options = tree.trained(state.params), {"lr": lr, "donate": self.donate}
        trained, optimiser_state = self.optimiser.step(params, clipped, state.optimiser, **options)
        average = state.ema
        if self.config.ema is not None:
            average = optim.ema(average, trained, decay=self.config.ema, donate=self.donate)
        loss_number, norm_number = numbers or checked()
        new = _after(state, loss_number, trained, optimiser_state, average)
        return new, loss_number, norm_number

    def _gradients(self, state: State) -> tuple[State, Array, Any]:
        """The state after the batches of a step, their loss and its gradients.

        If gradients overflow, the next batches are used with a lower loss scale.
        """
        weights = self.backend.cast_params(state.params, self.config.precision)
        while True:
            state, value, grads = self._accumulated(state, weights)
            # Before the test of finite gradients, so that all processes agree.
            if self.reduce is not None:
                grads = optim.reduced(grads, self.reduce)
            if state.loss_scale is None:
                return state, value, grads
            grads, finite = state.loss_scale.unscale(grads, tree.trained(state.params))
            # No scale makes this loss finite. With reduce, a process must not stop alone.
            if not finite and self.reduce is None and not is_finite(value):
                return state, value, grads
            try:
                state = state._replace(loss_scale=state.loss_scale.update(finite))
            except FloatingPointError as error:
                raise Diverged(f"step {state.step + 1}: {error}") from error
            if finite:
                return state, value, grads

    def _accumulated(self, state: State, weights: Any) -> tuple[State, Array, Any]:
        """The state after the next batches, their loss, and its gradients times the loss scale.

        Loss and gradients are those of the batches of all processes.
        """
        loss, config, world = self.loss, self.config, self.world
        n = config.accumulate // world.size
        numbers = range(state.batches, state.batches + config.accumulate)
        numbers = numbers[world.rank * n : (world.rank + 1) * n]  # of this process
        batches = _batches(self.source, numbers)
        counts = (sum(b.n_targets for b in batches), sum(b.n_tokens for b in batches))
        n_targets, n_tokens = world.sums(*counts)
        scale, memory = state.loss_scale, state.memory

        def one(params: Any, i: int) -> tuple[Array, Any]:
            nonlocal memory
            # The dropout mask depends on the number of the batch in the run, not on the step.
            key = ops.RandomKey(config.seed, step=numbers[i] + 1)
            if isinstance(loss, SegmentLoss):
                value, cache, memory = loss.after(memory, params, batches[i], self.backend, key)
            else:
                value, cache = loss(params, batches[i], self.backend, key)
            return value, cache if scale is None else Scaled(cache, scale.scale)

        value, grads = weighted(one, weights, shares(batches, n_targets))
        if world.size > 1:
            value, grads = optim.reduced((value, grads), world.all_reduce)
        after = state.batches + config.accumulate
        state = state._replace(batches=after, tokens=state.tokens + n_tokens, memory=memory)
        return state, value, grads


def _compiled(
    calls: CompiledSteps, source: Batches, config: TrainConfig, state: State, lr: float
) -> tuple[State, float, float]:
    """A step of `_Steps` by a compiled call."""
    numbers = range(state.batches, state.batches + config.accumulate)
    batches = _batches(source, numbers)
    new, (loss, norm), grads = calls(state, batches, lr)
    tokens = state.tokens + sum(batch.n_tokens for batch in batches)
    state = state._replace(batches=numbers.stop, tokens=tokens)
    require_sound(_with_loss(state, loss), loss, norm, grads, config, lr)
    return _after(state, loss, *new), loss, norm


def _batches(source: Batches, numbers: Iterable[int]) -> list[Batch]:
    return [as_batch(f"train: source.batch({i})", source.batch(i)) for i in numbers]


def _after(state: State, loss: float, trained: Any, optimiser: Any, average: Any) -> State:
    """The state after a step with this loss, these parameters and this optimiser state."""
    params = tree.join(state.params, trained)
    state = _with_loss(state, loss)._replace(params=params, optimiser=optimiser, ema=average)
    return state._replace(step=state.step + 1)


def _with_loss(state: State, loss: float) -> State:
    if state.step == 0:
        return state._replace(first=loss, mean=loss)
    return state._replace(mean=MEMORY * state.mean + (1 - MEMORY) * loss)


def _judged(state: State, validation: float | None) -> State:
    if validation is None:
        return state
    if not math.isfinite(validation):
        raise Diverged(
            f"the validation loss after step {state.step} is {validation}, the recent mean "
            f"training loss {state.mean:.3g}"
        )
    if validation < state.best:
        return state._replace(best=validation, best_step=state.step, stale=0)
    return state._replace(stale=state.stale + 1)
