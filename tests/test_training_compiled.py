"""Training steps and tokens as programs of numba's: the numbers of those made call by call."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("numba", reason="needs extra numba")

from causal_models import causal

from xformer import GPT, backends, optim, reference_only, tree
from xformer.backends.numba.program import run as programs
from xformer.generation import compiled_decoding as compiling
from xformer.generation import generate, stream
from xformer.generation.compiled_decoding import _compiled
from xformer.generation.samplers import top_k
from xformer.training import Batch, Diverged, TrainConfig, Windows, loop, loss_of, start, train

TEXT = np.frombuffer(b"to be or not to be, that is the question " * 20, np.uint8)
# Without biases: the gradient of that of keys is 0, and AdamW takes the sign of what rounding
# makes of it.
MODEL = GPT(256, n_layers=2, d_model=16, n_heads=2, max_len=8, dropout=0.2, bias=False)
CONFIG = TrainConfig(steps=6, batch_size=3, eval_every=2, warmup=3, lr=1e-2, clip=0.5)
SOURCE = Windows(TEXT, MODEL.context, 3)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Programs that are recorded meanwhile, but for those of single ops."""
    loop._forward.cache_clear()
    found: list[Any] = []
    init = programs.Recorded.__init__

    def noted(self: Any, *given: Any, **options: Any) -> None:
        init(self, *given, **options)
        if not options.get("shares"):
            found.append(self)

    monkeypatch.setattr(programs.Recorded, "__init__", noted)
    return found


def numbers(config: TrainConfig = CONFIG, **options: Any) -> tuple[list[Any], Any]:
    options = {"loss": loss_of(MODEL), "source": SOURCE, "donate": True} | options
    loss, source, params = options.pop("loss"), options.pop("source"), options.pop("params", None)
    place = options.pop("place", backends.get("numba"))
    state = options.pop("state", None) or start(params or MODEL.init(), config)
    steps = [
        (step.loss, step.norm, step.validation, step.state)
        for step in train(loss, state, source, config, place, **options)
    ]
    return [step[:3] for step in steps], tree.map(np.array, steps[-1][3])


def require_alike(got: Any, wanted: Any) -> None:
    for one, other in zip(got[0], wanted[0], strict=True):
        np.testing.assert_allclose(one[:2], other[:2], rtol=2e-4)
    a, b = tree.flatten(got[1].params), tree.flatten(wanted[1].params)
    for name, x in a.items():
        np.testing.assert_allclose(tree.value(x), tree.value(b[name]), atol=2e-4, err_msg=name)


@pytest.mark.parametrize(
    "change",
    [{}, {"accumulate": 2, "clip": None}, {"ema": 0.9}, {"optimiser": "sgd"}],
    ids=["adamw", "accumulated", "averaged", "sgd"],
)
def test_steps(made: list[Any], change: dict[str, Any]) -> None:
    """By default on backend numba, where states are donated; one program for all of them.

    And one for validation, which the next run finds.
    """
    config = TrainConfig(**vars(CONFIG) | change)
    held = [SOURCE.batch(99)]
    wanted = numbers(config, compiled=False, held_out=held)
    assert not made
    got = numbers(config, held_out=held)
    assert len(made) == 2
    require_alike(got, wanted)
    assert numbers(config, held_out=held)[0] == got[0]  # the same bits
    assert len(made) == 3


def test_steps_of_frozen_parameters(made: list[Any]) -> None:
    """They stay as they are, and where they are."""
    params = tree.freeze(MODEL.init(), "embed.*", "*.ffn.*")
    before = tree.map(np.array, params)
    got = numbers(params=params)
    require_alike(got, numbers(params=before, compiled=False))
    assert len(made) == 1
    for leaf, old in zip(*(tree.flatten(p).values() for p in (params, before)), strict=True):
        if isinstance(leaf, tree.Frozen):
            np.testing.assert_array_equal(leaf.value, old.value)


def test_batches_of_many_lengths(made: list[Any]) -> None:
    """A program for each."""

    class Some:
        def batch(self, i: int) -> Batch:
            batch, n = SOURCE.batch(i), 4 + 2 * (i % 3)
            arrays = tuple(ids[:, :n] for ids in batch.arrays)
            return batch._replace(arrays=arrays, n_targets=3 * n, n_tokens=3 * n)

    require_alike(numbers(source=Some()), numbers(source=Some(), compiled=False))
    assert len(made) == 3


def test_a_run_goes_on(made: list[Any]) -> None:
    """From a state of a step, with the same bits."""
    wanted = numbers()
    first = numbers(TrainConfig(**vars(CONFIG) | {"steps": 3}), schedule=CONFIG.learning_rate())
    got = numbers(state=first[1])
    assert [*first[0], *got[0]][0] == wanted[0][0] and got[0] == wanted[0][3:]


def test_what_goes_wrong(made: list[Any]) -> None:
    """Is named as ever: a gradient that is not finite, ids that the model has not."""
    params = MODEL.init()
    params.embed.table[5] = np.nan
    loss = loss_of(MODEL)

    class Fives:
        def batch(self, i: int) -> Batch:
            batch = SOURCE.batch(i)
            return batch._replace(arrays=tuple(np.full_like(ids, 5) for ids in batch.arrays))

    with pytest.raises(Diverged, match=r"not finite: the gradient of embed\.table and"):
        numbers(params=params, source=Fives())
    assert len(made) == 1

    class Foreign:
        def batch(self, i: int) -> Batch:
            batch = SOURCE.batch(i)
            return batch._replace(arrays=tuple(ids.astype(int) + 300 for ids in batch.arrays))

    with pytest.raises(ValueError, match="loss: ids of array 1 of the batch must lie in"):
        numbers(source=Foreign(), loss=loss)


def test_where_steps_are_not_compiled(made: list[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        numbers(donate=False)
        numbers(place=backends.get())
        numbers(reduce=lambda x: x)
        loss = loss_of(MODEL)
        numbers(loss=lambda *given: loss(*given))
    assert not made
    numbers(place=backends.get(), compiled=True)
    assert len(made) == 1


PROMPTS = [[1, 5, 2, 7, 3], [4, 6]]


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "alibi"])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "two"])
def test_tokens(name: str, prompts: Any, made: list[Any]) -> None:
    """In one program, which the next text finds; a sampler sees the logits."""
    model, params = causal(name)
    params = tree.map(lambda p: p.astype(np.float32), params)
    for sampler in (None, top_k(3)):
        options: Any = {"max_new_tokens": 9, "sampler": sampler}
        wanted = generate(model, params, prompts, **options)
        assert generate(model, params, prompts, **options, compiled=True) == wanted
        n = len(made)
        assert generate(model, params, prompts, **options, compiled=True, seed=1)
        assert len(made) == n


def test_two_texts_in_turn() -> None:
    """Neither writes over the other's keys."""
    model, params = causal("gpt2")
    params = tree.map(lambda p: p.astype(np.float32), params)
    wanted = [list(stream(model, params, [p], max_new_tokens=12)) for p in PROMPTS]
    both = [stream(model, params, [p], max_new_tokens=12, compiled=True) for p in PROMPTS]
    assert [list(row) for row in zip(*zip(*both, strict=True), strict=True)] == wanted


@pytest.mark.usefixtures("numba_kernels")
def test_tokens_are_programs_by_themselves(made: list[Any]) -> None:
    """Of texts that are long enough, some a call; stop ids end them, and references stay so."""
    _compiled.cache_clear()
    model, params = causal("gpt2")
    params = tree.map(lambda p: p.astype(np.float32), params)
    n = model.context - len(PROMPTS[0]) + 1
    with patch.object(compiling, "PAYS", n):
        found = generate(model, params, PROMPTS, max_new_tokens=n)
        assert len(made) == 1
        with reference_only():
            assert generate(model, params, PROMPTS, max_new_tokens=n) == found
        assert len(made) == 1
        assert generate(model, params, PROMPTS, max_new_tokens=n, compiled=False) == found
        assert generate(model, params, PROMPTS, max_new_tokens=n - 1) == [
            ids[: n - 1] for ids in found
        ]
        stop = {found[0][2], found[1][4]}
        wanted = generate(model, params, PROMPTS, max_new_tokens=n, stop=stop, compiled=False)
        assert generate(model, params, PROMPTS, max_new_tokens=n, stop=stop) == wanted
    assert len(made) == 1


def test_a_model_that_has_no_likeliest_token() -> None:
    model, params = causal("gpt2")
    params = tree.map(lambda p: np.full(p.shape, np.nan, np.float32), params)
    with pytest.raises(ValueError, match="the largest logit of each row must be finite"):
        generate(model, params, PROMPTS[:1], max_new_tokens=5, compiled=True)


# ---- Optimisers of one's own ----


class Own(NamedTuple):
    """A state with numbers of every type."""

    velocity: Any
    decay: float = 0.9
    steps: int = 0
    warm: bool = True
    width: int = 4
    name: str = "own"


def own_step(params: Any, grads: Any, state: Any, *, lr: float, donate: bool) -> Any:
    velocity = tree.map(lambda v, g: state.decay * v + g, state.velocity, grads)
    rate = lr / (1 + 0.1 * state.steps) if state.warm else lr
    trained = tree.map(lambda p, v: p - rate * v, params, velocity)
    decay = state.decay * 0.99
    return trained, state._replace(velocity=velocity, decay=decay, steps=state.steps + 1)


def reading_step(params: Any, grads: Any, state: Any, *, lr: float, donate: bool) -> Any:
    """A step that reads numbers: it cannot be recorded."""
    state = state._replace(warm=state.steps < 2, decay=max(state.decay, 0.5))
    return own_step(params, grads, state, lr=lr, donate=donate)


def own_init(params: Any) -> Own:
    return Own(tree.map(np.zeros_like, params))


@pytest.mark.parametrize("step", [own_step, reading_step])
def test_an_optimiser_of_ones_own(step: Any) -> None:
    """It trains as without programs: the same types, losses and states, also after a resume."""
    own = optim.Optimiser(own_init, step)
    config = TrainConfig(**vars(CONFIG) | {"ema": 0.9})

    def trained(steps: int, state: Any = None, **options: Any) -> Any:
        short = TrainConfig(**vars(config) | {"steps": steps})
        state = state or start(MODEL.init(), short, own)
        options |= {"optimiser": own, "schedule": config.learning_rate(), "donate": True}
        steps = list(train(loss_of(MODEL), state, SOURCE, short, "numba", **options))
        copy = tree.map(lambda x: x.copy() if hasattr(x, "dtype") else x, steps[-1].state)
        return [(step.loss, step.norm, step.validation) for step in steps], copy

    wanted = trained(6, compiled=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = trained(6)
        first = trained(3)
        rest = trained(6, first[1])
        assert type(rest[1].optimiser.steps) is int and rest[1].optimiser.steps == 6
    assert bool(said) == (step is reading_step)
    require_alike(got, wanted)
    assert first[0] + rest[0] == got[0]
    a, b = tree.flatten(got[1].optimiser), tree.flatten(wanted[1].optimiser)
    for name, leaf in a.items():
        assert np.asarray(leaf).dtype == np.asarray(b[name]).dtype, name
        np.testing.assert_allclose(leaf, b[name], rtol=2e-4, atol=2e-4) if name != "name" else None
    assert tree.flatten(got[1].params)["embed.table"].dtype == np.float32


@pytest.mark.parametrize("changes", [2, 20])
def test_an_optimiser_that_reads_what_changes(changes: int) -> None:
    """Its attribute has the new value in the next step. After many changes nothing is compiled."""

    class Decayed:
        decay = 0.0

        def step(self, params: Any, grads: Any, state: Any, *, lr: float, donate: bool) -> Any:
            return tree.map(lambda p, g: p - lr * g - self.decay * p, params, grads), state

    def losses(compiled: bool) -> list[float]:
        own, found = Decayed(), []
        pair = optim.Optimiser(lambda params: {}, own.step)
        config = TrainConfig(**vars(CONFIG) | {"steps": changes + 2})
        options: Any = {"optimiser": pair, "donate": True, "compiled": compiled}
        for step in train(
            loss_of(MODEL), start(MODEL.init(), config, pair), SOURCE, config, "numba", **options
        ):
            found.append(step.loss)
            own.decay = 0.01 * min(step.step, changes)
        return found

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        np.testing.assert_allclose(losses(True), losses(False), rtol=2e-4)
    texts = [str(each.message) for each in said]
    assert len(texts) == (changes > 16) and all("has changed 16 times" in text for text in texts)


@pytest.mark.parametrize("other", ["jax", "torch"])
def test_an_optimiser_of_ones_own_elsewhere(other: str) -> None:
    pytest.importorskip(other, reason=f"{other} is not installed")
    place = backends.get(other)
    zeros = place.xp.zeros_like
    own = optim.Optimiser(lambda params: Own(tree.map(zeros, params)), own_step)
    params = tree.map(place.asarray, tree.map(lambda p: p.astype(np.float32), MODEL.init()))
    states = []
    for compiled in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch compiles nothing
            options: Any = {"donate": True, "optimiser": own, "compiled": compiled}
            begin = start(tree.map(lambda p: p + 0, params), CONFIG, own)
            steps = list(train(loss_of(MODEL), begin, SOURCE, CONFIG, place, **options))
        states.append(([step.loss for step in steps], steps[-1].state.optimiser))
    np.testing.assert_allclose(states[1][0], states[0][0], rtol=2e-4)
    for name in ("decay", "steps", "warm", "width", "name"):
        got, wanted = (getattr(state, name) for _, state in states)
        assert type(got) is type(wanted), name
        assert got == (pytest.approx(wanted, rel=1e-6) if name == "decay" else wanted)
