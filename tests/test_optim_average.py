"""The moving average of parameters, gradients of several batches as one, and the loss's scale."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xformer import GPT, Transformer, ops, optim, tree
from xformer.backends import Backend
from xformer.optim import LossScale

IGNORED = -1


class Micro(NamedTuple):
    tokens: Any  # (B, T)
    targets: Any
    n_targets: int


# ---- Moving average ----


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999, 1.0])
def test_ema_equals_torch(decay: float) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    rng = np.random.default_rng(1)
    layer = torch.nn.Linear(3, 2).double()
    theirs = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(decay))
    average: Any = None
    for _ in range(20):
        params = {"weight": rng.normal(size=(2, 3)), "bias": [rng.normal(size=2), None]}
        with torch.no_grad():
            layer.weight.copy_(torch.tensor(params["weight"]))
            layer.bias.copy_(torch.tensor(params["bias"][0]))
        theirs.update_parameters(layer)
        average = params if average is None else optim.ema(average, params, decay=decay)
    assert np.allclose(average["weight"], theirs.module.weight.detach().numpy(), rtol=1e-12)
    assert np.allclose(average["bias"][0], theirs.module.bias.detach().numpy(), rtol=1e-12)
    assert average["bias"][1] is None


def test_ema_on_every_library(library: Backend) -> None:
    a, b = library.asarray([1.0, 2.0], "float32"), library.asarray([3.0, 0.0], "float32")
    got = library.to_numpy(optim.ema(a, b, decay=np.float64(0.75)))
    assert got.tolist() == [1.5, 1.5] and got.dtype == np.float32


def test_bad_averages() -> None:
    w = np.ones((2, 3))
    for decay in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"^ema: decay must lie in \[0, 1\], got"):
            optim.ema(w, w, decay=decay)
    with pytest.raises(ValueError, match=r"^ema: the average of params must have shape \(2, 3\)"):
        optim.ema(w[:1], w, decay=0.5)


# ---- Accumulation ----

GPT_SMALL = GPT(vocab_size=13, n_layers=2, d_model=8, n_heads=2, max_len=7)


def text(seed: int, ignored: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 13, (6, 8))
    targets = rows[:, 1:].copy()
    targets[rng.random(targets.shape) < ignored] = IGNORED
    targets[0, 0] = 1  # one at least
    return rows[:, :-1], targets


def cut(tokens: np.ndarray, targets: np.ndarray, ends: list[int]) -> list[Micro]:
    """The rows of a batch in parts that end before these."""
    bounds = [0, *sorted(ends), len(tokens)]
    parts = [slice(a, b) for a, b in itertools.pairwise(bounds) if a < b]
    return [Micro(tokens[p], targets[p], int((targets[p] != IGNORED).sum())) for p in parts]


def gaps(got: Any, wanted: Any) -> float:
    leaves = tree.flatten(wanted)
    assert tree.flatten(got).keys() == leaves.keys()
    return max(float(np.max(np.abs(a - leaves[n]))) for n, a in tree.flatten(got).items())


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 100),
    ignored=st.sampled_from([0.0, 0.3, 0.9]),
    ends=st.lists(st.integers(1, 5), max_size=4, unique=True),
    smoothing=st.sampled_from([0.0, 0.1]),
)
def test_micro_batches_are_the_big_batch(
    seed: int, ignored: float, ends: list[int], smoothing: float
) -> None:
    params = GPT_SMALL.init(seed=1, dtype="float64")
    tokens, targets = text(seed, ignored)
    options: Any = {"ignore_index": IGNORED, "label_smoothing": smoothing, "z_loss": 1e-2}
    loss, cache = GPT_SMALL.loss(params, tokens, targets, **options)
    parts = cut(tokens, targets, ends)

    def one(params: Any, i: int) -> Any:
        return GPT_SMALL.loss(params, parts[i].tokens, parts[i].targets, **options)

    mean, grads = optim.accumulate(one, params, parts)
    assert float(mean) == pytest.approx(float(loss), rel=1e-12)
    assert gaps(grads, cache.backward()) < 1e-12


def test_the_mean_of_means_would_be_another(library: Backend) -> None:
    """On every library, with frozen leaves; one micro-batch has nothing to learn from."""
    tokens, targets = text(3, 0.4)
    targets[1], targets[2:5, 1:] = IGNORED, IGNORED
    parts = cut(tokens, targets, [1, 2, 5])
    assert [part.n_targets for part in parts][1] == 0
    params = tree.freeze(GPT_SMALL.init(seed=1, dtype="float64"), "embed.*")
    params = tree.map(library.asarray, params)

    def loss(tokens: np.ndarray, targets: np.ndarray) -> Any:
        arrays = [library.asarray(a) for a in (tokens, targets)]
        return GPT_SMALL.loss(params, *arrays, ignore_index=IGNORED)

    def one(params: Any, i: int) -> Any:
        return loss(parts[i].tokens, parts[i].targets)

    whole, cache = loss(tokens, targets)
    mean, grads = optim.accumulate(one, params, parts)
    grads, wanted = (tree.map(library.to_numpy, g) for g in (grads, cache.backward()))
    assert float(mean) == pytest.approx(float(whole), rel=1e-12)
    assert gaps(grads, wanted) < 1e-12
    assert grads.embed.table is None
    means = [float(one(params, i)[0]) for i, part in enumerate(parts) if part.n_targets]
    assert abs(sum(means) / len(means) - float(whole)) > 1e-3


def test_pairs_of_texts() -> None:
    """Padding beyond the longest row of a micro-batch is left out, as a loader would."""
    model = Transformer(
        src_vocab_size=9,
        tgt_vocab_size=11,
        d_model=8,
        n_heads=2,
        n_encoder_layers=1,
        n_decoder_layers=2,
        max_len=8,
    )
    params = model.init(seed=1, dtype="float64")
    rng = np.random.default_rng(2)
    src, tgt = rng.integers(1, 9, (4, 8)), rng.integers(1, 11, (4, 8))
    for row, (s, t) in enumerate([(3, 4), (2, 2), (8, 7), (5, 8)]):
        src[row, s:], tgt[row, t:] = 0, 0

    def loss_of(params: Any, src: Any, tgt: Any) -> Any:
        return model.loss(params, src, tgt[:, :-1], tgt[:, 1:], label_smoothing=0.1)

    loss, cache = loss_of(params, src, tgt)
    parts = [(src[:2, :3], tgt[:2, :4]), (src[2:], tgt[2:])]
    micro = [Micro(s, t, int((t[:, 1:] != 0).sum())) for s, t in parts]

    def one(params: Any, i: int) -> Any:
        return loss_of(params, *parts[i])

    mean, grads = optim.accumulate(one, params, micro)
    assert float(mean) == pytest.approx(float(loss), rel=1e-12)
    assert gaps(grads, cache.backward()) < 1e-12


def test_one_micro_batch_is_itself_bit_for_bit() -> None:
    params = GPT_SMALL.init(seed=1)
    tokens, targets = text(1, 0.0)
    key = ops.RandomKey(1, step=2)
    loss, cache = GPT_SMALL.loss(params, tokens, targets, dropout_key=key)
    mean, grads = optim.accumulate(
        lambda params, i: GPT_SMALL.loss(params, tokens, targets, dropout_key=key),
        params,
        [Micro(tokens, targets, targets.size)],
    )
    assert mean == loss and mean.dtype == np.float32
    assert gaps(grads, cache.backward()) == 0


def test_no_targets() -> None:
    for parts in ([], [Micro(None, None, 0)]):
        message = f"^accumulate: there must be at least one target, got 0 in {len(parts)} micro"
        with pytest.raises(ValueError, match=message):
            optim.accumulate(lambda params, i: (None, None), None, parts)


# ---- The scale of the loss ----


def test_scale_equals_torch() -> None:
    """The same scale after each of 60 steps, some of which overflow."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rng = np.random.default_rng(1)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**10, growth_factor=3.0, backoff_factor=0.25, growth_interval=4
    )
    scale = LossScale(2.0**10)
    w = torch.zeros(3, requires_grad=True)
    optimiser = torch.optim.SGD([w], lr=1.0)
    params = np.zeros(3, np.float32)
    for _ in range(60):
        g = rng.normal(size=3).astype(np.float32)
        g[0] = np.inf if rng.random() < 0.15 else g[0]
        optimiser.zero_grad()
        w.grad = torch.tensor(g) * scaler.scale(torch.ones(()))
        scaler.step(optimiser)
        scaler.update()
        grads, finite = scale.unscale(g * np.float32(scale.scale), params)
        assert finite == bool(np.isfinite(g).all())
        if finite:
            params = params - grads
        scale = scale.update(finite, growth=3.0, backoff=0.25, interval=4)
        assert scale.scale == scaler.get_scale()
        assert np.allclose(params, w.detach().numpy(), rtol=1e-6)


def test_small_gradients_outlive_float16() -> None:
    """A gradient of 1e-6 / 1024 is 0 in float16, and is not where the loss is scaled."""
    w = np.float32([1.0, 2.0])
    half = w.astype(np.float16)
    loss = np.float32(1.0)  # as cross-entropy in float32 above a network in float16
    for scale, wanted in ((LossScale(), 1e-6 / 1024), (LossScale(1.0), 0.0)):
        dloss = scale.dloss(loss)
        grads = (half * 0 + np.float16(1)) * (dloss * np.float32(1e-6 / 1024)).astype(np.float16)
        wide, finite = scale.unscale(grads, w)
        assert finite and wide.dtype == np.float32
        assert wide == pytest.approx(np.full(2, wanted), rel=1e-3)


def test_scale_on_every_library(library: Backend) -> None:
    w = {"a": library.asarray([1.0, 2.0], "float32"), "b": [None, library.asarray(3.0, "float32")]}
    scale = LossScale(8.0)
    loss = library.asarray(0.5, "float32")
    assert float(scale.dloss(loss)) == 8.0
    grads, finite = scale.unscale(tree.map(lambda p: p * scale.dloss(loss), w), w)
    assert finite and library.to_numpy(grads["a"]).tolist() == [1.0, 2.0]
    for bad in (float("inf"), float("nan")):
        broken = {**w, "b": [None, library.asarray(bad, "float32")]}
        assert not scale.unscale(broken, w)[1]


def test_the_scale_grows_and_shrinks() -> None:
    scale = LossScale()
    assert scale == (65536.0, 0)
    assert scale.update(False) == (32768.0, 0)
    for _ in range(1999):
        scale = scale.update(True)
    assert scale == (65536.0, 1999)
    assert scale.update(True) == (131072.0, 0)
    assert scale.update(False) == (32768.0, 0)  # and the count begins again
    assert LossScale(1e308).update(True, interval=1) == (1e308, 0)  # not to infinity
    assert tree.flatten(scale) == {"scale": 65536.0, "good_steps": 1999}


def test_a_scale_does_not_fall_to_zero() -> None:
    """What is not finite at any scale is said, and the last scale can still be divided by."""
    scale = LossScale()
    with pytest.raises(FloatingPointError, match=r"not finite at a scale of 1\.18e-38 either"):
        for _ in range(2000):
            scale = scale.update(False)
    assert scale.scale == 2.0**-126
    with np.errstate(all="raise"):
        grads, finite = scale.unscale(scale.dloss(np.float32(1)), np.float32(0))
    assert finite and grads == 1


def test_bad_scales() -> None:
    for options, message in (
        ({"growth": 0.5}, r"update: growth must lie in \[1, inf\], got 0\.5"),
        ({"backoff": 1.5}, r"update: backoff must lie in \[0, 1\], got 1\.5"),
        ({"interval": 0}, "update: interval must be an int of at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            LossScale().update(True, **options)
    with pytest.raises(ValueError, match=r"^unscale: there are no gradients$"):
        LossScale().unscale((), ())
