"""Initial weights: torch's bounds and spreads, the same numbers on every library, clear errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from libraries import only

import xformer
from xformer import backends, initializers, tree
from xformer.backends import Backend
from xformer.initializers import normal, xavier_normal, xavier_uniform

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
