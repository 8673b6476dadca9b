"""Above the size from which numba's kernels run, `watch`, `edit`, `per_example` and others work.

They also work with as few numbers as other tests use, where NumPy's kernels run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xformer as xf
from xformer import tree
from xformer.layers import AttentionConfig, BlockConfig, EmbedConfig, FeedForwardConfig, NormConfig
from xformer.models import LanguageModel

pytest.importorskip("numba", reason="numba is not installed")

VOCAB, T, D = 128, 64, 64
LLAMA = BlockConfig(
    AttentionConfig(D, 4, n_kv_heads=2, bias=False),
    FeedForwardConfig(96, activation="silu", gated=True),
    NormConfig("rms"),
)
MODELS = {
    "GPT": xf.GPT(VOCAB, 2, D, 4, T),
    "Llama": LanguageModel(EmbedConfig(VOCAB, D, D, T), (LLAMA,) * 2),
}
SIZES = {"few": (3, 4), "many": (8, T)}  # of a batch; many: each op has over 16,384 numbers


def arguments(model: Any, size: str) -> tuple[Any, Any, Any]:
    rng, (b, t) = np.random.default_rng(1), SIZES[size]
    return (model.init(0), *rng.integers(VOCAB, size=(2, b, t)))


def close(got: Any, want: Any) -> None:
    pairs = zip(tree.flatten({"": got}).items(), tree.flatten({"": want}).values(), strict=True)
    for (name, a), b in pairs:
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1, abs(b).max()), err_msg=name)


def names(model: Any, args: Any) -> Any:
    _, cache = model.loss(*args)
    return list(xf.watch(cache, "*")[1])


def edited(model: Any, args: Any) -> Any:
    _, cache = model.loss(*args)
    cache = xf.edit(
        cache, {"stack.blocks.1.attn": lambda dy: 0.5 * dy, "*.norm": lambda dy: 2 * dy}
    )
    return cache.backward()


def clipped(model: Any, args: Any) -> Any:
    found = xf.per_example(model.loss(*args)[1])
    return {"norms": found.squared_norms, "sum": found.clipped(1.0)}


def along(model: Any, args: Any) -> Any:
    params, *batch = args
    v = tree.map(lambda x: x * 0 + 0.01, params)
    return list(xf.jvp(lambda p: model.loss(p, *batch)[0], (params,), (v,)))


def in_few_bits(model: Any, args: Any) -> Any:
    params, *batch = args
    return [xf.rounded(lambda p: model.loss(p, *batch)[0], "bfloat16")(params)]


def checkpointed(model: Any, args: Any) -> Any:
    model = dataclasses.replace(model, activation_checkpointing=True)
    return clipped(model, args)


WORKS: dict[str, Callable[[Any, Any], Any]] = {
    "edit": edited,
    "per_example": clipped,
    "per_example, activations are computed again": checkpointed,
    "jvp": along,
    "rounded": in_few_bits,
}


@pytest.mark.parametrize("kernels", ["numba", "mkl"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", MODELS)
def test_the_names_of_nodes(model: str, size: str, kernels: str) -> None:
    args = arguments(MODELS[model], size)
    with xf.unfused():
        want = names(MODELS[model], args)
        with xf.kernels(kernels):
            assert names(MODELS[model], args) == want


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("work", WORKS)
def test_as_with_kernels_of_numpy(work: str, model: str, size: str) -> None:
    args = arguments(MODELS[model], size)
    with xf.unfused():
        want = WORKS[work](MODELS[model], args)
        with xf.kernels("numba"):
            close(WORKS[work](MODELS[model], args), want)


def test_a_fused_kernel_is_named() -> None:
    model = MODELS["GPT"]
    with xf.kernels("numba"):
        _, cache = model.loss(*arguments(model, "many"))
    for call in (xf.per_example, lambda cache: xf.watch(cache, "stack.blocks.1.attn")):
        with pytest.raises(ValueError, match=r"a kernel of \w+ ran; run .* xf\.unfused"):
            call(cache)


def test_gradients_of_attention_by_example_need_its_probabilities() -> None:
    """The message is the same at every size, and names the op."""
    rng = np.random.default_rng(1)
    q = rng.normal(size=(2, 4, 64, 32)).astype(np.float32)
    bias = np.zeros((4, 64, 64), np.float32)
    for kernels in ("numpy", "numba"):
        with xf.kernels(kernels), xf.unfused():
            ctx, cache = xf.ops.sdpa(q, q, q, bias=bias)
        with pytest.raises(ValueError, match="a kernel of sdpa ran, which does not save the prob"):
            xf.per_example(cache, ctx)
