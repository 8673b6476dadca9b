"""Models as ONNX files: ONNX Runtime computes what NumPy does, for every family and size."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from causal_models import ALL, CONFIGS, SIZES, T5, T5_NAMES, UNPADDED, V, causal, lively, seq2seq
from exported import FIXED, Session, distance, in_dtype, onnx
from libraries import slow_but
from truths import minilm

import xformer as xf
from xformer import export, pretrained, tree
from xformer.dispatch import Kernel
from xformer.export import NotExported, writing
from xformer.export.recording import Input, recorded
from xformer.layers import EmbedConfig, RopeConfig, rope_tables
from xformer.models import Classifier, EncoderDecoder, LanguageModel, Pooler
from xformer.ops import softmax
from xformer.pretrained.families import FAMILIES
from xformer.pretrained.tokenizer import tokenizer
from xformer.sentences import embed, settings

EXACT = 1e-12  # of float64, in sums of another order
FLOAT32 = 1e-5
SHAPES = ((1, 1), (3, 24), (2, 5))  # (B, T)
DATA = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def data_of_one_test() -> None:
    """Each test draws the same numbers, whatever ran before it."""
    global DATA
    DATA = np.random.default_rng(0)


def tokens(*shape: int) -> np.ndarray:
    return DATA.integers(1, V, shape)


def padding(batch: int, length: int, side: str) -> np.ndarray:
    kept = np.arange(length) < DATA.integers(1, length + 1, batch)[:, None]
    return kept if side == "right" else kept[:, ::-1]


def require_same(
    model: Any, params: Any, path: Path, *, mask: bool | None = None, **options: Any
) -> None:
    """The output in ONNX Runtime, for several sizes, in both dtypes."""
    is_pair = isinstance(model, EncoderDecoder)
    fixed = options.get("sizes", {}).get("length")
    shapes = SHAPES if fixed is None else [(batch, fixed) for batch, _ in SHAPES]
    for dtype in ("float64", "float32"):
        params = in_dtype(params, dtype)
        export.onnx(model, params, path, mask=mask, **options)
        run = Session(path)
        masked = {x.name for x in run.session.get_inputs()} & {"mask", "src_mask"}
        for i, (batch, length) in enumerate(shapes):
            data = {"src": length, "tgt": SHAPES[-i][1]} if is_pair else {"tokens": length}
            feeds: dict[str, Any] = {name: tokens(batch, n) for name, n in data.items()}
            if (model.src_embed if is_pair else model.embed) is None:
                data = {name.replace("tokens", "vectors"): n for name, n in data.items()}
                feeds = {n: DATA.normal(size=(batch, m, 12)).astype(dtype) for n, m in data.items()}
            for name in masked:
                side = "right" if is_pair or not model.causal else "left"
                feeds[name] = padding(batch, length, side)
            (got,) = run(**feeds).values()
            arrays = list(feeds.values())[: len(data)]
            masks = {name: feeds[name] for name in masked}
            call = model.forward
            with xf.reference_only():
                wanted, _ = call(params, *arrays, **masks)
                exact, _ = call(
                    in_dtype(params, "float64"),
                    *(a.astype("float64") if a.dtype == "float32" else a for a in arrays),
                    **masks,
                )
            assert got.dtype == wanted.dtype == dtype
            if dtype == "float64":
                assert distance(got, wanted) < EXACT
            else:  # these parameters multiply rounding: about as near to exact as NumPy's float32
                error, ours = (np.abs(x - exact).max() for x in (got, wanted))
                assert error <= 3 * ours + FLOAT32 * np.abs(exact).max()


# Padding needs positions that are added to embeddings.
MASKED = [(name, mask) for name in ALL for mask in (False, True)[: 1 + (name not in UNPADDED)]]


@pytest.mark.parametrize(("name", "mask"), MASKED)
def test_decoders(name: str, mask: bool, tmp_path: Path) -> None:
    require_same(*causal(name), tmp_path / "model.onnx", mask=mask, **FIXED.get(name, {}))


@pytest.mark.parametrize("name", T5_NAMES)
def test_encoder_decoders(name: str, tmp_path: Path) -> None:
    require_same(*seq2seq(name), tmp_path / "model.onnx")


BERT = SIZES | {"max_position_embeddings": 40, "type_vocab_size": 2}
BERT = {key: n for key, n in BERT.items() if key != "num_key_value_heads"}
TORCH = {"d_model": 12, "nhead": 3, "dim_feedforward": 20}
OTHERS: dict[str, dict[str, Any]] = {
    "bert": BERT,
    "roberta": BERT | {"pad_token_id": 1},
    "distilbert": {
        **{"vocab_size": V, "dim": 12, "n_layers": 2, "n_heads": 3, "hidden_dim": 20},
        "max_position_embeddings": 40,
    },
    "albert": BERT | {"embedding_size": 5},
    "xlm-roberta": BERT | {"pad_token_id": 1},
    "camembert": BERT | {"pad_token_id": 1},
    "modernbert": {
        **{"vocab_size": V, "hidden_size": 12, "num_hidden_layers": 4, "num_attention_heads": 3},
        **{"intermediate_size": 20, "local_attention": 4},
    },
    "mpnet": {key: n for key, n in BERT.items() if key != "type_vocab_size"},
    "electra": BERT | {"embedding_size": 5},
    "nomic_bert": BERT,
    "t5": T5,
    "nn.Transformer": TORCH | {"num_encoder_layers": 1, "num_decoder_layers": 1},
    "nn.TransformerEncoder": TORCH | {"num_layers": 2},
    "llama2.c": {
        **{"d_model": 12, "d_ff": 20, "n_layers": 2, "n_heads": 3, "n_kv_heads": 1},
        **{"vocab_size": V, "max_len": 40, "tied": True},
    },
}
HEADS = [(family, head) for family in FAMILIES for head in FAMILIES[family].heads or ("",)]
FIRST = {*dict(reversed(HEADS)).items()}  # of each family


def architecture_of(family: str, architecture: str) -> Any:
    config = {k: v for k, v in {**CONFIGS, **OTHERS}[family].items() if k != "architecture"}
    kind: dict[str, Any] = {"model_type": family}
    if architecture:
        kind["architectures"] = [architecture]
    if family == "t5":
        kind["is_encoder_decoder"] = architecture != "T5EncoderModel"
    return pretrained.model(kind | config)


@pytest.mark.parametrize("head", slow_but(FIRST, HEADS), ids="-".join)
def test_every_architecture(head: tuple[str, str], tmp_path: Path) -> None:
    family, architecture = head
    model = architecture_of(family, architecture)
    require_same(model, lively(model, 0), tmp_path / "model.onnx", **FIXED.get(family, {}))


def test_logits_of_usual_parameters_are_equal_to_1e_5(tmp_path: Path) -> None:
    model = xf.GPT(vocab_size=V, n_layers=4, d_model=48, n_heads=4, max_len=32)
    params = model.init(seed=0)
    export.onnx(model, params, tmp_path / "gpt.onnx")
    ids = tokens(3, 32)
    got = Session(tmp_path / "gpt.onnx")(tokens=ids)["logits"]
    assert np.abs(got - model.forward(params, ids)[0]).max() < FLOAT32


# ---- Embeddings ----


def encoder(**options: Any) -> tuple[Any, Any]:
    config = {"model_type": "bert", "architectures": ["BertModel"], **BERT, **options}
    model = pretrained.model(config)
    return model, lively(model, 0)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    "pooling", ["mean", "first", "cls", "last", "pooler", "weighted_mean", ("max", "mean")], ids=str
)
def test_pooling(pooling: Any, normalize: bool, tmp_path: Path) -> None:
    model, params = encoder()
    assert isinstance(model.head, Pooler)
    path = tmp_path / "embed.onnx"
    options: dict[str, Any] = {"pooling": pooling, "normalize": normalize}
    written = export.onnx(model, params, path, types=True, **options)
    width = 24 if isinstance(pooling, tuple) else 12
    assert written.outputs == {"embeddings": f"float64 (batch, {width})"}
    ids, mask, types = tokens(3, 7), padding(3, 7, "right"), DATA.integers(0, 2, (3, 7))
    got = Session(path)(tokens=ids, mask=mask, types=types)["embeddings"]
    how = {"pooling": "first" if pooling == "cls" else pooling, "normalize": normalize}
    wanted, _ = model.pooled(params, ids, mask=mask, types=types, **how)
    assert distance(got, wanted) < EXACT


def test_minilm(tmp_path: Path) -> None:
    folder = minilm()
    model, params = pretrained.load(folder)
    own, path = settings(folder), tmp_path / "minilm.onnx"
    export.onnx(model, params, path, pooling=own.pooling, normalize=own.normalize)
    words = tokenizer(folder)
    texts = ["A cat sits on the mat.", "Shares fell on Monday, and then rose again.", "Why?"]
    ids, mask = words.batch(texts)
    got = Session(path)(tokens=ids, mask=mask)["embeddings"]
    assert np.abs(got - embed(model, params, words, texts, **own._asdict())).max() < 1e-6


# ---- Positions whose tables depend on the length ----


def rotary(scaling: str, **options: Any) -> tuple[Any, Any]:
    blocks = causal("no positions")[0].blocks
    rope = RopeConfig(4, scaling=scaling, **options)
    model = LanguageModel(EmbedConfig(V, 12, 12, positions="none"), blocks, rotary=rope)
    return model, lively(model, 0)


@pytest.mark.parametrize(
    ("scaling", "options"),
    [
        ("none", {}),
        ("linear", {"factor": 2.0}),
        ("yarn", {"factor": 2.0, "original_max_len": 8}),
    ],
)
def test_frequencies_that_are_fixed(scaling: str, options: Any, tmp_path: Path) -> None:
    require_same(*rotary(scaling, **options), tmp_path / "model.onnx")


@pytest.mark.parametrize("max_len", [3, 9, 15, 16, 17, 18, 30])
def test_relative_bias_with_a_largest_length(max_len: int, tmp_path: Path) -> None:
    """T5's table of buckets ends at 16 tokens, its max_distance."""
    path = tmp_path / "model.onnx"
    model, _ = causal("relative bias")
    with_context = replace(model, embed=EmbedConfig(V, 12, 12, max_len + 1))
    for decoder in (model, with_context):
        params = lively(decoder, 0)
        export.onnx(decoder, params, path, max_len=max_len)
        run = Session(path)
        for length in (1, 2, max_len):
            ids = tokens(2, length)
            assert distance(run(tokens=ids)["logits"], decoder.forward(params, ids)[0]) < EXACT
    pair, params = seq2seq("t5")
    export.onnx(pair, params, path, max_len=max_len, mask=False)
    run = Session(path)
    for length in (1, 2, max_len):
        ids, target = tokens(2, length), tokens(2, max_len)
        got = run(src=ids, tgt=target)["logits"]
        assert distance(got, pair.forward(params, ids, target)[0]) < EXACT


LONG: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 2.0, "max_len": 12},
    "longrope": {
        **{"original_max_len": 12, "factor": 2.0},
        **{"short_factor": (1.0, 1.5), "long_factor": (2.0, 3.0)},
    },
}


@pytest.mark.parametrize("scaling", LONG)
def test_frequencies_that_change_with_the_length(scaling: str, tmp_path: Path) -> None:
    model, params = rotary(scaling, **LONG[scaling])
    path = tmp_path / "model.onnx"
    with pytest.raises(NotExported, match=rf'"{scaling}" has other frequencies .* max_len=12'):
        export.onnx(model, params, path)
    assert not path.exists()
    export.onnx(model, params, path, max_len=12)
    for length in (1, 12):
        ids = tokens(2, length)
        got = Session(path)(tokens=ids)["logits"]
        assert distance(got, model.forward(params, ids)[0]) < EXACT
    with pytest.raises(Exception, match="out of data bounds"):  # it has other frequencies
        Session(path)(tokens=tokens(2, 13))
    export.onnx(model, params, path, sizes={"length": 16})
    ids = tokens(2, 16)
    assert distance(Session(path)(tokens=ids)["logits"], model.forward(params, ids)[0]) < EXACT
    with pytest.raises(NotExported, match="the value of an array decides"):  # the longest text
        export.onnx(model, params, path, sizes={"length": 16}, mask=True)


def test_frequencies_of_each_layer(tmp_path: Path) -> None:
    """The layer whose frequencies change sets the limit."""
    scaling = next(iter(LONG))
    model, params = rotary(scaling, **LONG[scaling])
    model = replace(model, rotary=(RopeConfig(2, 100.0), model.rotary))
    path = tmp_path / "model.onnx"
    with pytest.raises(NotExported, match=rf'"{scaling}" has other frequencies .* max_len=12'):
        export.onnx(model, params, path)
    export.onnx(model, params, path, max_len=12)
    ids = tokens(2, 12)
    assert distance(Session(path)(tokens=ids)["logits"], model.forward(params, ids)[0]) < EXACT


def test_positions_far_out_keep_their_precision(tmp_path: Path) -> None:
    """Angles are in float64 as on NumPy: in float32, those at 60,000 would be wrong by 1e-3."""
    model, params = rotary("none")
    params = in_dtype(params, "float32")

    def fn(arrays: dict[str, Any]) -> dict[str, Any]:
        x = arrays["x"]
        tables = rope_tables(model.rotary, like=x, length=x.shape[0])
        return {"cos": tables.cos, "sin": tables.sin}

    inputs = {"x": Input(("length",), np.float32)}
    graph, outputs = recorded(fn, inputs, {"length": 1 << 20}, None)
    writing.write(tmp_path / "rope.onnx", graph, outputs, {}, {})
    got = Session(tmp_path / "rope.onnx")(x=np.zeros(60_001, np.float32))
    wanted = rope_tables(model.rotary, like=np.zeros(1, np.float32), length=60_001)
    for name in ("cos", "sin"):
        assert np.abs(got[name] - getattr(wanted, name)).max() < 1e-7


def test_xl_needs_a_largest_length(tmp_path: Path) -> None:
    gpt: dict[str, Any] = {"vocab_size": V, "n_layers": 2, "d_model": 12, "n_heads": 3}
    model = xf.GPT(**gpt, max_len=8, positions="xl", memory_len=3)
    params = lively(model, 0)
    path = tmp_path / "xl.onnx"
    with pytest.raises(NotExported, match=r"give max_len, the most tokens \(in .*constant\)"):
        export.onnx(model, params, path)
    export.onnx(model, params, path, max_len=21)
    run = Session(path)
    for length in (1, 2, 9, 21):
        ids = tokens(2, length)
        assert distance(run(tokens=ids)["logits"], model.forward(params, ids)[0]) < EXACT


# ---- Tools of ONNX and ONNX Runtime ----


TOOLS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("gpt2", "llama", "mixtral", "gemma2", "alibi", "t5")),
    ("BertModel", {"pooling": "mean"}),
    ("BertForSequenceClassification", {}),
]


@pytest.mark.parametrize(("name", "options"), TOOLS)
def test_tools_read_the_file(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Shapes are inferred, and what is prepared for quantisation or converted computes the same."""
    pytest.importorskip("sympy", reason="sympy, which ONNX Runtime infers shapes with, is missing")
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    if name.startswith("Bert"):
        model = pretrained.model(BERT | {"model_type": "bert", "architectures": [name]})
        params = lively(model, 0)
    else:
        model, params = seq2seq(name) if name == "t5" else causal(name)
    paths = [tmp_path / f"{kind}.onnx" for kind in ("plain", "prepared", "converted", "quantised")]
    export.onnx(model, in_dtype(params, "float32"), paths[0], **options)
    onnx.shape_inference.infer_shapes(onnx.load(paths[0]), True, True, True)
    quant_pre_process(str(paths[0]), str(paths[1]))
    converted = onnx.version_converter.convert_version(onnx.load(paths[0]), 21)
    onnx.checker.check_model(converted, full_check=True)
    onnx.save(converted, paths[2])
    quantize_dynamic(str(paths[1]), str(paths[3]))
    runs = [Session(path) for path in paths]
    kinds = {x.name: x.type for x in runs[0].session.get_inputs()}
    for batch, length in SHAPES:
        feeds = {
            n: np.ones((batch, length), bool) if kind == "tensor(bool)" else tokens(batch, length)
            for n, kind in kinds.items()
        }
        plain, prepared, newer, quantised = (next(iter(run(**feeds).values())) for run in runs)
        assert distance(prepared, plain) < 1e-4 and distance(newer, plain) < 1e-4
        assert quantised.shape == plain.shape and np.isfinite(quantised).all()


# ---- The file ----


def test_names_opset_and_weights(tmp_path: Path) -> None:
    model, params = causal("gpt2")
    params = in_dtype(params, "float32")
    path = tmp_path / "gpt2.onnx"
    written = export.onnx(model, params, path, mask=True)
    assert written.files == (path,) and [*tmp_path.iterdir()] == [path]
    assert written.inputs == {"tokens": "int64 (batch, length)", "mask": "bool (batch, length)"}
    assert written.outputs == {"logits": f"float32 (batch, length, {V})"}
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    assert [(o.domain, o.version) for o in proto.opset_import] == [("", 17)]
    assert proto.producer_name == "xformer" and len(proto.graph.node) == written.n_nodes
    named = {x.name: onnx.numpy_helper.to_array(x) for x in proto.graph.initializer}
    leaves = tree.flatten(params)
    assert leaves.keys() <= named.keys()
    assert all(np.array_equal(named[name], leaf) for name, leaf in leaves.items())
    # Tables of any length, and no copy of a weight, are in the graph.
    assert sum(x.nbytes for name, x in named.items() if name not in leaves) < 1000
    scopes = {node.name.partition("/")[0] for node in proto.graph.node}
    assert {"embedding", "blocks", "linear"} <= scopes


def test_large_weights_are_in_a_file_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, params = causal("llama")
    path, data = tmp_path / "llama.onnx", tmp_path / "llama.onnx.data"
    export.onnx(model, params, path)
    ids = tokens(2, 5)
    wanted = Session(path)(tokens=ids)["logits"]
    monkeypatch.setattr(writing, "EXTERNAL", 1)
    assert export.onnx(model, params, path).files == (data, path)
    onnx.checker.check_model(str(path))
    assert np.array_equal(Session(path)(tokens=ids)["logits"], wanted)
    leaves = tree.flatten(params)
    stored = {x.name: x for x in onnx.load(path).graph.initializer}
    for name, leaf in leaves.items():
        assert np.array_equal(onnx.numpy_helper.to_array(stored[name]), leaf)
    assert data.stat().st_size >= tree.nbytes(params)
    # A file of weights is replaced, or deleted when it is not needed, if an export has written it.
    export.onnx(model, params, path)
    monkeypatch.undo()
    assert export.onnx(model, params, path).files == (path,) and not data.exists()
    data.write_bytes(b"weights of another program")
    export.onnx(model, params, path)
    monkeypatch.setattr(writing, "EXTERNAL", 1)
    with pytest.raises(FileExistsError, match=r"llama.onnx.data exists, and no export has written"):
        export.onnx(model, params, path)
    assert data.read_bytes() == b"weights of another program"
    assert np.array_equal(Session(path)(tokens=ids)["logits"], wanted)


def test_fixed_sizes_have_smaller_graphs(tmp_path: Path) -> None:
    model, params = causal("llama")
    dynamic = export.onnx(model, params, tmp_path / "dynamic.onnx")
    fixed = export.onnx(model, params, tmp_path / "f.onnx", sizes={"batch": 2, "length": 5})
    assert fixed.inputs == {"tokens": "int64 (2, 5)"} and fixed.n_nodes < dynamic.n_nodes
    ids = tokens(2, 5)
    got = Session(tmp_path / "f.onnx")(tokens=ids)["logits"]
    assert distance(got, model.forward(params, ids)[0]) < EXACT


def test_a_batch_has_no_largest_size(tmp_path: Path) -> None:
    model, params = causal("gpt2")
    path, ids = tmp_path / "gpt2.onnx", tokens(4096, 2)
    wanted = model.forward(params, ids)[0]
    for sizes in ({}, {"batch": 4096, "length": 2}):
        export.onnx(model, params, path, sizes=sizes)
        assert distance(Session(path)(tokens=ids)["logits"], wanted) < EXACT


@pytest.mark.parametrize("id", [-1, -3, -V, V])
def test_ids_outside_the_vocabulary_are_refused(id: int, tmp_path: Path) -> None:
    """ONNX alone would take negative ids from the end of the table."""
    model, params = causal("gpt2")
    export.onnx(model, params, tmp_path / "gpt2.onnx")
    ids = tokens(2, 5)
    ids[1, 2] = id
    with pytest.raises(Exception, match="out of data bounds"):
        Session(tmp_path / "gpt2.onnx")(tokens=ids)


def test_parameters_of_any_library_and_frozen_ones(tmp_path: Path) -> None:
    model, params = causal("gpt2")
    path = tmp_path / "gpt2.onnx"
    export.onnx(model, params, path)
    wanted = path.read_bytes()
    export.onnx(model, tree.freeze(params, "embed.*"), path)
    assert path.read_bytes() == wanted
    strict = pytest.importorskip("array_api_strict", reason="extra dev is not installed")
    export.onnx(model, tree.map(strict.asarray, params), path)
    assert path.read_bytes() == wanted


# ---- Bad input ----


def test_a_recurrent_layer_needs_a_fixed_length(tmp_path: Path) -> None:
    model, params = causal("qwen3_5_text")
    for options in ({}, {"max_len": 7}, {"sizes": {"batch": 2}}):
        with pytest.raises(ValueError, match="chunks, whose number must be known: fix length"):
            export.onnx(model, params, tmp_path / "model.onnx", **options)
    assert not any(tmp_path.iterdir())


GPT = xf.GPT(vocab_size=11, n_layers=1, d_model=6, n_heads=2, max_len=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "meen"}, "onnx: pooling must be one of .*; did you mean mean?"),
        ({"pooling": "pooler"}, 'pooled: pooling "pooler" needs a model with a Pooler'),
        ({"types": True}, "onnx: types are for a model with token types"),
        ({"sizes": {"lenght": 3}}, "onnx: sizes must be one of batch, length, got 'lenght'"),
        ({"sizes": {"length": 0}}, r"onnx: sizes\['length'\] must be an int of at least 1, got 0"),
        ({"sizes": {"length": 9}}, r"onnx: sizes\['length'\] must be at most 8, got 9"),
        ({"max_len": 9}, "onnx: max_len must be at most 8, got 9"),
        ({"max_len": 0}, "onnx: max_len must be an int of at least 1, got 0"),
        ({"max_len": 2}, r"length is at most 2: fix it with sizes=\{'length': 2\}"),
    ],
)
def test_bad_options(options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        export.onnx(GPT, GPT.init(), tmp_path / "gpt.onnx", **options)
    assert not any(tmp_path.iterdir())


def test_bad_models_params_and_paths(tmp_path: Path) -> None:
    path, params = tmp_path / "gpt.onnx", GPT.init()
    half = in_dtype(params, "float16")
    for call, kind, message in (
        ((object(), params, path), TypeError, "onnx: model must be a Lang.* got object"),
        ((GPT, half, path), NotExported, "params.embed.table must be float32 or float64"),
        ((GPT, {"w": 3}, path), TypeError, "onnx: params.w must be an array, got int"),
        ((GPT, params, tmp_path / "gpt"), ValueError, "must end with .onnx, got '.*gpt'"),
        ((GPT, params, tmp_path / "no/gpt.onnx"), FileNotFoundError, "there is no folder .*no"),
    ):
        with pytest.raises(kind, match=message):
            export.onnx(*call)
    (tmp_path / "a.onnx").mkdir()
    with pytest.raises(IsADirectoryError, match="is a folder"):
        export.onnx(GPT, params, tmp_path / "a.onnx")
    pair = xf.Transformer(11, 11, 6, 2, 1, 1, 8)
    with pytest.raises(ValueError, match="onnx: pooling is for a LanguageModel"):
        export.onnx(pair, pair.init(), path, pooling="mean")
    assert [x.name for x in tmp_path.iterdir()] == ["a.onnx"]


def test_what_is_not_exported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that has no rule, a value that is read, and a size that is baked in."""

    def softmaxes(how: str) -> Any:
        def run(x: Any, **options: Any) -> Any:
            xp = x.__array_namespace__()
            if how == "function":
                xp.prod(x)
            elif how == "value":
                assert xp.sum(x) > 0
            elif how == "table":
                raise MemoryError
            return softmax.reference(x * float(x.shape[-1] if how == "size" else 1), **options)

        return run

    ids = {
        "function": r"onnx: prod of the array API is not exported \(in softmax\)",
        "value": r"the value of an array decides.*\(in softmax\)",
        "table": r"a table for the largest size does not fit memory; give max_len \(in softmax\)",
        "size": r"the graph depends on a dynamic size; fix one of batch, length .*\(in softmax\)",
    }
    for how, message in ids.items():
        monkeypatch.setattr(softmax, "kernels", {"onnx": [Kernel(softmaxes(how), "onnx", None)]})
        with pytest.raises(NotExported, match=message):
            recorded(
                lambda arrays: {"y": softmax(arrays["x"])[0]},
                {"x": Input(("batch", "length"), np.float32)},
                {"batch": 8, "length": 8},
                None,
            )


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    for call in (export.onnx, export.onnx_step):
        with pytest.raises(ImportError, match=re.escape("pip install 'xformer-array[onnx]'")):
            call(GPT, GPT.init(), tmp_path / "gpt.onnx")


def test_a_failed_export_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpt.onnx"
    path.write_text("old")

    def full(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(onnx.numpy_helper, "from_array", full)
    with pytest.raises(OSError, match="the disk is full"):
        export.onnx(GPT, GPT.init(), path)
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


def test_classifiers(tmp_path: Path) -> None:
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **BERT}
    model = pretrained.model(config | {"num_labels": 5})
    assert isinstance(model.head, Classifier)
    written = export.onnx(model, lively(model, 0), tmp_path / "bert.onnx")
    assert written.outputs == {"logits": "float64 (batch, 5)"}


def test_token_classifiers(tmp_path: Path) -> None:
    config = {"model_type": "bert", "architectures": ["BertForTokenClassification"], **BERT}
    model = pretrained.model(config | {"num_labels": 5})
    require_same(model, lively(model, 0), tmp_path / "bert.onnx", mask=True)
