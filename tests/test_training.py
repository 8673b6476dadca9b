"""The loop and the checkpoints of models: what they do, and what they refuse."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors
from block_configs import block_config
from hostile import files_of_at_most
from libraries import only
from safetensors.numpy import load_file, save_file

import xformer as xf
from xformer import layers, optim, training
from xformer.backends import Backend
from xformer.layers import (
    BlockConfig,
    EmbedConfig,
    ExpertsConfig,
    FeedForwardConfig,
    GatedDeltaNetConfig,
    NormConfig,
    RelativeConfig,
    RopeConfig,
)
from xformer.models import Classifier, EncoderDecoder, LanguageModel, LMHead

GPT = xf.GPT(vocab_size=256, n_layers=1, d_model=16, n_heads=2, max_len=8)
NUMPY = xf.backends.get("numpy")


def corpus(n: int = 4000) -> training.Corpus:
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 100, np.uint8)
    return training.Corpus(text[:n], text[n:], "a fox")


# The loop

CONFIG = training.TrainConfig(steps=60, batch_size=8, lr=1e-2, warmup=5, eval_every=20)
MASKED = xf.GPT(vocab_size=256, n_layers=1, d_model=16, n_heads=2, max_len=8, dropout=0.1)


def train(
    params: Any,
    config: training.TrainConfig = CONFIG,
    *,
    model: Any = GPT,
    place: Backend = NUMPY,
    source: Any = None,
    **options: Any,
) -> Iterator[training.Step]:
    """Steps on the fox, from the first."""
    text = corpus()
    if source is None:
        source = training.Windows(text.train, GPT.context, config.batch_size, config.seed)
    held_out = training.Windows(text.validation, GPT.context, 8).held_out(config.eval_batches)
    state = training.start(params, config, options.get("optimiser"))
    options = {"held_out": list(held_out), **options}
    return training.train(training.loss_of(model), state, source, config, place, **options)


def test_training_learns_and_reports() -> None:
    params = GPT.init(seed=0)
    before = {k: v.copy() for k, v in xf.tree.flatten(params).items()}
    steps = list(train(params))
    assert [s.step for s in steps] == list(range(1, 61))
    assert [s.step for s in steps if s.validation is not None] == [20, 40, 60]
    assert steps[0].loss == pytest.approx(math.log(256), rel=0.2)
    assert steps[-1].validation is not None
    assert steps[-1].validation < 0.8 * training.unigram_loss(corpus())
    assert steps[-1].tokens == 60 * 8 * GPT.context
    assert all(s.memory is None or s.memory > 10_000_000 for s in steps)
    assert [s.seconds for s in steps] == sorted(s.seconds for s in steps)
    assert all((before[k] == v).all() for k, v in xf.tree.flatten(params).items())


def test_a_seed_gives_the_same_run_bit_for_bit() -> None:
    runs = [[s.loss for s in train(MASKED.init(0), model=MASKED)] for _ in range(2)]
    assert runs[0] == runs[1]
    other = dataclasses.replace(CONFIG, seed=1)
    assert [s.loss for s in train(MASKED.init(0), other, model=MASKED)] != runs[0]


@only("numpy-readonly", "array-api-strict", "torch", "jax", "cupy")
def test_a_seed_gives_the_same_run_on_other_libraries(library: Backend) -> None:
    """To float64 rounding: batches, dropout, accumulation, clipping, the average, validation."""
    config = training.TrainConfig(
        steps=3,
        batch_size=2,
        accumulate=2,
        ema=0.9,
        eval_every=2,
        eval_batches=1,
        seed=3,
    )
    found = []
    for place in (NUMPY, library):
        params = xf.tree.map(place.asarray, MASKED.init(3, dtype="float64"))
        steps = list(train(params, config, model=MASKED, place=place))
        numbers = [[s.loss, s.norm, s.lr, s.tokens, s.validation or 0.0] for s in steps]
        found.append((numbers, place.to_numpy(steps[-1].state.averaged.embed.table)))
    for here, there in zip(*found, strict=True):
        np.testing.assert_allclose(there, here, rtol=1e-9)


@pytest.mark.parametrize("shares", [(4, 4), (2, 3, 3), (1, 1, 1, 1, 1, 1, 1, 1)])
def test_accumulating_is_the_big_batch(shares: tuple[int, ...]) -> None:
    """Rows of different lengths, so that a mean of means would not do."""

    def source(sizes: tuple[int, ...]) -> Any:
        class Cut:
            def batch(self, i: int) -> training.Batch:
                step, part = divmod(i, len(sizes))
                rng = np.random.default_rng(step)
                tokens = rng.integers(0, 256, (8, 8))
                targets = np.where(np.arange(8) < rng.integers(1, 8, (8, 1)), tokens[:, ::-1], -1)
                rows = slice(sum(sizes[:part]), sum(sizes[: part + 1]))
                n_targets = int((targets[rows] >= 0).sum())
                return training.Batch((tokens[rows], targets[rows]), {}, n_targets, 8)

        return Cut()

    loss = training.loss_of(GPT, ignore_index=-1)
    found = []
    for sizes in ((8,), shares):
        config = dataclasses.replace(CONFIG, steps=4, accumulate=len(sizes))
        state = training.start(GPT.init(0, dtype="float64"), config)
        steps = list(training.train(loss, state, source(sizes), config, NUMPY))
        losses = [[s.loss, s.norm] for s in steps]
        found.append((losses, steps[-1].params.embed.table, [s.state.batches for s in steps]))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-12)
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-9, atol=1e-12)
    assert found[1][2] == [len(shares) * i for i in (1, 2, 3, 4)]


def test_every_batch_has_a_dropout_mask_of_its_own() -> None:
    seen: list[xf.RandomKey] = []

    def loss(params: Any, batch: Any, place: Any, key: Any = None) -> Any:
        if key is not None:
            seen.append(key)
        return training.loss_of(GPT)(params, batch, place, key)

    config = dataclasses.replace(CONFIG, steps=3, accumulate=2, seed=7)
    state = training.start(GPT.init(0), config)
    source = training.Windows(corpus().train, 8, 2, 7)
    list(training.train(loss, state, source, config, NUMPY))
    assert seen == [xf.RandomKey(7, step=i) for i in range(1, 7)]


def test_what_is_frozen_stays() -> None:
    params = xf.tree.freeze(GPT.init(0), "embed.*", "*.norm*")
    *_, last = train(params, dataclasses.replace(CONFIG, steps=5, ema=0.9))
    before, after = xf.tree.flatten(params), xf.tree.flatten(last.params)
    for name, leaf in before.items():
        assert isinstance(leaf, xf.tree.Frozen) == (after[name] is leaf), name
    assert set(xf.tree.flatten(last.state.averaged)) == set(before)
    with pytest.raises(ValueError, match="train: all parameters are frozen"):
        train(xf.tree.freeze(params))


@pytest.mark.parametrize("optimiser", optim.OPTIMISERS)
def test_donated_states_are_the_same_while_they_last(optimiser: str) -> None:
    """Bit for bit, with an average that at first is the parameters; on NumPy Adam's are reused."""
    config = dataclasses.replace(CONFIG, steps=6, ema=0.9, eval_every=2, optimiser=optimiser)
    kept = list(train(xf.tree.freeze(MASKED.init(0), "*.norm*"), config, model=MASKED))
    params = xf.tree.freeze(MASKED.init(0), "*.norm*")
    donated = train(params, config, model=MASKED, donate=True)
    for one, other in zip(kept, donated, strict=True):
        for name, leaf in xf.tree.flatten(one.state).items():
            again = xf.tree.flatten(other.state)[name]
            if name != "seconds":
                leaf, again = xf.tree.value(leaf), xf.tree.value(again)
                assert np.array_equal(leaf, again, equal_nan=True), name
        assert (one.loss, one.norm, one.validation) == (other.loss, other.norm, other.validation)
    written = params.embed.table is other.params.embed.table
    assert written == (optimiser in ("adam", "adamw", "muon"))
    assert other.state.ema.embed.table is not other.params.embed.table


def test_early_stopping_counts_validations() -> None:
    """Validation is best at once, since after it the rate is so high that nothing is learnt."""
    config = dataclasses.replace(CONFIG, steps=50, eval_every=2, patience=3, diverged=None)
    steps = list(train(GPT.init(0), config, schedule=lambda step: 0.01 if step < 11 else 1.0))
    best = min((s for s in steps if s.validation is not None), key=lambda s: s.validation or 0)
    assert steps[-1].step == best.step + 6 < 50
    state = steps[-1].state
    assert (state.best, state.best_step, state.stale) == (best.validation, best.step, 3)
    assert list(training.train(training.loss_of(GPT), state, Own(None), config, NUMPY)) == []


def test_the_average_is_validated() -> None:
    *_, last = train(GPT.init(0), dataclasses.replace(CONFIG, steps=20, ema=0.5))
    held_out = list(training.Windows(corpus().validation, 8, 8).held_out(8))
    loss = training.loss_of(GPT)
    got = [training.evaluate(loss, p, held_out, NUMPY) for p in (last.state.averaged, last.params)]
    assert last.validation == got[0] != got[1]
    assert training.evaluate(loss, last.params, [], NUMPY) is None


def test_evaluating_is_a_mean_over_targets() -> None:
    tokens = np.arange(40).reshape(5, 8)
    batches = [
        training.Batch((part, part), {}, part.size, part.size) for part in (tokens[:1], tokens[1:])
    ]
    whole = training.Batch((tokens, tokens), {}, 40, 40)
    params, loss = GPT.init(0, dtype="float64"), training.loss_of(GPT)
    one, two = (training.evaluate(loss, params, b, NUMPY) for b in ([whole], iter(batches)))
    assert one == pytest.approx(two, rel=1e-12)


def test_ones_own_optimiser_and_schedule() -> None:
    """microGPT's, of which a configuration has no words: Adam without decay, on a line to zero."""
    adam = optim.OPTIMISERS["adam"]
    options = {"betas": (0.85, 0.99), "eps": 1e-8}
    own = optim.Optimiser(adam.init, functools.partial(adam.step, **options))
    rates = optim.schedules.linear(0.01, 3)
    config = training.TrainConfig(steps=3, clip=None)
    *_, last = train(GPT.init(0), config, optimiser=own, schedule=rates)
    params, state = GPT.init(0), adam.init(GPT.init(0))
    source = training.Windows(corpus().train, 8, 8)
    for i in range(3):
        _, cache = GPT.loss(params, *source.batch(i).arrays)
        params, state = adam.step(params, cache.backward(), state, lr=0.01 * (1 - i / 3), **options)
    np.testing.assert_allclose(last.params.embed.table, params.embed.table, rtol=1e-6)


@pytest.mark.parametrize("optimiser", optim.OPTIMISERS)
def test_every_optimiser_learns(optimiser: str) -> None:
    rate = {"sgd": 0.1, "muon": 2e-2}.get(optimiser, 1e-2)
    steps = list(train(GPT.init(0), dataclasses.replace(CONFIG, optimiser=optimiser, lr=rate)))
    assert (steps[-1].validation or 9) < 0.9 * training.unigram_loss(corpus())


# What config says


def test_the_learning_rate_rises_and_falls() -> None:
    schedule = training.TrainConfig(steps=100, lr=1.0, warmup=10, final_lr=0.1).learning_rate()
    rates = [schedule(step) for step in range(1, 102)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.55) and rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("schedule", "at_60", "at_100"),
    [
        ("constant", 1.0, 1.0),
        ("linear", 0.5, 0.01),
        ("cosine", 0.5, 0.0),
        ("wsd", 1.0, 0.03),
        ("noam", (20 / 60) ** 0.5, 0.2**0.5),
    ],
)
def test_schedules_by_name(schedule: str, at_60: float, at_100: float) -> None:
    config = training.TrainConfig(steps=100, lr=1.0, warmup=20, final_lr=0.0, schedule=schedule)
    rate = config.learning_rate()
    assert rate(10) == pytest.approx(0.5) and rate(20) == pytest.approx(1.0)
    assert rate(60) == pytest.approx(at_60, abs=0.02)
    assert rate(100) == pytest.approx(at_100, abs=0.02)


def test_a_warm_up_longer_than_the_run() -> None:
    config = training.TrainConfig(steps=10, warmup=50)
    assert config.learning_rate()(10) == config.lr


def test_biases_and_norms_do_not_decay() -> None:
    config = training.TrainConfig(steps=1, weight_decay=0.5)
    params = xf.tree.map(np.ones_like, GPT.init(0))
    optimiser = config.chosen_optimiser()
    zero = xf.tree.map(np.zeros_like, params)
    new, _ = optimiser.step(params, zero, optimiser.init(params), lr=0.1)
    for name, leaf in xf.tree.flatten(new).items():
        np.testing.assert_allclose(leaf, 0.95 if leaf.ndim > 1 else 1.0, err_msg=name)


@pytest.mark.parametrize("optimiser", optim.OPTIMISERS)
def test_weight_decay_unless_given(optimiser: str) -> None:
    """None where it would be a part of the gradient, as of Adam and SGD."""
    params = xf.tree.map(lambda p: np.ones_like(p), GPT.init(0))
    zeros = xf.tree.map(np.zeros_like, params)

    def stepped(**options: float) -> np.ndarray:
        config = training.TrainConfig(steps=1, optimiser=optimiser, **options)
        own = config.chosen_optimiser()
        new, _ = own.step(params, zeros, own.init(params), lr=0.1)
        return np.asarray(new.embed.table)

    usual = 0.0 if optimiser in ("adam", "sgd") else 0.1
    assert np.array_equal(stepped(), stepped(weight_decay=usual))
    assert not np.array_equal(stepped(), stepped(weight_decay=0.5))


def test_muon_is_for_the_matrices_of_blocks() -> None:
    state = training.TrainConfig(steps=1, optimiser="muon").chosen_optimiser().init(GPT.init(0))
    owned = set(xf.tree.flatten(state["0"].momentum))
    assert owned == {
        name
        for name, leaf in xf.tree.flatten(GPT.init(0)).items()
        if ".blocks." in name and leaf.ndim == 2
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be an int of at least 1, got 0"),
        ({"steps": 2.5}, "steps must be an int of at least 1, got 2.5"),
        ({"batch_size": 0}, "batch_size must be an int of at least 1, got 0"),
        ({"accumulate": 0}, "accumulate must be an int of at least 1, got 0"),
        ({"eval_every": 0}, "eval_every must be an int of at least 1, got 0"),
        ({"eval_batches": 0}, "eval_batches must be an int of at least 1, got 0"),
        ({"patience": 0}, "patience must be an int of at least 1, got 0"),
        ({"seed": -1}, "seed must be an int of at least 0, got -1"),
        ({"seed": 1 << 64}, "seed must be below 2.64"),
        ({"warmup": 1.5}, "warmup must be an int of at least 0, got 1.5"),
        ({"lr": -1.0}, r"lr must lie in \[0, inf\], got -1"),
        ({"lr": math.inf}, "lr must be finite, got inf"),
        ({"lr": "a"}, "lr must be a number, got str"),
        ({"lr": None}, "lr must be a number, got NoneType"),
        ({"final_lr": None}, "final_lr must be a number, got NoneType"),
        ({"final_lr": 2.0}, r"final_lr must lie in \[0, 1\], got 2"),
        ({"betas": (2, 3)}, r"betas must lie in \[0, 1\), got \(2, 3\)"),
        ({"betas": 0.9}, "betas must be two numbers, got 0.9"),
        ({"clip": 0.0}, "clip must be above 0 and finite, or None for no clipping, got 0"),
        ({"clip": -1.0}, r"clip must lie in \[0, inf\], got -1"),
        ({"ema": 1.5}, r"ema must lie in \[0, 1\], got 1.5"),
        ({"weight_decay": math.nan}, "weight_decay must lie in"),
        ({"optimiser": "adamax"}, "optimiser must be one of sgd, .*, got 'adamax'"),
        ({"schedule": "step"}, "schedule must be one of cosine, .*, noam, got 'step'"),
    ],
)
def test_impossible_numbers_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^TrainConfig: {message}"):
        training.TrainConfig(**{"steps": 1, **options})


# Training that goes wrong


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    params = xf.tree.map(lambda p: np.full_like(p, np.inf), GPT.init(0))
    with (
        np.errstate(all="ignore"),
        pytest.raises(
            training.Diverged,
            match=r"the loss of step 1 is nan, .*; not finite: the gradient of embed.table and 1.",
        ),
    ):
        next(train(params))


def test_a_gradient_that_is_not_finite_is_named() -> None:
    def loss(params: Any, batch: Any, place: Any, key: Any = None) -> Any:
        value, cache = training.loss_of(GPT)(params, batch, place, key)
        return value, Broken(cache, key is not None and key.step == 4)

    class Broken(NamedTuple):
        cache: Any
        now: bool

        def backward(self, dloss: Any) -> Any:
            grads = self.cache.backward(dloss)
            if not self.now:
                return grads
            names = xf.tree.flatten(grads)
            names["stack.blocks.0.ffn.up.w"] = names["stack.blocks.0.ffn.up.w"] * np.inf
            return xf.tree.unflatten(grads, names)

    source = training.Windows(corpus().train, 8, 2)
    steps = training.train(loss, training.start(GPT.init(0), CONFIG), source, CONFIG, NUMPY)
    with (
        np.errstate(all="ignore"),
        pytest.raises(
            training.Diverged,
            match=r"the loss of step 4 is \d.*, the norm of its gradient (inf|nan); not finite: "
            r"the gradient of stack.blocks.0.ffn.up.w; lr was",
        ),
    ):
        list(steps)


@pytest.mark.parametrize("donate", [False, True])
def test_a_step_that_diverges_leaves_the_state_before_it(donate: bool) -> None:
    bad = MASKED.init(0)
    bad.stack.blocks[0].ffn.up.w[...] = np.inf
    state = training.start(bad, CONFIG)
    kept = copy.deepcopy(state)
    source = training.Windows(corpus().train, 8, 2)
    steps = training.train(training.loss_of(MASKED), state, source, CONFIG, NUMPY, donate=donate)
    with np.errstate(all="ignore"), pytest.raises(training.Diverged):
        next(steps)
    for name, leaf in xf.tree.flatten(kept).items():
        assert np.array_equal(leaf, xf.tree.flatten(state)[name], equal_nan=True), name


def test_gradients_whose_norm_overflows_are_named() -> None:
    """Each is finite; the largest one is named."""

    def loss(params: Any, batch: Any, place: Any, key: Any = None) -> Any:
        return np.float32(1), Fixed()

    class Fixed(NamedTuple):
        def backward(self, dloss: Any) -> Any:
            return {"a": np.float32([1e25, 2]), "b": np.float32([[3, -1e30]]), "c": np.ones(1)}

    state = training.start(xf.tree.map(np.zeros_like, Fixed().backward(1)), CONFIG)
    source = training.Windows(corpus().train, 8, 2)
    with (
        np.errstate(all="ignore"),
        pytest.raises(
            training.Diverged,
            match=r"the norm of its gradient inf; each .* is finite, that of b up to 1e\+30; lr w",
        ),
    ):
        next(training.train(loss, state, source, CONFIG, NUMPY))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_validation_that_is_not_finite_stops_the_run(value: float) -> None:
    def loss(params: Any, batch: Any, place: Any, key: Any = None) -> Any:
        found, cache = training.loss_of(GPT)(params, batch, place, key)
        return (found * value if key is None else found), cache

    config = dataclasses.replace(CONFIG, eval_every=2)
    source = training.Windows(corpus().train, 8, 2)
    state, held_out = training.start(GPT.init(0), config), source.held_out(1)
    steps = training.train(loss, state, source, config, NUMPY, held_out=list(held_out))
    assert next(steps).step == 1
    message = rf"^the validation loss after step 2 is {value}, the recent mean training loss 6"
    with pytest.raises(training.Diverged, match=message):
        next(steps)


def test_a_loss_that_rises_too_far_stops_the_run() -> None:
    config = dataclasses.replace(CONFIG, steps=400, lr=30.0, clip=None, diverged=2.0)
    with pytest.raises(
        training.Diverged, match=r"recent mean loss, .*, is above .*, 2 times that of"
    ):
        list(train(GPT.init(0), config))
    assert len(list(train(GPT.init(0), dataclasses.replace(CONFIG, diverged=1.0)))) == 60


# Checkpoints


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    training.save(tmp_path / "run", GPT, GPT.init(7), NUMPY)
    return tmp_path / "run"


def test_a_checkpoint_comes_back_exactly(saved: Path) -> None:
    model, params = training.load(saved, NUMPY)
    assert model == GPT
    for name, array in xf.tree.flatten(GPT.init(7)).items():
        assert (xf.tree.flatten(params)[name] == array).all(), name
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "model.safetensors"]


def test_a_checkpoint_loads_on_another_library(saved: Path) -> None:
    strict = pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
    _, params = training.load(saved, xf.backends.get("array-api-strict"))
    assert isinstance(params.embed.table, type(strict.asarray(0)))


def test_a_full_disk_leaves_the_old_checkpoint(saved: Path) -> None:
    before = (saved / "model.safetensors").read_bytes()
    with files_of_at_most(2000), pytest.raises(OSError, match=r"cannot be written: .*large"):
        training.save(saved, GPT, GPT.init(8), NUMPY)
    assert (saved / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "model.safetensors"]


def rewrite(saved: Path, **change: object) -> None:
    """Change the configuration that the weights carry."""
    path = saved / "model.safetensors"
    with safetensors.safe_open(path, "np") as file:
        config = json.loads(file.metadata()["xformer"])
    sizes: Any = change.pop("sizes", {})
    config.update(change)
    for name, value in sizes.items():
        *parts, last = name.split(".")
        nodes = [config["model"]]
        for part in parts:
            inner = [node[part] for node in nodes]
            nodes = [one for each in inner for one in (each if isinstance(each, list) else [each])]
        for node in nodes:
            node[last] = value(node[last]) if callable(value) else value
    save_file(load_file(path), path, metadata={"xformer": json.dumps(config)})


def test_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is no checkpoint: it has no model\.safetensors"):
        training.load(tmp_path, NUMPY)


def test_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"model must be one of xformer\.models"):
        training.save(tmp_path, object(), {}, NUMPY)


EMBED = EmbedConfig(11, 8, 8, 7, norm=NormConfig("rms"))
WINDOWED = block_config(8, 2, 4, window=(2, None))
ROUTED = block_config(8, 2, 4, experts=ExpertsConfig(2, 1, 4))
PAIR = EncoderDecoder(
    (WINDOWED, ROUTED),
    (WINDOWED,),
    EMBED,
    shared_embed=True,
    encoder_relative_bias=RelativeConfig(2),
    head=LMHead(),
    hf_config={"eos_token_id": [1, 2]},
)


OTHERS = {
    "Transformer": xf.Transformer(11, 13, 8, 2, 1, 1, 7, tied=True, shared_memory=True),
    "EncoderDecoder": PAIR,
    "classifier": LanguageModel(
        EMBED, (WINDOWED, ROUTED), rotary=(RopeConfig(4), None), head=Classifier(3)
    ),
    "layers that are shared": LanguageModel(EMBED, (WINDOWED,) * 40, n_shared_layer_groups=1),
    "configuration files": LanguageModel(
        EMBED, (WINDOWED,), hf_config={"config": "NormConfig", "n": [1, [2]]}, generation_config={}
    ),
    "gated DeltaNet": LanguageModel(
        EmbedConfig(11, 8, 8, positions="none"),
        (BlockConfig(GatedDeltaNetConfig(8, 2, 4, 4), FeedForwardConfig(12)), WINDOWED),
        head=LMHead(tied=False),
    ),
}


@pytest.mark.parametrize("model", OTHERS.values(), ids=OTHERS)
def test_other_models_come_back_too(model: Any, tmp_path: Path) -> None:
    params = model.init(3)
    training.save(tmp_path, model, params, NUMPY)
    found, back = training.load(tmp_path, NUMPY)
    assert found == model
    assert all((a == b).all() for a, b in zip(*map(leaves, (params, back)), strict=True))


def test_a_layer_of_ones_own_is_not_stored(tmp_path: Path) -> None:
    """As `load` would not know its class; nothing is written."""

    class Own(layers.FeedForwardConfig):
        pass

    block = dataclasses.replace(WINDOWED, ffn=Own(12))
    model = LanguageModel(EMBED, (block,))
    with pytest.raises(
        TypeError, match="save: the model must have configurations of xformer alone, got a Own"
    ):
        training.save(tmp_path / "run", model, model.init(), NUMPY)
    assert not (tmp_path / "run").exists()


DAMAGED = {
    "EncoderDecoder": [{"head": 5}, {"encoder": 3}, {"encoder": [None]}, {"src_embed": [1]}],
    "classifier": [
        *({"head": 5}, {"head": {"config": "NormConfig"}}, {"relative_bias": 3}),
        *({"embed.norm": 3}, {"blocks.attn": 3}, {"rotary": "x"}),
    ],
}
DAMAGED = {
    name: [*changes, {"source": {}, "x": 1}, {"hf_config": 3}, {"hf_config": [1]}]
    for name, changes in DAMAGED.items()
}


@pytest.mark.parametrize(("name", "change"), [(n, c) for n in DAMAGED for c in DAMAGED[n]])
def test_other_damaged_configurations_are_refused(
    name: str, change: dict[str, object], tmp_path: Path
) -> None:
    training.save(tmp_path, OTHERS[name], OTHERS[name].init(), NUMPY)
    rewrite(tmp_path, sizes=change)
    with pytest.raises(training.CheckpointError, match="its configuration is damaged"):
        training.load(tmp_path, NUMPY)


def leaves(params: object) -> list[np.ndarray]:
    return list(xf.tree.flatten(params).values())


@pytest.mark.parametrize("cut", [0, 4, 8, 60, -1])
def test_truncated_weights_are_refused(saved: Path, cut: int) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(training.CheckpointError, match=r"model\.safetensors"):
        training.load(saved, NUMPY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other-9"}, "format must be xformer-2, got 'other-9'"),
        ({"model": "Unknown"}, "its configuration is damaged"),
        ({"model": {"config": "Unknown"}}, "its configuration is damaged"),
        ({"model": {"config": "LMHead"}}, "its configuration is damaged"),
        ({"sizes": {"embed": 3}}, "its configuration is damaged"),
        ({"sizes": {"blocks.attn.n_heads": 3}}, "its configuration is damaged"),
        ({"sizes": {"colour": "red"}}, "its configuration is damaged"),
        ({"sizes": {"embed.vocab_size": 10**12}}, "2 parameters|1 parameters"),
        ({"sizes": {"blocks": lambda blocks: blocks * 1000}}, r"does not have the \d+000 layers"),
        ({"sizes": {"blocks.ffn.d_ff": 10**12}}, "parameters are missing, unexpected or misshapen"),
        ({"sizes": {"embed.max_len": 9}}, "first embed.positions: wanted .9, 16., got .8, 16."),
        ({"sizes": {"head.tied": False}}, "first head.w: wanted .16, 256., got None"),
    ],
)
def test_a_damaged_configuration_is_refused(
    saved: Path, change: dict[str, object], message: str
) -> None:
    rewrite(saved, **change)
    with pytest.raises(training.CheckpointError, match=message):
        training.load(saved, NUMPY)


@pytest.mark.parametrize("text", [None, "", "[]", "{", "null", "[" * 100_000])
def test_a_configuration_that_is_none_is_refused(saved: Path, text: str | None) -> None:
    path = saved / "model.safetensors"
    metadata = None if text is None else {"xformer": text}
    save_file(load_file(path), path, metadata=metadata)
    with pytest.raises(training.CheckpointError, match=r"model\.safetensors"):
        training.load(saved, NUMPY)


@pytest.mark.parametrize("dtype", ["int64", "float16"])
def test_parameters_of_another_dtype_are_refused(saved: Path, dtype: str) -> None:
    path = saved / "model.safetensors"
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
    arrays = load_file(path)
    arrays["embed.table"] = arrays["embed.table"].astype(dtype)
    save_file(arrays, path, metadata=metadata)
    with pytest.raises(training.CheckpointError, match="must be of one dtype, float32 or float64"):
        training.load(saved, NUMPY)


def test_a_folder_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        training.save(tmp_path / "file" / "run", GPT, GPT.init(), NUMPY)


# Batches of one's own

IDS = np.random.default_rng(0).integers(0, 256, (8, 9))
WINDOWS = IDS[:, :-1], IDS[:, 1:]
SHORT = training.TrainConfig(steps=2, batch_size=8, lr=1e-2, warmup=1)


class Own:
    """A source that only has batches."""

    def __init__(self, batch: Any) -> None:
        self.of = batch

    def batch(self, i: int) -> Any:
        return self.of


def of_own(batch: Any, **options: Any) -> list[float]:
    state = training.start(GPT.init(0), SHORT)
    loss, options = training.loss_of(GPT), {"held_out": [batch], **options}
    steps = [*training.train(loss, state, Own(batch), SHORT, "numpy", **options)]
    return [steps[0].loss, steps[1].loss, steps[1].validation or 0.0, steps[1].tokens]


def test_batches_of_ones_own_are_tuples() -> None:
    wanted = of_own(training.Batch(WINDOWS, {}, 64, 64))
    assert of_own(WINDOWS) == wanted and wanted[3] == 128


@pytest.mark.parametrize(
    ("batch", "got"), [(None, "NoneType"), (IDS, "ndarray"), ((), "tuple"), ([*WINDOWS], "list")]
)
def test_batches_that_are_none(batch: Any, got: str) -> None:
    wanted = f"must be a training.Batch, or a tuple of NumPy arrays .*, got {got}"
    with pytest.raises(TypeError, match=rf"train: source\.batch\(0\) {wanted}"):
        of_own(batch)
    params = GPT.init(0)
    with pytest.raises(TypeError, match=f"evaluate: held-out batch 1 {wanted}"):
        training.evaluate(training.loss_of(GPT), params, [WINDOWS, batch], "numpy")


@pytest.mark.parametrize("source", [[WINDOWS], iter([WINDOWS]), lambda i: WINDOWS])
def test_a_source_without_batches(source: Any) -> None:
    state = training.start(GPT.init(0), SHORT)
    with pytest.raises(TypeError, match=r"train: source must have a method batch\(i\)"):
        next(training.train(training.loss_of(GPT), state, source, SHORT, "numpy"))
