"""What generation_config.json says, followed as transformers follows it."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from causal_models import CONFIGS, T5, lively
from huggingface import torch, transformers

from xformer import finetune, pretrained, training
from xformer.cli import main
from xformer.cli.sampling import FILTERS, choice
from xformer.generation import stream_text
from xformer.generation.settings import Settings, settings_of, start_of, token_ids
from xformer.pretrained import PretrainedError
from xformer.pretrained.tokenizer import tokenizer

pytest.importorskip("tokenizers")
GPT2: dict[str, Any] = {"model_type": "gpt2", **CONFIGS["gpt2"], "n_positions": 64}
GPT2["architectures"] = [GPT2.pop("architecture")]
SEQ2SEQ: dict[str, Any] = {"model_type": "t5", "is_encoder_decoder": True, **T5}
SEQ2SEQ["architectures"] = ["T5ForConditionalGeneration"]
MODELS = {"gpt2": GPT2, "t5": SEQ2SEQ}
MAX_NEW = 9


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose greedy texts are lively, with tokenizers that name no end."""
    root = tmp_path_factory.mktemp("models")
    words = training.train_bpe(["the quick brown fox"], 270, specials=("<pad>", "<s>", "</s>"))
    for name, config in MODELS.items():
        model = pretrained.model(config | {"vocab_size": words.size})
        pretrained.save(model, lively(model, 5), root / name)
        (root / name / "tokenizer_config.json").write_text('{"eos_token": null}')
        words.save(root / name)
    return root


@pytest.fixture(params=MODELS)
def folder(request: Any, saved: Path, tmp_path: Path) -> Path:
    copied: Path = shutil.copytree(saved / request.param, tmp_path / request.param)
    return copied


def write(folder: Path, **keys: Any) -> None:
    start = {"decoder_start_token_id": 0} if is_target(folder) else {}
    (folder / "generation_config.json").write_text(json.dumps(start | keys))


def is_target(folder: Path) -> bool:
    """Whether texts stand alone, as targets of an encoder-decoder."""
    return folder.name == "t5"


def judge(folder: Path) -> Any:
    kind = "AutoModelForSeq2SeqLM" if is_target(folder) else "AutoModelForCausalLM"
    return getattr(transformers, kind).from_pretrained(folder)


JUDGES: dict[str, Any] = {}  # of the same parameters in all tests


def theirs(folder: Path, prompt: str = "ab", **options: Any) -> list[int]:
    """The new ids of transformers' generate, with its end."""
    ids = tokenizer(folder).encode(prompt)
    if folder.name not in JUDGES:
        JUDGES[folder.name] = judge(folder)
    hf, kind = JUDGES[folder.name], transformers.GenerationConfig
    has_file = (folder / "generation_config.json").exists()
    old = {"config_file_name": "config.json", "_from_model_config": True}
    hf.generation_config = kind.from_pretrained(folder, **({} if has_file else old))
    (out,) = hf.generate(torch.tensor([ids]), **options)
    new: list[int] = out[1 if is_target(folder) else len(ids) :].tolist()
    return new


def ours(
    folder: Path, capsys: pytest.CaptureFixture[str], *options: str, prompt: str = "ab"
) -> tuple[str, str]:
    """What the command writes after the prompt, and what it says."""
    assert main(["generate", "--model", str(folder), "--prompt", prompt, *options]) == 0
    said = capsys.readouterr()
    out = said.out.removesuffix("\n")
    return out if is_target(folder) else out.removeprefix(prompt), said.err


def ended(ids: list[int], *ends: int) -> list[int]:
    """The ids before the one that ended them."""
    return ids[:-1] if ids[-1] in ends else ids


# Keys, made of the ids that come without any.
CASES: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "an end": lambda ids: {"eos_token_id": ids[3]},
    "ends": lambda ids: {"eos_token_id": [250, ids[4], ids[2]]},
    "a length": lambda ids: {"max_new_tokens": 4},
    "a length of all": lambda ids: {"max_new_tokens": None, "max_length": 7},
    "both lengths": lambda ids: {"max_new_tokens": 3, "max_length": 8},
    "at least": lambda ids: {"eos_token_id": ids[2], "min_new_tokens": 6},
    "at least of all": lambda ids: {"eos_token_id": ids[2], "min_length": 7},
    "both of least": lambda ids: {"eos_token_id": ids[2], "min_new_tokens": 1, "min_length": 8},
    "suppressed": lambda ids: {"suppress_tokens": [ids[0], ids[2], 9999]},
    "suppressed first": lambda ids: {"begin_suppress_tokens": [ids[0], ids[2]]},
    "bad words": lambda ids: {"bad_words_ids": [[ids[0]], ids[1:3], [ids[4]]]},
    "a bad word that ends": lambda ids: {"bad_words_ids": [[ids[3]]], "eos_token_id": ids[3]},
    "forced at the end": lambda ids: {"forced_eos_token_id": 17, "eos_token_id": 17},
    "forced at the beginning": lambda ids: {"forced_bos_token_id": 33},
    "forced and suppressed": lambda ids: {
        "forced_bos_token_id": 33,
        "begin_suppress_tokens": [ids[0], ids[1], 33],
    },
    "penalty": lambda ids: {"repetition_penalty": 3.0},
    "no ngrams": lambda ids: {"no_repeat_ngram_size": 1},
    "both": lambda ids: {"no_repeat_ngram_size": 2, "repetition_penalty": 0.5},
    "beams": lambda ids: {"num_beams": 3, "eos_token_id": ids[1]},
    "beams of rules": lambda ids: {
        **{"num_beams": 4, "length_penalty": -0.5, "early_stopping": True, "min_new_tokens": 3},
        **{"no_repeat_ngram_size": 1, "repetition_penalty": 1.5, "eos_token_id": ids[1]},
        **{"suppress_tokens": [ids[0]], "forced_eos_token_id": 17},
    },
    "top 1": lambda ids: {"do_sample": True, "top_k": 1, "eos_token_id": ids[3]},
}


@pytest.mark.parametrize("name", CASES)
def test_the_command_writes_what_transformers_writes(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = theirs(folder, do_sample=False, max_new_tokens=MAX_NEW)
    keys = {"do_sample": False, "max_new_tokens": MAX_NEW} | CASES[name](free)
    write(folder, **keys)
    want = theirs(folder)
    ends = np.atleast_1d(keys.get("eos_token_id", [])).tolist()
    codec = tokenizer(folder)
    got, said = ours(folder, capsys)
    assert got == codec.decode(ended(want, *ends))
    assert said.startswith("generation_config.json: ")
    choosing = {"repetition_penalty", "no_repeat_ngram_size", "num_beams", "max_length"}
    if not choosing & keys.keys():  # which are the caller's in Python
        options: dict[str, Any] = {"max_new_tokens": keys["max_new_tokens"]}
        pieces = stream_text(*pretrained.load(folder), codec, "ab", **options)
        assert "".join(pieces) == got


def test_one_token_of_a_prompt_can_be_followed_by_a_forced_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = theirs(folder, "a", do_sample=False, max_new_tokens=MAX_NEW)
    keys = {"forced_bos_token_id": 33, "begin_suppress_tokens": free[:2]}
    write(folder, do_sample=False, max_new_tokens=MAX_NEW, **keys)
    want = theirs(folder, "a")
    assert want[0] == 33
    assert ours(folder, capsys, prompt="a")[0] == tokenizer(folder).decode(want)


def test_stop_strings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codec = tokenizer(folder)
    prompt = "brown"
    text = codec.decode(theirs(folder, prompt, do_sample=False, max_new_tokens=MAX_NEW))
    stop = next(text[i : i + 2] for i in range(1, len(text)) if "\ufffd" not in text[i : i + 2])
    file = str(folder / "tokenizer.json")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=file)
    for value in (stop, ["absent", stop]):
        write(folder, do_sample=False, max_new_tokens=MAX_NEW, stop_strings=value)
        want = codec.decode(theirs(folder, prompt, tokenizer=fast))
        assert want.endswith(stop) and len(want) < len(text)
        assert ours(folder, capsys, prompt=prompt)[0] == want.removesuffix(stop)
        model, params = pretrained.load(folder)
        assert (
            "".join(stream_text(model, params, codec, prompt, max_new_tokens=MAX_NEW)) + stop
            == want
        )


def test_special_tokens_as_stop_strings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Alone, and with the text before and after; the first token of that text is no end of it."""
    end, prompt = "<|im_end|>", "ab"
    options = {"do_sample": False, "max_new_tokens": MAX_NEW}
    free = theirs(folder, prompt, **options)
    old = tokenizer(folder)
    texts = [old.decode([i]) for i in free]
    used = old.encode(prompt)
    at = next(i for i in range(1, 8) if "\ufffd" not in texts[i - 1] and free[i] not in used)
    file = str(folder / "tokenizer.json")
    rename(folder, free[at], end)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=file)
    codec, (model, params) = tokenizer(folder), pretrained.load(folder)
    seen = set()
    for stop in (end, texts[at - 1] + end, end[2:], "<|", "absent" + end):
        ids = theirs(folder, prompt, tokenizer=fast, stop_strings=[stop], **options)
        whole = fast.decode(ids, skip_special_tokens=False)
        assert (stop in whole) == (len(ids) < MAX_NEW)
        want = whole.partition(stop)[0].replace(end, "").removesuffix(end[:2])
        got = ours(
            folder,
            capsys,
            "--stop",
            stop,
            "--temperature",
            "0",
            "--max-new-tokens",
            "9",
            prompt=prompt,
        )
        assert got[0] == want
        pieces = stream_text(model, params, codec, prompt, max_new_tokens=MAX_NEW, stop=[stop])
        assert "".join(pieces) == want
        seen.add(want)
    assert len(seen) > 2


def rename(folder: Path, i: int, name: str) -> None:
    """Give a token of the vocabulary another name, which makes it special."""
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    vocab = data["model"]["vocab"]
    (old,) = (token for token, own in vocab.items() if own == i)
    merges = data["model"]["merges"]
    data["model"]["merges"] = [pair for pair in merges if "".join(pair) != old]
    data["model"]["vocab"] = {(name if own == i else token): own for token, own in vocab.items()}
    added = {"id": i, "content": name, "special": True, "single_word": False}
    data["added_tokens"].append(added | {"lstrip": False, "rstrip": False, "normalized": False})
    path.write_text(json.dumps(data))


def test_stop_ids(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt, options = "the quick", {"do_sample": False, "max_new_tokens": MAX_NEW}
    free = theirs(folder, prompt, **options)
    codec = tokenizer(folder)
    greedy = ("--temperature", "0", "--max-new-tokens", "9")
    for stop in ([free[4]], [free[5], free[2]]):
        want = codec.decode(ended(theirs(folder, prompt, eos_token_id=stop, **options), *stop))
        ids = [text for i in stop for text in ("--stop-id", str(i))]
        got, said = ours(folder, capsys, *ids, *greedy, prompt=prompt)
        assert got == want and f" {min(map(free.index, stop))} new tokens at " in said
        assert (
            ours(folder, capsys, *ids, "--max-new-tokens", "9", "--beams", "1", prompt=prompt)[0]
            == want
        )
    for wrong in ("-1", "9999"):
        assert main(["generate", "--model", str(folder), "--prompt", "a", "--stop-id", wrong]) == 1
        assert "--stop-id: id must lie in [0, 270), got" in capsys.readouterr().err


def test_a_stop_string_ends_with_the_end_of_the_text(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The token that ends the text completes a stop string: what it begins with is not shown."""
    prompt, options = "the quick", {"do_sample": False, "max_new_tokens": MAX_NEW}
    free = theirs(folder, prompt, **options)
    at = next(i for i in range(1, MAX_NEW) if free[i] not in free[:i])
    text = tokenizer(folder).decode(free[:at])
    rename(folder, free[at], "<|im_end|>")
    write(folder, eos_token_id=free[at], **options)
    assert ours(folder, capsys, prompt=prompt)[0] == text
    stop = text[-1] + "<|im_end|>"
    assert ours(folder, capsys, "--stop", stop, prompt=prompt)[0] == text[:-1]


@pytest.mark.parametrize("folder", ["t5"], indirect=True)
def test_targets_begin_where_the_file_says(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = set()
    for keys in ({"decoder_start_token_id": 40}, {"bos_token_id": 41}, {"pad_token_id": 9}):
        keys = {"do_sample": False, "max_new_tokens": MAX_NEW} | keys
        (folder / "generation_config.json").write_text(json.dumps(keys))
        more = {"decoder_start_token_id": 0} if "pad_token_id" in keys else {}
        data = json.loads((folder / "config.json").read_text())
        data.pop("decoder_start_token_id", None)
        (folder / "config.json").write_text(json.dumps(data | more))
        want = tokenizer(folder).decode(theirs(folder, **more))
        texts.add(want)
        assert ours(folder, capsys)[0] == want
    assert len(texts) == 3


# Which file, which option


def test_one_file_comes_before_the_other(folder: Path) -> None:
    data = json.loads((folder / "config.json").read_text())
    ids = {"eos_token_id": 5, "bos_token_id": 6, "pad_token_id": 8}
    legacy = {"temperature": 0.5, "do_sample": True, "top_k": 50, "num_beams": 1, "max_length": 20}
    (folder / "config.json").write_text(json.dumps(data | ids | legacy))
    model, _ = pretrained.load(folder)
    assert token_ids(model, "eos_token_id") == (5,)
    # What old releases of transformers wrote into every config.json says nothing.
    want = Settings("config.json", do_sample=True, temperature=0.5)
    assert settings_of(model) == want
    assert judge(folder).generation_config.temperature == 0.5
    write(folder, eos_token_id=[7, 9], max_length=20)
    model, _ = pretrained.load(folder)
    assert token_ids(model, "eos_token_id") == (7, 9)
    assert token_ids(model, "bos_token_id") == (6,)  # transformers would know none
    assert settings_of(model) == Settings(max_length=20)
    assert judge(folder).generation_config.temperature is None
    assert start_of(model) == (0 if is_target(folder) else 6)


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
def test_options_come_before_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, do_sample=True, temperature=0.6, top_p=0.9, repetition_penalty=1.1, max_length=9)
    _, said = ours(folder, capsys)
    line = "generation_config.json: do_sample true, repetition_penalty 1.1, temperature 0.6, "
    assert said.startswith(line + "top_p 0.9, max_length 9\n") and " 7 new tokens at " in said
    _, said = ours(folder, capsys, "--temperature", "2", "--top-p", "0.5", "--max-new-tokens", "3")
    assert said.startswith("generation_config.json: repetition_penalty 1.1\n")
    assert " 3 new tokens at " in said
    write(folder, num_beams=2, max_new_tokens=4)
    _, said = ours(folder, capsys)
    assert said.startswith("generation_config.json: num_beams 2, max_new_tokens 4\n")
    for options in (("--temperature", "0"), ("--beams", "1")):
        assert "num_beams" not in ours(folder, capsys, *options)[1]
    write(folder, suppress_tokens=list(range(100)))
    _, said = ours(folder, capsys, "--max-new-tokens", "2")
    first, _ = said.splitlines()
    assert first.startswith("generation_config.json: suppress_tokens [0, 1") and len(first) < 110
    write(folder, eos_token_id=3)  # nothing that says how tokens are chosen, or how many
    assert ours(folder, capsys, "--max-new-tokens", "2")[1].startswith("2 prompt tokens in ")


SAMPLING = [
    {},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.7, "top_k": 0, "min_p": 0.1},
    {"top_k": 7, "repetition_penalty": 1.4, "no_repeat_ngram_size": 1, "top_p": 1.0},
    {"suppress_tokens": [3, 4, 5], "top_k": 20},
]


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
@pytest.mark.parametrize("keys", SAMPLING, ids=str)
def test_tokens_have_the_distribution_of_transformers(
    keys: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xformer.cli import generate as command

    write(folder, do_sample=True, **keys)
    ids = tokenizer(folder).encode("abba")
    options = {"max_new_tokens": 1, "return_dict_in_generate": True}
    hf = judge(folder)
    out = hf.generate(torch.tensor([ids]), output_scores=True, output_logits=True, **options)
    own: list[Any] = []

    def stream(*_: Any, sampler: Any, **__: Any) -> Any:
        own.append(sampler)
        return iter(())

    monkeypatch.setattr(command, "stream", stream)
    assert main(["generate", "--model", str(folder), "--prompt", "abba"]) == 0
    got = own[0](out.logits[0].numpy(), [ids])
    want = torch.softmax(out.scores[0], -1).numpy()
    got = torch.softmax(torch.tensor(np.asarray(got)), -1).numpy()
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
def test_what_is_not_followed_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, do_sample=True, typical_p=0.9, guidance_scale=1.5, epsilon_cutoff=0.0)
    with pytest.warns(UserWarning, match=r"generation_config\.json: not followed: guid.*, typ"):
        ours(folder, capsys, "--max-new-tokens", "1")
    write(folder, do_sample=True, num_beams=2)
    with pytest.warns(UserWarning, match="not followed: do_sample"):
        ours(folder, capsys, "--max-new-tokens", "1")
    write(folder, user_token_id=3, chat_format="chatml", use_cache=True)  # nor by transformers
    ours(folder, capsys, "--max-new-tokens", "1")


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
def test_a_prompt_beyond_max_length(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, max_length=2)
    assert main(["generate", "--model", str(folder), "--prompt", "abc"]) == 1
    err = capsys.readouterr().err
    assert (
        "generation_config.json: max_length is 2, but the prompt has 3 tokens: give --max-new"
        in err
    )
    assert " 2 new tokens at " in ours(folder, capsys, "--max-new-tokens", "2", prompt="abc")[1]


WRONG: dict[str, list[Any]] = {
    "eos_token_id": ["2", [[2]], -1, True],
    "forced_bos_token_id": ["2", [1, 2], 9999],
    "suppress_tokens": ["2", [None]],
    "bad_words_ids": [[2], [[]], [["2"]], 5, [[9999]]],
    "stop_strings": [5, [5], ""],
    "max_new_tokens": [0, 2.5, "3", True],
    "min_length": [-1, "3"],
    "do_sample": ["yes", 1],
    "temperature": ["hot", -1],
    "top_k": [-1, 1.5],
    "top_p": [2],
    "repetition_penalty": [0],
    "num_beams": [0, "4"],
    "early_stopping": ["sometimes", 3],
}


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
def test_wrong_values_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key, values in WRONG.items():
        for value in values:
            write(folder, **{key: value})
            assert main(["generate", "--model", str(folder), "--prompt", "a"]) == 1
            err = capsys.readouterr().err
            assert f"generation_config.json: {key} must" in err and err.count("\n") == 1
    (folder / "generation_config.json").write_text("{")
    assert main(["generate", "--model", str(folder), "--prompt", "a"]) == 1
    assert "generation_config.json: is no valid JSON" in capsys.readouterr().err


# Saved again


def test_it_is_saved_again(folder: Path, tmp_path: Path) -> None:
    keys = {"eos_token_id": [7, 9], "temperature": 0.6, "do_sample": True, "chat_format": "x"}
    keys["decoder_start_token_id"] = 0
    write(folder, **keys)
    model, params = pretrained.load(folder)
    for name in ("one", "two"):
        if name == "one":
            pretrained.save(model, params, tmp_path / name)
        else:
            finetune.save(model, params, tmp_path / name, base=folder)
        text = (tmp_path / name / "generation_config.json").read_text()
        assert json.loads(text) == model.generation_config == keys
        assert pretrained.load(tmp_path / name)[0].generation_config == keys
    (folder / "generation_config.json").unlink()
    pretrained.save(*pretrained.load(folder), tmp_path / "none")
    assert not (tmp_path / "none" / "generation_config.json").exists()


def test_bad_options_are_refused_before_a_model_is_read() -> None:
    args = argparse.Namespace(**dict.fromkeys((*FILTERS, "beams")) | {"top_k": 0})
    with pytest.raises(ValueError, match="top_k: k must be"):
        choice(args, Settings())


def test_broken_settings_do_not_matter_to_what_writes_nothing(tmp_path: Path) -> None:
    bert = {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 9}
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = pretrained.model(bert | sizes | {"intermediate_size": 8})
    pretrained.save(model, model.init(), tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    assert pretrained.load(tmp_path)[0].generation_config is None
    model = pretrained.model(GPT2)
    pretrained.save(model, model.init(), tmp_path)
    with pytest.raises(PretrainedError, match="no valid JSON"):
        pretrained.load(tmp_path)
