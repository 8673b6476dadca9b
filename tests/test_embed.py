"""Embeddings of texts: the library's call, what stands beside a model, the command, the page."""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import damaged, edited, refused_at_most, some
from hypothesis import given
from hypothesis import strategies as st
from sentences import BERT, LLAMA, TEXTS, cut_left, write, write_model
from truths import minilm

from xformer import GPT, pretrained, sentences, tree
from xformer.backends import Backend
from xformer.cli import embed as cli_embed
from xformer.cli import main
from xformer.cli import progress as cli_progress
from xformer.layers.pooling import POOLINGS
from xformer.pretrained.reading import PretrainedError
from xformer.pretrained.tokenizer import tokenizer
from xformer.sentences import Settings, batches, embed, settings, similarity

TOLERANCE = 1e-12  # of float64, in sums of another order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bert"), BERT)


@pytest.fixture(scope="module")
def opened(folder: Path) -> tuple[Any, Any, Any]:
    return (*pretrained.load(folder, dtype="float64"), tokenizer(folder))


def near(got: np.ndarray, want: Any) -> bool:
    return bool(np.allclose(got, want, rtol=0, atol=TOLERANCE))


def hidden(opened: tuple[Any, Any, Any], text: str) -> np.ndarray:
    """The hidden states (T, D) of one text."""
    model, params, own = opened
    states: np.ndarray = model.hidden(params, np.asarray([own.encode(text)]))[0][0]
    return states


# The library's call


def test_on_every_library(opened: tuple[Any, Any, Any], library: Backend) -> None:
    model, params, own = opened
    there = tree.map(library.asarray, params)
    got = embed(model, there, own, TEXTS)
    means = np.stack([hidden(opened, text).mean(0) for text in TEXTS])
    assert isinstance(got, np.ndarray) and got.dtype == np.float64
    assert near(got, means / np.linalg.norm(means, axis=1, keepdims=True))


@pytest.mark.parametrize(
    ("pooling", "pooled"),
    [
        ("mean", lambda x: x.mean(0)),
        ("first", lambda x: x[0]),
        ("cls", lambda x: x[0]),
        ("last", lambda x: x[-1]),
    ],
)
def test_pooling(opened: tuple[Any, Any, Any], pooling: str, pooled: Any) -> None:
    got = embed(*opened, TEXTS, pooling=pooling, normalize=False)
    assert near(got, [pooled(hidden(opened, text)) for text in TEXTS])


def test_berts_pooler(opened: tuple[Any, Any, Any]) -> None:
    _, params, _ = opened
    first = np.stack([hidden(opened, text)[0] for text in TEXTS])
    got = embed(*opened, TEXTS, pooling="pooler", normalize=False)
    assert near(got, np.tanh(first @ params.head.w + params.head.b))


def test_the_last_token_of_a_decoder(tmp_path: Path) -> None:
    own = tokenizer(write_model(tmp_path, LLAMA, special=False))
    opened = (*pretrained.load(tmp_path, dtype="float64"), own)
    want = [hidden(opened, text)[-1] for text in TEXTS]
    assert near(embed(*opened, TEXTS, normalize=False), want)
    assert near(embed(*opened, TEXTS, pooling="last", normalize=False), want)
    with pytest.raises(ValueError, match="embed: text 2 has no tokens, got ''"):
        embed(*opened, ["a", ""])


def test_the_size_of_batches_changes_nothing(
    opened: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, done = TEXTS * 5, []
    want = embed(*opened, texts)
    for size in (1, 2, 7):
        assert near(embed(*opened, texts, batch_size=size, progress=done.append), want)
        assert sum(done) == len(texts) and max(done) == size
        done.clear()
    monkeypatch.setattr(batches, "NUMPY_TOKENS", 32)
    assert near(embed(*opened, texts, progress=done.append), want)
    # texts of 17, 10, 8, 4 and 3 tokens, five of each
    assert done == [1, 1, 1, 1, 1, 3, 3, 4, 8, 2]


def test_no_texts_are_no_vectors(opened: tuple[Any, Any, Any]) -> None:
    got = embed(*opened, [])
    assert got.shape == (0, 12) and got.dtype == np.float64


def test_an_empty_text_is_its_special_tokens(opened: tuple[Any, Any, Any]) -> None:
    assert opened[2].encode("") == [2, 3]
    assert near(embed(*opened, [""], normalize=False)[0], hidden(opened, "").mean(0))


def test_a_long_text_is_cut_before_its_end_token(opened: tuple[Any, Any, Any]) -> None:
    texts = ["a cat", "the " * 30, "the cat " * 20]
    with pytest.warns(UserWarning, match="^embed: cut to 5 tokens: text 2 and 1 more of 3$"):
        got = embed(*opened, texts, max_len=5)
    assert near(got, embed(*opened, ["a cat", "the the the", "the cat the"]))
    with pytest.warns(UserWarning, match="^embed: cut to 24 tokens: text 2$"):
        got = embed(*opened, texts[:2], max_len=100)  # the model's table has no more
    assert near(got[1], embed(*opened, ["the " * 22])[0])


@pytest.mark.parametrize("how", ["config", "tokenizer"])
def test_the_end_of_a_long_text_is_read_as_by_sentence_transformers(
    tmp_path: Path, how: str
) -> None:
    judge = pytest.importorskip("sentence_transformers", reason="sentence-transformers is missing")
    folder = write_model(tmp_path, BERT, "float32")
    cut_left(folder, how)
    pooling = {"word_embedding_dimension": 12, "pooling_mode_mean_tokens": True}
    kinds = (("Transformer", ""), ("Pooling", "1_Pooling"))
    write(
        folder,
        modules=[
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(kinds)
        ],
        **{"1_Pooling__config": pooling, "sentence_bert_config": {"max_seq_length": 6}},
    )
    want = judge.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    with pytest.warns(UserWarning, match="^embed: cut to 6 tokens: text 1 and 2 more of 5$"):
        got = embed(
            *pretrained.load(folder), tokenizer(folder), TEXTS, **settings(folder)._asdict()
        )
    assert np.allclose(got, want, rtol=0, atol=1e-6)


def test_a_rotary_model_reads_what_it_was_made_for(tmp_path: Path) -> None:
    own = tokenizer(write_model(tmp_path, LLAMA, special=False))
    opened = (*pretrained.load(tmp_path, dtype="float64"), own)
    with pytest.warns(UserWarning, match="^embed: cut to 24 tokens: text 1$"):
        got = embed(*opened, ["the cat " * 20])
    assert near(got, embed(*opened, ["the cat " * 12]))


def test_a_prompt_stands_before_each_text(opened: tuple[Any, Any, Any]) -> None:
    got = embed(*opened, ["cat", "dog"], prompt="the very ")
    assert near(got, embed(*opened, ["the very cat", "the very dog"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "min"}, "embed: pooling must be one of mean, first, last, max, .*, got 'min'"),
        ({"pooling": ("mean", "pooler")}, "embed: pooling must be one of mean, .*, got 'pooler'"),
        ({"batch_size": 0}, "embed: batch_size must be an int of at least 1, got 0"),
        ({"max_len": 0}, "embed: max_len must be an int of at least 1, got 0"),
        ({"max_len": 2}, "max_len must exceed the 2 special tokens, got 2"),
    ],
)
def test_wrong_options(opened: tuple[Any, Any, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        embed(*opened, TEXTS, **options)


def test_wrong_arguments(opened: tuple[Any, Any, Any], tmp_path: Path) -> None:
    _, params, own = opened
    with pytest.raises(TypeError, match="embed: texts must be a list of texts, got one text"):
        embed(*opened, "one text")
    for texts in (None, 5):
        with pytest.raises(TypeError, match="embed: texts must be a list of texts, got"):
            embed(*opened, texts)
    with pytest.raises(TypeError, match="embed: prompt must be a string, got NoneType"):
        embed(*opened, TEXTS, prompt=None)
    with pytest.raises(TypeError, match="embed: text 2 must be a string, got int"):
        embed(*opened, ["a", 3])
    with pytest.raises(ValueError, match="embed: text 2 must be UTF-8"):
        embed(*opened, ["a", "b\udcff"])
    with pytest.raises(
        ValueError, match=r"embed: the model must be an encoder.*, got a causal language model"
    ):
        embed(GPT(7, 1, 4, 1, 5), params, own, TEXTS)
    small = pretrained.model(BERT | {"vocab_size": 9})
    with pytest.raises(ValueError, match="must be the model's, whose ids are below 9, got id 23"):
        embed(small, small.init(), own, TEXTS)
    decoder = pretrained.load(write_model(tmp_path, LLAMA))
    with pytest.raises(ValueError, match='"pooler" needs a model with a Pooler'):
        embed(*decoder, own, TEXTS, pooling="pooler")


CALLS = ("embed", "classify", "rank", "tag")


def loaded_for(call: str, folder: Path) -> tuple[Any, Any]:
    """A model that `call` takes, and its parameters."""
    head = {
        "embed": {"architectures": ["BertModel"]},
        "classify": {"architectures": ["BertForSequenceClassification"]},
        "rank": {"architectures": ["BertForSequenceClassification"], "num_labels": 1},
        "tag": {"architectures": ["BertForTokenClassification"]},
    }[call]
    return pretrained.load(write_model(folder, BERT | head))


def run(call: str, model: Any, params: Any, folder: Path, texts: list[str]) -> None:
    query = ("hello",) if call == "rank" else ()
    getattr(sentences, call)(model, params, tokenizer(folder), *query, texts)


@pytest.mark.parametrize("number", [math.nan, math.inf])  # NumPy has warnings for infinity
@pytest.mark.parametrize("call", CALLS)
def test_weights_that_are_not_finite_are_named(tmp_path: Path, call: str, number: float) -> None:
    model, params = loaded_for(call, tmp_path)
    leaves = tree.flatten(params)
    name = "stack.blocks.1.ffn.up.w"
    params = tree.unflatten(params, leaves | {name: np.full_like(leaves[name], number)})
    message = f"^text 2: what the model computes is not finite, because its parameter {name} is not"
    with pytest.raises(ValueError, match=message):
        run(call, model, params, tmp_path, ["hello", "hello lo"])


@pytest.mark.parametrize("call", CALLS)
def test_weights_of_zeros_are_an_error(tmp_path: Path, call: str) -> None:
    model, params = loaded_for(call, tmp_path)
    with pytest.raises(ValueError, match=r"^the model's embeddings of tokens are zero; are its w"):
        run(call, model, tree.map(np.zeros_like, params), tmp_path, ["hello"])


def test_vectors_of_zeros_are_no_embeddings(opened: tuple[Any, Any, Any]) -> None:
    model, params, own = opened
    zeros = tree.map(np.zeros_like, params)._replace(embed=params.embed)
    with pytest.raises(
        ValueError, match=r"embed: the vector of text . is zero; are the weights of"
    ):
        embed(model, zeros, own, TEXTS)


def test_frozen_parameters(opened: tuple[Any, Any, Any]) -> None:
    model, params, own = opened
    assert near(embed(model, tree.freeze(params), own, TEXTS), embed(*opened, TEXTS))


def test_similarity(library: Backend) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 5)), rng.normal(size=(2, 5))
    b[1] = 0
    lengths = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b[:1], axis=1)
    got = library.to_numpy(similarity(library.asarray(a), library.asarray(b)))
    assert near(got, np.concatenate([a @ b[:1].T / lengths, np.zeros((3, 1))], axis=1))
    own = library.to_numpy(similarity(library.asarray(a)))
    assert near(np.diag(own), 1) and near(own, own.T)
    gaps = a[:, None] - b
    for name, want in {
        "dot": a @ b.T,
        "euclidean": -((gaps**2).sum(-1) ** 0.5),
        "manhattan": -abs(gaps).sum(-1),
    }.items():
        got = library.to_numpy(similarity(library.asarray(a), library.asarray(b), name=name))
        assert near(got, want), name


def test_similarity_of_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"similarity: a must be \(N, D\), got shape \(3,\)"):
        similarity(np.ones(3))
    with pytest.raises(ValueError, match=r"similarity: b must be \(M, 3\), got shape \(2, 4\)"):
        similarity(np.ones((2, 3)), np.ones((2, 4)))


# What stands beside a model


def module(name: str, path: str = "", where: str = "sentence_transformers.models") -> Any:
    return {"idx": 0, "name": "0", "path": path, "type": f"{where}.{name}"}


CHAIN = [module("Transformer"), module("Pooling", "1_Pooling"), module("Normalize", "2_Normalize")]
FLAGS = {"word_embedding_dimension": 12, "pooling_mode_cls_token": False}


def test_nothing_said(tmp_path: Path) -> None:
    assert settings(tmp_path) == Settings(None, True, None, "")
    write(tmp_path, tokenizer_config={"model_max_length": 10**30})
    assert settings(tmp_path) == Settings()
    write(tmp_path, tokenizer_config={"model_max_length": 77})
    assert settings(tmp_path) == Settings(max_len=77)
    write(tmp_path, tokenizer_config={"max_len": 66})  # of transformers 2
    assert settings(tmp_path) == Settings(max_len=66)


def test_what_version_2_wrote(tmp_path: Path) -> None:
    write(
        tmp_path,
        modules=CHAIN,
        sentence_bert_config={"max_seq_length": 256, "do_lower_case": False},
        config_sentence_transformers={"__version__": {"sentence_transformers": "2.0.0"}},
        tokenizer_config={"model_max_length": 512},
        **{"1_Pooling__config": FLAGS | {"pooling_mode_mean_tokens": True}},
    )
    assert settings(tmp_path) == Settings("mean", True, 256, "")
    write(tmp_path, modules=CHAIN[:2], sentence_bert_config={"max_seq_length": None})
    write(tmp_path, **{"1_Pooling__config": FLAGS | {"pooling_mode_cls_token": True}})
    assert settings(tmp_path) == Settings("first", False, 512, "")
    write(tmp_path, **{"1_Pooling__config": FLAGS})
    assert settings(tmp_path).pooling == "mean"


def test_what_version_6_writes(tmp_path: Path) -> None:
    base, own = "sentence_transformers.base.modules", "sentence_transformers.sentence_transformer"
    names = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
    write(
        tmp_path,
        modules=[
            module("Transformer", "", f"{base}.transformer"),
            module("Pooling", "1_Pooling", f"{own}.modules.pooling"),
            module("Normalize", "2_Normalize", f"{base}.normalize"),
        ],
        sentence_bert_config={
            "transformer_task": "feature-extraction",
            "modality_config": {"text": {"method": "forward"}},
            "module_output_name": "token_embeddings",
        },
        config_sentence_transformers={
            "default_prompt_name": "query",
            "prompts": {"query": "query: ", "document": ""},
            "model_type": "SentenceTransformer",
            "similarity_fn_name": "cosine",
        },
        tokenizer_config={"model_max_length": 256},
        **{
            "1_Pooling__config": {
                "embedding_dimension": 12,
                "pooling_mode": "lasttoken",
                "include_prompt": True,
            },
            "2_Normalize__config": names,
        },
    )
    assert settings(tmp_path) == Settings("last", True, 256, "query: ")


CNN = module("CNN", "2_CNN")
OTHER = module("Transformer", "", "custom_code")
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"modules": {}}, "modules.json: must hold a JSON array, got dict"),
    ({"modules": [3]}, "module 0 must be an object, got 3"),
    ({"modules": [*CHAIN[:2], CNN]}, "module 2: type must be of .* got 'sent.*models.CNN'"),
    ({"modules": [OTHER, *CHAIN[1:]]}, "module 0: type must be .* got 'custom_code.Transformer'"),
    ({"modules": CHAIN[:1]}, "modules must be Transformer, Pooling, .*, got Transformer$"),
    ({"modules": [CHAIN[0], *CHAIN[2:], CHAIN[1]]}, "got Transformer, Normalize, Pooling"),
    ({"modules": [module("Transformer", "0_Transformer"), *CHAIN[1:]]}, "path must be empty"),
    ({"modules": [CHAIN[0], module("Pooling", "../x")]}, "module 1: path must be a folder's name"),
    ({"modules": [CHAIN[0], module("Pooling", "..")]}, "module 1: path must be a folder's name"),
    ({"1_Pooling__config": {"pooling_mode": "median"}}, "pooling_mode must be one of cls, max, "),
    ({"1_Pooling__config": {"pooling_mode": ["max", "min"]}}, "pooling_mode must be one of cls, "),
    ({"1_Pooling__config": {"pooling_mode": []}}, "pooling_mode must be one name or more, got"),
    ({"1_Pooling__config": {"pooling_mode": "mean", "x": 1}}, "config.json: not supported: 'x'"),
    ({"2_Normalize__config": {"module_input_name": "token_embeddings"}}, "module_input_name must"),
    ({"sentence_bert_config": {"max_seq_length": 0}}, "max_seq_length must be an integer from 1"),
    ({"sentence_bert_config": {"do_lower_case": True}}, "do_lower_case must be False, got True"),
    ({"config_sentence_transformers": {"model_type": "SparseEncoder"}}, "model_type must be"),
    ({"config_sentence_transformers": {"default_prompt_name": "q"}}, "must be one of prompts"),
    ({"config_sentence_transformers": {"prompts": {"q": 3}}}, "prompts: q must be a string, got 3"),
]


@pytest.mark.parametrize(("files", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_supported_is_refused(
    files: dict[str, Any], message: str, tmp_path: Path
) -> None:
    whole: dict[str, Any] = {"modules": CHAIN, "1_Pooling__config": {"pooling_mode": "mean"}}
    write(tmp_path, **whole)
    assert settings(tmp_path) == Settings("mean")
    write(tmp_path, **whole | files)
    with pytest.raises(PretrainedError, match=message):
        settings(tmp_path)


def test_a_missing_pooling_is_named(tmp_path: Path) -> None:
    write(tmp_path, modules=CHAIN)
    with pytest.raises(FileNotFoundError, match=r"there is no file .*1_Pooling"):
        settings(tmp_path)


DATA = {
    "modules": CHAIN,
    "1_Pooling__config": FLAGS | {"pooling_mode_mean_tokens": True},
    "sentence_bert_config": {"max_seq_length": 256, "do_lower_case": False},
    "config_sentence_transformers": {"prompts": {"q": "Q: "}, "default_prompt_name": "q"},
}


@some
@given(data=st.data())
def test_damaged_files_are_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp_path = tmp_path_factory.mktemp("damaged")
    write(tmp_path, **DATA)
    name = data.draw(st.sampled_from(sorted(DATA)))
    path = tmp_path / (name.replace("__", "/") + ".json")
    whole = path.read_bytes()
    text = data.draw(st.one_of(damaged(whole), edited(DATA[name])))
    path.write_bytes(text)
    with refused_at_most():
        found = settings(tmp_path)
        names = found.pooling if isinstance(found.pooling, tuple) else (found.pooling,)
        assert all(name in (None, *POOLINGS) for name in names)
        assert found.max_len is None or found.max_len > 0


# The command


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*argv: str) -> tuple[int, str, str]:
        status = main(list(argv))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_the_published_similarities(said: Any) -> None:
    """Of all-MiniLM-L6-v2, by its authors."""
    texts = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    assert said("embed", "--model", str(minilm()), *texts) == (
        0,
        "        1       2       3\n"
        "1  1.0000  0.6660  0.1046  The weather is lovely today.\n"
        "2  0.6660  1.0000  0.1411  It's so sunny outside!\n"
        "3  0.1046  0.1411  1.0000  He drove to the stadium.\n",
        "",
    )


def test_the_table(said: Any, folder: Path, opened: tuple[Any, Any, Any]) -> None:
    status, out, err = said("embed", "--model", str(folder), "--dtype", "float64", *TEXTS)
    assert (status, err) == (0, "")
    rows = [line.split()[1:6] for line in out.splitlines()[1:]]
    want = similarity(embed(*opened, TEXTS))
    assert rows == [[f"{x:.4f}" for x in row] for row in want]


def test_json(said: Any, folder: Path, opened: tuple[Any, Any, Any]) -> None:
    command = ["embed", "--model", str(folder), "--json", "--dtype", "float64", "--batch", "2"]
    status, out, _ = said(*command, "--no-normalize", "--pooling", "last", *TEXTS)
    got = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and [row["text"] for row in got] == TEXTS
    vectors = np.asarray([row["embedding"] for row in got])
    assert near(vectors, embed(*opened, TEXTS, pooling="last", normalize=False))
    status, out, _ = said("embed", "--model", str(folder), "--json", TEXTS[0])
    row = json.loads(out)["embedding"]
    single = np.asarray(row, np.float32)
    assert [float(str(x)) for x in single] == row  # nothing is lost, and no digit is too many


def test_settings_of_the_folder(said: Any, tmp_path: Path) -> None:
    write_model(tmp_path, BERT)
    write(tmp_path, modules=CHAIN[:2], sentence_bert_config={"max_seq_length": 5})
    write(tmp_path, **{"1_Pooling__config": {"pooling_mode": "cls"}})
    texts = ["a very good cat and a dog"]
    opened = (*pretrained.load(tmp_path), tokenizer(tmp_path))
    _, out, err = said("embed", "--model", str(tmp_path), "--json", *texts)
    assert err == "xformer: warning: embed: cut to 5 tokens: text 1\n"
    with pytest.warns(UserWarning, match="cut to 5"):
        want = embed(*opened, texts, pooling="first", normalize=False, max_len=5)
    assert np.asarray(json.loads(out)["embedding"], np.float32).tolist() == want[0].tolist()
    _, out, err = said("embed", "--model", str(tmp_path), "--json", "--max-len", "20", *texts)
    assert err == ""


def test_lines_of_a_file_and_of_standard_input(
    said: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes("\ufeffa cat\r\n\r\nünknown\u2028words".encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"so\nbad\n")))
    command = ["embed", "--model", str(folder), "--json", "why", "-", "--file", str(path)]
    status, out, _ = said(*command)
    texts = [json.loads(line)["text"] for line in out.splitlines()]
    assert (status, texts) == (0, ["why", "so", "bad", "a cat", "", "ünknown\u2028words"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"so\n")))
    status, out, _ = said("embed", "--model", str(folder), "--json", "--file", "-")
    assert status == 0 and json.loads(out)["text"] == "so"
    status, out, _ = said("embed", "--model", str(folder), "a\x1b[31m\tcat" + " so" * 40)
    assert status == 0 and out.endswith("1  1.0000  a [31m cat" + " so" * 15 + " s...\n")


def test_mistakes_are_one_line(said: Any, folder: Path, tmp_path: Path) -> None:
    own = ["embed", "--model", str(folder)]
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    shutil.copy(folder / "config.json", tmp_path)
    shutil.copy(folder / "model.safetensors", tmp_path)
    for command, message in [
        (own, "there are no texts: give a text, --file PATH, or - for standard input"),
        (
            [*own, "--file", str(tmp_path / "bad.txt")],
            "bad.txt is not UTF-8 text: byte 0xff at offset 0",
        ),
        ([*own, "--file", str(tmp_path / "absent")], "absent"),
        ([*own, *"abcdefghijklmnopqrstu"], "a table shows at most 20 texts, got 21: add --json"),
        ([*own, "--batch", "0", "x"], "--batch must be an int of at least 1, got 0"),
        (
            ["embed", "--model", "absent", "x"],
            "there is no folder or file absent. If it is a model on the Hugging Face Hub",
        ),
        (["embed", "--model", str(tmp_path), "x"], "is no file of a tokenizer, and no folder with"),
    ]:
        status, out, err = said(*command)
        assert (status, out) == (1, ""), command
        assert err.startswith("xformer: error: ") and message in err and err.count("\n") == 1


def test_a_bar_where_it_takes_long(
    said: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*args: Any, progress: Any, **options: Any) -> np.ndarray:
        vectors = embed(*args, **options)
        time.sleep(0.15)
        progress(len(vectors))
        return vectors

    monkeypatch.setattr(cli_embed, "embed", slow)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    command = ["embed", "--model", str(folder), *TEXTS]
    _, quick, err = said(*command)
    assert err == ""
    monkeypatch.setattr(cli_progress, "PATIENCE", 0.1)
    _, out, err = said(*command)
    assert out == quick and "5/5" in err


# The page
