"""ColBERT beside sentence-transformers' MultiVectorEncoder, MaxSim by a plain formula, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentences import BERT, SPECIAL, TEXTS, WORDS, tokenizers, write, write_model

from xformer import pretrained
from xformer.layers import LinearParams
from xformer.pretrained.reading import PretrainedError
from xformer.pretrained.tokenizer import tokenizer
from xformer.sentences import Dense, colbert, colbert_settings, maxsim
from xformer.sentences.colbert import QUERY_LEN

TOLERANCE = 1e-12  # of float64, in sums of another order
MARKERS = ("[unused0]", "[unused1]", "[Q] ", "[MASK]", ".")
SIZE = len(WORDS) + len(SPECIAL) + len(MARKERS)
CONFIG = BERT | {"vocab_size": SIZE, "max_position_embeddings": 40}


def write_bert(folder: Path) -> dict[str, np.ndarray]:
    """A BERT whose tokenizer has markers, a mask token and a full stop; its tensors."""
    from safetensors.numpy import load_file

    write_model(folder, CONFIG)
    vocab = {word: i for i, word in enumerate([*SPECIAL, *WORDS, *MARKERS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    inner.normalizer = tokenizers.normalizers.Lowercase()
    inner.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    inner.add_special_tokens([*SPECIAL, "[MASK]"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single=["[CLS]", "$A", "[SEP]"], special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    inner.save(str(folder / "tokenizer.json"))
    names = {f"{t.strip('[]').lower()}_token": t for t in (*SPECIAL, "[MASK]")}
    write(folder, tokenizer_config=names | {"tokenizer_class": "PreTrainedTokenizerFast"})
    return load_file(str(folder / "model.safetensors"))


def projection() -> np.ndarray:
    """(P, D), of numbers that float32 holds."""
    numbers = np.random.default_rng(3).normal(0, 0.4, (5, 12))
    return numbers.astype(np.float32).astype(np.float64)


def write_pylate(folder: Path, **changes: Any) -> Path:
    from safetensors.numpy import save_file

    write_bert(folder)
    dense = {"in_features": 12, "out_features": 5, "bias": False}
    activation = {"activation_function": "torch.nn.modules.linear.Identity"}
    kinds = {"sentence_transformers.models.Transformer": "", "pylate.models.Dense.Dense": "1_Dense"}
    write(
        folder,
        modules=[
            {"idx": i, "name": str(i), "path": path, "type": kind}
            for i, (kind, path) in enumerate(kinds.items())
        ],
        config_sentence_transformers={
            "model_type": "ColBERT",
            "prompts": {},
            "query_prefix": "[Q] ",
            "document_prefix": "the ",  # a word of the vocabulary
            "query_length": 14,
            "document_length": 12,
            "attend_to_expansion_tokens": False,
            "do_query_expansion": True,
            "skiplist_words": [".", "so", "absent"],
        }
        | changes,
        sentence_bert_config={"max_seq_length": 12, "do_lower_case": False},
        **{"1_Dense__config": dense | activation},
    )
    save_file({"linear.weight": projection()}, str(folder / "1_Dense" / "model.safetensors"))
    return folder


def write_stanford(folder: Path, **metadata: Any) -> Path:
    """As `HF_ColBERT.save_pretrained` writes: the tensors of BERT have a prefix."""
    from safetensors.numpy import save_file

    tensors = {f"bert.{name}": array for name, array in write_bert(folder).items()}
    named = tensors | {"linear.weight": projection()}
    save_file(named, str(folder / "model.safetensors"), {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    write(folder, config=config | {"architectures": ["HF_ColBERT"]})
    own = {"query_maxlen": 16, "doc_maxlen": 12, "dim": 5, "lr": 1e-5, "similarity": "cosine"}
    (folder / "artifact.metadata").write_text(json.dumps(own | metadata))
    return folder


def ours(folder: Path, texts: list[str], *, query: bool, **changes: Any) -> list[np.ndarray]:
    opened = (*pretrained.load(folder, dtype="float64"), tokenizer(folder))
    options = colbert_settings(folder, query=query)._asdict() | changes
    return colbert(*opened, texts, batch_size=2, **options)


def require_same(folder: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The vectors and scores of a folder equal sentence-transformers'; its queries, documents."""
    judge = pytest.importorskip("sentence_transformers", reason="sentence-transformers is missing")
    import torch

    texts = [*TEXTS, "so. why.", ""]
    dtype = {"dtype": torch.float64}
    encoder = judge.MultiVectorEncoder(str(folder), device="cpu", model_kwargs=dtype).double()
    want = encoder.encode_query(texts), encoder.encode_document(texts)
    with pytest.warns(UserWarning, match=r"^colbert: cut to 1\d tokens: text 3$"):
        got = ours(folder, texts, query=True), ours(folder, texts, query=False)
    for mine, theirs in zip(got, want, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.dtype == np.float64
            np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE)
    scores = encoder.similarity(*want)
    np.testing.assert_allclose(maxsim(*got), scores, rtol=1e-6)  # theirs are float32
    return got


@pytest.mark.parametrize("attend", [False, True])
def test_of_pylate(tmp_path: Path, attend: bool) -> None:
    folder = write_pylate(tmp_path, attend_to_expansion_tokens=attend)
    queries, documents = require_same(folder)
    assert {len(q) for q in queries} == {14}
    # [CLS] the a dog [SEP]; of "so. why." only "why" is kept; of "" only special tokens
    assert [len(documents[i]) for i in (1, 5, 6)] == [5, 4, 3]


def test_of_pylate_without_expansion(tmp_path: Path) -> None:
    folder = write_pylate(tmp_path, do_query_expansion=False)
    queries, _ = require_same(folder)
    assert [len(q) for q in queries] == [9, 5, 14, 4, 11, 7, 3]


@pytest.mark.parametrize("metadata", [{}, {"attend_to_mask_tokens": True, "query_maxlen": 15}])
def test_of_stanford(tmp_path: Path, metadata: dict[str, Any]) -> None:
    folder = write_stanford(tmp_path, **metadata)
    queries, _ = require_same(folder)
    assert {len(q) for q in queries} == {metadata.get("query_maxlen", 16)}
    own = colbert_settings(folder, query=False)
    assert own.marker == "[unused1]" and "." in own.skiplist and "so" not in own.skiplist


def test_stanfords_defaults(tmp_path: Path) -> None:
    folder = write_stanford(tmp_path, mask_punctuation=False, query_token_id="[unused1]")
    assert colbert_settings(folder, query=False).skiplist == ()
    assert colbert_settings(folder, query=True).marker == "[unused1]"
    (folder / "artifact.metadata").unlink()
    own = colbert_settings(folder, query=True)
    assert own[1:] == ("[unused0]", QUERY_LEN, True, False, ())


def test_the_encoder_of_stanford_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "colbert").mkdir()
    write_bert(tmp_path / "plain")
    write_stanford(tmp_path / "colbert")
    ids = np.asarray([[2, 5, 6, 3]])
    states = [
        model.hidden(params, ids)[0]
        for model, params in (pretrained.load(tmp_path / name) for name in ("plain", "colbert"))
    ]
    assert np.array_equal(*states)


def test_by_a_formula(tmp_path: Path) -> None:
    """Vectors of each token, mapped and normalised, by NumPy from the hidden states."""
    folder = write_pylate(tmp_path)
    model, params = pretrained.load(folder, dtype="float64")
    own = tokenizer(folder)
    (got,) = ours(folder, ["so the cat ran."], query=False)
    ids = own.encode("so the cat ran.")
    ids.insert(1, own.token_id("the"))
    states = model.hidden(params, np.asarray([ids]))[0][0] @ projection().T
    kept = [i for i, n in enumerate(ids) if n not in (own.token_id("so"), own.token_id("."))]
    want = (states / np.linalg.norm(states, axis=1, keepdims=True))[kept]
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def test_maxsim() -> None:
    rng = np.random.default_rng(0)
    queries = [rng.normal(size=(n, 5)) for n in (3, 1)]
    documents = [rng.normal(size=(n, 5)) for n in (4, 1, 7)]
    want = [[sum(max(a @ b for b in d) for a in q) for d in documents] for q in queries]
    np.testing.assert_allclose(maxsim(queries, documents), want, rtol=0, atol=1e-13)
    assert maxsim(queries, []).shape == (2, 0) and maxsim([], documents).shape == (0, 3)
    with pytest.raises(
        ValueError, match=r"maxsim: documents\[1\] must be \(T, P\) with P = 5, got"
    ):
        maxsim([], [documents[0], np.ones((2, 4))])
    for bad, message in (
        (
            [np.ones((2, 4))],
            r"maxsim: documents\[0\] must be \(T, P\) with P = 5, got shape \(2, 4",
        ),
        ([documents[0], np.ones((0, 5))], r"maxsim: documents\[1\] must be"),
        ([np.ones(5)], r"maxsim: documents\[0\] must be"),
    ):
        with pytest.raises(ValueError, match=message):
            maxsim(queries, bad)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "SentenceTransformer"}, "model_type must be 'ColBERT'"),
        ({"prompts": {"query": "why "}}, "prompts must be {}"),
        ({"query_length": 0}, "query_length must be an integer from 3"),
        ({"skiplist_words": [3]}, "skiplist_words must be a string"),
        ({"truncate": 1}, "not supported: 'truncate'"),
    ],
)
def test_what_is_refused_of_pylate(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_pylate(tmp_path, **changes)
    with pytest.raises(PretrainedError, match=message):
        colbert_settings(folder, query=True)


def test_what_else_is_refused(tmp_path: Path) -> None:
    folder = write_stanford(tmp_path, similarity="l2")
    with pytest.raises(PretrainedError, match="similarity must be 'cosine', got 'l2'"):
        colbert_settings(folder, query=True)
    from safetensors.numpy import load_file, save_file

    tensors = load_file(str(folder / "model.safetensors"))
    for changes, message in (
        ({"linear.weight": projection()[0]}, r"linear\.weight must be a matrix, got shape \(12,\)"),
        ({}, r"has no linear\.weight"),
    ):
        del tensors["linear.weight"]
        tensors |= changes
        save_file(tensors, str(folder / "model.safetensors"))
        with pytest.raises(PretrainedError, match=message):
            colbert_settings(folder, query=True)
    plain = tmp_path / "plain"
    plain.mkdir()
    write_model(plain, BERT)
    with pytest.raises(PretrainedError, match=r"is no ColBERT model: it has no modules\.json and"):
        colbert_settings(plain, query=True)
    opened = (*pretrained.load(plain), tokenizer(plain))
    with pytest.raises(ValueError, match="colbert: expand needs max_len"):
        colbert(*opened, ["a"], expand=True)
    with pytest.raises(ValueError, match="colbert: expand needs a tokenizer with a mask token"):
        colbert(*opened, ["a"], expand=True, max_len=9)
    with pytest.raises(TypeError, match="colbert: marker must be a string, got int"):
        colbert(*opened, ["a"], marker=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="colbert: texts must be a list of texts, got one text"):
        colbert(*opened, "a")
    assert colbert(*opened, []) == []
    module = Dense(LinearParams(np.ones((7, 3), np.float32), None))
    with pytest.raises(ValueError, match=r"colbert: modules\[0\] must map 12 numbers"):
        colbert(*opened, ["a"], modules=(module,))
