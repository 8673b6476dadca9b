"""Reversible blocks: the gradients of ordinary caches, from two streams that are saved."""

from __future__ import annotations

import dataclasses
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_configs import block_config
from judges import require_close
from libraries import only

from xformer import GPT, backends, inference, kernels, layers, ops, training, tree
from xformer.backends import Backend
from xformer.cli import main
from xformer.finetune import lora
from xformer.generation import generate
from xformer.inspection.ledger import ledger
from xformer.layers.block import block_gradients, branches_of
from xformer.layers.protocol import SITES
from xformer.layers.residual import branched
from xformer.layers.reversible import ReversibleCache
from xformer.models import EncoderDecoder, LanguageModel
from xformer.plots.flow import flow
from xformer.plots.maps import attention_maps

NUMPY = backends.get("numpy")
SIZES: dict[str, Any] = {"vocab_size": 32, "d_model": 32, "n_heads": 4, "max_len": 64}
DROPPED = block_config(8, 2, 12, activation="gelu", dropout=0.2, hidden_dropout=0.1)
KEY = ops.RandomKey(5, step=2)


def reversible(config: layers.BlockConfig) -> layers.BlockConfig:
    return dataclasses.replace(config, reversible=True)


def drawn(depth: int, config: layers.BlockConfig, dtype: str = "float64") -> tuple[Any, ...]:
    """x, the parameters of blocks far from their initial values, and dy."""
    rng = np.random.default_rng(depth)
    params = layers.StackParams.init(
        NUMPY.generator(1, dtype), (config,) * depth, out_scale=(2 * depth) ** -0.5
    ).blocks
    params = tree.map(lambda a: a + (0.1 * rng.normal(size=a.shape)).astype(dtype), params)
    x, dy = (rng.normal(size=(2, 7, 8)).astype(dtype) for _ in range(2))
    return x, params, dy


def with_caches(
    x: Any, params: Any, dy: Any, config: layers.BlockConfig, key: Any
) -> tuple[Any, Any, Any]:
    """y, dx and dparams of the same network, in which each branch saves its cache."""
    x1 = x2 = x
    caches = []
    for i, block in enumerate(params):
        layer_key = None if key is None else key.at(SITES * i)
        context = layers.Context(causal=True, dropout_key=layer_key)
        f, g = branches_of(block, layers.SideInputs(), config, context)
        rate, m = 0.0 if key is None else config.dropout, config.residual_multiplier
        r, of_f = branched(x2, f, config=config.norm, multiplier=m, dropout_rate=rate)
        x1 = x1 + r
        r, of_g = branched(x1, g, config=config.norm, multiplier=m, dropout_rate=rate)
        x2 = x2 + r
        caches.append((of_f, of_g))
    dx1 = dx2 = dy / 2
    grads = []
    for of_f, of_g in reversed(caches):
        more, *ffn = of_g.backward(dx2)
        dx1 = dx1 + more
        more, *attn = of_f.backward(dx1)
        dx2 = dx2 + more
        grads.append(block_gradients(tuple(attn), tuple(ffn))[0])
    return (x1 + x2) / 2, dx1 + dx2, tuple(reversed(grads))


# ---- The same gradients ----


@pytest.mark.parametrize("key", [None, KEY], ids=["", "dropout"])
@pytest.mark.parametrize("depth", [2, 4, 8, 12])
def test_gradients_are_those_of_ordinary_caches(depth: int, key: ops.RandomKey | None) -> None:
    """Dropout draws the same bits in both passes: others would be far off."""
    config = dataclasses.replace(reversible(DROPPED), residual_multiplier=0.7)
    x, params, dy = drawn(depth, config)
    y, cache = layers.blocks(
        x, params, configs=(config,) * depth, context=layers.Context(causal=True, dropout_key=key)
    )
    assert isinstance(cache, ReversibleCache)
    dx, dparams, dside = cache.backward(dy)
    wanted = with_caches(x, params, dy, config, key)
    assert np.array_equal(y, wanted[0]) and dside == layers.SideInputs()
    got = tree.flatten({"x": dx, "params": dparams})
    require_close(got, tree.flatten({"x": wanted[1], "params": wanted[2]}), rtol=1e-12)


def test_rounding_in_float32() -> None:
    """Each block adds some; docs/reformer.md has the figures."""
    config = reversible(DROPPED)
    for depth, limit in ((2, 3e-6), (12, 1e-5)):
        x, params, dy = drawn(depth, config, "float32")
        _, cache = layers.blocks(
            x, params, configs=(config,) * depth, context=layers.Context(causal=True)
        )
        dx, dparams, *_ = cache.backward(dy)
        _, *wanted = with_caches(x, params, dy, config, None)
        got = tree.flatten({"x": dx, "params": dparams})
        require_close(got, tree.flatten({"x": wanted[0], "params": wanted[1]}), rtol=limit)


@only("torch")
def test_twelve_blocks_by_autograd(library: Backend) -> None:
    """On the same forward, whose graph keeps all activations."""
    import torch

    config = reversible(DROPPED)
    x, params, dy = tree.map(library.asarray, drawn(12, config))
    leaves = tree.flatten({"x": x, "params": params})
    for leaf in leaves.values():
        leaf.requires_grad_()
    context = layers.Context(causal=True, dropout_key=KEY)
    options: Any = {"configs": (config,) * 12, "context": context}
    y, _ = layers.blocks(x, params, **options)
    grads = torch.autograd.grad(y, list(leaves.values()), dy)
    wanted = {n: g.numpy() for n, g in zip(leaves, grads, strict=True)}
    with torch.no_grad():
        _, cache = layers.blocks(x, params, **options)
        dx, dparams, *_ = cache.backward(dy)
    got = tree.flatten({"x": dx, "params": dparams})
    require_close({n: g.numpy() for n, g in got.items()}, wanted, rtol=1e-11)


def test_the_forward_is_that_of_the_paper() -> None:
    """Written again in NumPy, for one head: eq. 9 with layer norms in both functions."""
    config = reversible(block_config(8, 1, 12, activation="relu"))
    x, params, _ = drawn(3, config)

    def norm(x: Any, p: Any) -> Any:
        centred = x - x.mean(axis=-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5) * p.w + p.b

    def attend(x: Any, p: Any) -> Any:
        q, k, v = (x @ m.w + m.b for m in (p.q, p.kv.k, p.kv.v))
        e = np.exp(q @ k.swapaxes(1, 2) / 8**0.5) * np.tri(7)
        return e / e.sum(axis=-1, keepdims=True) @ v @ p.o.w + p.o.b

    x1 = x2 = x
    for block in params:
        y1 = x1 + attend(norm(x2, block.attn_norm), block.attn)
        ffn, inner = block.ffn, norm(y1, block.ffn_norm)
        y2 = x2 + np.maximum(inner @ ffn.up.w + ffn.up.b, 0) @ ffn.down.w + ffn.down.b
        x1, x2 = y1, y2
    y, cache = layers.blocks(x, params, configs=(config,) * 3, context=layers.Context(causal=True))
    np.testing.assert_allclose(y, (x1 + x2) / 2, rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal((cache.y1 + cache.y2) / 2, y)


def test_frozen_parameters_and_adapters() -> None:
    """Frozen ones get None; the gradients of the others are the same."""
    model = GPT(n_layers=2, reversible=True, **SIZES)
    params, tokens = model.init(seed=1, dtype="float64"), np.arange(40).reshape(2, 20) % 32
    wanted = tree.flatten(model.loss(params, tokens, tokens)[1].backward())
    names = [n for i, n in enumerate(tree.flatten(params.stack)) if i % 2]
    some = params._replace(stack=tree.freeze(params.stack, *names))
    grads = tree.flatten(model.loss(some, tokens, tokens)[1].backward())
    assert len(grads) == len(wanted) - len(names)
    require_close(grads, {name: wanted[name] for name in grads}, rtol=1e-12)
    adapted = lora.attach(params, rank=2, alpha=4)
    grads = tree.flatten(model.loss(adapted, tokens, tokens)[1].backward())
    assert grads.keys() == tree.flatten(tree.trained(adapted)).keys()


def test_a_backward_may_be_run_again() -> None:
    model = GPT(n_layers=3, reversible=True, dropout=0.2, **SIZES)
    params, tokens = model.init(seed=1), np.arange(20).reshape(2, 10)
    _, cache = model.loss(params, tokens, tokens, dropout_key=KEY)
    one, other = (tree.flatten(cache.backward()) for _ in range(2))
    assert all(np.array_equal(one[name], other[name]) for name in one)


# ---- What is saved ----


def saved(n_layers: int, **options: Any) -> int:
    """Bytes that a loss of (B, T) = (4, 64) saves for its backward, parameters apart."""
    model = GPT(n_layers=n_layers, **SIZES | options)
    params, tokens = model.init(seed=1), np.arange(256).reshape(4, 64) % 32
    key = KEY if options.get("dropout") else None
    _, cache = model.loss(params, tokens, tokens, dropout_key=key)
    return tree.nbytes((params, cache)) - tree.nbytes(params)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_depth_changes_no_byte(dropout: float) -> None:
    stream = 4 * 64 * 32 * 4  # B * T * D float32
    one = saved(1, reversible=True, dropout=dropout)
    assert one == saved(2, reversible=True, dropout=dropout)
    assert one == saved(12, reversible=True, dropout=dropout)
    both = (saved(1, activation_checkpointing=True, dropout=dropout) - one) / stream
    assert both == -1  # a stream instead of the input of the block, and another one
    assert saved(6, activation_checkpointing=True, dropout=dropout) - one == 4 * stream


def test_the_ledger_shows_it() -> None:
    """The saved set of any depth is the same; only parameters, gradients and state grow."""
    few, many = (
        ledger(GPT(n_layers=n, reversible=True, **SIZES), batch=4, length=64) for n in (2, 12)
    )
    assert few.saved == many.saved and not any(name.startswith("layer") for name in many.saved)
    growth = 2 * (many.params - few.params) + many.state - few.state  # gradients too
    assert many.backward - few.backward == pytest.approx(growth, rel=1e-3)


def test_the_peak_of_a_step_falls() -> None:
    peaks = {}
    tokens = np.arange(256).reshape(4, 64) % 32
    for flag in (False, True):
        model = GPT(n_layers=8, reversible=flag, **SIZES)
        params = model.init(seed=1)
        tracemalloc.start()
        _, cache = model.loss(params, tokens, tokens)
        cache.backward()
        peaks[flag] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        del cache
    assert peaks[True] < 0.35 * peaks[False]


@only("jax")
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_compiler_does_not_undo_it(library: Backend, dropout: float) -> None:
    """A jitted step saves two or three streams a block, as XLA schedules it, instead of thirty."""
    import jax
    import jax.numpy as jnp

    tokens, step = jnp.arange(256).reshape(4, 64) % 32, jnp.asarray(3)
    memory, stream = {}, 4 * 64 * 32 * 4
    for depth, flag in ((2, True), (6, True), (2, False), (6, False)):
        model = GPT(n_layers=depth, reversible=flag, dropout=dropout, **SIZES)
        params = tree.map(library.asarray, model.init(seed=1))

        def run(params: Any, tokens: Any, step: Any, model: LanguageModel = model) -> Any:
            key = ops.RandomKey(1, step=step)
            loss, cache = model.loss(params, tokens, tokens, dropout_key=key)
            return loss, cache.backward()

        compiled = jax.jit(run).lower(params, tokens, step).compile()
        memory[depth, flag] = compiled.memory_analysis().temp_size_in_bytes
        got, wanted = (tree.flatten(f(params, tokens, step)[1]) for f in (compiled, run))
        for name, a in got.items():
            assert np.allclose(a, wanted[name], rtol=1e-4, atol=1e-5), name
    growth = {flag: (memory[6, flag] - memory[2, flag]) / 4 / stream for flag in (False, True)}
    assert growth[True] <= 3 and growth[False] > 20


def test_inference_saves_nothing() -> None:
    model = GPT(n_layers=2, reversible=True, **SIZES)
    params, tokens = model.init(seed=1), np.arange(20).reshape(2, 10)
    wanted, _ = model.forward(params, tokens)
    with inference():
        y, cache = model.forward(params, tokens)
    assert np.array_equal(y, wanted) and tree.nbytes(cache) == 0


# ---- Use: decoding, training, the command ----


def test_generation_is_that_of_the_forward() -> None:
    """Greedy tokens with a KV cache, on NumPy, whose kernel for a token is of one stream."""
    model = GPT(n_layers=3, reversible=True, **SIZES)
    params = tree.map(lambda a: 3 * a, model.init(seed=1))
    (ids,) = generate(model, params, [[1, 2, 3]], max_new_tokens=12)
    text = [1, 2, 3]
    for _ in range(12):
        logits, _ = model.forward(params, np.asarray([text]))
        text.append(int(np.argmax(logits[0, -1])))
    assert list(ids) == text[3:] and len(set(text)) > 3


def test_an_encoder_may_be_reversible() -> None:
    block = block_config(8, 2, 12)
    model = EncoderDecoder((reversible(block),) * 2, (block,) * 2)
    params, rng = model.init(0, dtype="float64"), np.random.default_rng(0)
    src, tgt = rng.normal(size=(2, 5, 8)), rng.normal(size=(2, 3, 8))
    y, cache = model.forward(params, src, tgt)
    grads = cache.backward(np.ones_like(y))
    assert isinstance(cache.encode.stack.layers, ReversibleCache)
    assert tree.flatten(grads).keys() == tree.flatten(params).keys()


def test_train_resume_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    sizes = ["--layers", "3", "--d-model", "16", "--heads", "2", "--max-len", "16"]
    command = ["train", "--data", str(text), *sizes, "--batch", "4", "--reversible"]
    assert main([*command, "--steps", "5", "--out", "run"]) == 0
    model, _ = training.load("run", NUMPY)
    assert model.blocks[0].reversible
    assert main(["train", "--resume", "run", "--steps", "8"]) == 0
    assert len(Path("run/log.jsonl").read_text().splitlines()) == 8
    capsys.readouterr()
    assert main(["memory", "--model", "run", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert not any(name.startswith("layer") for name in result["saved"])
    assert main([*command, "--activation-checkpointing", "--out", "other"]) == 1
    assert "activation_checkpointing excludes reversible blocks" in capsys.readouterr().err
    assert main(["memory", "--model", "run", "--activation-checkpointing"]) == 1


PAGE = (Path(__file__).resolve().parent.parent / "docs" / "reformer.md").read_text("utf-8")


def test_the_table_of_saved_bytes_is_what_the_page_prints() -> None:
    shown = "".join(re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL))
    rows = re.findall(r"^12 layers +([\d.]+ MB)", shown, re.MULTILINE)
    table = re.findall(r"^\| (?:plain|activation.*|reversible) \| ([\d.]+ MB)", PAGE, re.MULTILINE)
    assert rows == table and len(rows) == 3


def test_the_table_of_rounding() -> None:
    """Its rows are of the model that it names; the tokens are others, so a factor is allowed."""
    cells = re.findall(r"^  \| (layers|float\d\d, \w+)(?: caches)? \|(.*)\|$", PAGE, re.MULTILINE)
    table = {name: [float(x) for x in row.split("|")] for name, row in cells}
    assert table.pop("layers") == [2, 4, 8, 12, 24, 48]
    assert list(table) == ["float32, ordinary", "float32, reversible", "float64, reversible"]
    tokens = np.random.default_rng(0).integers(0, 256, (4, 65))

    def gradients(n_layers: int, dtype: str) -> Any:
        model = GPT(256, n_layers, 128, 4, max_len=64, reversible=True)
        params = tree.map(lambda a: a.astype(dtype), model.init(0, dtype="float64"))
        _, cache = model.loss(params, tokens[:, :-1], tokens[:, 1:])
        return tree.map(lambda a: a.astype("float64"), cache.backward())

    for n_layers, shown in zip((2, 4), table["float32, reversible"], strict=False):
        right = gradients(n_layers, "float64")
        off = tree.map(lambda a, b: a - b, gradients(n_layers, "float32"), right)
        distance, whole = (
            np.sqrt(sum(float(np.sum(a**2)) for a in tree.flatten(each).values()))
            for each in (off, right)
        )
        assert shown / 2 < distance / whole < 2 * shown
    for row in table.values():  # "it grows slowly with the depth"
        assert 1 < row[-1] / row[0] < 3


# ---- What is refused ----


def test_what_cannot_be_inverted_is_refused() -> None:
    experts = layers.ExpertsConfig(n_experts=3, top_k=2, d_ff=5)
    for options, message in (
        ({"norm_placement": "post"}, r'another norm_placement than "post"'),
        ({"parallel": True}, r"^block: reversible excludes parallel$"),
        ({"experts": experts}, r"^block: reversible excludes experts: rounding"),
    ):
        with pytest.raises(ValueError, match=message):
            block_config(8, 2, 12, reversible=True, **options)
    with pytest.raises(ValueError, match='another norm_placement than "post"'):
        GPT(n_layers=1, reversible=True, norm_placement="post", **SIZES)
    with pytest.raises(ValueError, match=r"^LanguageModel: activation_checkpointing excludes"):
        GPT(n_layers=1, reversible=True, activation_checkpointing=True, **SIZES)
    block = block_config(8, 2, 12)
    with pytest.raises(ValueError, match=r"all configs must have one reversible, got \[False, T"):
        LanguageModel(None, (block, reversible(block)), head=None)


def test_arguments_that_do_not_fit_are_refused() -> None:
    config = reversible(block_config(8, 2, 12))
    x, params, _ = drawn(2, config)
    options: Any = {"configs": (config,) * 2}
    with pytest.raises(ValueError, match=r"^blocks: reversible excludes activation_checkpointing$"):
        layers.blocks(x, params, activation_checkpointing=True, **options)
    with pytest.raises(ValueError, match=r"no cross-attention, got a memory$"):
        layers.blocks(x, params, layers.SideInputs(x), **options)
    crossed = (config.init(NUMPY.generator(0, "float64"), cross=True),)
    with pytest.raises(ValueError, match=r"^block: memory and params.cross need each other"):
        layers.blocks(x, crossed, **options)
    with pytest.raises(ValueError, match=r"^block: a reversible block has two streams"):
        layers.block(x, params[0], config=config)
    _, cache = layers.blocks(x, params, **options)
    with pytest.raises(ValueError, match=r"^blocks: drouter_logits must be None"):
        cache.backward(x, [x, None])
    with pytest.raises(AttributeError, match="save no cache of each layer"):
        cache.blocks  # noqa: B018


def test_pictures_of_what_is_not_saved_are_refused() -> None:
    model = GPT(n_layers=2, reversible=True, **SIZES)
    params, tokens = model.init(), np.zeros((1, 4), np.int64)
    with pytest.raises(ValueError, match="reversible blocks save no attention probabilities"):
        attention_maps(model, params, tokens)
    with pytest.raises(TypeError, match="reversible blocks save no outputs of layers"):
        flow(model, params, tokens, tokens)


def test_numbas_step_is_numpys() -> None:
    pytest.importorskip("numba", reason="extra numba is not installed")
    model = GPT(n_layers=2, reversible=True, dropout=0.1, **SIZES)
    params, tokens = model.init(seed=1), np.arange(256).reshape(4, 64) % 32
    wanted = tree.flatten(model.loss(params, tokens, tokens, dropout_key=KEY)[1].backward())
    with kernels("numba"):
        got = tree.flatten(model.loss(params, tokens, tokens, dropout_key=KEY)[1].backward())
    for name, a in got.items():
        np.testing.assert_allclose(a, wanted[name], rtol=2e-4, atol=2e-5, err_msg=name)


def test_blocks_of_both_kinds_are_refused() -> None:
    configs = tuple(block_config(8, 2, 16, reversible=on) for on in (True, False))
    params = tuple(config.init(NUMPY.generator(0, "float64")) for config in configs)
    with pytest.raises(ValueError, match="either all blocks must be reversible, or none"):
        layers.blocks(np.ones((1, 3, 8)), params, configs=configs)


def test_encoder_decoders_that_cannot_be_reversible() -> None:
    streams, plain = (block_config(8, 2, 16, reversible=on) for on in (True, False))
    with pytest.raises(ValueError, match="a decoder's blocks cannot be reversible"):
        EncoderDecoder((plain,), (streams,))
    with pytest.raises(ValueError, match="activation_checkpointing excludes reversible blocks"):
        EncoderDecoder((streams,), (plain,), activation_checkpointing=True)
