"""Whole training steps and whole texts that look at no value, so that no device is waited for.

On torch's meta device, which has no values; on array-api-strict's second device, where nothing may
depend on values and arrays of two devices do not mix; and on the CUDA stand-in and a GPU, through
the launchers of the kernels. Only `Backend.to_numpy` may read, and is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
from causal_models import V, causal
from libraries import ON_DEVICE, opened

import xformer
from xformer import backends, ops, optim, pretrained, tree
from xformer.backends import Backend
from xformer.dispatch import Kernel, Overridable
from xformer.dispatch.checks import in_range
from xformer.generation import beam_search, generate, prefill, samplers, speculative
from xformer.plots.maps import attention_maps
from xformer.training import Batch, TrainConfig, Windows, loss_of, start, train

META, STRICT = "torch's meta device", "array-api-strict"
READS = ("__bool__", "__int__", "__float__", "__index__", "__array__", "__buffer__")
READS += ("get", "item", "tolist")  # of CuPy
BERT = {
    **{"vocab_size": V, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3},
    **{"intermediate_size": 20, "max_position_embeddings": 8, "num_labels": 3},
}
TOKENS = np.random.default_rng(0).integers(0, V, 200)


class Unread(NamedTuple):
    """A backend whose arrays raise where they are looked at."""

    place: Backend
    reads: list[tuple[int, ...]]  # shapes of what to_numpy has read

    def params(self, model: Any) -> Any:
        return tree.map(lambda p: self.place.asarray(p, "float32"), model.init(0))


@pytest.fixture(params=[META, STRICT, *ON_DEVICE])
def unread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Unread]:
    with ExitStack() as stack:
        if request.param == META:
            pytest.importorskip("torch", reason="the extra torch is not installed")
            place = backends.get("torch", "meta")
        elif request.param == STRICT:
            from array_api_strict import ArrayAPIStrictFlags

            place = backends.get("array-api-strict", "device1")
            flags = {"boolean_indexing": False, "data_dependent_shapes": False}
            stack.enter_context(ArrayAPIStrictFlags(**flags))
            blind = Kernel(
                lambda ids, *, size, name: True, "array_api_strict", None
            )  # as on any device
            monkeypatch.setitem(in_range.kernels, "array_api_strict", [blind])
        else:
            try:
                place = stack.enter_context(opened(request.param))
            except backends.Unusable as error:
                if request.param in (request.config.getoption("--backend") or ()):
                    pytest.fail(str(error), pytrace=False)
                pytest.skip(str(error))
        yield Unread(place, guarded(place, monkeypatch))


def guarded(place: Backend, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Refuse every look at arrays of this backend but by to_numpy; the shapes that it is asked."""
    reads: list[tuple[int, ...]] = []
    looking = False
    array, read = type(place.asarray([1.0])), type(place).to_numpy
    is_meta = str(place.device) == "meta"

    def to_numpy(self: Backend, a: Any) -> np.ndarray:
        nonlocal looking
        reads.append(tuple(a.shape))
        if is_meta:
            return np.zeros(a.shape, str(a.dtype).rpartition(".")[2])
        looking = True
        try:
            return read(self, a)
        finally:
            looking = False

    def refusing(name: str, found: Callable[..., Any]) -> Callable[..., Any]:
        def look(self: Any, *args: Any, **options: Any) -> Any:
            assert looking, f"{name} of an array on a device: it would be waited for"
            return found(self, *args, **options)

        return look

    monkeypatch.setattr(type(place), "to_numpy", to_numpy)
    for name in () if is_meta else READS:
        if hasattr(array, name):
            monkeypatch.setattr(array, name, refusing(name, getattr(array, name)))
    return reads


def gpt() -> Any:
    return xformer.GPT(vocab_size=V, n_layers=2, d_model=12, n_heads=3, max_len=16, dropout=0.2)


MODELS: dict[str, Callable[[], Any]] = {"gpt": gpt, "llama": lambda: causal("llama")[0]}
every_model = pytest.mark.parametrize("name", MODELS)


def test_a_look_is_refused(unread: Unread) -> None:
    x = unread.place.asarray([1.0])
    for look in (float, int, bool, np.asarray):
        with pytest.raises((AssertionError, RuntimeError, TypeError, NotImplementedError)):
            look(x[0])
    assert unread.place.to_numpy(x).shape == (1,) and unread.reads == [(1,)]


@every_model
@pytest.mark.parametrize("donate", [False, True])
def test_a_training_step(unread: Unread, name: str, donate: bool) -> None:
    """The loss, its backward, clipping, AdamW and the average."""
    model, place = MODELS[name](), unread.place
    params = unread.params(model)
    state, average = optim.adamw_init(params), tree.map(lambda p: p + 0, params)
    ids, targets = (place.asarray(TOKENS[i : i + 14].reshape(2, 7)) for i in (0, 1))
    mask = place.asarray(np.tri(2, 7, 5, dtype=bool))
    options = {"dropout_key": ops.RandomKey(3, 1)} if name == "gpt" else {}
    options |= {"mask": mask, "ignore_index": 3, "label_smoothing": 0.1, "z_loss": 1e-4}
    loss, cache = model.loss(params, ids, targets, **options)
    grads, norm = optim.clip_by_global_norm(cache.backward(), max_norm=1.0, donate=donate)
    params, state = optim.adamw(params, grads, state, lr=1e-3, donate=donate)
    optim.ema(average, params, decay=0.9, donate=donate)
    assert not unread.reads
    assert all(np.isfinite(place.to_numpy(x)) for x in (loss, norm))


@every_model
def test_the_loop_reads_once_a_step(unread: Unread, name: str) -> None:
    """The loss and the norm, together; and the loss of each batch that it validates on."""
    model, place = MODELS[name](), unread.place
    config = TrainConfig(steps=3, batch_size=2, accumulate=2, eval_every=3, ema=0.9)
    source = Windows(TOKENS, 7, config.batch_size)
    held_out = list(source.held_out(2))
    first = start(unread.params(model), config)
    steps = list(train(loss_of(model), first, source, config, place, held_out=held_out))
    assert unread.reads == [(2,)] * 3 + [()] * len(held_out)
    assert all(math.isfinite(step.loss) and math.isfinite(step.norm) for step in steps)


@every_model
@pytest.mark.parametrize("prompts", [[[1, 2, 3]], [[1, 2, 3], [4]]], ids=["one", "two, padded"])
def test_texts_read_once_a_token(unread: Unread, name: str, prompts: Any) -> None:
    """The likeliest ids; or the logits, from which the host draws."""
    model, rows = MODELS[name](), len(prompts)
    params = unread.params(model)
    assert [len(new) for new in generate(model, params, prompts, max_new_tokens=5)] == [5] * rows
    assert unread.reads == [(rows,)] * 5
    unread.reads.clear()
    filters = (samplers.repetition_penalty(1.1), samplers.temperature(0.8), samplers.top_k(9))
    sampler = samplers.compose(*filters, samplers.top_p(0.9), samplers.min_p(0.05))
    generate(model, params, prompts, max_new_tokens=5, sampler=sampler)
    assert unread.reads == [(rows, V)] * 5


# ---- Ids that a model has not are found on the host, before they go to a device ----


def batch(*arrays: np.ndarray) -> Batch:
    return Batch(arrays, {}, arrays[-1].size, arrays[-1].size)


GOOD, BAD, NEGATIVE = (np.array([[1, 2, n]]) for n in (3, V, -1))


@every_model
def test_ids_of_a_batch(unread: Unread, name: str) -> None:
    model, place = MODELS[name](), unread.place
    params = unread.params(model)
    for arrays, n, span in (
        ((BAD, GOOD), 1, f"1 to {V}"),
        ((NEGATIVE, GOOD), 1, "-1 to 2"),
        ((GOOD, BAD), 2, f"1 to {V}"),
        ((GOOD, NEGATIVE), 2, "-1 to 2"),
    ):
        message = (
            rf"^loss: ids of array {n} of the batch must lie in \[0, {V}\), got ids from {span}"
        )
        with pytest.raises(ValueError, match=message):
            loss_of(model)(params, batch(*arrays), place)
    loss_of(model, ignore_index=-1)(params, batch(GOOD, NEGATIVE), place)
    for prompts in ([[1], [2, V]], [[1, -1]]):
        with pytest.raises(
            ValueError, match=rf"^prefill: ids must lie in \[0, {V}\), got ids from"
        ):
            generate(model, params, prompts, max_new_tokens=1)
    assert not unread.reads


def test_ids_of_an_encoder_decoder(unread: Unread) -> None:
    model = xformer.Transformer(V, 11, 12, 3, 1, 1, 8)
    params, place = unread.params(model), unread.place
    assert model.id_sizes == (V, 11, 11)
    for arrays, n in (((BAD, GOOD, GOOD), 1), ((GOOD, GOOD + 8, GOOD), 2), ((GOOD,) * 2, 3)):
        given = batch(*arrays, *([GOOD + 8] if n == 3 else []))
        with pytest.raises(ValueError, match=f"^loss: ids of array {n} of the batch must lie in"):
            loss_of(model)(params, given, place)
    with pytest.raises(ValueError, match=rf"^prefill: ids must lie in \[0, {V}\)"):
        generate(model, params, [[V]], max_new_tokens=1)
    assert not unread.reads


def test_labels_of_a_classifier() -> None:
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    model = pretrained.model(config | BERT)
    assert model.id_sizes == (V, 3)


# ---- Several devices: whatever is computed is so where the backend is active ----


depth = [0]  # of contexts of `Backend.active`


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ops that ran, and "active"; an op outside of `Backend.active` raises."""
    ran = list[str]()
    call = Overridable.__call__

    @contextmanager
    def active(self: Backend) -> Iterator[None]:
        ran.append("active")
        depth[0] += 1
        yield
        depth[0] -= 1

    def checked(self: Overridable, *args: Any, **options: Any) -> Any:
        assert depth[0], f"{self.__name__} runs on whichever device is current"
        ran.append(self.__name__)
        return call(self, *args, **options)

    monkeypatch.setattr(type(backends.get()), "active", active)
    monkeypatch.setattr(Overridable, "__call__", checked)
    return ran


def test_training_is_on_the_device(watched: list[str]) -> None:
    model, config = gpt(), TrainConfig(steps=2, batch_size=2, eval_every=2)
    source = Windows(TOKENS, 7, config.batch_size)

    def init(params: Any) -> Any:
        assert depth[0], "moments are made on whichever device is current"
        return optim.adamw_init(params)

    optimiser = optim.Optimiser(init, optim.adamw)
    first = start(model.init(0), config, optimiser)
    options = {"held_out": list(source.held_out(1)), "optimiser": optimiser}
    steps = train(loss_of(model), first, source, config, backends.get(), **options)
    assert len(list(steps)) == 2
    assert {"embedding", "linear_cross_entropy", "adam_update", "clip_leaves"} <= set(watched)


def test_texts_are_on_the_device(watched: list[str]) -> None:
    model = gpt()
    params = model.init(0)
    sampler = samplers.top_p(0.9)
    for make in (
        lambda: generate(model, params, [[1, 2], [3]], max_new_tokens=2),
        lambda: generate(model, params, [[1, 2], [3]], max_new_tokens=2, sampler=sampler),
        lambda: beam_search(model, params, [[1, 2], [3]], n_beams=2, max_new_tokens=2),
        lambda: list(speculative(model, params, model, params, [1, 2], k=2, max_new_tokens=3)),
        lambda: prefill(model, params, [[3]], after=prefill(model, params, [[1], [2]]).rows([1])),
    ):
        watched.clear()
        make()
        assert {"embedding", "advance"} <= set(watched)


def test_maps_are_made_on_the_device(watched: list[str]) -> None:
    model = gpt()
    attention_maps(model, model.init(0), np.array([[1, 2, 3]]))
    assert {"embedding", "sdpa"} <= set(watched)


def test_arrays_are_made_on_the_device(watched: list[str]) -> None:
    """By what runs no op: CuPy makes arrays on its current device alone."""
    model = gpt()
    prefix = prefill(model, model.init(0), [[1], [2]])
    for make in (
        lambda: prefix.rows([1, 0]),
        lambda: backends.get().generator(0).stack(lambda: np.ones(2), 3),
    ):
        watched.clear()
        make()
        assert watched == ["active"]
