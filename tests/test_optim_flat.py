"""Gradients in one array: the same numbers, one call a step, views, two processes beside one."""

from __future__ import annotations

import math
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hanging import SECONDS
from libraries import ON_DEVICE, STAND_IN, only

import xformer
from xformer import backends, optim, tree
from xformer.backends import Backend
from xformer.optim.loss_scale import Scaled
from xformer.training import Batch, Diverged, TrainConfig, Windows, loss_of, start, train

TEXT = np.frombuffer(b"to be or not to be, that is the question " * 20, np.uint8)
MODEL = xformer.GPT(vocab_size=256, n_layers=1, d_model=6, n_heads=2, max_len=6)


def gradients(library: Backend) -> Any:
    """Of sizes around a multiple of 16, a leaf that is absent, and one without elements."""
    shapes = [(3, 5), (4, 4), (), (17,), (0, 3)]
    leaves: list[Any] = [
        library.asarray(np.random.default_rng(i).normal(size=s), "float32")
        for i, s in enumerate(shapes)
    ]
    return {"a": leaves[:2], "b": None, "c": tuple(leaves[2:])}


def test_the_same_numbers(library: Backend) -> None:
    grads, calls = gradients(library), []

    def doubled(flat: Any) -> Any:
        calls.append(tuple(flat.shape))
        return flat * 2.0

    found = optim.reduced(grads, doubled)
    assert calls == [(16 + 16 + 16 + 32,)]
    for name, leaf in tree.flatten(grads).items():
        got = tree.flatten(found)[name]
        assert got.shape == leaf.shape and got.dtype == leaf.dtype
        assert np.array_equal(library.to_numpy(got), 2 * library.to_numpy(leaf)), name
    assert found["b"] is None


def test_one_array_for_each_dtype(library: Backend) -> None:
    of = {"a": "float32", "b": "float64", "c": "float32"}
    grads = {name: library.asarray(np.ones(3), dtype) for name, dtype in of.items()}
    sizes: list[int] = []

    def same(flat: Any) -> Any:
        sizes.append(math.prod(flat.shape))
        return flat

    found = optim.reduced(grads, same)
    assert sizes == [32, 16]
    assert [str(x.dtype) for x in found.values()] == [str(x.dtype) for x in grads.values()]
    assert optim.reduced({}, same) == {} and len(sizes) == 2


@only("numpy", STAND_IN)
def test_leaves_are_views(library: Backend) -> None:
    """Which clipping and the optimiser may write to; each begins at whole packs."""
    held: list[Any] = []

    def same(flat: Any) -> Any:
        held.append(flat)
        return flat

    def host(x: Any) -> np.ndarray:
        return getattr(x, "host", x)

    found = optim.reduced(gradients(library), same)
    if library.name == "numpy":  # CuPy's clipping is never in place
        found, _ = optim.clip_by_global_norm(found, max_norm=0.1, donate=True)
    first = host(held[0]).ctypes.data
    for leaf in filter(lambda x: x.size, tree.flatten(found).values()):
        assert np.shares_memory(host(leaf), host(held[0]))
        assert (host(leaf).ctypes.data - first) % 64 == 0


def test_what_reduce_gives_is_checked(library: Backend) -> None:
    grads = gradients(library)
    with pytest.raises(ValueError, match="reduced: what reduce returns must have shape"):
        optim.reduced(grads, lambda flat: flat[1:])
    with pytest.raises(TypeError, match="reduced: what reduce returns"):
        optim.reduced(grads, lambda flat: None)


# ---- The loop ----


def losses(library: Backend, config: TrainConfig, **options: Any) -> list[tuple[float, float]]:
    source = Windows(TEXT, MODEL.context, config.batch_size)
    params = tree.map(library.asarray, MODEL.init(0))
    run = train(loss_of(MODEL), start(params, config), source, config, library, **options)
    return [(step.loss, step.norm) for step in run]


@pytest.mark.parametrize("donate", [False, True])
def test_the_same_steps(library: Backend, donate: bool) -> None:
    """Of accumulated batches too there is one call; nothing else changes a bit."""
    donate = donate and library.name != "numpy-readonly"  # whose arrays cannot be written to
    config = TrainConfig(steps=3, batch_size=2, accumulate=2, clip=0.1, lr=1e-2, eval_every=3)
    calls = []

    def same(flat: Any) -> Any:
        calls.append(math.prod(flat.shape))
        return flat

    got = losses(library, config, donate=donate, reduce=same)
    assert len(calls) == 3
    wanted = losses(library, config, donate=donate)
    # Sums of torch and JAX depend on where arrays begin, CuPy's of repeated ids on their order.
    exact = library.name not in ("torch", "jax", "cupy")
    assert got == wanted if exact else np.allclose(got, wanted, rtol=1e-6)


@only(*ON_DEVICE)
def test_captured_steps(library: Backend) -> None:
    """The reduction is captured with the step; CuPy cannot: it brings a table of the leaves."""
    from nvidia import calling_cublaslt

    config = TrainConfig(steps=3, batch_size=2, lr=1e-2, eval_every=3)
    options: Any = {"donate": True, "reduce": lambda flat: flat * 0.5, "deterministic": True}
    refused = pytest.warns(RuntimeWarning, match=r"no graph: xformer\.optim\.flat\._joined: ")
    with calling_cublaslt(library):
        wanted = losses(library, config, **options)
        with nullcontext() if library.name == STAND_IN else refused:
            assert losses(library, config, compiled=True, **options) == wanted


@only(*ON_DEVICE)
def test_overflow_is_that_of_all(library: Backend) -> None:
    """A step of float16 is made anew where gradients of another process have overflowed."""
    config = TrainConfig(steps=2, batch_size=2, lr=1e-2, eval_every=2, precision="float16")
    calls: list[int] = []

    def first_is_infinite(flat: Any) -> Any:
        calls.append(math.prod(flat.shape))
        return flat + np.inf if len(calls) == 1 else flat

    losses(library, config, reduce=first_is_infinite)
    assert len(calls) == 3


@only(*ON_DEVICE)
def test_an_infinite_loss_of_its_own_stops_nobody_alone(library: Backend) -> None:
    """The batch is passed over by all, as an overflow is."""
    config = TrainConfig(steps=2, batch_size=2, lr=1e-2, eval_every=2, precision="float16")
    called: list[int] = []

    def first_is_infinite(params: Any, batch: Batch, place: Backend, key: Any = None) -> Any:
        value, cache = loss_of(MODEL)(params, batch, place, key)
        called.append(1)
        return (value, cache) if len(called) > 1 else (value + np.inf, Scaled(cache, np.inf))

    source = Windows(TEXT, MODEL.context, config.batch_size)
    params = tree.map(library.asarray, MODEL.init(0))

    def steps(**options: Any) -> list[float]:
        called.clear()
        run = train(first_is_infinite, start(params, config), source, config, library, **options)
        return [step.loss for step in run]

    with pytest.raises(Diverged, match="step 1"):
        steps()
    assert len(called) == 1
    assert all(map(math.isfinite, steps(reduce=lambda flat: flat))) and len(called) == 3


class Half:
    """Every second batch of a source, from one on."""

    def __init__(self, source: Any, first: int) -> None:
        self.source, self.first = source, first

    def batch(self, i: int) -> Batch:
        return self.source.batch(2 * i + self.first)


@only("numpy")
def test_two_processes_are_one_with_twice_the_batch(library: Backend) -> None:
    """Here two threads, each with half of the batches, beside one that accumulates both."""
    config = TrainConfig(steps=4, batch_size=2, clip=0.5, lr=1e-2, eval_every=4)
    source = Windows(TEXT, MODEL.context, config.batch_size)
    init = tree.map(lambda p: library.asarray(p, "float64"), MODEL.init(0))
    flats: dict[int, Any] = {}
    barrier = threading.Barrier(2, timeout=SECONDS)
    ends: dict[int, Any] = {}

    def process(rank: int) -> None:
        def mean(flat: Any) -> Any:
            flats[rank] = flat
            barrier.wait()
            total = (flats[0] + flats[1]) / 2
            barrier.wait()
            return total

        given = start(init, config), Half(source, rank), config, backends.get()
        *_, ends[rank] = train(loss_of(MODEL), *given, reduce=mean)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    both = TrainConfig(**{**vars(config), "accumulate": 2})
    *_, whole = train(loss_of(MODEL), start(init, both), source, both, library)
    one, other, wanted = (tree.flatten(x.params) for x in (ends[0], ends[1], whole))
    assert ends[0].norm == ends[1].norm == pytest.approx(whole.norm, rel=1e-9)
    assert ends[0].loss != ends[1].loss
    for name, leaf in wanted.items():
        assert np.array_equal(one[name], other[name]), name
        assert np.allclose(one[name], leaf, rtol=1e-9, atol=1e-12), name
