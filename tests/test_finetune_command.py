"""`xformer finetune`: folders that transformers and PEFT load, and mistakes told in one line."""

from __future__ import annotations

import io
import itertools
import json
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from finetuning import BERT, CLASSIFIER, GPT2, LLAMA, RANKER, T5, TAGGER, write_folder, write_lines
from test_finetune import records
from truths import published

from xformer import finetune, pretrained, training, tree
from xformer.cli import finetune_options, main
from xformer.pretrained.tokenizer import tokenizer

# PEFT still asks transformers for something by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = np.array([[9, 10, 11, 12], [8, 9, 7, 20]])
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "causal": (LLAMA, "llama", "LlamaForCausalLM"),
    "prefix": (GPT2, "gpt", "GPT2LMHeadModel"),
    "masked": (BERT, "bert", "BertForMaskedLM"),
    "classify": (CLASSIFIER, "bert", "BertForSequenceClassification"),
    "seq2seq": (T5, "t5", "T5ForConditionalGeneration"),
    "contrastive": (BERT | {"architectures": ["BertModel"]}, "bert", "BertModel"),
    "classify-pairs": (CLASSIFIER, "bert", "BertForSequenceClassification"),
    "tag": (TAGGER, "bert", "BertForTokenClassification"),
    "rank": (RANKER, "bert", "BertForSequenceClassification"),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def folder(task: str, name: str = "base") -> Path:
    """The base model of a task, in float32."""
    config, style, _ = CASES[task]
    Path(name).mkdir()
    return write_folder(Path(name), config, style)


def command(task: str, *options: str) -> list[str]:
    data = write_lines(Path("data.jsonl"), records(task, 24))
    named = ["--model", "base", "--data", str(data), "--task", task, "--out", "new"]
    return ["finetune", *named, "--steps", "4", "--batch", "8", "--lr", "0.02", *options]


# A run that has saved nothing.
BEGUN = ["checkpoints", "config.toml", "lock", "log.jsonl", "run.json"]


def names(path: str) -> list[str]:
    """The files in a folder and below it."""
    return sorted(str(p.relative_to(path)) for p in Path(path).rglob("*"))


def output(model: Any, params: Any) -> np.ndarray:
    inputs = (IDS, IDS[:, ::-1].copy()) if hasattr(model, "decoder") else (IDS,)
    y: np.ndarray = model.forward(params, *inputs)[0]
    return y


def theirs(model: Any) -> np.ndarray:
    """The same of transformers."""
    import torch

    inputs = {"input_ids": torch.tensor(IDS)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor(IDS[:, ::-1].copy())
    with torch.no_grad():
        out = model.eval()(**inputs)
    y: np.ndarray = (out.logits if hasattr(out, "logits") else out.last_hidden_state).numpy()
    return y


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("task", CASES)
def test_transformers_and_peft_load_what_is_saved(
    task: str, adapters: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same outputs, which are no longer those of the base; its folder is as it was."""
    from huggingface import transformers

    base = folder(task)
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    assert main(command(task, *(["--lora", "2"] if adapters else []))) == 0
    out = capsys.readouterr().out
    assert "saved to new" in out and "validation loss" in out
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before

    model, params = pretrained.load("new")
    got = output(model, params)
    assert np.abs(got - output(*pretrained.load(base))).max() > 1e-3
    kind = getattr(transformers, CASES[task][2])
    np.testing.assert_allclose(theirs(kind.from_pretrained("new")), got, atol=2e-5)
    text = "abc 123"
    own = transformers.AutoTokenizer.from_pretrained("new")
    assert own(text)["input_ids"] == tokenizer("new").encode(text) == tokenizer(base).encode(text)

    assert Path("new/adapter").exists() == adapters
    if adapters:
        peft = pytest.importorskip("peft")
        wrapped = peft.PeftModel.from_pretrained(kind.from_pretrained("base"), "new/adapter")
        np.testing.assert_allclose(theirs(wrapped), got, atol=2e-5)


@pytest.mark.parametrize("task", CASES)
def test_the_command_that_uses_the_model_runs(
    task: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(task)
    assert main([*command(task)[:-6], "--out", "it's new", "--steps", "1"]) == 0
    said = re.findall(r"^to use it: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(said) == (task != "masked")
    for line in said:
        before, pipe, after = line.rpartition(" | ")
        if pipe:
            pair = subprocess.run(["sh", "-c", before], check=True, capture_output=True).stdout
            assert pair.count(b"\t") == pair.count(b"\n") == 1
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(pair)))
        program, *words = shlex.split(after)
        assert (program, *words[1:3]) == ("xformer", "--model", "it's new")
        assert main(words) == 0
        assert capsys.readouterr().out


@pytest.mark.parametrize("task", ["causal", "prefix", "classify", "seq2seq"])
def test_losses_are_those_of_transformers(task: str) -> None:
    """Of batches with padding, for labels that it is told not to count."""
    from huggingface import torch, transformers

    from xformer import backends, finetune

    base = folder(task)
    model, params = pretrained.load(base)
    mine = finetune.task(task, model, tokenizer(base))
    found = finetune.examples(mine, [finetune.Record("", r) for r in records(task, 6)])
    batch = mine.batch(found, np.random.default_rng(0))
    loss, _ = mine.loss(params, batch, backends.get("numpy"))
    arrays = [torch.tensor(a) for a in batch.arrays]
    (mask,) = (torch.tensor(m).long() for m in batch.masks.values())
    labels = arrays[-1].masked_fill(arrays[-1] == -1, -100)
    hf = getattr(transformers, CASES[task][2]).from_pretrained(base).eval()
    if task in ("causal", "prefix"):  # it shifts labels itself: here each has one more in front
        logits = hf(input_ids=arrays[0], attention_mask=mask).logits
        wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    else:
        wanted = hf(input_ids=arrays[0], attention_mask=mask, labels=labels).loss
    np.testing.assert_allclose(float(loss), wanted.item(), rtol=1e-5)


def test_a_new_classifier(capsys: pytest.CaptureFixture[str]) -> None:
    """On the body of a language model; with adapters its head is trained too, so it is merged."""
    folder("causal")
    data = write_lines(
        Path("data.jsonl"),
        [{"text": r["text"], "label": "xyz"[r["label"]]} for r in records("classify", 24)],
    )
    options = ["--model", "base", "--data", str(data), "--task", "classify", "--steps", "3"]
    assert main(["finetune", *options, "--lora", "2", "--out", "new"]) == 0
    assert "only the merged model is saved" in capsys.readouterr().out
    assert not Path("new/adapter").exists()
    model, params = pretrained.load("new")
    assert model.hf_config["id2label"] == {"0": "x", "1": "y", "2": "z"}
    from huggingface import transformers

    hf = transformers.AutoModelForSequenceClassification.from_pretrained("new")
    np.testing.assert_allclose(theirs(hf), output(model, params), atol=2e-5)
    assert main(["classify", "--model", "new", "abc"]) == 0


def test_new_labels_of_words(capsys: pytest.CaptureFixture[str]) -> None:
    folder("masked")
    rows = [
        {"words": r["words"], "tags": ["xyz"[t] for t in r["tags"]]} for r in records("tag", 24)
    ]
    write_lines(Path("data.jsonl"), rows)
    options = ["--model", "base", "--data", "data.jsonl", "--steps", "3", "--out", "new"]
    assert main(["finetune", *options]) == 0
    assert "task: tag\n" in capsys.readouterr().out
    model, params = pretrained.load("new")
    assert model.hf_config["id2label"] == {"0": "x", "1": "y", "2": "z"}
    from huggingface import transformers

    hf = transformers.AutoModelForTokenClassification.from_pretrained("new")
    np.testing.assert_allclose(theirs(hf), output(model, params), atol=2e-5)
    for bad, message in (
        ({"words": [], "tags": []}, "words must be a list that is not empty, got []"),
        ({"words": "ab", "tags": ["x"]}, "words must be a list that is not empty, got 'ab'"),
        (
            {"words": ["a", ""], "tags": ["x", "x"]},
            "words must be texts that are not empty, got ''",
        ),
        ({"words": ["a"], "tags": [["x"]]}, "labels must all be names, or all numbers"),
        ({"words": ["a", "b"], "tags": ["x"]}, "there must be a tag for each of 2 words, got 1"),
    ):
        write_lines(Path("data.jsonl"), [*rows, bad])
        assert main(["finetune", *options[:-1], "other"]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        (["--freeze", "embed.*", "stack.blocks.0.*"], ("stack.blocks.1.", "stack.norm", "head")),
        (["--train", "head.*", "stack.norm.*"], ("stack.norm", "head")),
        (["--train", "stack.*", "--freeze", "*.attn.*"], ("stack.blocks", "stack.norm")),
        (["--lora", "1", "--targets", "head", "--train", "*.1.*"], ("head", "stack.blocks.1.")),
    ],
)
def test_parts_are_trained(options: list[str], trained: tuple[str, ...]) -> None:
    """What is frozen is saved bit for bit."""
    base = folder("causal")
    assert main(command("causal", *options)) == 0
    before, after = (tree.flatten(pretrained.load(path)[1]) for path in (base, "new"))
    for name, leaf in before.items():
        frozen = not name.startswith(trained) or ("*.attn.*" in options and ".attn." in name)
        assert np.array_equal(leaf, after[name]) == frozen, name


def test_lines_of_text_and_no_validation(capsys: pytest.CaptureFixture[str]) -> None:
    folder("masked")
    Path("data.txt").write_text("\n".join(r["text"] for r in records("masked", 20)))
    options = ["--model", "base", "--task", "masked", "--out", "new", "--steps", "2"]
    assert main(["finetune", *options, "--data", "data.txt", "--validation-fraction", "0"]) == 0
    out = capsys.readouterr().out
    assert "examples: 20 to train on, 0 to validate on\n" in out and "validation loss" not in out


def test_cut_texts_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    folder("masked")
    texts = ["abc", "abcdefghij", "abcdef", "abcdefg"]  # in [CLS] and [SEP]
    write_lines(Path("texts.jsonl"), [{"text": text} for text in texts])
    options = ["--data", "texts.jsonl", "--max-len", "8", "--steps", "1"]
    assert main(command("masked", *options)) == 0
    assert "1 to validate on; 2 cut to 8 tokens\n" in capsys.readouterr().out


@pytest.mark.parametrize(("style", "backend"), [("cosine", "numpy"), ("constant", "torch")])
def test_a_seed_is_a_result(style: str, backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    if backend != "numpy":
        pytest.importorskip(backend)
    folder("causal")
    options = ["--schedule", style, "--backend", backend, "--dtype", "float64", "--lora", "2"]
    for _ in range(2):
        assert main(command("causal", *options)) == 0
        if not Path("old").exists():
            shutil.move("new", "old")
    capsys.readouterr()
    files = [Path(p, "model.safetensors").read_bytes() for p in ("old", "new")]
    assert files[0] == files[1]


def test_settings_of_sentences_are_kept() -> None:
    """So that sentence-transformers, and `xformer embed`, go on as before."""
    base = folder("contrastive")
    files = {
        "modules.json": '[{"idx": 0, "name": "0", "path": "", "type": '
        '"sentence_transformers.models.Transformer"}, {"idx": 1, "name": "1", "path": "1_Pooling", '
        '"type": "sentence_transformers.models.Pooling"}]',
        "1_Pooling/config.json": '{"pooling_mode_cls_token": true}',
        "generation_config.json": "{}",
    }
    (base / "1_Pooling").mkdir()
    for name, text in files.items():
        (base / name).write_text(text)
    assert main(command("contrastive")) == 0
    assert all(Path("new", name).read_text() == text for name, text in files.items())
    assert main(["embed", "--model", "new", "abc", "abd"]) == 0


def test_settings_of_splade_and_colbert_are_kept() -> None:
    base = folder("masked")
    kinds = {"1_SpladePooling": "SpladePooling", "7_Projection": "Dense"}
    modules = [{"path": path, "type": f"own.{kind}"} for path, kind in kinds.items()]
    names = ["sentence_roberta_config.json", "sentence_xlnet_config.json", "artifact.metadata"]
    names += [f"{path}/config.json" for path in kinds] + ["7_Projection/model.safetensors"]
    for name in names:
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(name)
    (base / "modules.json").write_text(json.dumps(modules))
    assert main(command("masked")) == 0
    for name in names:
        assert Path("new", name).read_text() == name


def test_a_damaged_list_of_modules_is_found_before_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder("masked") / "modules.json").write_text("[")
    assert main(command("masked")) == 1
    assert "modules.json: is no valid JSON" in capsys.readouterr().err
    assert names("new") == []


def test_another_tokenizer() -> None:
    """What is saved is the one that was used."""
    folder("causal")
    folder("prefix", "other")
    assert main(command("causal", "--tokenizer", "other")) == 0
    want, base, got = (tokenizer(name).encode("abc") for name in ("other", "base", "new"))
    assert want == got != base


def test_stories260k(capsys: pytest.CaptureFixture[str]) -> None:
    """llama2.c's model with its tokenizer beside it becomes a Llama."""
    path, _ = published("stories260K.bin"), published("tok512.bin")
    Path("names.txt").write_text("".join(f"{name}\n" for name in ("ada", "bea", "cleo") * 20))
    options = ["--model", str(path), "--data", "names.txt", "--task", "causal", "--out", "new"]
    more = ["--lora", "4", "--targets", "*", "--steps", "20", "--lr", "0.01"]
    assert main(["finetune", *options, *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    (losses,) = (line for line in lines if line.startswith("validation loss"))
    after, before = float(losses.split()[2]), float(losses.split()[4])
    assert before > 8 and after < 2
    model, params = pretrained.load("new")
    assert model.hf_config["model_type"] == "llama"
    assert tokenizer("new").decode(tokenizer(path.with_name("tok512.bin")).encode("ada")) == "ada"
    from huggingface import transformers

    hf = transformers.AutoModelForCausalLM.from_pretrained("new")
    np.testing.assert_allclose(theirs(hf), output(model, params), atol=1e-4)


# ---- Mistakes ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "absent"], "there is no folder or file"),
        (["--data", "absent.jsonl"], "there is no file absent.jsonl"),
        (["--data", "empty.jsonl"], "empty.jsonl: there is nothing in it to train on"),
        (["--data", "bad.jsonl"], "bad.jsonl: line 2: is no valid JSON"),
        (["--data", "data.txt"], "data.txt: must be a .jsonl, .json or .csv file with prompt, co"),
        (["--data", "long.jsonl"], "long.jsonl: line 1: the prompt's 41 tokens leave no room for"),
        (["--data", "one.jsonl"], "1 examples are too few to keep 1 for validation"),
        (["--task", "masked", "--data", "masked.jsonl"], "must be a masked language model"),
        (["--max-len", "1"], "--max-len must be an int of at least 2, got 1"),
        (["--max-len", "33", "--model", "gpt"], "--max-len must be at most the model's 32, got 33"),
        (["--validation-fraction", "1"], "--validation-fraction must lie in [0, 1), got 1"),
        (["--steps", "0"], "--steps must be an int of at least 1, got 0"),
        (["--batch", "0"], "--batch must be an int of at least 1, got 0"),
        (["--lora", "0"], "--lora must be an int of at least 1, got 0"),
        (["--lora", "2", "--targets", "*.qkv"], "'*.qkv' matches no linear map; there are *.attn"),
        (["--alpha", "2"], "--alpha and --targets need --lora"),
        (["--targets", "*"], "--alpha and --targets need --lora"),
        (["--freeze", "stack.*", "x"], "freeze: 'x' matches none of"),
        (["--freeze", "*"], "train: all parameters are frozen"),
        (["--train", "x"], "thaw: 'x' matches none of"),
        (["--out", "base"], "base is not empty"),
        (["--model", "bare"], "is no file of a tokenizer, and no folder with one"),
        (["--lr", "nan"], "--lr must lie in [0, inf], got nan"),
        (["--seed", "-1"], "--seed must be an int of at least 0, got -1"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = folder("causal")
    Path("gpt").mkdir()
    write_folder(Path("gpt"), GPT2, "gpt")
    shutil.copytree(base, "bare")
    Path("bare/tokenizer.json").unlink()
    write_lines(Path("masked.jsonl"), records("masked", 10))
    long = [{"prompt": "a" * 40, "completion": "b"}] * 20
    write_lines(Path("long.jsonl"), long)
    write_lines(Path("one.jsonl"), [{"prompt": "a", "completion": "b"}])
    Path("empty.jsonl").write_text("\n")
    Path("bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n')
    Path("data.txt").write_text("a\nb\n")
    assert main(command("prefix", *options)) == 1
    said = capsys.readouterr()
    assert said.err.startswith("xformer: error: ") and said.err.count("\n") == 1
    assert message in said.err
    assert not Path("new").exists() or not any(Path("new").iterdir())


def test_a_label_out_of_range(capsys: pytest.CaptureFixture[str]) -> None:
    folder("classify")
    rows = [*records("classify", 5), {"text": "a", "label": 3}]
    write_lines(Path("labels.jsonl"), rows)
    assert main(command("classify", "--data", "labels.jsonl")) == 1
    assert "labels.jsonl: line 6: label must be a number below 3" in capsys.readouterr().err


def test_a_full_disk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and nothing half written."""
    from xformer.pretrained import files

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    folder("causal")
    # Only of that module: the model is validated before it is written.
    monkeypatch.setattr(files, "np", SimpleNamespace(**vars(np) | {"ascontiguousarray": full}))
    assert main(command("causal")) == 1
    assert "no space left on device; there is no checkpoint yet" in capsys.readouterr().err
    assert names("new") == BEGUN


def test_ctrl_c_saves_what_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from xformer import finetune

    def interrupted(*args: Any, **options: Any) -> Any:
        yield next(iter(real(*args, **options)))
        raise KeyboardInterrupt

    real = finetune.train
    monkeypatch.setattr(finetune, "train", interrupted)
    folder("causal")
    assert main(command("causal")) == 0
    said = capsys.readouterr()
    assert "stopped early" in said.err and "saved to new after 1 steps" in said.out
    assert Path("new/model.safetensors").exists()


def test_ctrl_c_while_it_is_measured_keeps_the_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pressed once while training, and again while the last model is validated."""
    real, calls = finetune.evaluate, itertools.count()

    def pressed(*args: Any, **options: Any) -> float:
        if next(calls):
            raise KeyboardInterrupt
        return real(*args, **options)

    def steps(*args: Any, **options: Any) -> Any:
        for step in train(*args, **options):
            signal.raise_signal(signal.SIGINT)
            yield step

    train = finetune.train
    monkeypatch.setattr(finetune, "evaluate", pressed)
    monkeypatch.setattr(finetune, "train", steps)
    folder("causal")
    assert main(command("causal")) == 0
    assert "saved to new after 1 steps" in capsys.readouterr().out
    pretrained.load("new")


@pytest.mark.parametrize("until", [1, 3])
def test_the_best_model_is_kept(
    until: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a training that goes wrong, and of one that ends worse than it was."""
    losses = iter([9.0, 2.0, 3.0, 4.0])

    def steps(*args: Any, **options: Any) -> Any:
        for step in train(*args, **options):
            if step.step > until:
                raise training.Diverged("the loss is nan")
            yield step

    train = finetune.train
    monkeypatch.setattr(finetune, "train", steps)
    monkeypatch.setattr(finetune_options, "EVERY", 1)
    monkeypatch.setattr("xformer.training.loop.evaluate", lambda *_, **__: next(losses))
    folder("causal")
    assert main(command("causal")) == 1
    err = capsys.readouterr().err
    saved = f"the loss is nan; new has the model of step {min(until, 2)}, the best validated one"
    assert saved in err
    kept = pretrained.load("new")[1].embed.table

    losses = iter([9.0, 2.0, 3.0, 4.0][:until] + [10.0] * 4)
    monkeypatch.setattr(finetune, "train", train)
    assert main(command("causal", "--out", "whole")) == 0
    out = capsys.readouterr().out
    assert f"before training; the best model is from step {min(until, 2)}\n" in out
    assert np.array_equal(kept, pretrained.load("whole")[1].embed.table)


def test_training_that_goes_wrong_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    folder("causal")
    with np.errstate(all="ignore"):
        assert main(command("causal", "--lr", "1e30")) == 1
    assert "no model was validated, so none is saved" in capsys.readouterr().err
    assert names("new") == BEGUN


def test_a_full_disk_is_foreseen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder("causal")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert main(command("causal")) == 1
    said = capsys.readouterr()
    assert re.search(r"new: the checkpoints need \d+\.\d kB, and 1\.0 kB are free\n", said.err)
    assert "validat" not in said.out


def test_a_checkpoint_of_ours_is_no_base(capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text("the quick brown fox " * 2000)
    assert (
        main(["train", "--preset", "tiny", "--steps", "1", "--data", "text.txt", "--out", "base"])
        == 0
    )
    assert main(command("causal")) == 1
    assert "base was written by xformer train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "kind", "wanted"),
    [
        ("plain text\n", "LlamaForCausalLM", "causal"),
        ('{"text": "a"}\n', "BertForMaskedLM", "masked"),
        ('{"text": "a", "label": 1}\n', "BertForMaskedLM", "classify"),
        ('{"text": "a", "text_pair": "b", "label": 1}\n', "BertForMaskedLM", "classify-pairs"),
        ('{"words": ["a"], "tags": ["O"]}\n', "BertForMaskedLM", "tag"),
        ('{"prompt": "a", "completion": "b"}\n', "LlamaForCausalLM", "prefix"),
        ('{"source": "a", "target": "b"}\n', "T5ForConditionalGeneration", "seq2seq"),
        ('{"anchor": "a", "positive": "b"}\n', "BertModel", "contrastive"),
        ('{"query": "a", "document": "b", "score": 1}\n', "BertModel", "rank"),
        ('{"query": "a", "document": "b", "label": 1}\n', "BertForMaskedLM", "rank"),
    ],
)
def test_the_task_follows_from_the_fields(
    tmp_path: Path, lines: str, kind: str, wanted: str
) -> None:
    data = tmp_path / ("data.txt" if lines.startswith("plain") else "data.jsonl")
    data.write_text(lines)
    (tmp_path / "config.json").write_text(f'{{"architectures": ["{kind}"]}}')
    assert finetune.suited(data, tmp_path) == wanted


@pytest.mark.parametrize(
    ("lines", "kind", "said"),
    [
        ("plain text\n", "BertForSequenceClassification", "classify.*label and text.*has text$"),
        ('{"text": "a", "class": 1}\n', "BertForSequenceClassification", "has class and text$"),
        ('{"words": ["a"]}\n', "BertForTokenClassification", "tag.*tags and words.*has words$"),
    ],
)
def test_a_classifier_learns_from_labels(tmp_path: Path, lines: str, kind: str, said: str) -> None:
    data = tmp_path / ("data.txt" if lines.startswith("plain") else "data.jsonl")
    data.write_text(lines)
    (tmp_path / "config.json").write_text(f'{{"architectures": ["{kind}"]}}')
    with pytest.raises(ValueError, match=said):
        finetune.suited(data, tmp_path)
