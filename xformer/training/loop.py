"""The training loop: any loss, any backend."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from array_api_compat import array_namespace

from xformer import inference, ops, optim, tree
from xformer.backends import Backend
from xformer.compiling import Forward
from xformer.generation.prefix import place_of
from xformer.optim import LossScale, Optimiser, Schedule
from xformer.optim.loss_scale import Scaled
from xformer.training.batch import Batch
from xformer.training.compiled import CompiledSteps, Reduce, why_not_compiled
from xformer.training.config import TrainConfig
from xformer.training.diverged import Diverged, is_finite, require_sound
from xformer.training.loss import ArrayLoss, Loss
from xformer.training.state import State
from xformer.typing import Array

KEPT = 8  # losses whose programs are kept
MEMORY = 0.95  # of the running mean of losses: about twenty steps


class Batches(Protocol):
    """Where batches come from: every `Source` is such."""

    def batch(self, i: int, /) -> Batch:
        """Batch 0, 1, 2, ... without end."""


class Step(NamedTuple):
    """What a training step reports."""

    step: int  # from 1
    loss: float  # nats per target of its batches
    norm: float  # of the gradients, before clipping
    lr: float
    tokens: int  # seen since the start
    seconds: float  # since the start, validation included
    memory: int | None  # bytes at most so far; None where the system does not tell
    validation: float | None  # nats per target, where it was measured
    state: State  # after the step; where states are donated, until the next is asked for

    @property
    def params(self) -> Any:
        """All parameters after the step."""
        return self.state.params


def start(params: Any, config: TrainConfig, optimiser: Optimiser | None = None) -> State:
    """The state before the first step; optimiser: unless given, the one of config.

    ValueError where all parameters are frozen, and for a precision that their backend has not.
    """
    trained = tree.trained(params)
    if not tree.flatten(trained):
        raise ValueError("train: all parameters are frozen")
    optimiser = optimiser or config.chosen_optimiser()
    place = place_of(trained)
    if config.precision is not None:
        place.require_precision(config.precision)
    with place.active():
        own = optimiser.init(trained)
    scale = LossScale() if config.precision == "float16" else None
    return State(params, own, None if config.ema is None else trained, loss_scale=scale)


def train(
    loss: Loss,
    state: State,
    source: Batches,
    config: TrainConfig,
    place: Backend,
    *,
    held_out: Iterable[Batch] = (),
    optimiser: Optimiser | None = None,
    schedule: Schedule | None = None,
    donate: bool = False,
    deterministic: bool = False,
    compiled: bool | None = None,
    reduce: Reduce | None = None,
) -> Iterator[Step]:
    """Yields a `Step` after each step that is left of config.steps, or of its patience.

    held_out: batches to validate on, every config.eval_every steps and after the last.
    optimiser, schedule: in the place of those of config, for what it has no words for. A state
    decides all that follows it: the same losses come after it whenever it is gone on from, bit for
    bit on NumPy, and to rounding on every backend. deterministic: bit for bit on every device, see
    `Backend.deterministic`, which may take longer. Raises Diverged, and nothing after it is done.

    donate: the given state, and that of each step, may be written over by the next step, which then
    needs no memory for another: copy what is to outlive it. Nothing else may hold their arrays. So
    may, on a device, the step that turns out to be Diverged.

    A device is waited for once a step, when all of it is under way, for its loss and norm.

    compiled: a step is one call of the library where that can be (`xformer.compile`); a
    RuntimeWarning says where it cannot, and nothing else changes. ValueError without `donate`.
    Unless given, they are in float32 on backend numba, where that can be, states are donated and
    nothing is reduced.

    reduce: data-parallel, what several processes do to their gradients, once a step: their mean,
    see `optim.reduced`. Each has its own batches, of as many targets, and the same state at first;
    a step's norm is then that of the mean, its loss and tokens are those of the process, which by
    its own loss may be Diverged: end the others with it, as `python -m mpi4py` does.

    A step of config.accumulate batches is one of the big batch that they make, to rounding, where
    there is no dropout; each batch draws masks of its own, so that with dropout it is another one.

    In a precision (config.precision) weights are rounded once a step, and for validation; what is
    in the state stays float32. Where gradients overflow float16, the step is made of the next
    batches, with a lower scale of the loss.
    """
    optimiser = optimiser or config.chosen_optimiser()
    schedule = schedule or config.learning_rate()
    held_out = list(held_out) if isinstance(held_out, Iterator) else held_out
    if compiled and not donate:
        raise ValueError("train: compiled steps write over their states: they need donate=True")
    calls = None
    dtypes = {leaf.dtype for leaf in tree.flatten(tree.trained(state.params)).values()}
    usual = donate and reduce is None and all(map(place.records, dtypes))
    if usual if compiled is None else compiled:
        why = why_not_compiled(loss, config, place)
        if why is None:
            calls = CompiledSteps(loss, config, place, optimiser, reduce)
        elif compiled:
            warnings.warn(f"train: steps are not compiled: {why}", RuntimeWarning, stacklevel=2)
    begun = time.perf_counter() - state.seconds
    if donate and state.ema is not None:  # at first it may be the parameters themselves
        with place.active():
            state = state._replace(ema=tree.map(_copy, state.ema))
    while state.step < config.steps and not is_stale(state, config):
        lr = schedule(state.step + 1)
        with place.active(), place.deterministic() if deterministic else nullcontext():
            if calls is None:
                given = source, config, place, optimiser, lr, donate, reduce
                state, value, norm = _step(loss, state, *given)
            else:
                state, value, norm = _compiled(calls, state, source, config, lr)
        validation = None
        if state.step % config.eval_every == 0 or state.step == config.steps:
            with place.active():
                weights = place.cast_params(state.averaged, config.precision)
            validation = evaluate(loss, weights, held_out, place, compiled=compiled)
            del weights
            state = _judged(state, validation)
        state = state._replace(seconds=time.perf_counter() - begun)
        memory = place.memory().peak
        yield Step(
            state.step, value, norm, lr, state.tokens, state.seconds, memory, validation, state
        )


def evaluate(
    loss: Loss,
    params: Any,
    batches: Iterable[Batch],
    place: Backend,
    *,
    compiled: bool | None = None,
) -> float | None:
    """Mean loss in nats over the targets of all batches, without dropout; None without batches.

    The loss is called within `inference()`. compiled: False leaves programs out; unless given,
    batches of one shape are runs of one, where that pays (`Backend.records`).
    """
    total, count = 0.0, 0
    for batch in batches:
        with place.active(), inference():
            if isinstance(loss, ArrayLoss) and compiled is not False:
                inputs = tree.map(place.asarray, loss.inputs(batch))
                mean = _forward(loss)(params, inputs)
            else:
                mean, _ = loss(params, batch, place)
            total += float(place.to_numpy(mean)) * batch.n_targets
        count += batch.n_targets
    return total / count if count else None


@lru_cache(KEPT)
def _forward(loss: ArrayLoss) -> Forward:
    """The mean loss of inputs."""

    def mean(params: Any, inputs: Any) -> Array:
        return loss.of(params, inputs, None)[0]

    return Forward(mean)


def is_stale(state: State, config: TrainConfig) -> bool:
    """Whether validation has not improved for too long."""
    return config.patience is not None and state.stale >= config.patience


def _step(
    loss: Loss,
    state: State,
    source: Batches,
    config: TrainConfig,
    place: Backend,
    optimiser: Optimiser,
    lr: float,
    donate: bool,
    reduce: Reduce | None,
) -> tuple[State, float, float]:
    """The state after a step, its loss and the norm of its gradient."""
    state, value, grads = _gradients(loss, state, source, config, place, reduce)
    clip = math.inf if config.clip is None else config.clip
    clipped, norm = optim.clip_by_global_norm(grads, max_norm=clip, donate=donate)

    def sound() -> tuple[float, float]:
        found, size = _read(value, norm, place)
        require_sound(_with_loss(state, found), found, size, grads, config, lr)
        return found, size

    # Where reading is waiting, all work is begun first, and a donated state may be lost.
    read = None if place.defers else sound()
    options = {"lr": lr, "donate": donate}
    trained, own = optimiser.step(tree.trained(state.params), clipped, state.optimiser, **options)
    average = state.ema
    if config.ema is not None:
        average = optim.ema(average, trained, decay=config.ema, donate=donate)
    found, size = read or sound()
    return _after(state, found, trained, own, average), found, size


def _compiled(
    calls: CompiledSteps, state: State, source: Batches, config: TrainConfig, lr: float
) -> tuple[State, float, float]:
    """As `_step`."""
    numbers = range(state.batches, state.batches + config.accumulate)
    batches = [source.batch(number) for number in numbers]
    new, (found, size), grads = calls(state, batches, lr)
    tokens = state.tokens + sum(batch.n_tokens for batch in batches)
    state = state._replace(batches=numbers.stop, tokens=tokens)
    require_sound(_with_loss(state, found), found, size, grads, config, lr)
    return _after(state, found, *new), found, size


def _after(state: State, loss: float, trained: Any, own: Any, average: Any) -> State:
    """The state after a step with this loss."""
    params = tree.join(state.params, trained)
    state = _with_loss(state, loss)._replace(params=params, optimiser=own, ema=average)
    return state._replace(step=state.step + 1)


def _gradients(
    loss: Loss,
    state: State,
    source: Batches,
    config: TrainConfig,
    place: Backend,
    reduce: Reduce | None,
) -> tuple[State, Array, Any]:
    """The state after the batches of a step, their loss and its gradients.

    Of gradients that overflow the next batches take the place, with a lower scale.
    """
    weights = place.cast_params(state.params, config.precision)
    while True:
        state, value, grads = _accumulated(loss, state, weights, source, config, place)
        if reduce is not None:  # before it is asked whether they are finite: all then go on alike
            grads = optim.reduced(grads, reduce)
        if state.loss_scale is None:
            return state, value, grads
        grads, finite = state.loss_scale.unscale(grads, tree.trained(state.params))
        # Which no scale would change; where gradients are reduced, a process must not stop alone.
        if not finite and reduce is None and not is_finite(value):
            return state, value, grads
        try:
            state = state._replace(loss_scale=state.loss_scale.update(finite))
        except FloatingPointError as error:
            raise Diverged(f"step {state.step + 1}: {error}") from error
        if finite:
            return state, value, grads


def _accumulated(
    loss: Loss, state: State, weights: Any, source: Batches, config: TrainConfig, place: Backend
) -> tuple[State, Array, Any]:
    """The state after the next batches, their loss and its gradients, times the scale."""
    numbers = range(state.batches, state.batches + config.accumulate)
    batches = [source.batch(number) for number in numbers]
    scale = state.loss_scale

    def one(params: Any, i: int) -> tuple[Array, Any]:
        # A dropout mask for each batch of the run, whichever step it falls in.
        key = ops.RandomKey(config.seed, step=numbers[i] + 1)
        value, cache = loss(params, batches[i], place, key)
        return value, cache if scale is None else Scaled(cache, scale.scale)

    value, grads = optim.accumulate(one, weights, batches)
    tokens = state.tokens + sum(batch.n_tokens for batch in batches)
    return state._replace(batches=numbers.stop, tokens=tokens), value, grads


def _read(loss: Array, norm: Array, place: Backend) -> tuple[float, float]:
    """Both as numbers, for which the device is waited once."""
    xp = array_namespace(loss, norm)
    found, size = place.to_numpy(xp.stack([loss, norm])).tolist()
    return found, size


def _copy(array: Array) -> Array:
    return array_namespace(array).asarray(array, copy=True)


def _with_loss(state: State, loss: float) -> State:
    if state.step == 0:
        return state._replace(first=loss, mean=loss)
    return state._replace(mean=MEMORY * state.mean + (1 - MEMORY) * loss)


def _judged(state: State, validation: float | None) -> State:
    if validation is None:
        return state
    if not math.isfinite(validation):
        raise Diverged(
            f"the validation loss after step {state.step} is {validation}, the mean training loss "
            f"of late {state.mean:.3g}"
        )
    if validation < state.best:
        return state._replace(best=validation, best_step=state.step, stale=0)
    return state._replace(stale=state.stale + 1)
