"""Pipelines, on threads, against the whole model."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from causal_models import V, causal

import xformer as xf
from xformer import distributed, layers, tree
from xformer.base.pairwise_sum import PairwiseSum
from xformer.distributed.pipeline import Pipeline
from xformer.distributed.world import World, threads
from xformer.layers import RopeConfig
from xformer.models import Classifier, EncoderDecoder, LanguageModel, LMHead, Pooler

KINDS = ["gpipe", "1f1b"]


def batches(n: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [(rng.integers(0, V, (2, 6)), rng.integers(0, V, (2, 6))) for _ in range(n)]


def of_whole(model: Any, params: Any, data: list[Any], shares: Any = None, **options: Any) -> Any:
    """The loss and the gradients of the whole model, added pairwise."""
    shares = [1 / len(data)] * len(data) if shares is None else shares
    total = PairwiseSum(lambda a, b: tree.map(lambda x, y: x + y, a, b))
    for (tokens, targets), share in zip(data, shares, strict=True):
        loss, cache = model.loss(params, tokens, targets, **options)
        total.add((loss * share, cache.backward(np.full_like(loss, share))))
    return total.total()


def of_pipeline(model: Any, params: Any, data: list[Any], n: int, **options: Any) -> list[Any]:
    """The same of a pipeline: what each process has, with the gradients of all."""

    def work(world: World) -> Any:
        part = distributed.pipeline(model, world)
        loss, grads = part.gradients(part.shard(params), data, **options)
        return loss, part.whole(grads)

    return threads.run(n, work)


def require_bits(got: Any, wanted: Any) -> None:
    a, b = tree.flatten({"": got}), tree.flatten({"": wanted})
    assert list(a) == list(b)
    for name in b:
        assert np.array_equal(a[name], b[name]), name


def deep(name: str = "llama", **options: Any) -> tuple[Any, Any]:
    """A model of six layers with a head that is not tied."""
    model, _ = causal(name)
    model = dataclasses.replace(model, blocks=model.blocks[:1] * 6, head=LMHead(False), **options)
    return model, tree.map(lambda p: 2 * p, model.init(dtype="float64"))


# --- the schedule ---


def test_schedules_as_they_print() -> None:
    def lines(kind: str) -> list[str]:
        tasks = [distributed.schedule(kind, 4, stage=s, n_stages=3) for s in range(3)]
        return [" ".join(f"{what}{i}" for what, i in of_stage) for of_stage in tasks]

    assert lines("gpipe") == ["F0 F1 F2 F3 B0 B1 B2 B3"] * 3
    assert lines("1f1b") == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_batches", [1, 2, 3, 7])
@pytest.mark.parametrize("n_stages", [1, 2, 4])
def test_schedules_can_be_run(kind: str, n_batches: int, n_stages: int) -> None:
    """By a simulation, in which a task takes a step if what it needs was done before.

    Each task is there once, caches are as few as the page says, and so are the steps.
    """
    options: Any = {"n_stages": n_stages}
    tasks = [distributed.schedule(kind, n_batches, stage=s, **options) for s in range(n_stages)]
    every = {(what, i) for what in "FB" for i in range(n_batches)}
    assert all(set(t) == every and len(t) == len(every) for t in tasks)
    done: set[tuple[str, int, int]] = set()
    n_done, steps, most = [0] * n_stages, 0, [0] * n_stages
    while min(n_done) < len(every):
        ready = []
        for s in range(n_stages):
            if n_done[s] == len(every):
                continue
            what, i = tasks[s][n_done[s]]
            before = s - 1 if what == "F" else s + 1
            if not 0 <= before < n_stages or (what, i, before) in done:
                assert what == "F" or ("F", i, s) in done
                ready.append((what, i, s))
        assert ready, "no stage can go on"
        for what, i, s in ready:
            done.add((what, i, s))
            n_done[s] += 1
            kept = sum(("F", j, s) in done and ("B", j, s) not in done for j in range(n_batches))
            most[s] = max(most[s], kept)
        steps += 1
    assert steps == 2 * (n_batches + n_stages - 1)  # each stage is idle for 2 (n_stages - 1)
    limits = [n_batches if kind == "gpipe" else n_stages - s for s in range(n_stages)]
    assert most == [min(n_batches, limit) for limit in limits]


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (("2f2b", 4), {"stage": 0, "n_stages": 2}, "schedule: kind must be one of 1f1b, gpipe"),
        (("1f1b", 0), {"stage": 0, "n_stages": 2}, "schedule: n_batches must be"),
        (("1f1b", 4), {"stage": 2, "n_stages": 2}, r"schedule: stage must be in \[0, 2\), got 2"),
    ],
)
def test_bad_schedules(args: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        distributed.schedule(*args, **options)


# --- a step ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_gradients_are_those_of_the_whole_bit_for_bit(kind: str, n: int) -> None:
    """Six layers on four processes are 1, 2, 1 and 2."""
    model, params = deep()
    data = batches(5)
    options: Any = {"label_smoothing": 0.1, "z_loss": 1e-3, "shares": [0.1, 0.3, 0.2, 0.25, 0.15]}
    wanted = of_whole(model, params, data, **options)
    for got in of_pipeline(model, params, data, n, kind=kind, **options):
        require_bits(got, wanted)


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "learned positions": ("gpt2", {}),
    "experts": ("mixtral", {}),
    "post-norm": ("post-norm", {}),
    "alibi": ("alibi", {}),
    "checkpointing": ("qwen3", {"activation_checkpointing": True}),
    "windows, softcap": ("gemma2", {}),
    "no norms": ("llama", {"final_norm": False}),
    "RoPE by layer": ("llama", {"rotary": (RopeConfig(4), RopeConfig(4, 9.0), None) * 2}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_options(name: str) -> None:
    family, options = CHANGES[name]
    model, params = deep(family, **options)
    data = batches(3)
    wanted = of_whole(model, params, data)
    for got in of_pipeline(model, params, data, 3):
        require_bits(got, wanted)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_table_of_a_tied_head_is_on_two_stages(n: int) -> None:
    """Its gradient is that of both, up to rounding; and the same on both."""
    model, params = causal("gpt2")
    model = dataclasses.replace(model, blocks=model.blocks[:1] * 4)
    params = tree.map(lambda p: 2 * p, model.init(dtype="float64"))
    data = batches(4)
    loss, wanted = of_whole(model, params, data)

    def work(world: World) -> Any:
        part = distributed.pipeline(model, world)
        own = part.shard(params)
        value, grads = part.gradients(own, data)
        assert tree.flatten(grads).keys() == tree.flatten(own).keys()
        return value, part.whole(grads), grads.embed

    found = threads.run(n, work)
    for value, grads, _ in found:
        assert value == loss
        table = wanted.embed.table
        np.testing.assert_allclose(grads.embed.table, table, atol=1e-14 * np.abs(table).max())
        require_bits(grads._replace(embed=None), wanted._replace(embed=None))
        require_bits(grads.embed.positions, wanted.embed.positions)
    first, last = found[0][2], found[-1][2]
    assert np.array_equal(first.table, last.table)


def test_training() -> None:
    """Five steps of AdamW, each on its own stage: the parameters of the whole, bit for bit."""
    model, params = deep()
    data = batches(4)

    def work(world: World) -> Any:
        part = distributed.pipeline(model, world)
        own = part.shard(params)
        state = xf.optim.adamw_init(own)
        for _ in range(5):
            loss, grads = part.gradients(own, data)
            own, state = xf.optim.adamw(own, grads, state, lr=1e-2)
        return loss, part.whole(own)

    whole, state = params, xf.optim.adamw_init(params)
    for _ in range(5):
        loss, grads = of_whole(model, whole, data)
        whole, state = xf.optim.adamw(whole, grads, state, lr=1e-2)
    for got in threads.run(3, work):
        require_bits(got, (loss, whole))


@pytest.mark.parametrize(("kind", "most"), [("gpipe", [5, 5, 5]), ("1f1b", [3, 2, 1])])
def test_caches_in_memory(kind: str, most: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where they are made and used."""
    model, params = deep()
    now, highest = [0] * 3, [0] * 3
    forward, backward = Pipeline._forward, Pipeline._backward

    def counted_forward(self: Pipeline, *args: Any) -> Any:
        now[self.world.rank] += 1
        highest[self.world.rank] = max(highest[self.world.rank], now[self.world.rank])
        return forward(self, *args)

    def counted_backward(self: Pipeline, *args: Any) -> Any:
        now[self.world.rank] -= 1
        return backward(self, *args)

    monkeypatch.setattr(Pipeline, "_forward", counted_forward)
    monkeypatch.setattr(Pipeline, "_backward", counted_backward)
    of_pipeline(model, params, batches(5), 3, kind=kind)
    assert highest == most


def test_shard_and_whole_are_inverses() -> None:
    for model, params in (deep(), causal("gpt2")):
        params = tree.freeze(params, "stack.*.attn.*")

        def work(world: World, m: Any = model, p: Any = params) -> Any:
            part = distributed.pipeline(m, world)
            return part.shard(p), part.whole(part.shard(p))

        for own, got in threads.run(2, work):
            require_bits(tree.thaw(got), tree.thaw(params))
            assert tree.flatten(got).keys() == tree.flatten(params).keys()
            assert list(tree.frozen(got)) == list(tree.frozen(params))
            assert tree.nbytes(own) < 0.8 * tree.nbytes(params)


def test_frozen_parameters_have_no_gradient() -> None:
    model, params = causal("gpt2")
    params = tree.freeze(params, "embed.*", "stack.*.ffn.*")
    data = batches(2)
    wanted = of_whole(model, params, data)
    for got in of_pipeline(model, params, data, 2):
        require_bits(got, wanted)


# --- what is refused ---


BLOCK = layers.BlockConfig(layers.AttentionConfig(12, 3), layers.FeedForwardConfig(12))
EMBED = layers.EmbedConfig(V, 12, 12, positions="none")
QKV = layers.EmbedConfig(V, 12, 12, 8, mode="qkv", d_positions=4)
MIXTURE = dataclasses.replace(BLOCK, ffn=layers.ExpertsConfig(3, 2, 8))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (LanguageModel(EMBED, (BLOCK,)), "2 processes need as many layers, got 1"),
        (LanguageModel(EMBED, (BLOCK,) * 2, head=None), "needs a head that gives logits, got None"),
        (LanguageModel(EMBED, (BLOCK,) * 2, head=Pooler()), "gives logits, got Pooler"),
        (LanguageModel(None, (BLOCK,) * 2, head=Classifier(3)), "must have an embedding, got None"),
        (LanguageModel(EMBED, (BLOCK,) * 2, n_shared_layer_groups=1), "exclude n_shared_layer_gr"),
        (
            LanguageModel(EMBED, (BLOCK,) * 2, relative_bias=layers.RelativeConfig(3)),
            "exclude relative_bias, which they share",
        ),
        (LanguageModel(QKV, (BLOCK,) * 2), 'exclude embed.mode "qkv"'),
        (
            LanguageModel(EMBED, (dataclasses.replace(BLOCK, reversible=True),) * 2),
            "exclude reversible",
        ),
        (
            LanguageModel(EMBED, (MIXTURE,) * 2, load_balancing_weight=0.1, router_z_weight=0.1),
            "exclude load_balancing_weight, router_z_weight",
        ),
    ],
)
def test_refused(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^pipeline: .*{message}"):
        threads.run(2, lambda world: distributed.pipeline(model, world))


def test_an_encoder_decoder_is_refused() -> None:
    model = EncoderDecoder((BLOCK,), (BLOCK,))
    with pytest.raises(TypeError, match="pipeline: model must be a LanguageModel, got EncoderDec"):
        threads.run(1, lambda world: distributed.pipeline(model, world))


def test_no_batches_are_refused() -> None:
    model, params = deep()
    with pytest.raises(ValueError, match="schedule: n_batches must be an int of at least 1, got 0"):
        of_pipeline(model, params, [], 2)
    with pytest.raises(ValueError, match="pipeline: shares must be 3, one a micro-batch, got 2"):
        of_pipeline(model, params, batches(3), 2, shares=[0.5, 0.5])


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_other_libraries(library: str) -> None:
    pytest.importorskip(library)
    backend = xf.backends.get(library)
    model, params = deep()
    data = batches(3)
    wanted = of_whole(model, params, data)
    with backend.active():
        moved = tree.map(lambda p: backend.asarray(p), params)
        ids = [tuple(backend.asarray(a) for a in batch) for batch in data]

        def work(world: World) -> Any:
            part = distributed.pipeline(model, world)
            loss, grads = part.gradients(part.shard(moved), ids)
            return tree.map(backend.to_numpy, (loss, part.whole(grads)))

        for got in threads.run(2, work):
            a, b = tree.flatten({"": got}), tree.flatten({"": wanted})
            assert all(np.allclose(a[name], b[name], rtol=1e-10, atol=1e-12) for name in b)
