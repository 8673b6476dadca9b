"""The ids that begin and end texts, as the files of a model name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from causal_models import CONFIGS, T5

from xformer import finetune, pretrained, training
from xformer.cli import main
from xformer.generation import prefill, stream_text
from xformer.generation.text import ends_of
from xformer.generation.token_ids import start_of, token_id, token_ids
from xformer.pretrained import PretrainedError

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
        assert main(["generate", "--model", path, "--prompt", prompt, "--max-new", "2"]) == 1
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
        lambda: stream_text(model, model.init(), own, "a", max_new=1),
    ):
        with pytest.raises(PretrainedError, match="eos_token_id must be an id"):
            ask()
