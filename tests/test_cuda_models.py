"""Toy models trained through the CUDA launchers, beside NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from block_configs import block_config
from causal_models import causal
from judges import FLOAT32, FLOAT64
from libraries import ON_DEVICE, only

import xformer
from xformer import backends, layers, ops, optim, tree
from xformer.backends import Backend
from xformer.training import TrainConfig, Windows, loss_of, start, train

V = 37  # of causal_models
WITHIN = {"float64": FLOAT64, "float32": 5 * FLOAT32}  # a whole model: more sums, one after another
ATTENTION_KERNELS = {"sdpa_forward", "sdpa_backward_queries", "sdpa_backward_keys"}
# What is left to generic code: linear maps, masks and the optimiser's trees.
GPT_KERNELS = ATTENTION_KERNELS | {
    *("layer_norm_forward", "layer_norm_backward", "column_sums"),
    *("activation_forward", "activation_backward", "dropout"),
    *("embedding_forward", "add_rows"),
    *("cross_entropy_forward", "token_total", "cross_entropy_backward"),
}
LLAMA_KERNELS = ATTENTION_KERNELS | {
    *("rms_norm_forward", "rms_norm_backward", "column_sums"),
    *("glu_forward", "glu_backward", "rope", "embedding_forward", "add_rows"),
    *("cross_entropy_forward", "token_total", "cross_entropy_backward"),
}


def gpt() -> tuple[Any, Any]:
    model = xformer.GPT(vocab_size=V, n_layers=2, d_model=12, n_heads=3, max_len=10, dropout=0.2)
    return model, model.init(0, dtype="float64")


UPDATE_KERNELS = {"adamw", "squares", "norm_of_parts", "scaled"}
MODELS = {"gpt": (gpt, GPT_KERNELS), "llama": (lambda: causal("llama"), LLAMA_KERNELS)}


def steps(backend: Backend, model: Any, params: Any, dtype: str) -> tuple[list[float], Any, Any]:
    """Losses of three training steps, the first gradients, the last parameters, on the host."""
    params = tree.map(lambda p: backend.asarray(p, dtype), params)
    state, losses, first = optim.adamw_init(params), [], None
    rng = np.random.default_rng(1)
    for step in range(3):
        tokens = backend.asarray(rng.integers(0, V, (2, 7)))
        targets = backend.asarray(rng.integers(-1, V, (2, 7)))
        options = {"dropout_key": ops.RandomKey(3, step)} if model.embed.dropout else {}
        loss, cache = model.loss(params, tokens, targets, ignore_index=-1, **options)
        grads, _ = optim.clip_by_global_norm(cache.backward(), max_norm=1.0)
        first = tree.map(backend.to_numpy, grads) if first is None else first
        params, state = optim.adamw(params, grads, state, lr=1e-3, eps=1e-3)
        losses.append(float(loss))
    return losses, first, tree.map(backend.to_numpy, params)


@only(*ON_DEVICE)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", WITHIN)
def test_training_steps(library: Backend, launched: list[Any], name: str, dtype: str) -> None:
    make, kernels = MODELS[name]
    model, params = make()
    losses, grads, trained = steps(library, model, params, dtype)
    assert {kernel for kernel, _, _ in launched} == kernels | UPDATE_KERNELS
    wanted_losses, wanted_grads, wanted = steps(backends.get(), model, params, "float64")
    assert losses == pytest.approx(wanted_losses, rel=WITHIN[dtype])
    for got, exact in ((grads, wanted_grads), (trained, wanted)):
        got, exact = tree.flatten(got), tree.flatten(exact)
        assert got.keys() == exact.keys()
        top = max(np.max(np.abs(value)) for value in exact.values())
        for leaf, value in exact.items():
            # The gradient of a bias of keys is zero: a sum of numbers that are not.
            size = max(np.max(np.abs(value)), top / 100)
            off = np.max(np.abs(got[leaf] - value)) / size
            assert off < 10 * WITHIN[dtype], f"{leaf}: {off:.1e}"


@only(*ON_DEVICE)
@pytest.mark.parametrize(
    ("norm", "kind", "sums", "read"),
    [  # of each layer's norms: whether it makes a sum, whether its backward adds a gradient
        ("pre", "layer", [True] * 3, [True] * 3),
        ("pre", "rms", [True] * 3, [True] * 3),
        ("post", "layer", [True] * 3, [False] * 3),  # nothing else reads these sums
        ("sandwich", "rms", [True, False] * 3, [True, False] * 3),
        ("output", "layer", [False] * 3, [False] * 3),
    ],
)
def test_sums_are_made_with_the_norm_behind_them(
    library: Backend, launched: list[Any], norm: str, kind: str, sums: list[bool], read: list[bool]
) -> None:
    """Those at the end of a block too, and their gradients: a launch for a norm and direction."""
    config = block_config(6, 2, 11, norm_placement=norm, norm=kind)
    rng = library.generator(0)
    x, memory, dy = (rng.normal((2, 3, 6)) for _ in range(3))
    params = config.init(rng, cross=True)
    launched.clear()
    _, cache = layers.blocks(x, (params,), layers.SideInputs(memory), configs=(config,) * 2)
    added = [args[1] is not None for name, _, args in launched if name == f"{kind}_norm_forward"]
    assert added == [norm == "post", *sums[1:], *sums]  # before the first norm there may be none
    launched.clear()
    cache.backward(dy)
    backward = [args for name, _, args in launched if name == f"{kind}_norm_backward"]
    ds = [args[4 if kind == "rms" else 5] is not None for args in backward]
    assert ds == read[::-1] * 2


@only(*ON_DEVICE)
@pytest.mark.parametrize("shared", [False, True])
def test_sums_of_parallel_blocks(library: Backend, launched: list[Any], shared: bool) -> None:
    """The last sum of a block is made with the first norm of the next one."""
    config = block_config(6, 2, 11, parallel=True, shared_norm=shared)
    rng = library.generator(0)
    params = config.init(rng)
    launched.clear()
    y, cache = layers.blocks(rng.normal((2, 3, 6)), (params,), configs=(config,) * 2)
    added = [args[1] is not None for name, _, args in launched if name == "layer_norm_forward"]
    assert added == ([False, True] if shared else [False, False, True, False])
    launched.clear()
    cache.backward(y)
    ds = [args[5] is not None for name, _, args in launched if name == "layer_norm_backward"]
    assert ds == ([True, True] if shared else [False, True] * 2)


@only(*ON_DEVICE)
def test_training_loop(library: Backend) -> None:
    """The loop of `xformer train`, unchanged: the same losses as on NumPy."""
    text = np.frombuffer(b"to be or not to be, that is the question " * 20, np.uint8)
    config = TrainConfig(steps=3, batch_size=2, eval_every=3)
    model = xformer.GPT(vocab_size=256, n_layers=1, d_model=8, n_heads=2, max_len=6, dropout=0.1)
    source = Windows(text, model.context, config.batch_size)
    held_out = list(source.held_out(1))
    losses = {}
    for backend in (library, backends.get()):
        params = tree.map(backend.asarray, model.init(0))
        first = start(params, config)
        run = list(train(loss_of(model), first, source, config, backend, held_out=held_out))
        losses[backend.name] = [*(step.loss for step in run), run[-1].validation]
    assert losses[library.name] == pytest.approx(losses["numpy"], rel=WITHIN["float32"])
