"""`xformer train --from`: a new run that begins with a model, whoever made it."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finetuning import BERT, GPT2, LLAMA, T5, write_folder
from runs import rows

from xformer import pretrained, training, tree
from xformer.backends import get
from xformer.cli import main, train

NUMPY = get("numpy")
TEXT = "the quick brown fox jumps over the lazy dog. "
TRAIN = [
    *("train", "--data", "fox.txt", "--preset", "tiny", "--batch", "3", "--steps", "6"),
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
KINDS = {"llama": (LLAMA, "llama"), "gpt2": (GPT2, "gpt"), "bert": (BERT, "bert"), "t5": (T5, "t5")}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a text; no samples, which take longer than these runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_sample", lambda *_, **__: None)
    Path("fox.txt").write_text(TEXT * 100)


def folder(kind: str) -> None:
    Path(kind).mkdir()
    write_folder(Path(kind), *KINDS[kind])


def own(*options: str) -> int:
    sizes = ("--layers", "1", "--d-model", "16", "--heads", "2", "--max-len", "16")
    return main([*TRAIN, *sizes, "--out", "own", *options])


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, float]]:
    """The jobs of the runs, and the loss of each before training."""
    found: list[tuple[Any, float]] = []
    real = train._measured

    def kept(job: Any, state: Any, world: Any) -> float:
        loss = real(job, state, world)
        found.append((job, loss))
        return loss

    monkeypatch.setattr(train, "_measured", kept)
    return found


def theirs(path: str, batches: list[training.Batch]) -> float:
    """The loss of transformers, of the model in a folder."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path).eval()
    total, count = 0.0, 0
    for batch in batches:
        tokens, targets = map(torch.tensor, batch.arrays)
        with torch.no_grad():
            logits = model(tokens).logits
        total += float(torch.nn.functional.cross_entropy(logits.mT, targets, reduction="sum"))
        count += targets.numel()
    return total / count


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_it_begins_and_ends_as_transformers_model(
    kind: str, measured: list[tuple[Any, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import AutoTokenizer

    folder(kind)
    assert main([*TRAIN, "--from", kind, "--out", "run", "--lr", "0.01"]) == 0
    ((job, before),) = measured
    out = capsys.readouterr().out
    line = f"validation loss {before:.3f} nats per token before training\n"
    assert f"{line}perplexity {math.exp(before):,.2f}\n" in out
    assert abs(before - theirs(kind, job.held_out.batches)) < 1e-5
    best = min(row["validation"] for row in rows(Path("run")) if row["validation"])
    assert best < before - 0.1
    assert abs(best - theirs("run", job.held_out.batches)) < 1e-5
    words = [AutoTokenizer.from_pretrained(path)("the fox")["input_ids"] for path in (kind, "run")]
    assert words[0] == words[1]
    assert json.loads(Path("run/run.json").read_text())["notes"]["max_len"] == 32


def test_its_learning_rate_is_low_unless_given() -> None:
    folder("llama")
    assert main([*TRAIN, "--from", "llama", "--out", "run", "--schedule", "constant"]) == 0
    assert rows(Path("run"))[-1]["lr"] == 5e-5


def test_a_run_of_our_own(measured: list[tuple[Any, float]]) -> None:
    """Its weights alone: the counts and the optimiser are new."""
    assert own("--tokenizer", "characters", "--dropout", "0.1") == 0
    best = min(row["validation"] for row in rows(Path("own")) if row["validation"])
    assert main([*TRAIN, "--from", "own", "--out", "run", "--lr", "0", "--seed", "1"]) == 0
    ((job, before),) = measured
    assert before == best  # the same windows, bit for bit
    assert [row["step"] for row in rows(Path("run"))] == list(range(1, 7))
    assert rows(Path("run"))[0]["tokens"] == 3 * 16
    (model, params), (copy, same) = (training.load(path, NUMPY) for path in ("own", "run"))
    assert model == copy and model.embed.dropout == 0.1 and job.model == model
    for name, leaf in tree.flatten(params).items():
        assert np.array_equal(leaf, tree.flatten(same)[name]), name


def begun(kind: str) -> None:
    if kind == "own":
        assert own() == 0
    else:
        folder(kind)


def some(n: int, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is stopped after n steps."""
    real = train.train
    with monkeypatch.context() as patch:
        patch.setattr(train, "train", lambda *a, **o: itertools.islice(real(*a, **o), n))
        assert main(command) == 0


@pytest.mark.parametrize("kind", ["own", "gpt2"])
def test_it_is_stopped_and_goes_on_without_that_folder(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(kind)
    command = [*TRAIN, "--from", kind]
    assert main([*command, "--out", "never"]) == 0
    some(0, [*command, "--out", "run"], monkeypatch)
    shutil.rmtree(kind)
    some(1, ["train", "--resume", "run"], monkeypatch)
    assert [row["step"] for row in rows(Path("run"))] == [1]
    assert main(["train", "--resume", "run"]) == 0
    assert rows(Path("run")) == rows(Path("never"))
    weights = [Path(name, "model.safetensors").read_bytes() for name in ("never", "run")]
    assert weights[0] == weights[1]


def test_it_was_killed_before_its_first_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It reads the weights anew, and never begins with random ones."""
    folder("gpt2")
    assert main([*TRAIN, "--from", "gpt2", "--out", "never"]) == 0
    some(0, [*TRAIN, "--from", "gpt2", "--out", "run"], monkeypatch)
    for path in Path("run").rglob("*"):
        if path.is_file() and path.name not in ("run.json", "lock"):
            path.unlink()
    Path("gpt2").rename("elsewhere")
    capsys.readouterr()
    assert main(["train", "--resume", "run"]) == 1
    assert "gpt2" in capsys.readouterr().err
    Path("elsewhere").rename("gpt2")
    assert main(["train", "--resume", "run"]) == 0
    assert rows(Path("run")) == rows(Path("never"))


def test_what_it_made_is_a_base_again(capsys: pytest.CaptureFixture[str]) -> None:
    """For another run, and of a pretrained model for `xformer finetune`."""
    folder("llama")
    assert main([*TRAIN, "--from", "llama", "--out", "run"]) == 0
    assert main([*TRAIN, "--from", "run", "--out", "again"]) == 0
    Path("lines.txt").write_text(f"{TEXT}\n" * 20)
    tune = ["--data", "lines.txt", "--task", "causal", "--steps", "2", "--out", "tuned"]
    assert main(["finetune", "--model", "again", *tune]) == 0
    names = [tree.flatten(pretrained.load(path)[1]).keys() for path in ("llama", "tuned")]
    assert names[0] == names[1]
    capsys.readouterr()
    assert own() == 0
    assert main(["finetune", "--model", "own", *tune]) == 1
    said = "own was written by xformer train, which trains it further: "
    said += "xformer train --from own --data "
    assert capsys.readouterr().err == f"xformer: error: {said}lines.txt\n"


def test_prepared_text_has_the_vocabulary_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    folder("gpt2")
    assert main(["prepare", "fox.txt", "tokens", "--tokenizer", "gpt2"]) == 0
    assert main(["prepare", "fox.txt", "bytes"]) == 0
    options = ["--from", "gpt2", "--steps", "2"]
    assert main([*TRAIN, *options, "--data", "tokens", "--out", "run"]) == 0
    assert main([*TRAIN, *options, "--data", "bytes", "--out", "other"]) == 1
    assert "bytes has its own vocabulary, another was given" in capsys.readouterr().err
    assert not Path("other").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "absent"], "there is no folder or file absent"),
        (["--from", "fox.txt"], "--from: must be the folder of a model, got the file fox.txt"),
        (["--from", "bert"], "got BertForMaskedLM; train it with xformer finetune --model bert"),
        (
            ["--from", "t5"],
            "got T5ForConditionalGeneration; train it with xformer finetune --model t5",
        ),
        (["--from", "pairs"], "got EncoderDecoder; train it with the Python interface"),
        (
            ["--from", "gpt2", "--layers", "1"],
            "--layers excludes --from: the model in gpt2 fixes it",
        ),
        (["--from", "gpt2", "--dropout", "0"], "--dropout excludes --from"),
        (["--from", "gpt2", "--tokenizer", "bytes"], "--tokenizer excludes --from"),
        (["--from", "gpt2", "--max-len", "33"], "--max-len must be at most 32, the context of the"),
        (["--from", "gpt2", "--resume", "own"], "--from starts a new run: it excludes --resume"),
        (["--from", "longer"], "longer: the id of the EOS token must be below "),
        (["--from", "bare"], "bare is no file of a tokenizer, and no folder with one"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from xformer import Transformer

    for kind in ("gpt2", "bert", "t5"):
        folder(kind)
    pairs = Transformer(9, 9, 8, 2, 1, 1, 8)
    training.save("pairs", pairs, pairs.init(), NUMPY)
    shutil.copytree("gpt2", "bare", ignore=lambda *_: ["tokenizer.json", "tokenizer_config.json"])
    shutil.copytree("gpt2", "longer")
    Path("longer/tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    assert main([*TRAIN, *options, "--out", "new"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("xformer: error: ") and message in err and err.count("\n") == 1
    assert not Path("new").exists()


@pytest.mark.parametrize("model", [None, {"name": "GPT", "depth": 3}, {"name": "Llama"}])
def test_a_damaged_note_of_the_model_is_named(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder("gpt2")
    assert main([*TRAIN, "--from", "gpt2", "--out", "run"]) == 0
    path = Path("run/run.json")
    content = json.loads(path.read_text())
    content["about"]["model"] = model
    path.write_text(json.dumps(content))
    capsys.readouterr()
    assert main(["train", "--resume", "run"]) == 1
    assert "run/run.json: its model is damaged" in capsys.readouterr().err
