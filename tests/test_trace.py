"""`xf.trace` and `xformer trace`: what is recorded is what ran, and tracing changes nothing."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from block_configs import block_config

import xformer as xf
from xformer import dispatch, ops, pretrained, training, tree
from xformer.backends import Backend
from xformer.cli import main
from xformer.dispatch import observer
from xformer.inspection.trace import Step, Trace
from xformer.layers import EmbedConfig, ExpertsConfig, RopeConfig
from xformer.models import LanguageModel, LMHead
from xformer.ops import RandomKey

ROOT = Path(__file__).resolve().parent.parent
NUMPY = xf.backends.get("numpy")
GPT = xf.GPT(vocab_size=11, n_layers=1, d_model=8, n_heads=2, max_len=7)
TOKENS, TARGETS = np.array([[1, 5, 2, 5, 0]]), np.array([[5, 2, 5, 0, 3]])
# Each op with its depth: a GPT of one layer, by the references.
FORWARD = [
    ("embedding", 0),
    ("blocks", 0),
    ("layer_norm", 1),
    ("linear_many", 1),
    ("linear", 2),
    ("linear", 2),
    ("linear", 2),
    ("sdpa", 1),
    ("linear", 1),
    ("add_norm", 1),
    ("layer_norm", 2),
    ("feed_forward", 1),
    ("linear", 2),
    ("gelu", 2),
    ("linear", 2),
    ("layer_norm", 0),
    ("linear_cross_entropy", 0),
    ("linear", 1),
    ("cross_entropy", 1),
]
ROUTED = block_config(d_model=8, n_heads=2, d_ff=6, experts=ExpertsConfig(3, 2, 5))
MODELS = {
    "GPT": GPT,
    "dropout": xf.GPT(11, 2, 8, 2, 7, dropout=0.3),
    "checkpointed": xf.GPT(11, 2, 8, 2, 7, activation_checkpointing=True),
    "reversible": xf.GPT(11, 2, 8, 2, 7, reversible=True),
    "rotary, gated, experts": LanguageModel(
        EmbedConfig(11, 8, 8, positions="none"),
        (ROUTED, block_config(d_model=8, n_heads=2, d_ff=6, gated=True, activation="silu")),
        rotary=RopeConfig(4),
        head=LMHead(tied=False),
        load_balancing_weight=0.1,
        router_z_weight=0.1,
    ),
}


def step_of(model: Any, backend: Backend, params: Any = None) -> tuple[Any, Any]:
    """Loss and gradients."""
    rng = backend.generator(0, "float32")
    params = model.init_from(rng) if params is None else params
    tokens, targets = backend.asarray(TOKENS), backend.asarray(TARGETS)
    loss, cache = model.loss(params, tokens, targets, dropout_key=RandomKey(3))
    return loss, cache.backward()


def traced(model: Any = GPT, params: Any = None) -> tuple[Trace, Any, Any]:
    """The steps of the references, loss and gradients."""
    with xf.reference_only(), xf.trace() as steps:
        loss, grads = step_of(model, NUMPY, params)
    return steps, loss, grads


def rms(array: Any) -> float:
    return float(np.sqrt(np.mean(np.asarray(array, np.float64) ** 2)))


def named(steps: Trace, op: str, *, backward: bool) -> list[Step]:
    return [step for step in steps if step.op == op and step.is_backward == backward]


def test_the_ops_are_in_order() -> None:
    steps, _, _ = traced()
    forward = [(step.op, step.depth) for step in steps if not step.is_backward]
    assert forward == [*FORWARD, ("sum_to", 0), ("index_add", 1)]  # two of them in backward
    begins = len(FORWARD)
    assert steps[begins].is_backward and not any(s.is_backward for s in steps[:begins])
    assert repr(steps) == "Trace(21 forward, 19 backward)"


def test_backward_is_in_reverse_order() -> None:
    """On each level; only the maps to queries, keys and values are in order, as they are equals."""
    steps, _, _ = traced()
    forward = [step for step in steps[: len(FORWARD)] if step.op != "linear"]
    backward = [step for step in steps if step.is_backward and step.op != "linear"]
    for depth in range(3):
        calls = [step.call for step in forward if step.depth == depth]
        assert [step.call for step in backward if step.depth == depth] == calls[::-1], depth
    numbers = {step.call: step.op for step in steps if not step.is_backward}
    assert all(numbers[step.call] == step.op for step in steps)
    assert len({(step.call, step.is_backward) for step in steps}) == len(steps)


def test_shapes_and_sizes_are_those_of_the_arrays() -> None:
    params = GPT.init(seed=4)
    steps, loss, grads = traced(params=params)
    (look_up,) = named(steps, "embedding", backward=False)
    assert [(a.name, a.shape, a.dtype) for a in look_up.inputs] == [
        ("table", (11, 8), "float32"),
        ("ids", (1, 5), "int64"),
    ]
    (y,) = look_up.outputs
    rows = np.asarray(params.embed.table)[TOKENS]
    assert y.shape == rows.shape and y.rms == pytest.approx(rms(rows), rel=1e-6)
    assert (y.min, y.max) == (rows.min(), rows.max())
    (last,) = named(steps, "linear_cross_entropy", backward=False)
    assert last.outputs[0].shape == () and last.outputs[0].rms == pytest.approx(float(loss))
    block, dblock = params.stack.blocks[0], grads.stack.blocks[0]
    for op, which, array in (
        ("layer_norm", 0, grads.stack.norm),  # the first in backward is the last one
        ("linear", 1, dblock.ffn.down),
        ("linear", 2, dblock.ffn.up),
        ("linear", 3, dblock.attn.o),
        ("linear", 4, dblock.attn.q),
    ):
        dx, dw, db = named(steps, op, backward=True)[which].outputs
        assert (dx.name, dw.name, db.name) == ("dx", "dw", "db")
        for got, wanted in ((dw, array.w), (db, array.b)):
            assert got.shape == wanted.shape
            assert got.rms == pytest.approx(rms(wanted), rel=1e-5, abs=1e-12)
            assert (got.min, got.max) == (wanted.min(), wanted.max())
    # A step with parameters names each of them.
    (feed,) = named(steps, "feed_forward", backward=False)
    leaves = {f"params.{name}": leaf.shape for name, leaf in tree.flatten(block.ffn).items()}
    assert {a.name: a.shape for a in feed.inputs} == {"x": (1, 5, 8)} | leaves
    (dfeed,) = named(steps, "feed_forward", backward=True)
    assert [a.name for a in dfeed.inputs] == ["dy"]
    assert {a.name: a.rms for a in dfeed.outputs if a.name != "dx"} == {
        f"dparams.{name}": pytest.approx(rms(leaf), rel=1e-5, abs=1e-12)
        for name, leaf in tree.flatten(dblock.ffn).items()
    }


BLOCKS = "xformer/layers/blocks_cache.py", "xformer/layers/reversible.py"


@pytest.mark.parametrize("name", MODELS)
def test_formulas_and_lines_exist(name: str) -> None:
    steps, _, _ = traced(MODELS[name])
    for step in steps:
        assert step.formula, step
        path, _, line = step.where.partition(":")
        text = (ROOT / path).read_text(encoding="utf-8").splitlines()[int(line) - 1]
        assert text.strip().startswith(f"def {'backward' if step.is_backward else step.op}("), step
        assert (
            path in (f"xformer/ops/{step.op}.py", f"xformer/layers/{step.op}.py")
            or step.op in (*("add_norm", "linear_many", "barrier", "cos_sin", "constant"),)
            or (step.op == "blocks" and path in BLOCKS)
        ), step
    assert named(steps, "linear", backward=False)[0].formula == "y = x w + b over the last axis."
    doc = named(steps, "linear", backward=True)[0].formula
    assert doc.startswith("dx = dy w^T, dw = x^T dy")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])
def test_loss_and_gradients_are_the_same(name: str, kernels: bool, library: Backend) -> None:
    """Bit for bit, on every library."""
    model = MODELS[name]

    def run() -> tuple[Any, Any]:
        if kernels:
            return step_of(model, library)
        with xf.reference_only():
            return step_of(model, library)

    wanted, plain = run()
    with xf.trace() as steps:
        loss, grads = run()
    assert steps and observer() is None
    results = tree.flatten({"loss": loss, "grads": grads})
    for key, array in tree.flatten({"loss": wanted, "grads": plain}).items():
        np.testing.assert_array_equal(library.to_numpy(results[key]), library.to_numpy(array), key)
    assert type(grads) is type(plain)
    outputs = named(steps, "embedding", backward=False)[0].outputs
    assert outputs[0].rms is not None and outputs[0].rms > 0
    assert len({step.is_backward for step in steps}) == 2


def test_kernels_are_named() -> None:
    with xf.trace() as steps:
        step_of(GPT, NUMPY)
    (norm, *_) = named(steps, "layer_norm", backward=False)
    assert norm.where.startswith("xformer/backends/numpy/layer_norm.py:")
    assert norm.formula.startswith("y = w * (x - mean)")
    with xf.kernels("numpy"), xf.reference_only(), xf.trace() as steps:
        step_of(GPT, NUMPY)
    assert not any("backends" in step.where for step in steps)


def test_numba_traces_a_program_as_one_step() -> None:
    if xf.backends.unavailable_reason("numba") is not None:
        pytest.skip("the extra numba is not installed")
    with xf.kernels("numba"):
        wanted, plain = step_of(GPT, NUMPY)
        with xf.trace() as steps:
            loss, grads = step_of(GPT, NUMPY)
            compiled = xf.compile(lambda x: ops.relu(x)[0])
            n_steps = len(steps)
            compiled(np.ones((3, 5), np.float32))
    assert loss == wanted and len(steps) == n_steps
    for key, array in tree.flatten(plain).items():
        np.testing.assert_array_equal(tree.flatten(grads)[key], array, key)
    assert all(step.where for step in steps)
    with xf.kernels("numba"), xf.trace() as steps:
        ops.gelu(np.ones((300, 400), np.float32))
    assert steps[0].where == "xformer/backends/numba/kernels/activations.py"


def test_what_a_checkpointed_block_recomputes_is_shown() -> None:
    steps, _, _ = traced(MODELS["checkpointed"])
    begins = next(i for i, step in enumerate(steps) if step.is_backward)
    again = [step.op for step in steps[begins:] if not step.is_backward]
    assert again.count("sdpa") == 2 and again.count("feed_forward") == 2
    assert "sdpa (forward)" in str(steps)


def test_dropout_is_recorded_if_it_drops() -> None:
    steps, _, _ = traced(MODELS["dropout"])
    n_forward = len(named(steps, "dropout", backward=False))
    assert n_forward == 1 + 2 * 3  # of the embedding; of weights and two branches of each layer
    assert named(steps, "random_bits", backward=False)
    assert not named(traced()[0], "dropout", backward=False)


@pytest.fixture
def op() -> Iterator[Any]:
    """An op that fails for negative numbers, and whose backward fails for negative gradients."""

    @xf.overridable
    def doubled(x: Any) -> tuple[Any, Doubled]:
        """y = 2 x."""
        y, cache = ops.relu(x)
        if (y != x).any():
            raise ValueError("negative")
        return y + x, Doubled(cache, x.shape)

    yield doubled
    dispatch.op._ops.remove(doubled)


class Doubled(NamedTuple):
    relu: Any
    shape: tuple[int, ...]

    def backward(self, dy: Any) -> Any:
        """dx = 2 dy."""
        dx = self.relu.backward(dy)
        if (dy < 0).any():
            raise ValueError("negative")
        return dx + dy


X = np.array([[1.0, 2.0]])


def test_an_op_of_ones_own(op: Any) -> None:
    with xf.trace() as steps:
        y, cache = op(X)
        assert isinstance(cache, Doubled) and cache.shape == (1, 2) and cache[1] == cache.shape
        assert repr(cache) == repr(op(X)[1]) and type(cache).__name__ == "Doubled"
        again = pickle.loads(pickle.dumps(cache.relu))
        np.testing.assert_array_equal(again.backward(X), X)
        assert type(again) is type(ops.relu.reference(X)[1])
        assert cache._replace(shape=()).shape == ()
        _, relu, _, _, *_ = steps
        dx = cache.backward(dy=X)
    np.testing.assert_array_equal(y, 2 * X)
    np.testing.assert_array_equal(dx, 2 * X)
    assert [(s.op, s.depth, s.is_backward) for s in steps[-2:]] == [
        ("doubled", 0, True),
        ("relu", 1, True),
    ]
    assert relu.op == "relu" and steps[0].formula == "y = 2 x."
    assert re.fullmatch(r"test_trace\.py:\d+", steps[0].where)
    assert steps[-2].inputs == (("dy", (1, 2), "float64", None, None, None),)
    assert steps[-2].outputs[0][:3] == ("dx", (1, 2), "float64")
    assert steps[-2].outputs[0][3:] == (pytest.approx(rms(2 * X)), 2.0, 4.0)


def test_nothing_is_recorded_outside(op: Any) -> None:
    with xf.trace() as steps:
        _, cache = op(X)
        n_steps = len(steps)
    op(X)
    np.testing.assert_array_equal(cache.backward(X), 2 * X)
    assert len(steps) == n_steps == 2 and observer() is None
    _, untraced = op(X)
    with xf.trace() as later:
        untraced.backward(X)  # its forward was not recorded
        assert not later
        cache.backward(X)
    assert [step.op for step in later] == ["doubled", "relu"] and len(steps) == n_steps


def test_an_inner_trace_records_alone(op: Any) -> None:
    with xf.trace() as outer:
        op(X)
        with xf.trace() as inner:
            op(X)
        op(X)
    assert len(inner) == 2 and len(outer) == 4
    assert [step.depth for step in outer] == [0, 1, 0, 1]


def test_an_error_leaves_no_state(op: Any) -> None:
    with xf.trace() as steps:
        with pytest.raises(ValueError, match="negative"):
            op(-X)
        assert [(step.op, step.depth) for step in steps] == [("relu", 1)]  # that one has ended
        _, cache = op(X)
        with pytest.raises(ValueError, match="negative"):
            cache.backward(-X)
        op(X)
    assert [step.depth for step in steps if step.op == "doubled"] == [0, 0]
    assert observer() is None
    with pytest.raises(ValueError, match="negative"), xf.trace() as steps:
        op(-X)
    assert observer() is None
    with pytest.raises(ValueError, match=r"linear: w must be \(I, O\)"), xf.trace() as steps:
        ops.linear(X, np.ones((3, 2)))
    assert not steps


def test_threads_and_tasks_are_apart(op: Any) -> None:
    with xf.trace() as steps:
        thread = threading.Thread(target=lambda: op(X))
        thread.start()
        thread.join()

    async def run(n: int) -> list[str]:
        with xf.trace() as steps:
            for _ in range(n):
                op(X)
                await asyncio.sleep(0)
        return [step.op for step in steps]

    async def both() -> Any:
        return await asyncio.gather(run(2), run(3))

    assert [len(steps) for steps in asyncio.run(both())] == [4, 6]
    assert not steps and observer() is None


def test_inference_records_the_forward() -> None:
    with xf.inference(), xf.trace() as steps:
        _, cache = ops.relu(X)
        with pytest.raises(RuntimeError, match="inference"):
            cache.backward(X)
    assert [step.op for step in steps] == ["relu"]


def test_arrays_without_a_size() -> None:
    """Integers and empty arrays."""
    with xf.trace() as steps:
        ops.random_bits(X, key=RandomKey(0), size=3)
        ops.relu(np.ones((0, 3)))
    bits, relu = (step.outputs[0] for step in steps)
    assert (bits.dtype, bits.rms) == ("int64", None) and (relu.shape, relu.rms) == ((0, 3), None)
    assert "-" in str(steps) and "y: int64" in steps.table(values=True)


def test_the_tables_fit() -> None:
    steps, _, _ = traced(xf.GPT(256, 1, 64, 2, 64))
    for width in (100, 80):
        lines = steps.table(width=width).split("\n")
        assert max(map(len, lines)) <= width
        assert not any(line != line.rstrip() for line in lines)
    forward, backward = str(steps).split("\n\n")
    assert max(forward.count("\n"), backward.count("\n")) < 50  # one screen each
    assert re.search(r"^ 19    cross_entropy +logits 1x5x256, targets 1x5 -> \(\)", forward, re.M)
    assert re.search(r"^ 19    cross_entropy +\(\) -> dlogits 1x5x256", backward, re.M)
    assert forward.count("y = x w + b over the last axis.  [xformer/ops/linear.py:") == 1
    only = steps.table(op="gelu", values=True)
    assert len(re.findall(r"^ 14  gelu ", only, re.M)) == 2 and "linear" not in only
    assert re.search(r"^ +dx: rms [\d.e-]+, from -[\d.e-]+ to [\d.e-]+$", only, re.M)
    with pytest.raises(ValueError, match=r"op must be one of embedding, .*, got 'tan'"):
        steps.table(op="tan")
    assert str(Trace()) == ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = xf.GPT(256, 2, 8, 2, 16)
    training.save(tmp_path / "gpt", model, model.init(1), NUMPY)
    return tmp_path / "gpt"


def test_the_command_shows_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace"]) == 0
    shown = capsys.readouterr().out
    title, forward, backward = shown.rstrip("\n").split("\n\n")
    assert re.fullmatch(
        r"LanguageModel, 1 layer, 18 tokens: loss \d\.\d+ on 'to be, or not to be'", title
    )
    assert max(map(len, shown.split("\n"))) <= 100
    assert "xformer/ops/linear.py:" in forward and "xformer/backends" not in shown
    assert backward.startswith("  n  backward  ") and "dtable 256x64" in backward
    assert main(["trace", "--layers", "2", "--op", "sdpa", "--text", "abc", "--values"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("LanguageModel, 2 layers, 2 tokens: ") and "linear" not in shown
    assert shown.count("q, k, v 1x2x2x32 -> 1x2x2x32") == 2 and shown.count("dq: rms ") == 2
    assert main(["trace", "--kernels", "--dtype", "float64"]) == 0
    assert "xformer/backends/numpy/sdpa.py:" in capsys.readouterr().out


def test_the_command_shows_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    command = ["trace", "--model", str(folder)]
    assert main([*command, "--text", "a fox", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    model = xf.GPT(256, 2, 8, 2, 16)
    ids = np.frombuffer(b"a fox", np.uint8).astype(np.int64)[None]
    with xf.reference_only():
        loss, _ = model.loss(model.init(1), ids[:, :-1], ids[:, 1:])
    assert output["loss"] == pytest.approx(float(loss))
    assert [step["op"] for step in output["steps"]].count("sdpa") == 2 * 2
    assert output["steps"][0]["inputs"][0] == {
        **{"name": "table", "shape": [256, 8], "dtype": "float32"},
        **dict.fromkeys(("rms", "min", "max")),
    }
    assert main([*command, "--text", "a fox", "--layers", "1", "--op", "sdpa", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert [step["op"] for step in output["steps"]] == ["sdpa"] * 2
    assert [step["is_backward"] for step in output["steps"]] == [False, True]


IDS = {"pad_token_id": 0, "eos_token_id": 2}
T5 = {"model_type": "t5", "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 3}
BERT = {
    **{"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 6, "max_position_embeddings": 40, "type_vocab_size": 2},
}
COHERE2 = BERT | {"model_type": "cohere2", "layer_types": ["sliding_attention", "full_attention"]}
del COHERE2["type_vocab_size"]
ALBERT = BERT | {"model_type": "albert", "embedding_size": 8}


def saved(tmp_path: Path, config: dict[str, Any], architecture: str) -> str:
    """A folder in Hugging Face's format with random weights and a tokenizer."""
    pytest.importorskip("tokenizers")
    words = training.train_bpe(["the quick brown fox"], 270, specials=("<pad>", "<s>", "</s>"))
    model = pretrained.model(
        {**config, **IDS, "architectures": [architecture], "vocab_size": words.size}
    )
    folder = tmp_path / architecture
    pretrained.save(model, model.init(), folder)
    words.save(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("config", "architecture", "title", "loss"),
    [
        (T5, "T5ForConditionalGeneration", "EncoderDecoder, 2 layers, ", "linear_cross_entropy"),
        (BERT, "BertForMaskedLM", "LanguageModel, 1 layer, ", "linear_cross_entropy"),
        (BERT, "BertForSequenceClassification", "LanguageModel, 1 layer, ", "cross_entropy"),
        (BERT, "BertForTokenClassification", "LanguageModel, 1 layer, ", "linear_cross_entropy"),
        (COHERE2, "Cohere2ForCausalLM", "LanguageModel, 1 layer, ", "linear_cross_entropy"),
    ],
    ids=["t5", "masked", "classifier", "tokens", "RoPE by layer"],
)
def test_the_command_shows_other_models(
    config: dict[str, Any],
    architecture: str,
    title: str,
    loss: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An encoder-decoder on the text as source and target, and encoders."""
    path = saved(tmp_path, config, architecture)
    assert main(["trace", "--model", path, "--layers", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(title) and f"  {loss} " in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--op", "tan"], "--op must be one of embedding, blocks, layer_norm, "),
        (["--op", "tan", "--json"], "--op must be one of embedding, blocks, layer_norm, "),
        (["--layers", "0"], "--layers must be an int of at least 1, got 0"),
        (["--text", "a"], "--text must have at least 2 tokens, got 1"),
        (["--text", ""], "the text must hold at least one token"),
        (["--text", "a" * 99], "64"),
        (["--tokenizer", "x"], "--tokenizer needs --model: a preset has a vocabulary of bytes"),
        (["--model", "nowhere"], "there is no folder or file nowhere"),
    ],
)
def test_bad_options_are_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *options]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("xformer: error: ") and message in err and err.count("\n") == 1
    assert not out and observer() is None


def test_bad_options_of_a_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    assert main(["trace", "--model", str(folder), "--layers", "3"]) == 1
    assert "--layers must be at most the model's 2, got 3" in capsys.readouterr().err
    for config, architecture, options, message in (
        (
            ALBERT,
            "AlbertForMaskedLM",
            ["--layers", "1"],
            "--layers: the layers of this model share",
        ),
        (BERT, "BertModel", [], "a loss needs a head that gives logits, got "),
    ):
        path = saved(tmp_path, config, architecture)
        assert main(["trace", "--model", path, *options]) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["trace", "--model", str(folder), "--preset", "tiny"])
    assert "not allowed with argument" in capsys.readouterr().err
