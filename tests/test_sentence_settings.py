"""Every key that sentence-transformers writes: followed, harmless or refused by name."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentences import BERT, TEXTS, write, write_model
from test_embed_modules import PROMPTS, chain, judged, write_dense, write_sentences

from xformer import finetune, pretrained, tree
from xformer.cli import main
from xformer.pretrained.reading import PretrainedError
from xformer.pretrained.tokenizer import tokenizer
from xformer.sentences import (
    Settings,
    colbert_settings,
    embed,
    prompts,
    rank_settings,
    settings,
    similarity,
    similarity_name,
    splade_settings,
)
from xformer.sentences.settings import LENGTHS, settings_files

KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
TEXT = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
DENSE = {"in_features": 12, "out_features": 7, "activation_function": "torch.nn.Tanh"}


# The longest text


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_text_is_read_from_every_name(kind: str, tmp_path: Path) -> None:
    folder = write_sentences(tmp_path, {})
    old = {"word_embedding_dimension": 12, "pooling_mode_mean_tokens": True}
    write(folder, **{"1_Pooling__config": old})  # sentence-transformers 5 reads it too
    long = (folder / LENGTHS[0]).rename(folder / f"sentence_{kind}_config.json")
    long.write_text('{"max_seq_length": 5, "do_lower_case": false}')
    assert settings(folder).max_len == 5
    options = settings(folder)._asdict()
    own = (*pretrained.load(folder, dtype="float64"), tokenizer(folder))
    with pytest.warns(UserWarning, match="embed: cut to 5 tokens: text 1"):
        got = embed(*own, TEXTS, **options)
    np.testing.assert_allclose(got, judged(folder, TEXTS), rtol=0, atol=1e-12)


def test_the_first_file_of_the_longest_text_counts(tmp_path: Path) -> None:
    write(tmp_path, sentence_albert_config={"max_seq_length": 7}, sentence_bert_config={})
    assert settings(tmp_path).max_len == 7  # an empty file does not count
    write(tmp_path, sentence_bert_config={"do_lower_case": False})
    assert settings(tmp_path).max_len is None
    write(tmp_path, tokenizer_config={"model_max_length": 9})
    assert settings(tmp_path).max_len == 9
    assert tuple(f"sentence_{kind}_config.json" for kind in KINDS) == LENGTHS


# Similarity


def by_formula(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    gaps = a[:, None, :] - b[None, :, :]
    if name == "manhattan":
        return -np.abs(gaps).sum(-1)
    if name == "euclidean":
        return -np.linalg.norm(gaps, axis=-1)
    if name == "cosine":
        a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
    return a @ b.T


@pytest.mark.parametrize("name", SIMILARITIES)
def test_similarities(name: str) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 5)), rng.normal(size=(4, 5))
    want = by_formula(name, a, b)
    np.testing.assert_allclose(similarity(a, b, name=name), want, rtol=0, atol=1e-14)
    np.testing.assert_allclose(similarity(a, name=name), by_formula(name, a, a), atol=1e-14)
    assert "-0.0" not in str(similarity(a, name=name).diagonal())
    assert similarity(a[:0], b, name=name).shape == (0, 4)
    assert similarity(a, b[:0], name=name).shape == (3, 0)
    judge = pytest.importorskip("sentence_transformers", reason="sentence-transformers is missing")
    theirs = judge.SimilarityFunction.to_similarity_fn(name)(a, b)
    np.testing.assert_allclose(theirs.numpy(), want, rtol=0, atol=1e-12)


def test_another_similarity_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"similarity: name must be one of cosine, .*'l2'"):
        similarity(np.ones((2, 3)), name="l2")
    for name in ("l2", "maxsim"):
        write(tmp_path, config_sentence_transformers={"similarity_fn_name": name})
        for function in (settings, similarity_name):
            with pytest.raises(PretrainedError, match="similarity_fn_name must be one of cosi"):
                function(tmp_path)
    write(tmp_path, config_sentence_transformers={"similarity_fn_name": None})
    assert similarity_name(tmp_path) == "cosine" == similarity_name(tmp_path / "none")


@pytest.mark.parametrize("name", SIMILARITIES)
def test_the_commands_follow_the_similarity(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without Normalize, so that each similarity gives other numbers."""
    folder = write_sentences(tmp_path / "model", {"pooling_mode": "mean"})
    write(folder, config_sentence_transformers={"similarity_fn_name": name})
    assert similarity_name(folder) == name
    own = (*pretrained.load(folder), tokenizer(folder))
    vectors = embed(*own, TEXTS, **settings(folder)._asdict())
    want = by_formula(name, *[vectors.astype(np.float64)] * 2)
    assert main(["embed", "--model", str(folder), *TEXTS]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    shown = [[float(cell) for cell in line.split()[1:6]] for line in lines]
    np.testing.assert_allclose(shown, want, rtol=0, atol=6e-5)
    assert len({line.index(text[:50]) for line, text in zip(lines, TEXTS, strict=True)}) == 1

    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "a.txt").write_text("\n\n".join(TEXTS))
    query = "the dog sat"
    command = ["search", str(notes), query, "--model", str(folder), "-k", "5", "--json"]
    assert main(command) == 0
    hits = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    scores = by_formula(name, embed(*own, [query], **settings(folder)._asdict()), vectors)[0]
    order = np.argsort(-scores)
    assert [hit["text"] for hit in hits] == [TEXTS[i] for i in order]
    np.testing.assert_allclose([hit["score"] for hit in hits], scores[order], rtol=0, atol=1e-5)


# Keys

HARMLESS = None


def refused(name: str) -> str:
    """The end of a message that names the key."""
    return rf"({name} must be .*|not supported: .*'{name}'.*)"


SENTENCE: dict[str, list[tuple[Any, Any]]] = {  # key -> (value, what follows from it)
    "max_seq_length": [(5, {"max_len": 5}), (None, HARMLESS)],
    "do_lower_case": [(False, HARMLESS), (True, refused("do_lower_case"))],
    "transformer_task": [
        ("feature-extraction", HARMLESS),
        ("text-generation", refused("transformer_task")),
    ],
    "module_output_name": [
        ("token_embeddings", HARMLESS),
        ("sentence_embedding", refused("module_output_name")),
    ],
    "modality_config": [
        (TEXT, HARMLESS),
        (TEXT | {"image": {"method": "get_image_features"}}, HARMLESS),
        (
            TEXT | {"message": {"method": "forward", "format": "flat"}},
            "message must be absent: texts in a chat template are not supported",
        ),
        ({"image": TEXT["text"]}, "modality_config must be an object with text"),
        ({"text": {"method": "get_text_features"}}, "text: method must be 'forward'"),
        (
            {"text": {"method": "forward", "method_output_name": "pooler_output"}},
            "text: method_output_name must be 'last_hidden_state'",
        ),
        (
            {"text": {"method": "forward", "method_output_name": ["hidden_states", -2]}},
            "text: method_output_name must be 'last_hidden_state'",
        ),
    ],
    "processing_kwargs": [({}, HARMLESS), ({"text": {"max_length": 3}}, "processing_kwargs must")],
    "unpad_inputs": [(True, HARMLESS), (False, HARMLESS)],
    "query_length": [(None, HARMLESS), (5, refused("query_length"))],
    "document_length": [(None, HARMLESS), (5, refused("document_length"))],
    "query_expansion": [(None, HARMLESS), ({"length": 5}, refused("query_expansion"))],
    **{
        f"{kind}_{end}": [({}, HARMLESS), ({"torch_dtype": "float16"}, refused(f"{kind}_{end}"))]
        for end, kinds in (
            ("args", ("model", "tokenizer", "config")),
            ("kwargs", ("model", "processor", "config")),
        )
        for kind in kinds
    },
}
WHOLE: dict[str, list[tuple[Any, Any]]] = {
    "model_type": [("SentenceTransformer", HARMLESS), ("CrossEncoder", refused("model_type"))],
    "__version__": [({"sentence_transformers": "6.2.0", "pytorch": "2.13.0"}, HARMLESS)],
    "requirements": [({"transformers": ">=5"}, HARMLESS)],
    "prompts": [({"passage": "so "}, {"prompt": "so "})],
    "default_prompt_name": [(None, {"prompt": ""}), ("query", {"prompt": "the very good "})],
    "similarity_fn_name": [("dot", HARMLESS), ("maxsim", refused("similarity_fn_name"))],
    "truncate_dim": [(None, HARMLESS), (5, refused("truncate_dim"))],
    "max_active_dims": [(None, HARMLESS), (5, refused("max_active_dims"))],
}
POOLING: dict[str, list[tuple[Any, Any]]] = {
    "embedding_dimension": [(12, HARMLESS)],
    "word_embedding_dimension": [(12, HARMLESS)],
    "pooling_mode": [("cls", {"pooling": "first"}), ("median", refused("pooling_mode"))],
    "include_prompt": [(False, {"include_prompt": False}), (True, HARMLESS)],
    "pooling_mode_cls_token": [(True, HARMLESS)],  # pooling_mode counts
}
OF_DENSE: dict[str, list[tuple[Any, Any]]] = {
    "in_features": [(12, HARMLESS), (11, "linear.weight must be of shape")],
    "out_features": [(7, HARMLESS), (8, "linear.weight must be of shape")],
    "bias": [(True, HARMLESS), (False, "not supported: 'linear.bias'")],
    "activation_function": [
        ("torch.nn.Tanh", HARMLESS),
        ("torch.nn.modules.activation.ReLU", {"modules": "relu"}),
        ("torch.nn.Mish", refused("activation_function")),
    ],
    **{
        name: [("sentence_embedding", HARMLESS), ("token_embeddings", refused(name))]
        for name in ("module_input_name", "module_output_name")
    },
    "use_residual": [(False, HARMLESS), (True, refused("use_residual"))],
}
OF_NORMALIZE = {name: OF_DENSE[name] for name in ("module_input_name", "module_output_name")}
ENTRY: dict[str, list[tuple[Any, Any]]] = {
    "idx": [(7, HARMLESS)],
    "name": [("last", HARMLESS)],
    "kwargs": [(["task"], HARMLESS)],  # names of arguments that `encode` may get
    "path": [("../3_Normalize", refused("path"))],
    "type": [("custom.Normalize", refused("type"))],
}
FILES = {
    "sentence_bert_config": SENTENCE,
    "config_sentence_transformers": WHOLE,
    "1_Pooling__config": POOLING,
    "2_Dense__config": OF_DENSE,
    "3_Normalize__config": OF_NORMALIZE,
    "modules": ENTRY,
}
CASES = [
    (file, key, value, effect)
    for file, keys in FILES.items()
    for key, cases in keys.items()
    for value, effect in cases
]


def seen(found: Settings) -> dict[str, Any]:
    """The settings, without the arrays of the Dense module."""
    return found._asdict() | {"modules": "".join(str(one.activation) for one in found.modules)}


@pytest.mark.parametrize(("file", "key", "value", "effect"), CASES)
def test_a_key_is_followed_harmless_or_refused(
    file: str, key: str, value: Any, effect: Any, tmp_path: Path
) -> None:
    folder = write_sentences(tmp_path, {"pooling_mode": "mean"}, "Dense", "Normalize")
    write_dense(folder / "2_Dense", (12, 7), "torch.nn.Tanh")
    write(folder, **{"3_Normalize__config": {}})
    before = seen(settings(folder))
    path = folder / (file.replace("__", "/") + ".json")
    data = json.loads(path.read_text())
    (data if isinstance(data, dict) else data[3])[key] = value
    path.write_text(json.dumps(data))
    if isinstance(effect, str):
        with pytest.raises(PretrainedError, match=effect):
            settings(folder)
    elif key == "max_seq_length" and value is None:
        assert seen(settings(folder)) == before | {"max_len": None}
    else:
        assert seen(settings(folder)) == before | (effect or {})


# The modules that are followed, and the keys of their files; every other module is refused.
FOLLOWED: dict[str, set[str]] = {
    "Transformer": set(SENTENCE),
    "Pooling": set(POOLING),
    "Dense": set(OF_DENSE),
    "Normalize": set(OF_NORMALIZE),
    "MLMTransformer": set(SENTENCE),
    "SpladePooling": {
        *("pooling_strategy", "activation_function"),
        *("embedding_dimension", "word_embedding_dimension"),
    },
}
OTHERS = (
    *("Asym", "BoW", "CLIPModel", "CNN", "Dropout", "LSTM", "LayerNorm", "LogitScore"),
    *("HierarchicalTokenPooling", "LambdaTokenPooling", "MultiVectorMask", "Router"),
    *("SparseAutoEncoder", "SparseStaticEmbedding", "StaticEmbedding", "WeightedLayerPooling"),
    *("WordEmbeddings", "WordWeights"),
)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_other_modules_are_refused_by_name(name: str, at: int, tmp_path: Path) -> None:
    entries = chain("Transformer", "Pooling", "Normalize")
    entries[at]["type"] = f"sentence_transformers.models.{name}"
    write(tmp_path, modules=entries)
    for read in (
        settings,
        rank_settings,
        splade_settings,
        lambda folder: colbert_settings(folder, query=True),
    ):
        with pytest.raises(PretrainedError, match=rf"type must be .*{name}|, got 'sent.*Pooling'"):
            read(tmp_path)


def test_no_key_of_the_installed_version_is_new() -> None:
    """A release that writes another key or module fails here: decide what follows from it."""
    judge = pytest.importorskip("sentence_transformers", reason="sentence-transformers is missing")
    if int(judge.__version__.partition(".")[0]) < 6:
        pytest.skip("the modules are elsewhere in sentence-transformers before 6")
    own = importlib.import_module("sentence_transformers.base.modules.module").Module
    kinds = {}
    for part in ("base", *(f"{kind}_{end}" for kind, end in ENCODERS)):
        package = importlib.import_module(f"sentence_transformers.{part}.modules")
        for name, kind in vars(package).items():
            if inspect.isclass(kind) and issubclass(kind, own):
                kinds[name] = kind
    bases = {"Module", "InputModule", "BaseTokenPooling"}
    assert kinds.keys() - bases == {*FOLLOWED, *OTHERS}
    for name, keys in FOLLOWED.items():
        written = {*kinds[name].config_keys, *getattr(kinds[name], "config_key_renames", {})}
        assert written <= keys, name
    encoder = importlib.import_module("sentence_transformers").SentenceTransformer
    written = set(inspect.getsource(encoder._get_model_config).split('"')[1::2])
    assert written <= WHOLE.keys()


ENCODERS = (
    ("sentence", "transformer"),
    ("sparse", "encoder"),
    ("cross", "encoder"),
    ("multi_vector", "encoder"),
)


def test_what_the_installed_version_saves_is_read(tmp_path: Path) -> None:
    """All modules that are followed, written by sentence-transformers itself."""
    judge = pytest.importorskip("sentence_transformers", reason="sentence-transformers is missing")
    if int(judge.__version__.partition(".")[0]) < 6:
        pytest.skip("sentence-transformers before 6 writes fewer keys")
    base = write_sentences(tmp_path / "base", {"pooling_mode": "max"}, "Dense", "Normalize")
    write_dense(base / "2_Dense", (12, 7), "torch.nn.GELU")
    for name in SIMILARITIES:
        model = judge.SentenceTransformer(str(base), device="cpu", similarity_fn_name=name)
        model.save(str(folder := tmp_path / name), create_model_card=False)
        assert seen(settings(folder)) == seen(settings(base)) and similarity_name(folder) == name
        own = (*pretrained.load(folder), tokenizer(folder))
        vectors = embed(*own, TEXTS, **settings(folder)._asdict())
        np.testing.assert_allclose(vectors, judged(folder, TEXTS), rtol=0, atol=1e-5)
        theirs = model.similarity(vectors, vectors).numpy()
        np.testing.assert_allclose(similarity(vectors, name=name), theirs, rtol=0, atol=2e-3)
        found = settings_files(folder)
        assert {path.rpartition("/")[2] for path in found} >= {"modules.json", "config.json"}
        assert "2_Dense/model.safetensors" in found


def test_a_chat_template_is_not_left_out_in_silence(tmp_path: Path) -> None:
    """sentence-transformers 6 puts the texts of such a model into its template."""
    judge = pytest.importorskip("sentence_transformers", reason="sentence-transformers is missing")
    if int(judge.__version__.partition(".")[0]) < 6:
        pytest.skip("sentence-transformers before 6 knows no templates")
    write_model(tmp_path, BERT, "float32")
    template = "{% for m in messages %}why {{ m['content'] }}{% endfor %}"
    write(
        tmp_path,
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": template,
            "pad_token": "[PAD]",
        },
    )
    folder = tmp_path / "saved"
    judge.SentenceTransformer(str(tmp_path), device="cpu").save(str(folder))
    with pytest.raises(PretrainedError, match="message must be absent: texts in a chat template"):
        settings(folder)


# What fine-tuning keeps


def test_a_tuned_model_has_the_settings_of_its_base(tmp_path: Path) -> None:
    """With module folders of other names, and every file that settings are read from."""
    base = write_sentences(
        tmp_path / "base", {"pooling_mode": ["cls", "max"]}, "Dense", "Normalize"
    )
    entries = chain("Transformer", "Pooling", "Dense", "Dense", "Normalize")
    for entry, path in zip(entries[1:], ("Pool", "12_Dense", "d.2", "9_N"), strict=True):
        entry["path"] = path
    write(
        base,
        modules=entries,
        Pool__config={"pooling_mode": ["cls", "max"], "include_prompt": False},
        config_sentence_transformers={
            "prompts": PROMPTS,
            "default_prompt_name": "query",
            "similarity_fn_name": "manhattan",
        },
        sentence_xlnet_config={"max_seq_length": 11},
    )
    (base / LENGTHS[0]).unlink()
    write_dense(base / "12_Dense", (24, 17), "torch.nn.ReLU")
    write_dense(base / "d.2", (17, 7), "torch.nn.Tanh", bias=False)
    model, params = pretrained.load(base, dtype="float64")
    finetune.save(model, params, new := tmp_path / "new", tokenizer=tokenizer(base), base=base)
    own, kept = (settings(folder) for folder in (base, new))
    assert seen(own) == seen(kept) and kept.max_len == 11 and kept.pooling == ("first", "max")
    weights = [tree.flatten([one.params for one in found.modules]) for found in (own, kept)]
    assert all(np.array_equal(w, weights[1][name]) for name, w in weights[0].items())
    assert similarity_name(new) == "manhattan" and prompts(new) == PROMPTS
    assert settings_files(base) == settings_files(new) and len(settings_files(new)) == 8
    vectors = [
        embed(*pretrained.load(folder, dtype="float64"), tokenizer(folder), TEXTS[:2], **options)
        for folder, options in ((base, own._asdict()), (new, kept._asdict()))
    ]
    assert np.array_equal(*vectors)


def test_files_that_modules_name_outside_are_not_copied(tmp_path: Path) -> None:
    entries = [{"path": path} for path in ("..", "../x", "/", "a/b", ".git", 3, None)] + ["x"]
    write(tmp_path, modules=entries)
    for path in ("a/b", ".git"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "config.json").write_text("{}")
    assert settings_files(tmp_path) == ["modules.json"]
