"""Old names work for one release, and say the new ones."""

from __future__ import annotations

import json
import operator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from block_configs import block_config, changed
from safetensors.numpy import load_file

import xformer
from xformer import backends, finetune, layers, ops, renamed, training
from xformer.cli import main, train_from
from xformer.dispatch import explain, reference_only
from xformer.layers import BlockConfig, ExpertsConfig, RelativeConfig, StackParams, advance, stack
from xformer.models import EncoderDecoder, LanguageModel
from xformer.training import checkpoint

BUCKETS = RelativeConfig(2, 8, 16)
PAIR = (block_config(8, 2, 5),), (block_config(8, 2, 5),)
GPT = xformer.GPT(11, 1, 8, 2, max_len=8)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [(module, old, new) for module, names in renamed.NAMES.items() for old, new in names.items()],
)
def test_names_of_modules(module: str, old: str, new: str) -> None:
    package = pytest.importorskip(module)
    with pytest.warns(DeprecationWarning, match=rf"^{module}\.{old} is called {module}\.{new};"):
        assert getattr(package, old) is getattr(package, new)
    assert old not in dir(package)


def test_methods_and_arguments() -> None:
    network, params, tokens = GPT.network, GPT.init(0), np.array([[1, 2, 3]])
    wanted, state = network.decode(params, tokens, network.init_state(), all_logits=True)
    with pytest.warns(DeprecationWarning, match=r"^LanguageModel\.start is called "):
        state = network.start()
    with pytest.warns(DeprecationWarning, match=r"^LanguageModel\.extend is called "):
        got, state = network.extend(params, tokens, state, every=True)
    assert np.array_equal(got, wanted)
    with pytest.warns(DeprecationWarning, match=r"^LanguageModel\.rewind is called "):
        assert network.rewind(state, 1).length == 2


@pytest.mark.parametrize(
    ("kind", "old", "new", "value", "given"),
    [
        (xformer.GPT, "norm", "norm_placement", "post", (11, 1, 8, 2, 8)),
        (xformer.GPT, "checkpoint", "activation_checkpointing", True, (11, 1, 8, 2, 8)),
        (LanguageModel, "relative", "relative_bias", BUCKETS, (None, (block_config(8, 2, 5),))),
        (EncoderDecoder, "encoder_relative", "encoder_relative_bias", BUCKETS, PAIR),
        (EncoderDecoder, "decoder_relative", "decoder_relative_bias", BUCKETS, PAIR),
        (LanguageModel, "source", "hf_config", {"a": 1}, (None, (block_config(8, 2, 5),))),
    ],
)
def test_fields(kind: Any, old: str, new: str, value: Any, given: tuple[Any, ...]) -> None:
    options = {} if kind is not LanguageModel else {"head": None}
    with pytest.warns(DeprecationWarning, match=rf"^{kind.__name__}\({old}=\) is called "):
        got = kind(*given, **{old: value}, **options)
    assert getattr(got, new) == value
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        kind(*given, **{f"{old}_": value}, **options)


X, W = np.ones((2, 3)), np.ones((3, 4))
WS = np.ones((2, 3, 4)), np.ones((2, 3, 4)), np.ones((2, 4, 3))


@pytest.mark.parametrize(
    ("op", "args", "options"),
    [
        (ops.linear, (X, W), {}),
        (ops.linear_cross_entropy, (X, W), {"targets": np.zeros(2, int)}),
        (ops.experts, (X, *WS, np.ones((2, 1))), {"ids": np.zeros((2, 1), int)}),
    ],
)
def test_an_argument_with_the_opposite_value(
    op: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """By a kernel of NumPy and by the reference."""
    for context in (nullcontext(), reference_only()):
        with context:
            for old in (True, False):
                wanted, wanted_cache = op(*args, **options, trainable=not old)
                message = rf"^{op.__name__}\(fixed={old}\) is called .*\(trainable={not old}\);"
                with pytest.warns(DeprecationWarning, match=message) as said:
                    y, cache = op(*args, **options, fixed=old)
                assert len(said) == 1 and said[0].filename == __file__
                assert np.array_equal(y, wanted) and type(cache) is type(wanted_cache)
                grads = [c.backward(*([] if y.ndim == 0 else [y])) for c in (cache, wanted_cache)]
                for got, grad in zip(*grads, strict=True):
                    assert (got is None) == (grad is None) and (got is None or (got == grad).all())
                assert (grads[0][1] is None) == old
    with pytest.warns(DeprecationWarning, match=r"\(trainable=False\);") as said:
        text = explain(op, *args, **options, fixed=True)
    assert len(said) == 1 and said[0].filename == __file__
    assert text == explain(op, *args, **options, trainable=False)


FLAT: list[dict[str, Any]] = [
    {},
    {"n_kv_heads": 1, "d_head": 3, "d_value": 2, "scale": 0.3, "qk_norm": "all"},
    {"activation": "silu", "gated": True, "norm": "rms", "norm_offset": 1.0, "eps": 0.1},
    {"window": (1, None), "softcap": 2.0, "sinks": True},
    {"bias": False, "qkv_bias": True, "o_bias": None, "ffn_bias": True},
    {"dropout": 0.1, "hidden_dropout": 0.2},
    {"dropout": 0.1, "attn_dropout": 0.3, "ffn_bias": None},
    {"parallel": True, "shared_norm": True, "shaw_max_distance": 3},
    {"norm_placement": "sandwich", "experts": ExpertsConfig(3, 2, 5)},
]


@pytest.mark.parametrize("options", FLAT)
def test_a_block_before_it_had_parts(options: dict[str, Any]) -> None:
    with pytest.warns(
        DeprecationWarning, match=r"^BlockConfig\(.*\) is called BlockConfig\(attn, "
    ) as said:
        block = BlockConfig(8, 2, 5, **options)
    assert block == block_config(8, 2, 5, **options) and len(said) == 1


def test_one_option_of_a_block() -> None:
    """As `dataclasses.replace` gives it, beside the parts."""
    block = block_config(8, 2, 5, norm="rms", dropout=0.1)
    with pytest.warns(DeprecationWarning, match=r"^BlockConfig\(window\) is called "):
        assert replace(block, window=(1, 0)) == changed(block, window=(1, 0))
    with pytest.warns(DeprecationWarning, match=r"^BlockConfig\(norm\) is called "):
        assert replace(block, norm="layer") == changed(block, norm="layer")


def test_a_placement_is_no_kind_of_norm() -> None:
    """`norm` has another meaning: its old values still give the placement."""
    with pytest.warns(DeprecationWarning):
        block = BlockConfig(8, 2, 5, norm="post")
    assert (block.norm_placement, block.norm.kind) == ("post", "layer")
    with pytest.warns(DeprecationWarning):
        block = BlockConfig(8, 2, 5, norm="post", norm_kind="rms")
    assert (block.norm_placement, block.norm.kind) == ("post", "rms")
    with (
        pytest.warns(DeprecationWarning),
        pytest.raises(ValueError, match='norm: kind must be "layer" or "rms", got \'x\''),
    ):
        BlockConfig(8, 2, 5, norm="x")
    with pytest.raises(TypeError, match="unexpected keyword argument 'window_'"):
        BlockConfig(8, 2, 5, window_=3)


@pytest.mark.parametrize(
    ("owner", "old", "new"),
    [
        (GPT, "norm", "norm_placement"),
        (GPT, "checkpoint", "activation_checkpointing"),
        (GPT.network, "source", "hf_config"),
        (GPT.network, "relative", "relative_bias"),
        (EncoderDecoder(*PAIR), "encoder_relative", "encoder_relative_bias"),
        (EncoderDecoder(*PAIR), "decoder_relative", "decoder_relative_bias"),
        (GPT.network, "n_groups", "n_shared_layer_groups"),
        (GPT.network.blocks[0], "norm_kind", "norm.kind"),
        (GPT.network.blocks[0], "shaw", "attn.shaw_max_distance"),
        (GPT.network.blocks[0], "n_heads", "attn.n_heads"),
        (GPT.network.blocks[0], "kv_heads", "attn.kv_heads"),
        (GPT.network.blocks[0], "d_ff", "ffn.d_ff"),
        (GPT.network.blocks[0], "bias", "attn.bias"),
    ],
)
def test_attributes(owner: Any, old: str, new: str) -> None:
    kind = type(owner).__name__
    with pytest.warns(DeprecationWarning, match=rf"^{kind}\.{old} is called {kind}\.{new};"):
        assert getattr(owner, old) == operator.attrgetter(new)(owner)
    assert not hasattr(type(owner), old)


# A block as version 0.1's files had it before a block had parts. JSON has no tuples.
FLAT_BLOCK: dict[str, Any] = {
    "d_model": 8, "n_heads": 2, "d_ff": 5, "n_kv_heads": None, "d_head": None, "d_value": None,
    "activation": "relu", "gated": False, "experts": None, "norm_placement": "post", "norm": "rms",
    "norm_offset": 0.0, "eps": 1e-05, "parallel": False, "shared_norm": False, "bias": True,
    "qkv_bias": None, "o_bias": None, "ffn_bias": None, "qk_norm": None, "scale": None,
    "window": [2, None], "softcap": None, "sinks": False, "shaw_max_distance": None,
    "dropout": 0.1, "attn_dropout": None, "hidden_dropout": 0.2,
}  # fmt: skip


@pytest.mark.parametrize("is_older", [False, True])
def test_models_that_were_saved_before(tmp_path: Path, is_older: bool) -> None:
    own: dict[str, Any] = {"norm": "rms", "window": (2, None), "dropout": 0.1}
    mixture = ExpertsConfig(3, 2, 5)
    encoder = block_config(8, 2, 5, norm_placement="post", hidden_dropout=0.2, **own)
    decoder = block_config(8, 2, 5, norm_placement="post", experts=mixture, **own)
    model = EncoderDecoder((encoder,), (decoder,))
    training.save(tmp_path, model, model.init(0), xformer.backends.get())
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    config = json.loads(header["__metadata__"]["xformer"])
    sizes, experts = config["config"], asdict(mixture)
    sizes["encoder"] = [dict(FLAT_BLOCK)]
    sizes["decoder"] = [FLAT_BLOCK | {"experts": experts, "hidden_dropout": 0.0}]
    if is_older:
        for block in (*sizes["encoder"], *sizes["decoder"]):
            block["norm_kind"], block["norm"] = block.pop("norm"), block.pop("norm_placement")
            block["shaw"] = block.pop("shaw_max_distance")
        sizes["checkpoint"] = sizes.pop("activation_checkpointing")
    header["__metadata__"]["xformer"] = json.dumps(config)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    assert training.inspect(tmp_path) == model


def test_a_relative_bias_of_layers() -> None:
    configs, rng = PAIR[0], xformer.backends.get().generator(0)
    with pytest.warns(DeprecationWarning, match=r"^init\(relative=\) is called "):
        params = StackParams.init(rng, configs, relative=BUCKETS)
    with pytest.warns(
        DeprecationWarning, match=r"^StackParams\.relative is called .*_bias;"
    ) as said:
        assert params.relative is params.relative_bias is not None
    assert said[0].filename == __file__
    x = np.ones((1, 3, 8), np.float32)
    wanted, _ = stack(x, params, configs=configs, relative_bias=BUCKETS, causal=True)
    with pytest.warns(DeprecationWarning, match=r"^stack\(relative=\) is called "):
        y, _ = stack(x, params, configs=configs, relative=BUCKETS, causal=True)
    assert np.array_equal(y, wanted)
    past: Any = {"kv_cache": (xformer.layers.KVCache(),), "n_cached": 0}
    with pytest.warns(DeprecationWarning, match=r"^advance\(relative=\) is called "):
        y, _ = advance(x, params, configs=configs, relative=BUCKETS, **past)
    assert np.array_equal(y, wanted)


def test_parameters_that_were_saved_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model, and of a run's state, which has them several times."""
    model = EncoderDecoder(*PAIR, encoder_relative_bias=BUCKETS, decoder_relative_bias=BUCKETS)
    params, backend, flatten = model.init(0), xformer.backends.get(), xformer.tree.flatten
    state = training.State(params, {"m": params, "step": 3}, params)

    def with_old_names(found: dict[str, Any]) -> dict[str, Any]:
        return {name.replace("relative_bias", "relative"): part for name, part in found.items()}

    with monkeypatch.context() as patch:
        patch.setattr(xformer.tree, "flatten", lambda params: with_old_names(flatten(params)))
        patch.setattr(checkpoint, "asdict", lambda model: with_old_names(asdict(model)))
        training.save(tmp_path, model, params, backend)
        about = {"model": with_old_names(asdict(model))}
        training.write_state(tmp_path / "state", state, backend, about)
    assert '"encoder_relative":' in (tmp_path / "config.json").read_text()
    assert "encoder.relative" in load_file(tmp_path / "model.safetensors")
    found, loaded = training.load(tmp_path, backend)
    assert found == model
    saved = training.read_state(tmp_path / "state")
    assert "optimiser.m.decoder.relative" in saved.arrays
    saved.require(json.loads(json.dumps({"model": asdict(model)})))
    for got, wanted in ((loaded, params), (saved.restored(state, backend), state)):
        leaves = flatten(got)
        assert leaves.keys() == flatten(wanted).keys()
        for name, leaf in flatten(wanted).items():
            np.testing.assert_array_equal(leaves[name], leaf)  # nan too


def test_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    """With a line on stderr for each."""
    assert renamed.command_line([]) == []
    assert renamed.command_line(["train", "--max-len", "8"]) == ["train", "--max-len", "8"]
    with pytest.warns(FutureWarning, match="^--context is called --max-len;"):
        got = renamed.command_line(["train", "--context=8", "--steps", "3"])
    assert got == ["train", "--max-len=8", "--steps", "3"]
    for command in ("memory", "summary"):
        with pytest.warns(FutureWarning, match="^--length is called --seq-len;"):
            assert renamed.command_line([command, "--length", "8"]) == [command, "--seq-len", "8"]
    with pytest.warns(FutureWarning, match="^xformer check is called xformer gradcheck;"):
        assert main(["check", "--only", "no such case"]) == 1
    assert "no case has 'no such case'" in capsys.readouterr().err


def test_every_new_option_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for command, options in renamed.OPTIONS.items():
        with pytest.raises(SystemExit):
            main([command, "--help"])
        said = capsys.readouterr().out
        assert all(new in said for new in options.values())
        assert not any(f"{old} " in said for old in options)


def test_runs_that_were_begun_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fox.txt").write_text("the quick brown fox jumps over the lazy dog. " * 50)
    sizes = "--layers 1 --d-model 8 --heads 2 --max-len 8 --batch 2 --steps 2 --preset tiny"
    about_of, names = train_from.about_of, renamed.FIELDS["GPT"].items()

    def old(model: Any) -> dict[str, Any]:
        about = about_of(model)
        return about | {name: about.pop(new) for name, new in names}

    with monkeypatch.context() as patch:  # of run.json and of every checkpoint
        patch.setattr(train_from, "about_of", old)
        assert main(["train", *sizes.split(), "--data", "fox.txt", "--out", "run"]) == 0
    assert json.loads(Path("run/run.json").read_text())["about"]["model"]["norm"] == "pre"
    path = Path("run/run.json")
    found = json.loads(path.read_text())
    olds = {new: old for old, new in renamed.FIELDS["notes"].items() if old != "graph"}
    for name in [name for name in found["notes"] if name in olds]:
        found["notes"][olds[name]] = found["notes"].pop(name)
    path.write_text(json.dumps(found))
    assert main(["train", "--resume", "run", "--steps", "4"]) == 0
    assert runs.rows(Path("run"))[-1]["step"] == 4


def test_place_of_training_is_backend(tmp_path: Path) -> None:
    backend = backends.get("numpy")
    with pytest.warns(DeprecationWarning, match=r"Run\(place=\) is called Run\(backend=\)"):
        run = training.Run(tmp_path / "run", place=backend, about={})
    with pytest.warns(DeprecationWarning, match=r"Run\.place is called Run\.backend"):
        assert run.place is backend
    for function in (training.train, training.evaluate, finetune.train, finetune.evaluate):
        name = function.__name__
        with (
            pytest.warns(DeprecationWarning, match=rf"{name}\(place=\) .* {name}\(backend=\)"),
            pytest.raises(TypeError, match=r"missing .* required positional argument"),
        ):
            function(place=backend)


def test_place_of_a_residual_is_norm_placement() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3))
    wanted, _ = layers.residual(x, None, ops.tanh, norm_placement="post")
    with pytest.warns(
        DeprecationWarning, match=r"residual\(place=\) .* residual\(norm_placement=\)"
    ):
        got, _ = layers.residual(x, None, ops.tanh, place="post")
    assert np.array_equal(got, wanted)
