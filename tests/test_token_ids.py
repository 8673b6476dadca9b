"""The ids that begin and end texts, as the files of a model name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from causal_models import CONFIGS, T5, lively
from truths import published

from xformer import finetune, pretrained, training
from xformer.cli import main
from xformer.generation import prefill, stream_text
from xformer.generation.settings import start_of, token_id, token_ids
from xformer.generation.text import end_of, ends_of
from xformer.models import GPT
from xformer.pretrained import PretrainedError
from xformer.pretrained.convert import as_llama
from xformer.pretrained.tokenizer import tokenizer

GPT2: dict[str, Any] = {"model_type": "gpt2", **CONFIGS["gpt2"]}
GPT2["architectures"] = [GPT2.pop("architecture")]
SEQ2SEQ: dict[str, Any] = {"model_type": "t5", "is_encoder_decoder": True, **T5}
SEQ2SEQ["architectures"] = ["T5ForConditionalGeneration"]
SEQ2SEQ.pop("decoder_start_token_id")

SPECIALS = ("<pad>", "<s>", "</s>")
WRONG: list[Any] = ["2", 2.5, [[2]], [2, "3"], -1, [2, -1], True, {"id": 2}, 1e400]


@pytest.mark.parametrize("value", [2, 2.0, [2], [2.0]])
def test_the_obvious_number(value: Any) -> None:
    model = pretrained.model(SEQ2SEQ | {"eos_token_id": value, "decoder_start_token_id": value})
    assert token_ids(model, "eos_token_id") == (2,)
    assert token_id(model, "decoder_start_token_id") == start_of(model) == 2
    assert type(start_of(model)) is int
    (prefix,) = prefill(model, model.init(), [[5]]).ids
    assert prefix == (2,)


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("name", ["eos_token_id", "bos_token_id", "decoder_start_token_id"])
def test_what_is_no_id_is_refused_by_name(name: str, value: Any) -> None:
    model = pretrained.model(SEQ2SEQ | {name: value})
    with pytest.raises(PretrainedError, match=rf"config\.json: {name} must be an id of at least 0"):
        token_ids(model, name)


@pytest.mark.parametrize("name", ["decoder_start_token_id", "bos_token_id", "pad_token_id"])
@pytest.mark.parametrize("value", [37, [1, 2]])
def test_a_target_begins_with_one_id_of_the_vocabulary(name: str, value: Any) -> None:
    model = pretrained.model(SEQ2SEQ | {name: value})
    with pytest.raises(PretrainedError, match=rf"config\.json: {name} must be one id below 37"):
        prefill(model, model.init(), [[5]])


def test_ends_outside_the_vocabulary_are_never_met() -> None:
    """GPT2Config's default in a small model is one: transformers takes it too."""
    model = pretrained.model(GPT2 | {"eos_token_id": [50256, 3]})
    assert token_ids(model, "eos_token_id") == (50256, 3)
    assert token_ids(pretrained.model(GPT2), "eos_token_id") == ()
    assert token_ids(pretrained.model(GPT2 | {"eos_token_id": []}), "eos_token_id") == ()


def test_what_a_target_begins_with() -> None:
    """As transformers: bos_token_id where there is no decoder_start_token_id."""
    ids = {"pad_token_id": 4}
    assert start_of(pretrained.model(SEQ2SEQ)) is None
    assert start_of(pretrained.model(SEQ2SEQ | ids)) == 4
    ids["bos_token_id"] = 3
    assert start_of(pretrained.model(SEQ2SEQ | ids)) == 3
    ids["decoder_start_token_id"] = 0
    assert start_of(pretrained.model(SEQ2SEQ | ids)) == 0


def words() -> training.Subwords:
    pytest.importorskip("tokenizers")
    return training.train_bpe(["the quick brown fox"], 270, specials=SPECIALS)


def folder(path: Path, config: dict[str, Any], **ids: Any) -> str:
    """A small model with a tokenizer, and these keys in its config.json."""
    tokens = words()
    model = pretrained.model(config | {"vocab_size": tokens.size})
    pretrained.save(model, model.init(), path)
    tokens.save(path)
    data = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(data | ids))
    return str(path)


@pytest.mark.parametrize("value", ["2", [[2]], True, -5])
def test_commands_name_the_key(
    value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, config in (
        ("eos_token_id", GPT2),
        ("bos_token_id", GPT2),
        ("decoder_start_token_id", SEQ2SEQ),
        ("pad_token_id", SEQ2SEQ),
    ):
        path = folder(tmp_path / name, config, **{name: value})
        prompt = "" if name == "bos_token_id" else "Once"
        assert main(["generate", "--model", path, "--prompt", prompt, "--max-new-tokens", "2"]) == 1
        said = capsys.readouterr()
        assert said.err.count("\n") == 1 and said.out == ""
        assert f"config.json: {name} must be " in said.err and f"got {value!r}" in said.err


def test_training_begins_targets_alike() -> None:
    """And so a wrong id is refused before it trains."""
    own = words()
    sized = SEQ2SEQ | {"vocab_size": own.size}
    model = pretrained.model(sized | {"decoder_start_token_id": [7.0]})
    task = finetune.task("seq2seq", model, own.tokenizer, 16)
    (example,) = task.examples({"source": "a", "target": "b"})
    assert task.batch([example], None).arrays[1][0, 0] == 7  # type: ignore[arg-type]
    model = pretrained.model(sized | {"decoder_start_token_id": "7"})
    with pytest.raises(PretrainedError, match="decoder_start_token_id must be an id"):
        finetune.task("seq2seq", model, own.tokenizer, 16)


def test_ends_are_checked_when_they_are_asked_for() -> None:
    own = words()
    model = pretrained.model(GPT2 | {"eos_token_id": "2", "vocab_size": own.size})
    for ask in (
        lambda: ends_of(own, model),
        lambda: stream_text(model, model.init(), own, "a", max_new_tokens=1),
    ):
        with pytest.raises(PretrainedError, match="eos_token_id must be an id"):
            ask()


# What ends a text, and what does not


def saved(path: Path, config: dict[str, Any]) -> str:
    """A model whose greedy texts are lively, with a tokenizer."""
    tokens = words()
    model = pretrained.model(config | {"vocab_size": tokens.size})
    pretrained.save(model, lively(model, 5), path)
    tokens.save(path)
    return str(path)


def spell(path: str, **tokens: int | None) -> None:
    """Name these ids in tokenizer_config.json, or no id (None), instead of what is there."""
    token = tokenizer(path).token
    named = {kind: None if i is None else token(i) for kind, i in tokens.items()}
    (Path(path) / "tokenizer_config.json").write_text(json.dumps(named))


def theirs(path: str, config: dict[str, Any], prompt: list[int], **options: Any) -> list[int]:
    """The new ids of transformers' generate."""
    from huggingface import torch, transformers

    is_target = config["model_type"] == "t5"
    name = "AutoModelForSeq2SeqLM" if is_target else "AutoModelForCausalLM"
    hf = getattr(transformers, name).from_pretrained(path)
    (ids,) = hf.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8, **options)
    new: list[int] = ids[1 if is_target else len(prompt) :].tolist()
    return new


def written(path: str, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What the command writes of a prompt of two letters, greedily."""
    greedy = ["--prompt", "ab", "--temperature", "0", "--max-new-tokens", "8"]
    assert main(["generate", "--model", path, *greedy, *options]) == 0
    return capsys.readouterr().out.removesuffix("\n")


@pytest.mark.parametrize("config", [SEQ2SEQ | {"decoder_start_token_id": 0}, GPT2])
def test_a_token_that_begins_texts_ends_none(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in transformers, whose generate goes by eos_token_id alone."""
    path = saved(tmp_path, config)
    prompt = words().encode("ab")
    free = theirs(path, config, prompt)
    first, end = free[0], next(i for i in free if i != free[0])
    spell(path, bos_token=first, eos_token=end)
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(data | {"eos_token_id": end}))
    want = theirs(path, config, prompt)
    assert want[0] == first and want[-1] == end and len(want) < 8
    codec = tokenizer(path)
    before = "" if "t5" in config["model_type"] else "ab"
    assert written(path, capsys) == before + codec.decode(want[:-1])
    model, params = pretrained.load(path)
    assert "".join(stream_text(model, params, codec, "ab", max_new_tokens=8)) == codec.decode(
        want[:-1]
    )


@pytest.mark.parametrize("name", ["</s>", "<|endoftext|>"])
def test_a_guess_ends_no_text(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A usual name in the vocabulary is no end; a name in tokenizer_config.json is one."""
    path = saved(tmp_path, GPT2)
    prompt = words().encode("ab")
    want = theirs(path, GPT2, prompt)
    # The second token that the model writes gets the usual name.
    end = next(i for i in want if i != want[0])
    text = (tmp_path / "tokenizer.json").read_text().replace('"</s>"', '"<end>"')
    data = json.loads(text)
    vocab = data["model"]["vocab"]
    (old,) = (token for token, i in vocab.items() if i == end)
    vocab.pop(old)
    vocab[name] = end
    data["added_tokens"].append(
        {"id": end, "content": name, "special": True, "single_word": False}
        | {"lstrip": False, "rstrip": False, "normalized": False}
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    plain = {"tokenizer_class": "PreTrainedTokenizerFast"}  # GPT2Tokenizer has an end by itself
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(plain))
    codec = tokenizer(path)
    assert codec.eos_id == end and "eos_token" in codec.guessed
    assert written(path, capsys) == "ab" + codec.decode(want)
    spell(path, eos_token=end)
    assert written(path, capsys) == "ab" + codec.decode(want[: want.index(end)])


def test_a_token_that_the_model_lacks_ends_no_text(tmp_path: Path) -> None:
    """As of a folder whose tokenizer was given an eos_token, and whose model was not resized."""
    path = saved(tmp_path, GPT2)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    codec, (model, _) = tokenizer(path), pretrained.load(path)
    assert codec.eos_id is not None and codec.eos_id >= model.embed.vocab_size
    assert ends_of(codec, model) == frozenset() and end_of(codec, model) is None
    (example,) = finetune.task("causal", model, codec, 16).examples({"text": "ab ab"})
    assert example.targets.tolist() == codec.encode("ab ab")[1:]


def test_runs_of_byte_pairs_end_where_they_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their documents end with <|endoftext|>, in memory and once they are saved."""
    pytest.importorskip("tokenizers")
    own = training.train_bpe(["the quick brown fox"], 270)
    assert own.eos_id is not None
    gpt = GPT(own.size, n_layers=1, d_model=16, n_heads=2, max_len=32)
    assert ends_of(own, gpt) == {own.eos_id}
    own.save(tmp_path)
    assert ends_of(training.load_vocabulary(tmp_path), gpt) == {own.eos_id}


def test_what_ends_texts_of_llama2c() -> None:
    """As its run.c: also the token with which another text begins."""
    pytest.importorskip("tokenizers")
    model, _ = pretrained.load(published("stories260K.bin"))
    codec = tokenizer(published("tok512.bin"))
    llama, _ = as_llama(*pretrained.load(published("stories260K.bin")))
    assert ends_of(codec, model) == ends_of(codec, llama) == {1, 2}
    assert end_of(codec, llama) == 2
