"""Text, the loop and checkpoints: what they do, and what they refuse."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import xformer as xf
from xformer import training
from xformer.training import checkpoint
from xformer.training.data import fixed_windows, windows

GPT = xf.GPT(vocab_size=256, n_layers=1, d_model=16, n_heads=2, max_len=8)
NUMPY = xf.backends.get("numpy")


def corpus(n: int = 4000) -> training.Corpus:
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 100, np.uint8)
    return training.Corpus(text[:n], text[n:], "a fox")


# Text


def test_the_default_corpus_is_real_text_and_large() -> None:
    found = training.load_corpus()
    assert len(found.train) > 3_000_000 and len(found.validation) > 200_000
    assert b"def " in found.validation.tobytes()
    assert 3.0 < training.unigram_loss(found) < 3.7


def test_a_folder_is_split_by_files(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_text(f"file {i:02}\n")
    (tmp_path / "picture.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / ".hidden").write_text("not this")
    found = training.load_corpus(tmp_path)
    assert found.validation.tobytes() == b"file 01\nfile 11\n"
    assert len(found.train) == 18 * 8
    assert "20 files, 1 empty or not UTF-8 left out" in found.description


def test_a_file_is_split_at_its_last_tenth(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("äbcdefghij" * 10)
    found = training.load_corpus(path)
    assert found.train.tobytes() + found.validation.tobytes() == path.read_bytes()
    assert len(found.validation) == 11


def test_text_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin1").write_bytes("schön".encode("latin-1"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="latin1 is not UTF-8 text"):
        training.load_corpus(tmp_path / "latin1")
    with pytest.raises(ValueError, match="no UTF-8 text in 0 files"):
        training.load_corpus(tmp_path / "folder")
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        training.load_corpus(tmp_path / "absent")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ValueError, match="the text is too short: 9 bytes are needed"):
        next(
            training.train(GPT, GPT.init(), training.load_corpus(tmp_path / "empty"), CONFIG, NUMPY)
        )


@settings(max_examples=50, deadline=None)
@given(n=st.integers(2, 60), length=st.integers(1, 12), seed=st.integers(0, 10))
def test_windows_are_pieces_of_the_text(n: int, length: int, seed: int) -> None:
    text = np.arange(n, dtype=np.uint8)
    if n <= length:
        with pytest.raises(ValueError, match=f"{length + 1} bytes are needed"):
            next(windows(text, length=length, batch_size=3, seed=seed))
        return
    tokens, targets = next(windows(text, length=length, batch_size=3, seed=seed))
    assert tokens.shape == targets.shape == (3, length)
    assert (targets == tokens + 1).all() and tokens.min() >= 0 and targets.max() < n
    for tokens, targets in fixed_windows(text, length=length, batch_size=2, n_batches=3):
        assert tokens.shape == (2, length) and (targets == tokens + 1).all()


def test_unigram_loss_of_two_equal_bytes_is_one_bit() -> None:
    text = np.frombuffer(b"ab" * 50_000, np.uint8)
    loss = training.unigram_loss(training.Corpus(text, text, ""))
    assert math.isclose(loss, math.log(2), rel_tol=0.01)  # the other 254 bytes count one each


# The loop

CONFIG = training.TrainConfig(steps=60, batch_size=8, lr=1e-2, warmup=5, eval_every=20)


def test_training_learns_and_reports() -> None:
    params = GPT.init(seed=0)
    before = {k: v.copy() for k, v in xf.tree.flatten(params).items()}
    steps = list(training.train(GPT, params, corpus(), CONFIG, NUMPY))
    assert [s.step for s in steps] == list(range(1, 61))
    assert [s.step for s in steps if s.validation is not None] == [20, 40, 60]
    assert steps[0].loss == pytest.approx(math.log(256), rel=0.2)
    assert steps[-1].validation is not None
    assert steps[-1].validation < 0.8 * training.unigram_loss(corpus())
    assert steps[-1].tokens == 60 * 8 * GPT.max_len
    assert all((before[k] == v).all() for k, v in xf.tree.flatten(params).items())


def test_a_seed_gives_the_same_run_bit_for_bit() -> None:
    model = xf.GPT(256, 1, 16, 2, 8, dropout=0.1)
    runs = [
        [s.loss for s in training.train(model, model.init(0), corpus(), CONFIG, NUMPY)]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_seed_gives_the_same_run_on_other_libraries(name: str) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    backend = xf.backends.get(name)
    model = xf.GPT(256, 1, 16, 2, 8, dropout=0.1)
    config = training.TrainConfig(steps=5, batch_size=4, seed=3)
    here, there = (
        [s.loss for s in training.train(model, model.init(3, b.name), corpus(), config, b)]
        for b in (NUMPY, backend)
    )
    assert here == pytest.approx(there, rel=1e-5)  # float32, five steps


def test_the_learning_rate_rises_and_falls() -> None:
    config = training.TrainConfig(steps=100, batch_size=1, lr=1.0, warmup=10, final_lr=0.1)
    rates = [config.learning_rate(step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[54] == pytest.approx(0.55) and rates[-1] == pytest.approx(0.1)


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    params = xf.tree.map(lambda p: np.full_like(p, np.inf), GPT.init(0))
    with (
        np.errstate(all="ignore"),
        pytest.raises(FloatingPointError, match="the loss of step 1 is nan"),
    ):
        next(training.train(GPT, params, corpus(), CONFIG, NUMPY))


@pytest.mark.parametrize("field", ["steps", "batch_size", "eval_every", "eval_batches"])
def test_impossible_numbers_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        training.TrainConfig(**{"steps": 1, "batch_size": 1, field: 0})


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


def test_an_interrupted_write_leaves_the_old_checkpoint(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (saved / "model.safetensors").read_bytes()

    def full_disk(arrays: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        training.save(saved, GPT, GPT.init(8), NUMPY)
    assert (saved / "model.safetensors").read_bytes() == before


def rewrite(saved: Path, **change: object) -> None:
    """Change the configuration that the weights carry."""
    path = saved / "model.safetensors"
    with safetensors.safe_open(path, "np") as file:
        config = json.loads(file.metadata()["xformer"])
    config.update({k: v for k, v in change.items() if k != "sizes"})
    config["config"].update(change.get("sizes", {}))
    save_file(load_file(path), path, metadata={"xformer": json.dumps(config)})


def test_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is no checkpoint: it has no model\.safetensors"):
        training.load(tmp_path, NUMPY)


def test_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="model must be one of GPT, Transformer"):
        training.save(tmp_path, object(), {}, NUMPY)


def test_an_encoder_decoder_comes_back_too(tmp_path: Path) -> None:
    model = xf.Transformer(11, 13, 8, 2, 1, 1, 7, tied=True, shared_memory=True)
    params = model.init(3)
    training.save(tmp_path, model, params, NUMPY)
    found, back = training.load(tmp_path, NUMPY)
    assert found == model
    assert all((a == b).all() for a, b in zip(*map(leaves, (params, back)), strict=True))


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
        ({"format": "other-9"}, "format must be xformer-1, got 'other-9'"),
        ({"model": "Unknown"}, "its configuration is damaged"),
        ({"config": {"vocab_size": 256}}, "its configuration is damaged"),
        ({"sizes": {"n_heads": 3}}, "its configuration is damaged"),
        ({"sizes": {"colour": "red"}}, "its configuration is damaged"),
        ({"sizes": {"vocab_size": 10**12}}, "2 parameters|1 parameters"),
        ({"sizes": {"n_layers": 1000}}, "does not hold the 1000 layers"),
        ({"sizes": {"n_layers": 10**9}}, "n_layers must be at most 10000, got 1000000000"),
        ({"sizes": {"d_model": 2**40}}, "parameters are missing, unexpected or misshapen"),
        ({"sizes": {"d_ff": 10**12}}, "parameters are missing, unexpected or misshapen"),
        ({"sizes": {"max_len": 9}}, "first embed.positions: wanted .9, 16., got .8, 16."),
        ({"sizes": {"tied": False}}, "first head.w: wanted .16, 256., got None"),
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
