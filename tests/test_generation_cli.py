"""`xformer generate` as a user meets it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from causal_models import CONFIGS, T5
from libraries import ON_DEVICE, only
from truths import published

from xformer import backends, pretrained, tree
from xformer.backends import Backend
from xformer.cli import generate as command
from xformer.cli import main
from xformer.generation import generate
from xformer.pretrained.tokenizer import tokenizer

pytest.importorskip("tokenizers")
PROMPT = "Once upon a time"


def stories(folder: Path, *names: str) -> str:
    """stories260K in a folder, with a tokenizer under each of these names."""
    shutil.copy(published("stories260K.bin"), folder)
    for name in names:
        shutil.copy(published("tok512.bin"), folder / name)
    return str(folder / "stories260K.bin")


def model_folder(folder: Path, family: str) -> str:
    """A model of random weights with the tokens of stories260K."""
    if family == "t5":
        config = {"model_type": "t5", "is_encoder_decoder": True, **T5}
        config["architectures"] = ["T5ForConditionalGeneration"]
    else:
        config = {"model_type": family, **CONFIGS[family]}
        config["architectures"] = [config.pop("architecture")]
    model = pretrained.model(config | {"vocab_size": 512})
    pretrained.save(model, model.init(), folder)
    tokenizer(published("tok512.bin")).save(folder)
    return str(folder)


def run(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[str, str]:
    assert main(["generate", *map(str, args)]) == 0
    said = capsys.readouterr()
    return said.out, said.err


def refused(capsys: pytest.CaptureFixture[str], *args: Any) -> str:
    assert main(["generate", *map(str, args)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("xformer: error: ") and said.err.count("\n") == 1
    assert said.out == ""
    return said.err


def test_a_story(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = stories(tmp_path, "tok512.bin")
    greedy = ("--model", path, "--temperature", 0)
    out, err = run(capsys, *greedy, "--prompt", "", "--max-new-tokens", 200)
    assert out.encode() == published("stories260K_greedy_200_tokens.txt").read_bytes() + b"\n"
    said = r"1 prompt tokens in \d+\.\d\d s, 200 new tokens at \d+\.\d tokens/s\n"
    assert re.fullmatch(said, err)

    out, _ = run(capsys, *greedy, "--prompt", PROMPT, "--stop", "xyz", "--stop", "girl")
    assert out == "Once upon a time, there was a little \n"
    whole, _ = run(capsys, *greedy, "--prompt", PROMPT, "--max-new-tokens", 30)
    at_once, _ = run(capsys, *greedy, "--prompt", PROMPT, "--max-new-tokens", 30, "--no-stream")
    assert whole == at_once
    float64, _ = run(
        capsys, *greedy, "--prompt", PROMPT, "--max-new-tokens", 30, "--dtype", "float64"
    )
    assert whole == float64


def test_it_is_printed_as_it_comes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(command, "write", lambda pieces, _: written.append(len(list(pieces))))
    path = stories(tmp_path, "tok512.bin")
    for option in ("--stream", "--no-stream"):
        run(capsys, "--model", path, "--prompt", PROMPT, "--max-new-tokens", 20, option)
    assert written[0] > 15 and written[1] == 1


def test_without_temperature_nothing_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The likeliest tokens alone are known ahead, so `stream` must know that they are meant."""
    drawn: list[bool] = []
    own = command.stream

    def stream(*args: Any, **options: Any) -> Any:
        drawn.append(options["sampler"] is not None)
        return own(*args, **options)

    monkeypatch.setattr(command, "stream", stream)
    start = ("--model", stories(tmp_path, "tok512.bin"), "--prompt", PROMPT, "--max-new-tokens", 3)
    for option in ((), ("--temperature", 0), ("--temperature", 0, "--repetition-penalty", 2)):
        run(capsys, *start, *option)
    assert drawn == [True, False, True]


def test_sampling_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = stories(tmp_path, "tok512.bin")
    start = ("--model", path, "--prompt", PROMPT, "--max-new-tokens", 40)
    drawn, _ = run(capsys, *start, "--seed", 1)
    assert run(capsys, *start, "--seed", 1)[0] == drawn != run(capsys, *start, "--seed", 2)[0]
    greedy, _ = run(capsys, *start, "--temperature", 0)
    for option in (("--top-k", 1), ("--top-p", 0), ("--min-p", 1)):
        assert run(capsys, *start, *option, "--temperature", 2)[0] == greedy
    # As many different words as can be, under a penalty that forbids all others.
    out, _ = run(capsys, *start, "--temperature", 0, "--repetition-penalty", 1e9)
    assert out != greedy
    searched, _ = run(capsys, *start, "--beams", 4)
    assert searched != greedy and searched.startswith(PROMPT)
    assert run(capsys, *start, "--beams", 1)[0] == greedy


def test_without_a_length_the_context_is_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = ("--model", stories(tmp_path, "tok512.bin"), "--prompt", PROMPT * 50)
    _, err = run(capsys, *long)
    n_read, n_written = (int(n) for n in re.findall(r"(\d+) (?:prompt|new) tokens", err))
    assert n_read > 512 - command.MAX_NEW and 0 < n_written <= 513 - n_read
    assert "the model's context holds 512" in refused(
        capsys, *long, "--max-new-tokens", command.MAX_NEW
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_folders(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_folder(tmp_path, family)
    out, _ = run(capsys, "--model", folder, "--prompt", PROMPT, "--max-new-tokens", 5)
    assert out.startswith(PROMPT) == (family != "t5")
    searched, _ = run(
        capsys, "--model", folder, "--prompt", PROMPT, "--max-new-tokens", 5, "--beams", 2
    )
    assert searched.startswith(PROMPT) == (family != "t5")


def test_the_tokenizer_of_as_many_tokens_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stories(tmp_path, "tok512.bin")
    data = published("tok512.bin").read_bytes()
    (tmp_path / "tok400.bin").write_bytes(cut(data, 400))
    (tmp_path / "tok0.bin").write_bytes(b"tokens of another program")
    out, _ = run(
        capsys, "--model", path, "--prompt", PROMPT, "--temperature", 0, "--max-new-tokens", 9
    )
    assert out.startswith("Once upon a time, there was")
    (tmp_path / "tok512.bin").unlink()
    err = refused(capsys, "--model", path, "--prompt", PROMPT)
    assert "there is no tokenizer of 512 tokens beside" in err and "looked for tok*.bin" in err
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "tok512.bin").write_bytes(data)
    for place in ("elsewhere", "elsewhere/tok512.bin"):
        options = ("--tokenizer", tmp_path / place, "--temperature", 0, "--max-new-tokens", 9)
        assert run(capsys, "--model", path, "--prompt", PROMPT, *options)[0] == out


def cut(data: bytes, n: int) -> bytes:
    """The first n pieces of a tokenizer of llama2.c."""
    end = 4
    for _ in range(n):
        end += 8 + int.from_bytes(data[end + 4 : end + 8], "little")
    return data[:end]


def test_a_folder_without_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_folder(tmp_path, "llama")
    (tmp_path / "tokenizer.json").unlink()
    err = refused(capsys, "--model", folder, "--prompt", PROMPT)
    for name in ("tokenizer.json", "vocab.json with merges.txt", "vocab.txt", "--tokenizer PATH"):
        assert name in err
    given = published("tok512.bin")
    options = ("--tokenizer", given, "--max-new-tokens", 3)
    assert run(capsys, "--model", folder, "--prompt", PROMPT, *options)[0].startswith(PROMPT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top-k", 0), "--top-k must be an int of at least 1, got 0"),
        (("--temperature", -1), "--temperature must lie in [0, inf], got -1.0"),
        (("--beams", 2, "--top-p", 0.5), "--beams does not sample: it excludes --top-p"),
        (("--beams", 0), "--beams must be an int of at least 1, got 0"),
        (("--max-new-tokens", 600), "holds 512 tokens, and there are 5 of the prompt and 599 more"),
        (("--max-new-tokens", -1), "--max-new-tokens must be an int of at least 0, got -1"),
        (("--seed", -1), "seed must be an int of at least 0, got -1"),
        (("--stop", ""), "a string that ends the text must not be empty"),
        (("--prompt", PROMPT * 300), "the model's context holds 512 tokens, and there are"),
        (("--tokenizer", "absent"), "there is no file or folder absent"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: Any, message: str
) -> None:
    path = stories(tmp_path, "tok512.bin")
    assert message in refused(capsys, "--model", path, "--prompt", PROMPT, *options)


def test_what_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, "--model", tmp_path / "absent", "--prompt", PROMPT)
    assert f"there is no folder or file {tmp_path / 'absent'}\n" in err
    (tmp_path / "x.bin").write_bytes(b"12345")
    err = refused(capsys, "--model", tmp_path / "x.bin", "--prompt", PROMPT)
    assert "is no llama2.c checkpoint" in err
    bert = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 512}
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = pretrained.model(bert | sizes | {"intermediate_size": 8})
    pretrained.save(model, model.init(), tmp_path / "bert")
    tokenizer(published("tok512.bin")).save(tmp_path / "bert")
    err = refused(capsys, "--model", tmp_path / "bert", "--prompt", PROMPT)
    assert "or an encoder-decoder, with a head over its vocabulary, got a masked" in err


@only(*ON_DEVICE)
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3"])
def test_precision(
    family: str,
    library: Backend,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is written in bfloat16 is what the model in that precision writes; NumPy has none."""
    path = model_folder(tmp_path, family)
    asked = "--model", path, "--prompt", "Lily", "--temperature", 0, "--max-new-tokens", 3
    why = "stores numbers in float32 and float64, not bfloat16; backend cupy does"
    assert why in refused(capsys, *asked, "--precision", "bfloat16")
    why = "is no model"  # which is looked for later than what cannot be
    assert why not in refused(capsys, "--model", "absent", *asked[2:], "--precision", "bfloat16")
    monkeypatch.setattr(backends, "get", lambda *_: library)
    why = "--precision needs --dtype float32, got float64"
    assert why in refused(capsys, *asked, "--precision", "bfloat16", "--dtype", "float64")
    written, _ = run(capsys, *asked, "--precision", "bfloat16")
    model, params = pretrained.load(path)
    low = library.cast_params(params, "bfloat16")
    words = tokenizer(path)
    ids = words.encode("Lily")
    (new,) = generate(model, low, [ids], max_new_tokens=3)
    assert written == words.decode([*ids, *new]) + "\n"
    assert all(p.dtype.name == "bfloat16" for p in tree.flatten(low).values())


@only(*ON_DEVICE)
def test_a_precision_that_is_not_for_a_model(
    library: Backend,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = model_folder(tmp_path, "t5")
    monkeypatch.setattr(backends, "get", lambda *_: library)
    said = refused(capsys, "--model", path, "--prompt", "Lily", "--precision", "float16")
    why = "--precision float16 does not work for this model: sdpa: no kernel runs in float16"
    assert why in said


def test_a_trained_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its text slides past the context; bytes are its tokens."""
    (tmp_path / "fox.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    train = ["train", "--preset", "tiny", "--steps", "3", "--data", str(tmp_path / "fox.txt")]
    folder = str(tmp_path / "gpt")
    assert main([*train, "--out", folder]) == 0
    capsys.readouterr()
    for prompt, options in (
        (PROMPT, ("--max-new-tokens", 70)),
        ("the fox " * 20, ("--max-new-tokens", 5)),
    ):
        out, _ = run(capsys, "--model", folder, "--prompt", prompt, *options)
        assert out.startswith(prompt) and len(out) > len(prompt) + 1
    float64, _ = run(capsys, "--model", folder, "--prompt", "the", "--dtype", "float64")
    assert float64 == run(capsys, "--model", folder, "--prompt", "the")[0]
    assert "the prompt must hold at least one token" in refused(
        capsys, "--model", folder, "--prompt", ""
    )
    options = ("--prompt", "a", "--tokenizer", published("tok512.bin"))
    why = "was written by xformer train and has a tokenizer"
    assert why in refused(capsys, "--model", folder, *options)


def samples(out: str, n_samples: int) -> list[str]:
    """The texts of `--num-samples`, each with its prompt and a line end."""
    first, *texts = re.split(r"^--- sample (?=\d)", out, flags=re.MULTILINE)
    assert first == ""
    heads = [text.partition("\n")[0] for text in texts]
    assert heads == [f"{i} of {n_samples}" for i in range(1, n_samples + 1)]
    return [text.partition("\n")[2] for text in texts]


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_several_samples(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = ("--model", model_folder(tmp_path, family), "--prompt", PROMPT, "--seed", 3)
    start = (*start, "--max-new-tokens", 12, "--dtype", "float64")
    one, _ = run(capsys, *start)
    out, err = run(capsys, *start, "--num-samples", 3)
    first, *others = samples(out, 3)
    assert first == one and len({first, *others}) == 3
    assert all(text.startswith(PROMPT) == (family != "t5") for text in others)
    assert re.fullmatch(r"\d+ prompt tokens in [\d.]+ s, 36 new tokens at [\d.]+ tokens/s\n", err)
    again, _ = run(capsys, *start, "--num-samples", 3, "--no-stream")
    assert again == out
    more, _ = run(capsys, *start, "--num-samples", 5)
    assert samples(more, 5)[:3] == [first, *others]
    other, _ = run(capsys, *start, "--num-samples", 3, "--seed", 4)
    assert samples(other, 3)[1] != others[0]


def test_each_sample_ends_at_its_own_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stories(tmp_path, "tok512.bin")
    start = ("--model", path, "--prompt", PROMPT, "--max-new-tokens", 60, "--num-samples", 4)
    whole = samples(run(capsys, *start)[0], 4)
    cut = samples(run(capsys, *start, "--stop", ".")[0], 4)
    assert len({len(text) for text in cut}) > 1
    for long, short in zip(whole, cut, strict=True):
        assert long.startswith(short.removesuffix("\n")) and "." not in short
        assert ("." in long) == (len(short) < len(long))


def test_samples_of_a_run_slide_past_the_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fox.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    train = ["train", "--preset", "tiny", "--steps", "3", "--data", str(tmp_path / "fox.txt")]
    assert main([*train, "--out", str(tmp_path / "gpt")]) == 0
    capsys.readouterr()
    start = ("--model", tmp_path / "gpt", "--prompt", PROMPT, "--max-new-tokens", 80)
    one, _ = run(capsys, *start, "--dtype", "float64")
    several, _ = run(capsys, *start, "--dtype", "float64", "--num-samples", 2)
    first, second = samples(several, 2)
    assert first == one != second and len(second.encode()) > 64


def test_samples_by_compiled_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba")
    start = ("--model", stories(tmp_path, "tok512.bin"), "--prompt", PROMPT, "--backend", "numba")
    start = (*start, "--max-new-tokens", 20, "--dtype", "float64", "--num-samples", 3)
    plain, _ = run(capsys, *start, "--no-compile")
    assert run(capsys, *start, "--compile")[0] == plain
    assert len(set(samples(plain, 3))) == 3


def test_the_best_beams_are_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = stories(tmp_path, "tok512.bin")
    start = ("--model", path, "--prompt", PROMPT, "--max-new-tokens", 10, "--beams", 4)
    best, _ = run(capsys, *start)
    first, *others = samples(run(capsys, *start, "--num-samples", 3)[0], 3)
    assert first == best and len({first, *others}) == 3


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--num-samples", 0), "--num-samples must be an int of at least 1, got 0"),
        (("--beams", 2, "--num-samples", 3), "--num-samples must be at most the 2 beams, got 3"),
        (("--temperature", 0, "--num-samples", 2), "--num-samples 2 needs sampling"),
    ],
)
def test_samples_that_cannot_differ_are_refused(
    options: tuple[Any, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the model is read."""
    assert why in refused(capsys, "--model", "absent", "--prompt", PROMPT, *options)


def test_samples_need_a_model_that_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text('{"do_sample": false}')
    start = ("--model", folder, "--prompt", PROMPT, "--max-new-tokens", 2, "--num-samples", 2)
    said = refused(capsys, *start)
    assert "needs sampling" in said
    for options in re.findall(r"(--temperature \S+|--beams \d+)", said):
        samples(run(capsys, *start, *options.strip(",\n").split())[0], 2)
