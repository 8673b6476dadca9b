"""The files beside a vocabulary: the ids of AutoTokenizer on the same folder, or a refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_tokenizer import GPT2, PIECES, ROBERTA, TEXTS, byte_level, word_piece

from xformer import finetune, pretrained
from xformer.pretrained.families import FAMILIES
from xformer.pretrained.reading import PretrainedError
from xformer.pretrained.tokenizer import tokenizer
from xformer.pretrained.tokenizer_classes import KINDS
from xformer.pretrained.tokenizer_config import GENERIC, REGISTERED

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

Maker = Callable[[Path], Any]

SPECIALS = "hello XX hello [SEP]<s>hello</s> hello [MASK]Q <|endoftext|>hello<extra_id_0><pad>"
ALL = [*TEXTS, SPECIALS, " hello", "hello\n\nhello", "ＡＢ ﬁ ① NAÏVE, a", "hello[BB]lol XX lol"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
OF_PIECES = [*"helo!", "▁", "▁h", "he", "ll", "hell", "hello", "▁hello"]
PAIRS = [("▁", "h"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello")]


def saved(folder: Path, inner: Any) -> None:
    inner.save(str(folder / "tokenizer.json"))


def bert(folder: Path) -> None:
    saved(folder, tokenizer(word_piece(folder))._inner)
    (folder / "vocab.txt").unlink()


def bytes_of(*specials: str) -> Maker:
    def make(folder: Path) -> None:
        saved(folder, tokenizer(byte_level(folder, *specials))._inner)
        for name in ("vocab.json", "merges.txt"):
            (folder / name).unlink()

    return make


def pattern(folder: Path) -> None:
    """Bytes as Granite, OLMo 2 and Phi-4 have them: with another pattern than that of GPT-2."""
    bytes_of(*GPT2)(folder)
    path = str(folder / "tokenizer.json")
    inner = tokenizers.Tokenizer.from_file(path)
    steps = [tokenizers.pre_tokenizers.Split("l", "isolated"), inner.pre_tokenizer]
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    inner.save(path)


def pieces(folder: Path) -> None:
    """As Llama 2 has it, whose class has other rules in transformers 5."""
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *BYTES, *OF_PIECES])}
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, PAIRS, **options))
    n, d = tokenizers.normalizers, tokenizers.decoders
    inner.normalizer = n.Sequence([n.Prepend("▁"), n.Replace(" ", "▁")])
    inner.decoder = d.Sequence(
        [d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 1)]
    )
    saved(folder, inner)


def mpnet(folder: Path) -> None:
    path = word_piece(folder) / "vocab.txt"
    path.write_text("<s>\n<pad>\n</s>\n" + path.read_text() + "<mask>\n")


def unigram(*specials: str) -> Maker:
    scores = [*((token, 0.0) for token in specials), ("▁", -2.0), ("▁hello", -3.0), ("ll", -4.0)]
    scores += [(letter, -5.0) for letter in "helodnta,!"]

    def make(folder: Path) -> None:
        model = tokenizers.models.Unigram(scores, unk_id=specials.index("<unk>"))
        inner = tokenizers.Tokenizer(model)
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        inner.decoder = tokenizers.decoders.Metaspace()
        saved(folder, inner)

    return make


T5, ALBERT = ("<pad>", "</s>", "<unk>"), ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
XLM_ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
CAMEMBERT = ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>", "<mask>")
MAKERS: dict[str, Maker] = {
    "bert": bert,
    "gpt2": bytes_of(*GPT2),
    "roberta": bytes_of(*ROBERTA),
    "pattern": pattern,
    "pieces": pieces,
    "t5": unigram(*T5),
    "albert": unigram(*ALBERT),
    "xlm-roberta": unigram(*XLM_ROBERTA),
    "camembert": unigram(*CAMEMBERT),
    "vocab.txt": word_piece,
    "vocab.txt of MPNet": mpnet,
    "vocab.json": lambda folder: byte_level(folder, *GPT2),
    "vocab.json of RoBERTa": lambda folder: byte_level(folder, *ROBERTA),
}


def write(folder: Path, name: str, files: dict[str, Any]) -> None:
    """A tokenizer, and JSON files by their names; `without` leaves out a part of tokenizer.json."""
    MAKERS[name](folder)
    path = folder / "tokenizer.json"
    if (left_out := files.get("without")) is not None:
        path.write_text(json.dumps(json.loads(path.read_text()) | {left_out: None}))
    for file, data in files.items():
        if file != "without":
            (folder / f"{file}.json").write_text(json.dumps(data))


def config(tokenizer_class: str | None, **keys: Any) -> dict[str, Any]:
    named = {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
    return {"tokenizer_config": named | keys}


def flags(content: str, **changed: bool) -> dict[str, Any]:
    usual = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, **usual, "special": True, **changed}


N = len(PIECES)
OWN = {str(PIECES.index(f"[{name}]")): flags(f"[{name}]") for name in ("PAD", "UNK", "CLS", "SEP")}
OWN[str(PIECES.index("[MASK]"))] = flags("[MASK]")
LATER = {str(N): flags("XX", lstrip=True), str(N + 1): flags("lol", special=False)}
LSTRIPPED = {"__type": "AddedToken", **flags("<mask>", lstrip=True)}
SPACED = {"__type": "AddedToken", **flags("Q", lstrip=True)}
FIRST = {"0": flags("<s>")}
MAP = {"eos_token": flags("XX", rstrip=True), "additional_special_tokens": ["Q", "hello"]}
LISTED = {"added_tokens": {"Q": N}, "special_tokens_map": {"additional_special_tokens": ["Q"]}}
BERT, PLAIN, LLAMA = "BertTokenizer", "PreTrainedTokenizerFast", "LlamaTokenizer"

CASES: list[tuple[str, dict[str, Any]]] = [
    *(
        ("bert", config(name, **keys))
        for name in (BERT, PLAIN)
        for keys in (
            {},
            {"do_lower_case": False},
            {"do_lower_case": False, "strip_accents": True},
            {"strip_accents": False},
            {"tokenize_chinese_chars": False},
            {"split_special_tokens": True},
            {"additional_special_tokens": ["XX", "hello", SPACED]},
            {"extra_special_tokens": {"image_token": "XX"}, "video_token": "Q"},
            {"bos_token": "[BB]", "pad_token": None, "mask_token": "hello"},
            {"added_tokens_decoder": OWN | LATER},
            {"add_bos_token": True, "bos_token": "hello", "model_max_length": 4},
        )
    ),
    ("bert", config("DistilBertTokenizerFast", do_lower_case=False)),
    ("bert", config("ElectraTokenizer", do_lower_case=False)),
    ("bert", config(BERT) | {"without": "post_processor"}),
    ("bert", config(PLAIN) | {"without": "post_processor"}),
    ("bert", {"without": "post_processor", "config": {"model_type": "distilbert"}}),
    ("bert", {"config": {"model_type": "llama", "tokenizer_class": BERT}, "without": "normalizer"}),
    ("bert", {"without": "normalizer", "config": {"model_type": "bert"}}),
    ("bert", config(BERT, do_lower_case=False) | {"config": {"model_type": "mistral"}}),
    ("bert", config(BERT, eos_token="Q") | {"special_tokens_map": MAP}),
    ("bert", config(PLAIN, extra_special_tokens=["XX"]) | {"special_tokens_map": MAP}),
    ("bert", config(PLAIN, added_tokens_decoder=OWN) | {"special_tokens_map": MAP}),
    ("bert", {"added_tokens": {"XX": N, "lol": N + 1}, "special_tokens_map": MAP}),
    ("bert", LISTED),
    ("vocab.txt", config(BERT) | LISTED),
    ("vocab.txt", config(BERT, extra_special_tokens=["Q"]) | {"added_tokens": {"Q": N}}),
    *(
        ("gpt2", config(name, **keys))
        for name in ("GPT2Tokenizer", "GPTNeoXTokenizerFast", "Qwen2Tokenizer", LLAMA, PLAIN)
        for keys in ({}, {"add_prefix_space": True, "pad_token": "[PAD]", "add_bos_token": True})
    ),
    *(
        ("gpt2", {"config": {"model_type": kind}})
        for kind in ("gpt2", "gpt_neox", "qwen2", "qwen3", "starcoder2")
    ),
    *(
        ("pattern", config("GPT2Tokenizer") | {"config": {"model_type": kind}})
        for kind in ("granite", "olmo2", "olmo3", "phi3")
    ),
    ("gpt2", config(LLAMA) | {"config": {"model_type": "qwen2"}}),
    ("roberta", config("RobertaTokenizer", add_prefix_space=True)),
    ("roberta", config("BartTokenizer") | {"without": "post_processor"}),
    *(
        ("pieces", config(name, **keys))
        for name in (LLAMA, "GemmaTokenizerFast", PLAIN)
        for keys in ({}, {"legacy": True, "add_eos_token": True}, {"add_prefix_space": False})
    ),
    ("pieces", config(LLAMA) | {"without": "post_processor"}),
    ("pieces", config(LLAMA) | {"config": {"model_type": "mixtral"}}),
    ("t5", config("T5Tokenizer")),
    ("t5", config("T5TokenizerFast", extra_ids=2, eos_token="<pad>")),
    ("t5", config("T5Tokenizer", additional_special_tokens=["XX"])),
    ("albert", config("AlbertTokenizer")),
    ("albert", config("AlbertTokenizer", do_lower_case=False, keep_accents=True)),
    ("albert", config("AlbertTokenizerFast", add_prefix_space=False)),
    ("bert", {"config": {"model_type": "electra"}}),
    ("bert", {"config": {"model_type": "nomic_bert"}}),
    *(
        (kind, files)
        for kind, name in (("xlm-roberta", "XLMRoberta"), ("camembert", "Camembert"))
        for files in (
            {"config": {"model_type": kind}},
            config(f"{name}TokenizerFast", add_prefix_space=False),
            config(f"{name}Tokenizer", mask_token="hello", additional_special_tokens=["XX"]),
            config(f"{name}Tokenizer", cls_token="▁", sep_token="hello", eos_token="<unk>"),
            config(f"{name}Tokenizer", mask_token=LSTRIPPED),
        )
    ),
    ("xlm-roberta", config("XLMRobertaTokenizer") | {"config": {"model_type": "bert"}}),
    ("vocab.txt of MPNet", config("MPNetTokenizer")),
    ("vocab.txt of MPNet", config("MPNetTokenizer", do_lower_case=False, strip_accents=True)),
    ("vocab.txt of MPNet", config("MPNetTokenizer", mask_token="hello", sep_token="<pad>")),
    ("vocab.txt of MPNet", {"config": {"model_type": "mpnet"}}),
    ("vocab.txt", config(BERT, do_lower_case=False, additional_special_tokens=["XX"])),
    ("vocab.txt", config(BERT, pad_token="[NONE]") | {"added_tokens": {"XX": N}}),
    ("vocab.json", config("GPT2Tokenizer", add_bos_token=True, pad_token="[PAD]")),
    ("vocab.json", config("GPTNeoXTokenizer", add_eos_token=True)),
    ("vocab.json", config("Qwen2Tokenizer", add_prefix_space=True)),
    ("vocab.json", config("GPT2Tokenizer") | {"special_tokens_map": MAP}),
    ("vocab.json of RoBERTa", config("RobertaTokenizer", add_bos_token=True)),
]


@pytest.mark.parametrize(("name", "files"), CASES, ids=lambda value: str(value)[:80])
def test_the_ids_are_those_of_transformers(
    tmp_path: Path, name: str, files: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    write(tmp_path, name, files)
    ours, theirs = tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ALL:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        part = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, special=False) == part, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    for pair in zip(ALL, ALL[::-1], strict=True):
        found = ours.encoding(*pair)
        masks = {"return_special_tokens_mask": True, "return_offsets_mapping": True}
        wanted = {name: rows[0] for name, rows in theirs([pair], **masks).items()}
        assert found.ids == wanted["input_ids"], pair
        assert found.types == wanted.get("token_type_ids", found.types), pair
        assert found.special == list(map(bool, wanted["special_tokens_mask"])), pair
        for i, ours_span, their_span in zip(
            found.ids, found.spans, wanted["offset_mapping"], strict=True
        ):  # CamemBERT's mask includes the space before it there
            assert i == ours.mask_id or ours_span == their_span, pair
    for kind in ("bos", "eos", "pad", "mask"):
        if f"{kind}_token" in files.get("tokenizer_config", {}):
            assert getattr(ours, f"{kind}_id") == getattr(theirs, f"{kind}_token_id")


def test_the_classes_of_families_are_those_of_transformers() -> None:
    auto = pytest.importorskip("transformers.models.auto.tokenization_auto", exc_type=ImportError)
    unchanged = "TokenizersBackend", "MistralCommonBackend"
    for kind in FAMILIES:
        name = auto.TOKENIZER_MAPPING_NAMES.get(kind)
        assert (kind in GENERIC) == (name in unchanged), kind
        if kind not in GENERIC:
            assert REGISTERED.get(kind) == (name if name in KINDS else None), kind


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        (
            "bert",
            config(BERT, added_tokens_decoder={"99": flags("XX")}),
            "'XX' must have the id 99",
        ),
        ("bert", config(PLAIN, added_tokens_decoder={"x": flags("XX")}), "'x' must be an id"),
        (
            "roberta",
            config("GPT2Tokenizer", added_tokens_decoder=FIRST),
            "it lacks '</s>', '<mask>'",
        ),
        ("bert", {"added_tokens": {"XX": 99}}, "'XX' must have the id 99"),
        (
            "bert",
            config("GPT2Tokenizer"),
            "its model must be BPE, got WordPiece; with tokenizer_cl",
        ),
        ("bert", config(BERT, extra_special_tokens="XX"), "must be a list of tokens, or an object"),
        ("bert", config(BERT, extra_special_tokens=[3]), "must be a list of tokens, got"),
        ("bert", config("MyTokenizer", auto_map={"AutoTokenizer": ["a", "b"]}), "code for 'MyTok"),
        (
            "bert",
            config("FunnelTokenizer", do_lower_case=False),
            "do_lower_case must be True, got Fa",
        ),
        ("gpt2", config(PLAIN, fix_mistral_regex=True), "fix_mistral_regex must be False"),
        ("gpt2", config(PLAIN, init_inputs=["a"]), "init_inputs must be"),
        (
            "gpt2",
            config(PLAIN, fast_tokenizer_files=["tokenizer.4.0.json"]),
            "fast_tokenizer_files",
        ),
        ("t5", config("XLMRobertaTokenizer"), "unknown token must have id 3, tokenizer.json says"),
        ("t5", config("CamembertTokenizer", unk_token="ll"), "unknown token must have id 5, token"),
        ("bert", config("CamembertTokenizer"), "its model must be Unigram, got WordPiece"),
        ("t5", config("AlbertTokenizer"), "unknown token must have id 1, tokenizer.json says 2"),
        ("vocab.json", config(LLAMA), "tokenizer_class must be GPT2Tokenizer or RobertaTokenizer"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_files_that_contradict_each_other_are_refused(
    tmp_path: Path, name: str, files: dict[str, Any], message: str
) -> None:
    write(tmp_path, name, files)
    with pytest.raises(PretrainedError, match=message):
        tokenizer(tmp_path)


@pytest.mark.parametrize("where", ["tokenizer_config", "special_tokens_map"])
def test_a_list_beside_an_object_of_tokens(tmp_path: Path, where: str) -> None:
    """transformers 4 writes both; 5.3 leaves the list out."""
    files = config(BERT, extra_special_tokens={"image_token": "XX"})
    files.setdefault(where, {})["additional_special_tokens"] = ["Q"]
    write(tmp_path, "bert", files)
    own = tokenizer(tmp_path)
    ids = own.encode("hello XX Q", special=False)
    assert len(ids) == 3 and own.unk_id not in ids and set(ids[1:]) <= own.special_ids


def test_a_decoder_pads_at_the_left_after_saving_too(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    write(tmp_path / "old", "pieces", config(LLAMA))
    tokenizer(tmp_path / "old").save(tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert saved["padding_side"] == "left"
    assert saved["model_input_names"] == ["input_ids", "attention_mask"]


def test_null_for_the_space_before_a_text(tmp_path: Path) -> None:
    """Llama's class takes its default for it, as in the published files."""
    for name, keys in (("a", {}), ("b", {"add_prefix_space": None})):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "pieces", config(LLAMA, **keys))
    ids = [tokenizer(tmp_path / name).encode("hello") for name in "ab"]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("names", ["tokenizer_class", "model_type"])
def test_tokens_of_a_class_are_guesses_and_those_of_files_are_not(
    tmp_path: Path, names: str
) -> None:
    """A guess ends no text: see `generation.text.ends_of`."""
    named = "GPT2Tokenizer" if names == "tokenizer_class" else None
    write(tmp_path, "gpt2", config(named) | {"config": {"model_type": "gpt2"}})
    ours = tokenizer(tmp_path)
    assert ours.eos_id == 0 and "eos_token" in ours.guessed
    write(tmp_path, "gpt2", config(named, eos_token="<|endoftext|>"))
    assert tokenizer(tmp_path).eos_id == 0 and "eos_token" not in tokenizer(tmp_path).guessed


def test_keys_that_change_no_ids_are_harmless(tmp_path: Path) -> None:
    bert(tmp_path)
    want = [tokenizer(tmp_path).encode(text) for text in ALL]
    keys = {"chat_template": "{{ x }}", "padding_side": "left", "errors": "strict", "mine": [1]}
    write(tmp_path, "bert", config(PLAIN, clean_up_tokenization_spaces=True, auto_map=None, **keys))
    assert [tokenizer(tmp_path).encode(text) for text in ALL] == want


@pytest.mark.parametrize("named", [PLAIN, None])
def test_a_tuned_model_keeps_a_tokenizer_from_elsewhere(tmp_path: Path, named: str | None) -> None:
    """Beside GPT-2's config.json, tokenizer.json alone would be of GPT-2's class."""
    (tmp_path / "words").mkdir()
    write(tmp_path / "words", "gpt2", config(named) if named else {})
    path = tmp_path / "words/tokenizer.json"
    path.write_text(
        path.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true')
    )
    own = tokenizer(tmp_path / "words")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 270}
    names = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    model = pretrained.model(names | sizes)
    finetune.save(model, model.init(0), tmp_path / "tuned", tokenizer=own)
    again = tokenizer(tmp_path / "tuned")
    assert own.encode("hello") == own.encode(" hello")
    assert [again.encode(text) for text in ALL] == [own.encode(text) for text in ALL]


def test_a_tokenizer_of_a_class_is_saved(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    keys = {"do_lower_case": False, "truncation_side": "left", "split_special_tokens": True}
    write(tmp_path / "old", "bert", config(BERT, **keys) | {"added_tokens": {"XX": N}})
    old = tokenizer(tmp_path / "old")
    old.save(tmp_path)
    new = tokenizer(tmp_path)
    assert [new.encode(text) for text in ALL] == [old.encode(text) for text in ALL]
    assert new.truncation_side == "left" and new.split_special_tokens
