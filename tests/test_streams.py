"""Training with a segment memory: streams of text, the carried memory, checkpoints, commands."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from libraries import slow_but
from runs import leaves, rows

import xformer as xf
from xformer import backends, training, tree
from xformer.cli import main, train
from xformer.training import Batch, Run, State, Step, Streams, TrainConfig, Windows

NUMPY = backends.get("numpy")
TOKENS = np.random.default_rng(0).integers(0, 16, 600).cumsum() % 16  # not all alike
SIZES: Any = {"vocab_size": 16, "n_layers": 2, "d_model": 8, "n_heads": 2, "max_len": 8}
MODEL = xf.GPT(**SIZES, positions="xl", memory_len=12, dropout=0.1)
CONFIG = TrainConfig(
    steps=14, batch_size=3, accumulate=2, lr=1e-2, warmup=3, ema=0.9, eval_every=4, seed=5
)
LOSS = training.segment_loss_of(MODEL)


def source() -> Streams:
    return Streams(TOKENS[:400], SIZES["max_len"], CONFIG.batch_size)


def held_out() -> list[Batch]:
    return list(Streams(TOKENS[400:], SIZES["max_len"], 2).held_out(4))


def begun(dtype: str = "float32") -> State:
    return training.start(MODEL.init(CONFIG.seed, dtype=dtype), CONFIG, loss=LOSS)


def steps(state: State, **options: Any) -> Any:
    options = {"held_out": held_out(), **options}
    return training.train(LOSS, state, source(), CONFIG, NUMPY, **options)


# ---- Streams ----


@pytest.mark.parametrize(("n", "length", "rows"), [(61, 4, 3), (60, 4, 3), (100, 7, 5), (22, 7, 3)])
def test_rows_continue_each_other(n: int, length: int, rows: int) -> None:
    tokens = np.arange(n)
    source = Streams(tokens, length, rows)
    one_epoch = [source.batch(i) for i in range(source.per_epoch)]
    for row in range(rows):
        stream = np.concatenate([batch.arrays[0][row] for batch in one_epoch])
        first = row * ((n - 1) // rows)
        assert np.array_equal(stream, np.arange(first, first + source.per_epoch * length))
        targets = np.concatenate([batch.arrays[1][row] for batch in one_epoch])
        assert np.array_equal(targets, stream + 1)
    read = np.concatenate([batch.arrays[0].ravel() for batch in one_epoch])
    assert len(set(read)) == len(read) > n - 1 - rows * length - rows  # all but a rest
    assert [batch.starts for batch in one_epoch] == [True] + [False] * (source.per_epoch - 1)
    assert all(batch.n_targets == batch.n_tokens == rows * length for batch in one_epoch)
    again = source.batch(2 * source.per_epoch)
    assert again.starts and np.array_equal(again.arrays[0], one_epoch[0].arrays[0])


def test_held_out_streams() -> None:
    source = Streams(np.arange(61), 4, 3)
    for n, wanted in ((None, 5), (2, 2), (99, 5)):
        batches = list(source.held_out(n))
        assert len(batches) == wanted and batches[0].starts
        for i, batch in enumerate(batches):
            assert np.array_equal(batch.arrays[0], source.batch(i).arrays[0])


def test_fingerprints_of_streams() -> None:
    ids = np.arange(61)
    fingerprints = {Streams(ids, 4, 3).fingerprint(), Streams(ids, 4, 2).fingerprint()}
    fingerprints |= {Streams(ids, 5, 3).fingerprint(), Streams(ids + 1, 4, 3).fingerprint()}
    fingerprints.add(Windows(ids, 4, 3).fingerprint())
    assert len(fingerprints) == 5
    assert Streams(ids.astype("uint16"), 4, 3).fingerprint() in fingerprints


def test_bad_streams() -> None:
    message = "Streams: the text is too short: 3 streams of 4 tokens need 13, got 12"
    with pytest.raises(ValueError, match=f"^{message}$"):
        Streams(np.arange(12), 4, 3)
    assert Streams(np.arange(13), 4, 3).per_epoch == 1
    with pytest.raises(TypeError, match="tokens must be a NumPy array of integers, got float64"):
        Streams(np.ones(99), 4, 3)
    with pytest.raises(ValueError, match=r"^Streams.batch: i must be an int of at least 0, got -1"):
        source().batch(-1)
    with pytest.raises(ValueError, match=r"^held_out: n_batches must be an int of at least 1"):
        source().held_out(0)


# ---- Training ----


def test_the_memory_is_carried_from_batch_to_batch() -> None:
    """As a loop over `segment_loss` gives it: also within a step, and empty at an epoch's start."""
    network, texts = MODEL, source()
    assert texts.per_epoch == 16  # step 9 begins the second epoch
    params = MODEL.init(CONFIG.seed, dtype="float64")
    config = dataclasses.replace(CONFIG, clip=None, ema=None, steps=10)
    state = training.start(params, config, loss=LOSS)
    got = [
        (step.loss, step.state.memory.length)
        for step in training.train(LOSS, state, texts, config, NUMPY)
    ]
    optimiser, lr = config.chosen_optimiser(), config.learning_rate()
    memory, chosen = network.init_memory(params, 3), optimiser.init(params)
    wanted = []
    for step in range(10):
        losses, grads = [], []
        for i in (2 * step, 2 * step + 1):
            if i % 16 == 0:
                memory = network.init_memory(params, 3)
            tokens, targets = texts.batch(i).arrays
            key = xf.RandomKey(config.seed, step=i + 1)
            loss, cache, memory = network.segment_loss(
                params, tokens, targets, memory, dropout_key=key
            )
            losses.append(float(loss))
            grads.append(cache.backward())
        mean = tree.map(lambda a, b: (a + b) / 2, *grads)
        params, chosen = optimiser.step(params, mean, chosen, lr=lr(step + 1))
        wanted.append((sum(losses) / 2, memory.length))
    np.testing.assert_allclose(got, wanted, rtol=1e-9)
    assert [length for _, length in got] == [12] * 10


def test_validation_has_a_memory_of_its_own() -> None:
    """It is empty at first, is carried through the batches, and does not change training's."""
    network = MODEL
    params = MODEL.init(1)
    value = training.evaluate(LOSS, params, held_out(), NUMPY)
    memory, losses = network.init_memory(params, 2), []
    for batch in held_out():
        loss, _, memory = network.segment_loss(params, *batch.arrays, memory)
        losses.append(float(loss))
    assert value == pytest.approx(np.mean(losses), rel=1e-6)
    alone = [float(network.loss(params, *batch.arrays)[0]) for batch in held_out()]
    assert abs(value - np.mean(alone)) > 1e-5
    with_validation = [leaves(step.state.memory) for step in steps(begun())]
    assert with_validation == [leaves(step.state.memory) for step in steps(begun(), held_out=())]


@pytest.mark.parametrize("stop", slow_but((3, 8), [1, 3, 8, 11]))  # 8 steps are an epoch
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path, stop: int) -> None:
    def trained(folder: Path, n: int | None) -> State:
        with Run(folder, NUMPY, {"data": "tokens"}, model=MODEL, every=2) as run:
            state = run.begin(begun())
            last = CONFIG.steps if n is None else n
            resumed: Any = itertools.islice(steps(state, donate=True), last - state.step)
            step: Step
            for step in run.record(resumed):
                state = step.state
        return state

    whole = trained(tmp_path / "whole", None)
    first = trained(tmp_path / "parts", stop)
    assert first.step == stop and first.memory.length == 12
    second = trained(tmp_path / "parts", None)
    assert leaves(second) == leaves(whole)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    model, params = training.load(tmp_path / "parts", NUMPY)
    assert model == MODEL and tree.flatten(params).keys() == tree.flatten(whole.params).keys()


def test_it_learns_what_only_the_memory_knows() -> None:
    """Segments of one token: the text repeats after four, which one token does not tell."""
    tokens = np.tile([0, 1, 0, 2], 400)
    losses = {}
    for memory_len in (0, 4):
        sizes = SIZES | {"vocab_size": 3, "n_layers": 1, "d_model": 16, "max_len": 1}
        model = xf.GPT(**sizes, positions="xl", memory_len=memory_len)
        config = TrainConfig(steps=60, batch_size=4, lr=2e-2, warmup=2)
        loss = training.segment_loss_of(model)
        state = training.start(model.init(0), config, loss=loss)
        steps_run = training.train(loss, state, Streams(tokens, 1, 4), config, NUMPY)
        losses[memory_len] = np.mean([step.loss for step in steps_run][-10:])
    assert losses[0] > 0.9 * np.log(2) / 2  # after 0 it guesses between 1 and 2
    assert losses[4] < 0.1


def test_bad_training() -> None:
    params = MODEL.init()
    plain = training.start(params, CONFIG)
    message = "^train: a loss with a segment memory and a state with one need each other: start"
    with pytest.raises(ValueError, match=message):
        next(training.train(LOSS, plain, source(), CONFIG, NUMPY))
    with pytest.raises(ValueError, match=message):
        next(training.train(training.loss_of(MODEL), begun(), source(), CONFIG, NUMPY))
    without = dataclasses.replace(MODEL, memory_len=None)
    with pytest.raises(ValueError, match=r"^segment_loss_of: the model must have a memory_len, go"):
        training.segment_loss_of(without)
    batch = source().batch(0)
    ids = (batch.arrays[0] + 10, batch.arrays[1])
    with pytest.raises(
        ValueError, match=re.escape("ids of array 1 of the batch must lie in [0, 16)")
    ):
        LOSS(params, batch._replace(arrays=ids), NUMPY)
    with pytest.warns(RuntimeWarning, match="not compiled: the segment memory grows"):
        next(steps(begun(), donate=True, compiled=True))


# ---- Commands ----

TRAIN = [
    *("train", "--data", "fox.txt", "--layers", "1", "--d-model", "16", "--heads", "2"),
    *("--max-len", "8", "--batch", "3", "--preset", "tiny", "--positions", "xl"),
    *(
        "--validate-every",
        "3",
        "--validate-batches",
        "2",
        "--checkpoint-every",
        "2",
        "--warmup",
        "2",
    ),
]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a text; no samples, which take longer than these runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_sample", lambda *_, **__: None)
    Path("fox.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)


@pytest.mark.usefixtures("text")
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TRAIN, "--memory", "20", "--steps", "6", "--out", "whole"]) == 0
    about = json.loads(Path("whole/run.json").read_text())["about"]
    model, _ = training.load("whole", NUMPY)
    assert (model.blocks[0].attn.xl, model.memory_len, model.context) == (True, 20, None)
    assert (
        main([*TRAIN, "--memory", "20", "--steps", "3", "--schedule", "constant", "--out", "a"])
        == 0
    )
    assert main(["train", "--resume", "a", "--steps", "6"]) == 0
    assert (
        main([*TRAIN, "--memory", "20", "--steps", "6", "--schedule", "constant", "--out", "b"])
        == 0
    )
    assert rows(Path("a")) == rows(Path("b"))
    assert main([*TRAIN, "--steps", "1", "--out", "usual"]) == 0
    assert json.loads(Path("usual/run.json").read_text())["about"]["model"]["memory_len"] == 8
    options = ["--max-new-tokens", "30", "--temperature", "0", "--prompt", "the quick brown fox"]
    capsys.readouterr()
    for memory in ([], ["--memory", "0"], ["--memory", "40"]):
        assert main(["generate", "--model", "whole", *options, *memory]) == 0
        assert len(capsys.readouterr().out) >= len("the quick brown fox")
    assert (
        main([*TRAIN[:3], "--from", "whole", "--steps", "1", "--batch", "3", "--out", "next"]) == 0
    )
    assert json.loads(Path("next/run.json").read_text())["about"]["model"] == about["model"]


@pytest.mark.usefixtures("text")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            [*TRAIN[:-8], "--positions", "learned", "--memory", "3"],
            "--memory needs --positions xl, got learned",
        ),
        ([*TRAIN, "--memory", "-1"], "train: --memory must be an int of at least 0, got -1"),
        (
            [*TRAIN, "--batch", "99"],
            "Streams: the text is too short: 99 streams of 8 tokens need 793, got 450 "
            "(the validation part; reduce --max-len or --batch)",
        ),
    ],
)
def test_wrong_options(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, "--steps", "1", "--out", "a"]) == 1
    assert message in capsys.readouterr().err and not Path("a").exists()


@pytest.mark.usefixtures("text")
def test_a_model_without_a_memory(capsys: pytest.CaptureFixture[str]) -> None:
    plain = [part for part in TRAIN if part not in ("--positions", "xl")]
    assert main([*plain, "--steps", "1", "--out", "a"]) == 0
    assert main(["generate", "--model", "a", "--prompt", "x", "--memory", "3"]) == 1
    assert "--memory: the model has no memory" in capsys.readouterr().err
    assert main(["train", "--from", "a", "--positions", "xl", "--data", "fox.txt"]) == 1
    assert "--positions excludes --from: the model in a fixes it" in capsys.readouterr().err
