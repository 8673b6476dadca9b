"""backward(ready=): the gradients of each part once, as soon as nothing is added to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from judges import douts
from test_checkpointing import checkpointing

from xformer import (
    GPT,
    Transformer,
    backends,
    distributed,
    edit,
    finetune,
    kernels,
    layers,
    models,
    tree,
)
from xformer.distributed.world import threads
from xformer.proofs.catalogue import Case, cases

NUMPY = backends.get("numpy")
MODELS = ("GPT", "Transformer", "LanguageModel", "EncoderDecoder")
CASES = [case for case in cases() if case.subject in MODELS]
SIZES: dict[str, Any] = {"vocab_size": 16, "d_model": 8, "n_heads": 2, "max_len": 64}


def reported(cache: Any, *dys: Any) -> tuple[Any, dict[str, Any]]:
    """The gradients, and those of each part by name, in the order of their reports."""
    parts: dict[str, Any] = {}

    def ready(name: str, dparams: Any) -> None:
        assert name not in parts
        # A copy: nothing may be added in place later either.
        parts[name] = tree.map(lambda a: np.array(NUMPY.to_numpy(a)), dparams)

    return cache.backward(*dys, ready=ready), parts


def require_reported(grads: Any, parts: dict[str, Any]) -> None:
    """Each leaf of the gradients was reported once, with its bits."""
    found: dict[str, Any] = {}
    for name, part in parts.items():
        leaves = {f"{name}.{leaf}".rstrip("."): a for leaf, a in tree.flatten(part).items()}
        assert not leaves.keys() & found.keys()
        found |= leaves
    wanted = tree.flatten(grads)
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], a, equal_nan=True) for name, a in wanted.items())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_leaf_of_every_model(case: Case) -> None:
    """With every option: ties, shared layers, relative biases, reversible blocks, routers."""
    fn, args = case.build(NUMPY)
    y, cache = fn(*args)
    if type(cache).__name__ == "_All":  # of the gradients of vectors, which are no parameters
        cache = cache.cache
    dys = douts(NUMPY, y)
    grads, parts = reported(cache, *dys)
    require_reported(grads, parts)
    plain = tree.flatten(cache.backward(*dys))
    assert all(np.array_equal(plain[name], a) for name, a in tree.flatten(grads).items())


@pytest.mark.parametrize("name", ["GPT: as it is", "LanguageModel: masked LM, groups"])
def test_activation_checkpointing_and_frozen_leaves(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    fn, (params, *args) = case.build(NUMPY)
    params = tree.freeze(params, "stack.blocks.0.*")
    y, cache = checkpointing(fn, True)(params, *args)
    grads, parts = reported(cache, *douts(NUMPY, y))
    require_reported(grads, parts)
    assert not tree.flatten(parts["stack.blocks.0"])


def tokens(n: int = 2, length: int = 6) -> Any:
    return np.random.default_rng(0).integers(0, 16, (n, length))


@pytest.mark.parametrize("tied", [True, False])
def test_order(tied: bool) -> None:
    """A part is reported before the backward of the parts below it."""
    model = GPT(**SIZES, n_layers=3, tied=tied)
    events: list[str] = []

    def seen(name: str) -> Any:
        return {name: lambda dy: events.append(f"into {name}") or dy}

    _, cache = model.loss(model.init(0), tokens(), tokens())
    for i in range(3):
        cache = edit(cache, seen(f"stack.blocks.{i}"))
    cache.backward(ready=lambda name, dparams: events.append(name))
    head = [] if tied else ["head"]
    assert events == [
        *head,
        "stack.norm",
        *("into stack.blocks.2", "stack.blocks.2", "into stack.blocks.1", "stack.blocks.1"),
        *("into stack.blocks.0", "stack.blocks.0", "embed"),
    ]


def test_order_of_shared_layers_and_of_an_encoder_decoder() -> None:
    block = models.GPT(**SIZES, n_layers=4)
    shared = models.LanguageModel(block.embed, block.blocks, n_shared_layer_groups=2)
    _, cache = shared.loss(shared.init(0), tokens(), tokens())
    _, parts = reported(cache)
    assert list(parts) == ["stack.norm", "stack.blocks.1", "stack.blocks.0", "embed"]
    sizes: dict[str, Any] = {"d_model": 8, "n_heads": 2, "max_len": 16, "pad_id": 15}
    model = Transformer(16, 16, **sizes, n_encoder_layers=1, n_decoder_layers=2, shared_memory=True)
    _, cache = model.loss(model.init(0), tokens(), tokens(), tokens())
    _, parts = reported(cache)
    assert list(parts) == [
        *("head", "decoder.blocks.1", "decoder.blocks.0", "decoder.memory"),
        *("tgt_embed", "encoder.blocks.0", "src_embed"),
    ]


def test_a_contrastive_loss() -> None:
    model = GPT(**SIZES, n_layers=1)
    _, cache = finetune.contrastive_loss(model, model.init(0), tokens(4))
    grads, parts = reported(cache)
    require_reported(grads, parts)
    assert list(parts) == ["stack.norm", "stack.blocks.0", "embed"]


@pytest.mark.parametrize("reversible", [False, True])
def test_a_program_of_all_blocks(reversible: bool) -> None:
    """Numba's kernel of `blocks` reports at its end."""
    pytest.importorskip("numba", reason="extra numba")
    model = GPT(32, n_layers=2, d_model=32, n_heads=4, max_len=64, reversible=reversible)
    with kernels("numba"):
        _, cache = model.loss(model.init(0), tokens(4, 64), tokens(4, 64))
        assert type(cache.model.hidden.stack.layers).__name__ == "Saved"
        grads, parts = reported(cache)
    require_reported(grads, parts)
    assert list(parts) == ["stack.norm", "stack.blocks.1", "stack.blocks.0", "embed"]


def test_a_program_reports_while_it_is_recorded() -> None:
    """What a compiled function does with the reports must be a part of its result."""
    pytest.importorskip("numba", reason="extra numba")
    from xformer import compile

    model = GPT(**SIZES, n_layers=2)

    def step(params: Any, ids: Any) -> Any:
        _, cache = model.loss(params, ids, ids)
        parts: dict[str, Any] = {}
        grads = cache.backward(ready=parts.__setitem__)
        return grads, {name.replace(".", "/"): part for name, part in parts.items()}

    compiled = compile(step)
    for seed in (0, 1):
        params = model.init(seed)
        grads, parts = compiled(params, tokens())
        with kernels("numba"):
            wanted, _ = step(params, tokens())
        require_reported(grads, {name.replace("/", "."): part for name, part in parts.items()})
        leaves = tree.flatten(grads)
        for name, a in tree.flatten(wanted).items():
            np.testing.assert_allclose(leaves[name], a, rtol=1e-4, atol=1e-6)
    assert "instructions" in compiled.explain()


def test_parts_of_a_sequence_are_refused() -> None:
    model = GPT(**SIZES, n_layers=1)

    def work(world: Any) -> None:
        part = distributed.tensor_parallel(model, world, sequence=True)
        _, cache = part.loss(part.init(0), tokens(), tokens())
        cache.backward(ready=lambda name, dparams: None)

    with pytest.raises(ValueError, match="parallel: ready excludes sequence = True: the gradients"):
        threads.run(2, work)


def test_a_stack_alone() -> None:
    """`layers.stack` reports its parts too."""
    config = GPT(**SIZES, n_layers=1).blocks[0]
    params = layers.StackParams.init(NUMPY.generator(0, "float64"), (config,))
    x = np.random.default_rng(0).normal(size=(2, 3, 8))
    y, cache = layers.stack(x, params, configs=(config,))
    parts: dict[str, Any] = {}
    _, dparams, *_ = cache.backward(np.ones_like(y), ready=parts.__setitem__)
    assert list(parts) == ["norm", "blocks.0"]
    assert parts["blocks.0"] is dparams.blocks[0] and parts["norm"] is dparams.norm
