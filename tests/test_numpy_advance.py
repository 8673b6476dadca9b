"""`advance` by one token on NumPy: what the reference says, in every form that it takes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from block_configs import block_config, changed
from causal_models import NAMES, V, causal

from xformer import dispatch, inference, layers, ops, reference_only, tree
from xformer.backends.numpy import advance as kernel
from xformer.backends.numpy import linear as kernel_of_linear
from xformer.backends.numpy import products
from xformer.backends.numpy.threads import _blas, n_threads
from xformer.finetune import lora
from xformer.layers import EmbedConfig
from xformer.layers.advance import advance
from xformer.layers.norm import NormParams
from xformer.layers.rope_config import RopeConfig
from xformer.models import LanguageModel

LEFT = {
    "gpt_neox",
    "mixtral",
    "qwen2_moe",
    "gpt_oss",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "deepseek_v3",
    "positions for q, k, v",
    "alibi",
    "shaw",
}
LEFT |= {"bare blocks", "cohere", "cohere2", "olmo2", "olmo3"}
LEFT |= {"relative bias", "post-norm", "qwen3_5_text"}
WIDE = block_config(24, 4, 40, n_kv_heads=2, d_head=10, d_value=6, norm="rms", norm_offset=1.0)
FORMS = {
    "gelu_tanh, window": {"activation": "gelu_tanh", "window": (3, None)},
    "gated silu, no biases": {"activation": "silu", "gated": True, "bias": False},
    "gated gelu, sandwich": {"activation": "gelu", "gated": True, "norm_placement": "sandwich"},
    "output norms, scale": {"norm_placement": "output", "scale": 0.3},
    "layer norms": {"norm": "layer", "norm_offset": 0.0},
    "no norms": {"norm_placement": "none"},
    "no norms, residual scales": {"norm_placement": "none", "residual_scale": 0.5},
    "sandwich, residual scales": {"norm_placement": "sandwich", "residual_scale": -2.0},
    "residual multiplier": {"residual_multiplier": 0.22},
}


def own(form: str, *, interleaved: bool = False, dtype: str = "float64") -> tuple[Any, Any]:
    """A model with rotary positions in part of each head, and parameters far from the first."""
    blocks = (changed(WIDE, **FORMS[form]),) * 3
    rotary = RopeConfig(6, interleaved=interleaved)
    embed = EmbedConfig(V, 24, 24, positions="none")
    model = LanguageModel(embed, blocks, rotary=rotary, n_shared_layer_groups=1)
    rng = np.random.default_rng(3)
    params = tree.map(lambda p: p + rng.normal(0, 0.3, p.shape), model.init(1, dtype="float64"))
    return model, tree.map(lambda p: p.astype(dtype), params)


def continued(model: Any, params: Any, n_texts: int) -> list[Any]:
    """Logits after each of nine tokens, five of them read one by one, and the state at the end."""
    ids = np.random.default_rng(4).integers(0, V, (n_texts, 9))
    _, state = model.decode(params, ids[:, :4], model.init_state())
    steps = []
    for i in range(4, 9):
        logits, state = model.decode(params, ids[:, i : i + 1], state)
        steps.append(logits)
    return [*steps, *(array for kv_cache in state.kv_cache for array in kv_cache[:2])]


def require_same(model: Any, params: Any, n_texts: int = 1, rtol: float = 1e-11) -> None:
    got = continued(model, params, n_texts)
    with reference_only():
        wanted = continued(model, params, n_texts)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * np.abs(other).max())


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One element for each token that the kernel has advanced by."""
    calls: list[int] = []
    (entry,) = advance.import_kernels("numpy")

    def run(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return entry.run(*args, **options)

    monkeypatch.setitem(advance.kernels, "numpy", [entry._replace(run=run)])
    return calls


@pytest.mark.parametrize("name", NAMES)
def test_every_family(name: str, ran: list[int]) -> None:
    model, params = causal(name)
    require_same(model, params, n_texts=2)
    assert len(ran) == (0 if name in LEFT else 5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, interleaved: bool, ran: list[int]) -> None:
    require_same(*own(form, interleaved=interleaved), n_texts=3)
    assert len(ran) == 5


def test_large_maps_on_several_threads(monkeypatch: pytest.MonkeyPatch, ran: list[int]) -> None:
    monkeypatch.setattr(products, "WORTH", 10)
    with threadpoolctl.threadpool_limits(3, user_api="blas"):
        require_same(*own("layer norms"), n_texts=1)
        require_same(*own("gated silu, no biases"), n_texts=2)
    assert len(ran) == 10


@pytest.mark.parametrize("worth", [0, products.WORTH])
def test_products_of_a_token_have_no_threads_of_blas(
    worth: int, monkeypatch: pytest.MonkeyPatch, ran: list[int]
) -> None:
    """They wait by spinning, which takes long where another process wants their core."""
    seen: set[int] = set()

    def multiplied(x: Any, params: Any) -> Any:
        seen.update(library.get_num_threads() for library in _blas())
        return linear(x, params)

    linear = kernel._linear
    monkeypatch.setattr(kernel, "_linear", multiplied)
    monkeypatch.setattr(products, "WORTH", worth)
    with threadpoolctl.threadpool_limits(3, user_api="blas"):
        if n_threads() != 3:
            pytest.skip("NumPy's BLAS cannot be given 3 threads")
        require_same(*own("layer norms"))
        assert n_threads() == 3
    assert seen == {1} and ran


@pytest.mark.parametrize(("worth", "wanted"), [(products.WORTH, set()), (0, {3})])
def test_few_rows_of_a_text_wake_only_threads_that_pay(
    worth: int, wanted: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within `inference()`; BLAS has one thread there, and in training they are jobs."""
    jobs, during = list[int](), set[int]()
    run, matmul = kernel_of_linear.run, np.matmul

    def counted(*args: Any, **options: Any) -> Any:
        during.update(library.get_num_threads() for library in _blas())
        return matmul(*args, **options)

    monkeypatch.setattr(kernel_of_linear, "run", lambda todo: jobs.append(len(todo)) or run(todo))
    monkeypatch.setattr(np, "matmul", counted)
    monkeypatch.setattr(products, "WORTH", worth)
    x, w, b = np.ones((64, 64)), np.ones((64, 192)), np.ones(192)
    with threadpoolctl.threadpool_limits(3, user_api="blas"):
        if n_threads() != 3:
            pytest.skip("NumPy's BLAS cannot be given 3 threads")
        with inference():
            y, _ = ops.linear(x, w, b)
        assert during == {1} and set(jobs) == wanted
        assert np.array_equal(y, ops.linear(x, w, b)[0]) and jobs[-1] == 3
        jobs.clear()
        with inference():
            ops.linear(x[:2], w[:, :5])
        assert n_threads() == 3


def test_float32_and_frozen_and_read_only(ran: list[int]) -> None:
    model, params = own("gelu_tanh, window", dtype="float32")
    for leaf in tree.flatten(params).values():
        leaf.flags.writeable = False
    require_same(model, tree.freeze(params), rtol=2e-5)
    assert len(ran) == 5


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_row_of_equal_numbers_is_normalised_to_b(dtype: str) -> None:
    w, b = np.random.default_rng(0).normal(size=(2, 768)).astype(dtype)
    x = np.repeat(np.asarray([[100.0], [0.1], [-1e8]], dtype), 768, axis=1)
    config = block_config(768, 1, 768, eps=1e-12)
    y = kernel._norm(x, NormParams(w, b), config)
    assert y.dtype == dtype and np.array_equal(y, np.broadcast_to(b, x.shape))


def test_far_out_there_is_no_warning() -> None:
    model, params = own("gated silu, no biases", dtype="float32")
    blocks = [p._replace(ffn=tree.map(lambda w: w * 1e4, p.ffn)) for p in params.stack.blocks]
    params = params._replace(stack=params.stack._replace(blocks=tuple(blocks)))
    assert all(np.isfinite(a).all() for a in continued(model, params, 1))


def test_adapters_are_left_to_the_reference(ran: list[int]) -> None:
    """Of the gate alone; a softcap, of the last of layers that share a block."""
    model, params = own("gated silu, no biases")
    adapted = lora.attach(params, targets=("*.ffn.gate",), rank=2, alpha=4)
    require_same(model, tree.map(lambda leaf: leaf + 0.1, adapted))
    last = replace(model, blocks=(*model.blocks[:2], changed(model.blocks[2], softcap=2.0)))
    require_same(last, params)
    assert not ran


def test_why_not() -> None:
    model, params = own("layer norms")
    x = np.ones((1, 1, 24))
    _, state = model.decode(params, np.ones((1, 3), int), model.init_state())

    def explained(kv_cache: Any, mask: Any = None) -> str:
        context = layers.Context(kv_cache=kv_cache, mask=mask)
        return dispatch.explain(
            advance, x, params.stack, configs=model.blocks, context=context, n_cached=3
        )

    said = explained(state.kv_cache)
    assert said.startswith("advance on numpy: xformer.backends.numpy.advance.advance")
    mask = np.ones((1, 1, 1, 4), bool)
    assert "padding" in explained(state.kv_cache, mask)
    assert "not one token" in explained(model.init_state().kv_cache)
