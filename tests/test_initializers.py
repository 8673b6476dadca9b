"""Initial weights: torch's bounds and spreads, the same numbers on every library, clear errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from block_configs import block_config
from libraries import only

import xformer
from xformer import backends, initializers, layers, optim, tree
from xformer.backends import Backend
from xformer.initializers import fixup, normal, xavier_normal, xavier_uniform
from xformer.layers import (
    AttentionConfig,
    BlockConfig,
    EmbedConfig,
    ExpertsConfig,
    FeedForwardConfig,
)
from xformer.models import LanguageModel, LMHead

SHAPE = (300, 500)  # 150,000 draws


def draw(fn: Callable[..., Any], **options: Any) -> np.ndarray:
    return np.asarray(fn(backends.get().generator(3, "float64"), SHAPE, **options))


@pytest.mark.parametrize("gain", [1.0, 2.5])
def test_xavier_uniform(gain: float) -> None:
    w = draw(xavier_uniform, gain=gain)
    bound = gain * math.sqrt(6 / sum(SHAPE))
    assert w.shape == SHAPE
    assert np.abs(w).max() <= bound
    assert np.abs(w).max() > 0.999 * bound
    assert w.std() == pytest.approx(bound / math.sqrt(3), rel=0.01)
    assert abs(w.mean()) < 0.01 * bound


@pytest.mark.parametrize("gain", [1.0, 2.5])
def test_xavier_normal(gain: float) -> None:
    w = draw(xavier_normal, gain=gain)
    assert w.std() == pytest.approx(gain * math.sqrt(2 / sum(SHAPE)), rel=0.01)
    assert np.abs(w).max() > 3 * w.std()  # not uniform
    assert abs(w.mean()) < 0.01 * w.std()


def test_normal() -> None:
    assert draw(normal).std() == pytest.approx(0.02, rel=0.01)
    assert draw(normal, std=3.0).std() == pytest.approx(3.0, rel=0.01)
    assert normal(backends.get().generator(0), (2, 3, 4)).shape == (2, 3, 4)
    assert not draw(normal, std=0.0).any()


def test_bounds_and_spreads_are_torchs() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.manual_seed(0)
    w = torch.empty(SHAPE, dtype=torch.float64)
    theirs = torch.nn.init.xavier_uniform_(w, gain=1.5).numpy()
    ours = draw(xavier_uniform, gain=1.5)
    assert np.abs(ours).max() == pytest.approx(np.abs(theirs).max(), rel=1e-3)
    theirs = torch.nn.init.xavier_normal_(w, gain=1.5).numpy()
    assert draw(xavier_normal, gain=1.5).std() == pytest.approx(theirs.std(), rel=0.01)


def test_same_numbers_on_every_library(library: Backend) -> None:
    for fn in (normal, xavier_normal, xavier_uniform):
        exact = np.asarray(fn(backends.get().generator(5, "float64"), (3, 7)))
        for dtype in ("float32", "float64"):
            got = library.to_numpy(fn(library.generator(5, dtype), (3, 7)))
            assert got.dtype == dtype
            assert np.array_equal(got, exact.astype(dtype))


@only(*backends.NAMES)
def test_models_start_the_same_on_every_backend(library: Backend) -> None:
    gpt = xformer.GPT(vocab_size=7, n_layers=2, d_model=4, n_heads=2, max_len=3)
    network = xformer.Transformer(
        src_vocab_size=5,
        tgt_vocab_size=7,
        d_model=4,
        n_heads=2,
        n_encoder_layers=1,
        n_decoder_layers=1,
        max_len=6,
    )
    for model in (gpt, network):
        wanted = tree.flatten(model.init(seed=1))
        got = tree.flatten(model.init(seed=1, backend=library.name))
        assert got.keys() == wanted.keys()
        for name, p in got.items():
            assert np.array_equal(library.to_numpy(p), np.asarray(wanted[name])), name
        other = tree.flatten(model.init(seed=2, backend=library.name))
        assert any(not np.array_equal(library.to_numpy(p), wanted[k]) for k, p in other.items())


PARTS: dict[str, Any] = {"norm_placement": "none", "residual_scale": 1.0}
FFNS: dict[str, Any] = {
    "plain": FeedForwardConfig(11),
    "gated": FeedForwardConfig(11, "silu", gated=True),
    "experts": ExpertsConfig(3, 2, 11),
}


@pytest.mark.parametrize("ffn", FFNS)
def test_fixup_follows_the_rules_of_the_paper(ffn: str) -> None:
    """arXiv:1901.09321, section 3, rules 1 and 2: by the names of the parameters."""
    blocks = (BlockConfig(AttentionConfig(6, 2), FFNS[ffn], **PARTS),) * 5
    model = LanguageModel(EmbedConfig(13, 6, 6, max_len=7), blocks, head=LMHead(tied=False))
    params = model.init(seed=1, dtype="float64")
    before, after = tree.flatten(params), tree.flatten(fixup(params, n_branches=10))
    w = "" if ffn == "experts" else ".w"
    hidden = {"plain": 10**-0.5, "gated": 10**-0.25, "experts": 10**-0.25}[ffn]
    ratios = dict.fromkeys(("attn.q.w", "attn.kv.k.w", "attn.kv.v.w"), 10**-0.5)
    ratios |= {f"ffn.up{w}": hidden, f"ffn.gate{w}": hidden, "attn.o.w": 0, f"ffn.down{w}": 0}
    wanted = {f"stack.blocks.{i}.{name}": r for i in range(5) for name, r in ratios.items()}
    wanted["head.w"] = 0
    assert wanted.keys() - before.keys() == (
        {f"stack.blocks.{i}.ffn.gate.w" for i in range(5)} if ffn == "plain" else set()
    )
    for name, p in before.items():
        np.testing.assert_allclose(after[name], wanted.get(name, 1) * p, rtol=1e-15, err_msg=name)
    assert all((after[f"stack.blocks.4.{name}_scale"] == 1).all() for name in ("attn", "ffn"))
    tokens = np.arange(8).reshape(2, 4)
    loss, _ = model.loss(fixup(params, n_branches=10), tokens, tokens)
    assert loss == pytest.approx(math.log(13), rel=1e-14)  # the head is 0


def test_fixup_counts_cross_attention_and_a_shared_memory() -> None:
    model = xformer.Transformer(11, 13, 6, 2, 1, 2, 7, shared_memory=True, tied=True)
    before = model.init(seed=1, dtype="float64")
    after = tree.flatten(fixup(before, n_branches=8))
    for name, p in tree.flatten(before).items():
        if ".cross.q.w" in name or (".memory." in name and name.endswith(".w")):
            np.testing.assert_allclose(after[name], 8**-0.5 * p, rtol=1e-15)
        elif ".cross.o.w" in name or "ffn.down.w" in name:
            assert not after[name].any(), name
        elif "embed" in name or name.endswith(".b"):
            assert after[name] is p


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fixup_starts_as_the_identity(library: Backend, dtype: str) -> None:
    model = xformer.GPT(11, 3, 6, 2, 7, **PARTS)
    params = fixup(model.init_from(library.generator(0, dtype)), n_branches=6)
    assert {p.dtype for p in tree.flatten(params).values()} == {params.embed.table.dtype}
    tokens = library.asarray(np.array([[1, 0, 10, 4]]))
    hidden, _ = model.hidden(params, tokens)
    (embedded, _), _ = layers.embed(params.embed, ids=tokens, config=model.embed)
    assert np.array_equal(library.to_numpy(hidden), library.to_numpy(embedded))


def first_update(n_layers: int, *, by_fixup: bool, bias: bool = False) -> float:
    """The rms of the change of the hidden states by a step of SGD on the blocks, over its lr."""
    model = xformer.GPT(64, n_layers, 16, 2, 16, bias=bias, **PARTS)
    params = model.init(seed=0, dtype="float64")
    if by_fixup:
        params = fixup(params, n_branches=2 * n_layers)
    params = tree.freeze(params, "embed.*")
    tokens, targets = np.random.default_rng(0).integers(0, 64, (2, 4, 16))
    before, _ = model.hidden(params, tokens)
    trained, lr = tree.trained(params), 1e-4
    grads = model.loss(params, tokens, targets)[1].backward()
    trained, _ = optim.sgd(trained, grads, optim.sgd_init(trained), lr=lr)
    after, _ = model.hidden(tree.join(params, trained), tokens)
    return float(np.sqrt(np.mean((after - before) ** 2)) / lr)


def test_an_update_by_fixup_does_not_depend_on_depth() -> None:
    """The aim of arXiv:1901.09321 (section 3): each step changes the output by a multiple of lr."""
    shallow, deep = (first_update(n, by_fixup=True) for n in (3, 48))
    assert 0.8 < deep / shallow < 1.25
    assert first_update(12, by_fixup=False) > 20 * first_update(3, by_fixup=False)


def test_biases_after_the_last_weights_make_it_depend_on_depth() -> None:
    """They all get the same gradient, whatever the weights: docs/without-norm.md."""
    shallow, deep = (first_update(n, by_fixup=True, bias=True) for n in (3, 48))
    assert 12 < deep / shallow < 20  # 16 times as many


def test_fixup_of_nothing() -> None:
    for n in (0, -1, 2.0, None):
        with pytest.raises(ValueError, match=r"^fixup: n_branches must be an int of at least 1, g"):
            fixup(xformer.GPT(11, 1, 6, 2, 7).init(), n_branches=n)
    with pytest.raises(ValueError, match=r"^fixup: params must have sublayers, such as those of a"):
        fixup({"w": np.ones(3)}, n_branches=2)
    frozen = tree.freeze(xformer.GPT(11, 1, 6, 2, 7).init(), "*.attn.q.w")
    assert isinstance(fixup(frozen, n_branches=2).stack.blocks[0].attn.q.w, tree.Frozen)


@pytest.mark.parametrize("fn", [xavier_uniform, xavier_normal])
@pytest.mark.parametrize("shape", [(), (3,), (3, 4, 5)])
def test_xavier_is_for_two_axes(fn: Callable[..., Any], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^Xavier initialisation is for \(I, O\) weights, got sh"):
        fn(backends.get().generator(0), shape)


def test_bad_numbers() -> None:
    rng = backends.get().generator(0)
    for std in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=r"^normal: std must lie in \[0, inf\], got"):
            initializers.normal(rng, (2, 2), std=std)
    for fn in (xavier_normal, xavier_uniform):
        with pytest.raises(
            ValueError, match=rf"^{fn.__name__}: gain must lie in \[0, inf\], got -1"
        ):
            fn(rng, (2, 2), gain=-1.0)
        assert fn(rng, (0, 0)).shape == (0, 0)
        assert fn(rng, (0, 3)).shape == (0, 3)


def test_bad_dtype_and_backend() -> None:
    gpt = xformer.GPT(vocab_size=7, n_layers=1, d_model=4, n_heads=2, max_len=3)
    for dtype in ("float16", "int64", "text"):
        message = f"^backend numpy computes in float32 and float64, not {dtype}$"
        with pytest.raises(ValueError, match=message):
            gpt.init(dtype=dtype)
    with pytest.raises(ValueError, match=r"^backend must be one of numpy, .*, got 'tensorflow'$"):
        gpt.init(backend="tensorflow")


@pytest.mark.parametrize(
    ("options", "sublayer"),
    [
        ({"output": "none"}, "attn"),
        ({"output": "bias"}, "attn"),
        ({"d_ff": 6, "down": False}, "ffn"),
    ],
)
def test_fixup_needs_linear_layers_at_the_ends(options: Any, sublayer: str) -> None:
    config = block_config(6, 2, norm_placement="none", **{"d_ff": 8} | options)
    params = config.init(backends.get("numpy").generator(0, "float64"))
    with pytest.raises(ValueError, match=rf"must end with a linear layer, got none in {sublayer}"):
        fixup(params, n_branches=2)
