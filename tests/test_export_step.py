"""Training steps as ONNX files: the same losses, parameters and states as on NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_configs import block_config
from causal_models import ALL, CONFIGS, SIZES, T5_NAMES, V, causal, lively, seq2seq
from exported import FIXED, Session, distance, in_dtype, onnx
from safetensors.numpy import load_file, save_file

import xformer as xf
from xformer import backends, export, optim, pretrained, training, tree
from xformer.layers import EmbedConfig, ExpertsConfig
from xformer.models import LanguageModel

GPT: dict[str, Any] = {"vocab_size": V, "n_layers": 2, "d_model": 12, "n_heads": 3, "max_len": 16}
DATA = np.random.default_rng(0)
LR = 1e-2


@pytest.fixture(autouse=True)
def data_of_one_test() -> None:
    """Each test draws the same numbers, whatever ran before it."""
    global DATA
    DATA = np.random.default_rng(0)


def ids(*shape: int) -> np.ndarray:
    return DATA.integers(1, V, shape)


def batch(model: Any, i: int) -> dict[str, np.ndarray]:
    """A batch of another size in each step."""
    n, length = (3, 2, 5)[i % 3], (7, 12, 4)[i % 3]
    if isinstance(model, LanguageModel):
        return {"tokens": ids(n, length), "targets": ids(n, length)}
    return {"src": ids(n, length), "tgt": ids(n, 9), "targets": ids(n, 9)}


def feeds_of(written: Any) -> dict[str, np.ndarray]:
    return load_file(written.files[0])


def stepped(run: Session, feeds: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """The outputs of one step; `feeds` is then that of the next."""
    lr = np.asarray(LR, next(x.dtype for x in feeds.values() if x.dtype.kind == "f"))
    out = run(**feeds, **data, lr=lr)
    feeds |= {k.removeprefix("new."): x for k, x in out.items() if k.startswith("new.")}
    return out


def require_same(
    model: Any,
    params: Any,
    path: Path,
    *,
    steps: int = 4,
    optimiser: Any = "adamw",
    clip: float | None = 1.0,
    tolerance: float = 1e-9,  # Adam divides by the root of v: rounding of a zero gradient counts
    norm_tolerance: float = 1e-8,
    **options: Any,
) -> None:
    run_options = {"optimiser": optimiser, "clip": clip, **options}
    written = export.onnx_step(model, params, path, **run_options)
    run, feeds = Session(path), feeds_of(written)
    pair = optim.OPTIMISERS[optimiser] if isinstance(optimiser, str) else optimiser
    state = pair.init(tree.trained(params))
    for i in range(steps):
        data = batch(model, i)
        if (length := options.get("sizes", {}).get("length")) is not None:
            data = {name: ids(len(x), length) for name, x in data.items()}
        settings = dict(options.get("loss") or {})
        more: dict[str, Any] = {}
        if options.get("mask"):
            name = "mask" if "tokens" in data else "src_mask"
            shape = next(iter(data.values())).shape
            more[name] = np.arange(shape[1]) < DATA.integers(2, shape[1] + 1, shape[0])[:, None]
            settings |= more
        if (seed := options.get("dropout_seed")) is not None:
            more["number"] = np.asarray(i + 1)
            settings["dropout_key"] = xf.RandomKey(seed, step=i + 1)
        out = stepped(run, feeds, data | more)
        with xf.reference_only():
            loss, cache = model.loss(params, **data, **settings)
            max_norm = np.inf if clip is None else clip
            grads, norm = optim.clip_by_global_norm(cache.backward(), max_norm=max_norm)
            new = tree.trained(params)
            new, state = pair.step(new, grads, state, lr=LR, **options.get("options") or {})
        params = tree.join(params, new)
        assert distance(out["loss"], np.asarray(loss)) < tolerance
        assert distance(out["norm"], np.asarray(norm)) < norm_tolerance
    for name, p in tree.flatten(params).items():
        assert np.abs(feeds[f"params.{name}"] - tree.value(p)).max() < 1e3 * tolerance, name
    for name, leaf in tree.flatten(state).items():
        assert np.abs(feeds[f"state.{name}"] - leaf).max() < 1e3 * tolerance, name


@pytest.mark.parametrize("name", ALL)
def test_decoders(name: str, tmp_path: Path) -> None:
    require_same(*causal(name), tmp_path / "step.onnx", **FIXED.get(name, {}))


@pytest.mark.parametrize("name", T5_NAMES)
def test_encoder_decoders(name: str, tmp_path: Path) -> None:
    # Parameters of T5 that are off by 3e-16 change the norm by 1.6e-8 after three steps of Adam.
    options = {"norm_tolerance": 1e-7} if name == "t5" else {}
    require_same(*seq2seq(name), tmp_path / "step.onnx", **options)


OPTIMISERS: dict[str, Any] = {
    "sgd": ("sgd", {"momentum": 0.9}),
    "adam": ("adam", {"weight_decay": 0.1}),
    "adamw": ("adamw", {"weight_decay": 0.1, "betas": (0.8, 0.9)}),
    "lion": ("lion", {}),
    "adafactor": ("adafactor", {}),
    "muon, adamw": (
        optim.grouped(optim.Rule("stack.blocks.*", "muon", min_ndim=2), optim.Rule("*", "adamw")),
        {},
    ),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimisers(name: str, tmp_path: Path) -> None:
    optimiser, options = OPTIMISERS[name]
    # Biases of keys have the gradient 0 up to rounding, of which Lion takes the sign.
    model = xf.GPT(**GPT, bias=False)
    params = lively(model, 0)
    require_same(model, params, tmp_path / "step.onnx", optimiser=optimiser, options=options)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, {"clip": None}),
        ({}, {"mask": True, "loss": {"ignore_index": 3, "label_smoothing": 0.1, "z_loss": 0.01}}),
        ({"dropout": 0.2}, {"dropout_seed": 5}),
        ({"dropout": 0.2, "activation_checkpointing": True}, {"dropout_seed": 5}),
        ({"positions": "xl", "memory_len": 3}, {"max_len": 16}),
    ],
)
def test_options(config: Any, options: Any, tmp_path: Path) -> None:
    model = xf.GPT(**GPT | config)
    require_same(model, lively(model, 0), tmp_path / "step.onnx", **options)


@pytest.mark.parametrize("mask", [False, True])
def test_losses_of_experts(mask: bool, tmp_path: Path) -> None:
    experts = ExpertsConfig(n_experts=3, top_k=2, d_ff=5)
    block = block_config(d_model=12, n_heads=3, d_ff=8, experts=experts)
    model = LanguageModel(
        EmbedConfig(V, 12, 12, 16), (block,) * 2, router_z_weight=0.1, load_balancing_weight=0.1
    )
    require_same(model, lively(model, 0), tmp_path / "step.onnx", mask=mask)


def test_frozen_parameters_are_inputs_only(tmp_path: Path) -> None:
    model = xf.GPT(**GPT)
    params = tree.freeze(lively(model, 0), "embed.*", "stack.blocks.0.*")
    path = tmp_path / "step.onnx"
    require_same(model, params, path)
    inputs = {x.name for x in onnx.load(path).graph.input}
    outputs = {x.name for x in onnx.load(path).graph.output}
    assert {f"params.{name}" for name in tree.flatten(params)} <= inputs
    trained = tree.flatten(tree.trained(params))
    assert {n for n in outputs if n.startswith("new.params.")} == {
        f"new.params.{name}" for name in trained
    }


def test_classifiers(tmp_path: Path) -> None:
    sizes = SIZES | {"max_position_embeddings": 16, "num_labels": 5}
    del sizes["num_key_value_heads"]
    kind = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    model = pretrained.model(kind | sizes)
    params, path = lively(model, 0), tmp_path / "step.onnx"
    written = export.onnx_step(model, params, path, mask=True)
    assert written.inputs["targets"] == "int64 (batch)"
    assert written.inputs["mask"] == "bool (batch, length)"
    tokens, labels = ids(3, 7), DATA.integers(0, 5, 3)
    mask = np.ones((3, 7), np.bool_)
    out = stepped(
        Session(path), feeds_of(written), {"tokens": tokens, "targets": labels, "mask": mask}
    )
    assert distance(out["loss"], np.asarray(model.loss(params, tokens, labels)[0])) < 1e-12


def test_inputs_outputs_and_first_values(tmp_path: Path) -> None:
    config = dict(CONFIGS["gpt2"])
    kind = {"model_type": "gpt2", "architectures": [config.pop("architecture")]}
    model = pretrained.model(kind | config)
    params = in_dtype(model.init(), "float32")
    path = tmp_path / "step.onnx"
    written = export.onnx_step(model, params, path, dropout_seed=1)
    values = tmp_path / "step.first.safetensors"
    assert written.files == (values, path)
    assert values.stat().st_mode == path.stat().st_mode
    stored = load_file(values)
    state = tree.flatten(optim.adamw_init(params))
    wanted = {f"params.{n}": x for n, x in tree.flatten(params).items()}
    wanted |= {f"state.{n}": np.asarray(x) for n, x in state.items()}
    assert stored.keys() == wanted.keys() and set(stored) <= set(written.inputs)
    assert all(np.array_equal(stored[n], wanted[n]) for n in wanted)
    assert {n: kind for n, kind in written.inputs.items() if n not in stored} == {
        "tokens": "int64 (batch, length)",
        "targets": "int64 (batch, length)",
        "lr": "float32 ()",
        "number": "int64 ()",
    }
    assert written.outputs.keys() == {"loss", "norm", *(f"new.{name}" for name in stored)}
    onnx.checker.check_model(onnx.load(path), full_check=True)


@pytest.mark.parametrize("ignored", [None, -100])
def test_targets_outside_the_vocabulary_are_refused(ignored: int | None, tmp_path: Path) -> None:
    """-100 is an ignored target only if the loss says so."""
    model, path = xf.GPT(**GPT), tmp_path / "step.onnx"
    loss = {"ignore_index": ignored}
    written = export.onnx_step(model, model.init(), path, loss=loss)
    run, feeds = Session(path), feeds_of(written)
    for id in (-100, -3, V):
        targets = ids(2, 5)
        targets[1, 2] = id
        data = {"tokens": ids(2, 5), "targets": targets, "lr": np.asarray(LR, np.float32)}
        if id == ignored:
            assert np.isfinite(run(**feeds, **data)["loss"])
        else:
            with pytest.raises(Exception, match="Out of range value in index"):
                run(**feeds, **data)


def test_the_parameters_of_the_model_beside_it_are_kept(tmp_path: Path) -> None:
    """`--out RUN/model.onnx`: model.safetensors has the parameters, and must not be replaced."""
    model = xf.GPT(**GPT)
    params = model.init()
    training.save(tmp_path, model, params, backends.get())
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    path, first = tmp_path / "model.onnx", tmp_path / "model.first.safetensors"
    assert export.onnx_step(model, params, path).files == (first, path)
    export.onnx_step(model, params, path, optimiser="sgd")  # replaces those of an export
    assert "state.velocity.embed.table" in load_file(first)
    assert all(file.read_bytes() == content for file, content in before.items())


@pytest.mark.parametrize("content", ["parameters", "text", "nothing"])
def test_a_file_of_another_origin_is_kept(content: str, tmp_path: Path) -> None:
    model = xf.GPT(**GPT)
    path, first = tmp_path / "step.onnx", tmp_path / "step.first.safetensors"
    if content == "parameters":
        save_file({"w": np.ones(2)}, first)
    else:
        first.write_text(content * (content == "text"))
    before = first.read_bytes()
    with pytest.raises(FileExistsError, match=r"step.first.safetensors exists, and no export"):
        export.onnx_step(model, model.init(), path)
    assert [*tmp_path.iterdir()] == [first] and first.read_bytes() == before


# ---- Many steps in float32 ----


def losses(model: Any, params: Any, path: Path, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The losses of ONNX Runtime and of NumPy, on text of one pattern.

    Of one seed: where a gradient happens to be as small as its rounding, Adam's first step turns
    rounding into 1e-3 of a parameter, and the losses differ by 5e-5 (1 of 60 seeds).
    """
    rng = np.random.default_rng(0)
    path = path / "step.onnx"
    written = export.onnx_step(model, params, path, options={"weight_decay": 0.1})
    run, feeds = Session(path), feeds_of(written)
    state = optim.adamw_init(params)
    text = np.cumsum(rng.integers(0, 3, 4000)) % V
    got, wanted = [], []
    for _ in range(steps):
        at = rng.integers(0, 3900, 8)[:, None] + np.arange(17)
        tokens, targets = text[at[:, :-1]], text[at[:, 1:]]
        got.append(float(stepped(run, feeds, {"tokens": tokens, "targets": targets})["loss"]))
        loss, cache = model.loss(params, tokens, targets)
        grads, _ = optim.clip_by_global_norm(cache.backward(), max_norm=1.0)
        params, state = optim.adamw(params, grads, state, lr=LR, weight_decay=0.1)
        wanted.append(float(loss))
    return np.asarray(got), np.asarray(wanted)


def test_30_steps(tmp_path: Path) -> None:
    model = xf.GPT(**GPT)
    got, wanted = losses(model, model.init(seed=0), tmp_path, 30)
    assert np.abs(got - wanted).max() < 2e-5
    assert wanted[-1] < 0.8 * wanted[0]


@pytest.mark.slow
def test_1000_steps(tmp_path: Path) -> None:
    model = xf.GPT(**GPT)
    got, wanted = losses(model, model.init(seed=0), tmp_path, 1000)
    assert np.abs(got - wanted).max() < 2e-5
    assert wanted[-100:].mean() < 0.5 * wanted[0]


# ---- Bad input ----


def test_bad_options(tmp_path: Path) -> None:
    model = xf.GPT(**GPT)
    params, path = model.init(), tmp_path / "step.onnx"
    for options, message in (
        ({"optimiser": "adamx"}, "onnx_step: optimiser must be one of .*; did you mean adam?"),
        ({"optimiser": "muon"}, r"muon: .* must be \(..., I, O\)"),
        ({"clip": 0.0}, "max_norm must be positive, got 0"),
        ({"loss": {"reduction": "meen"}}, "reduction"),
        ({"sizes": {"lenght": 3}}, "did you mean length?"),
        ({"max_len": 17}, "max_len must be at most 16"),
    ):
        with pytest.raises(ValueError, match=message):
            export.onnx_step(model, params, path, **options)  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())
