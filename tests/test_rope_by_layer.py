"""RoPE of each layer: the tables that a layer gets, without RoPE in some layers, bad input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from causal_models import V, causal

from xformer import layers, ops, tree
from xformer.generation import generate
from xformer.layers import RopeConfig, RopeTables, rope_by_layer
from xformer.models import LanguageModel

LOCAL, GLOBAL = RopeConfig(4, 100.0), RopeConfig(2, 1e6)
BY_LAYER = (LOCAL, None, GLOBAL)
TOKENS = np.random.default_rng(0).integers(1, V, (2, 9))


def by_layer(rotary: Any) -> tuple[LanguageModel, Any]:
    """A Llama of three layers and its parameters, in float64."""
    model, params = causal("llama")
    return replace(model, rotary=rotary), params


def test_each_layer_has_the_tables_of_its_configuration() -> None:
    """Layer by layer, each as a model of one layer would be run."""
    model, params = by_layer(BY_LAYER)
    got, _ = replace(model, head=None).hidden(params, TOKENS)
    x, _ = ops.embedding(params.embed.table, ids=TOKENS)
    for block, config, rotary in zip(params.stack.blocks, model.blocks, BY_LAYER, strict=True):
        tables = None if rotary is None else layers.rope_tables(rotary, like=x, length=9)
        x, _ = layers.block(
            x, block, config=config, context=layers.Context(causal=True, rotary=tables)
        )
    x, _ = layers.norm(x, params.stack.norm, config=model.blocks[0].norm)
    np.testing.assert_allclose(got, x, rtol=1e-11, atol=1e-11)


def test_equal_configurations_of_all_layers_are_one_for_all() -> None:
    many, params = by_layer((LOCAL, RopeConfig(4, 100.0), LOCAL))
    one, _ = by_layer(LOCAL)
    np.testing.assert_array_equal(many.forward(params, TOKENS)[0], one.forward(params, TOKENS)[0])
    assert rope_by_layer.distinct(many.rotary) == (LOCAL,)
    tables = rope_by_layer.tables_of(many.rotary, like=TOKENS.astype(float), length=9)
    assert isinstance(tables, tuple) and not isinstance(tables, RopeTables)
    assert all(table is tables[0] for table in tables)  # computed once


def test_nope_in_all_layers_is_no_rotary() -> None:
    nope, params = by_layer((None,) * 3)
    none, _ = by_layer(None)
    np.testing.assert_array_equal(nope.forward(params, TOKENS)[0], none.forward(params, TOKENS)[0])
    with pytest.raises(ValueError, match=r"^LanguageModel: positions need positions in the embed"):
        nope.forward(params, TOKENS, positions=np.arange(9))


def test_some_of_the_layers() -> None:
    model, params = by_layer(BY_LAYER)
    some = model.with_layers([2, 0], final_norm=False)
    assert (some.rotary, some.final_norm) == ((GLOBAL, LOCAL), False)
    assert replace(model, rotary=LOCAL).with_layers([1]).rotary == LOCAL
    one = params._replace(stack=params.stack._replace(blocks=params.stack.blocks[:1]))
    got, _ = model.with_layers([0]).forward(one, TOKENS)
    want, _ = replace(model, blocks=model.blocks[:1], rotary=LOCAL).forward(one, TOKENS)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_decoding_is_the_forward_pass(dtype: str) -> None:
    """Prompt and then tokens one by one; in float32 NumPy's kernel for one token runs."""
    model, params = by_layer(BY_LAYER)
    params = tree.map(lambda p: p.astype(dtype), params)
    want, _ = model.forward(params, TOKENS)
    got, state = model.decode(params, TOKENS[:, :4], model.init_state(), all_logits=True)
    exact = {"rtol": 1e-10, "atol": 1e-10} if dtype == "float64" else {"rtol": 2e-3, "atol": 2e-3}
    np.testing.assert_allclose(got, want[:, :4], **exact)
    for i in range(4, 9):
        got, state = model.decode(params, TOKENS[:, i : i + 1], state)
        np.testing.assert_allclose(got, want[:, i], **exact)


def test_a_compiled_text_is_that_of_the_reference() -> None:
    pytest.importorskip("numba")
    from xformer import backends, dispatch

    place = backends.get("numba")
    model, params = by_layer(BY_LAYER)
    params = tree.map(lambda p: place.asarray(p.astype(np.float32)), params)
    with place.active():
        got = generate(model, params, TOKENS[:, :5].tolist(), max_new_tokens=6)
        with dispatch.reference_only():
            assert generate(model, params, TOKENS[:, :5].tolist(), max_new_tokens=6) == got


@pytest.mark.parametrize(
    ("rotary", "error", "message"),
    [
        ((LOCAL,), ValueError, r"one for all layers, or one for each of 3, got 1$"),
        ([LOCAL] * 3, TypeError, r"a RopeConfig, None, or a tuple of them for each layer, got \["),
        ((LOCAL, 1e4, None), TypeError, r"a RopeConfig, None, or a tuple .* got \(RopeConfig\("),
        (1e4, TypeError, r"a RopeConfig, None, or a tuple of them for each layer, got 10000"),
    ],
)
def test_bad_configurations(rotary: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^LanguageModel: rotary must be {message}"):
        by_layer(rotary)


def test_bad_tables() -> None:
    model, params = by_layer(None)
    x = np.ones((2, 9, model.d_model))
    tables = (layers.rope_tables(LOCAL, like=x, length=9),) * 2
    with pytest.raises(
        ValueError,
        match=r"^blocks: rotary must have tables for all layers, or for each of 3, got 2",
    ):
        layers.blocks(
            x, params.stack.blocks, configs=model.blocks, context=layers.Context(rotary=tables)
        )
