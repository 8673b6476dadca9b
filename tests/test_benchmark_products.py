"""The speed of light counts the products that a step needs, no more and no fewer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import products
from benchmarks.products import Attention, Light, Linear, Product
from benchmarks.shapes import BY_NAME, SHAPES, Shape
from xformer import GPT
from xformer.inspection.summary import summary


def gflop(shape: Shape, kind: type) -> float:
    found = [part for part in products.parts(shape) if isinstance(part, kind)]
    return sum(p.flops for part in found for p in part.products(shape.training)) / 1e9


def test_char_gpt_takes_what_is_known() -> None:
    shape = BY_NAME["char-gpt"]
    assert gflop(shape, Linear) == pytest.approx(196, abs=0.5)
    assert gflop(shape, Attention) == pytest.approx(11, abs=0.5)
    full = [
        part._replace(keys=shape.length)
        for part in products.parts(shape)
        if isinstance(part, Attention)
    ]
    flops = sum(p.flops for part in full for p in part.products(True))
    assert flops / 1e9 == pytest.approx(22, abs=0.5)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_products_are_those_of_the_summary(shape: Shape) -> None:
    """It counts them by running the model, and T (T + 1) / 2 pairs where here are T^2 / 2."""
    flops = summary(shape.model, batch=shape.batch, length=shape.length).flops
    passes = 3 if shape.training else 1
    n = passes * shape.batch * shape.length / 1e9
    assert gflop(shape, Linear) == pytest.approx(n * flops.weights)
    assert gflop(shape, Attention) == pytest.approx(n * flops.attention, rel=1 / shape.length)


def test_a_linear_map_has_two_products_backward() -> None:
    found = list(Linear(7, 3, 5).products(True))
    assert found == [Product(7, 3, 5), Product(7, 5, 3), Product(3, 7, 5)]
    assert list(Linear(7, 3, 5).products(False)) == found[:1]
    assert {p.flops for p in found} == {2 * 7 * 3 * 5}


def test_attention_comes_in_blocks_that_stay_in_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(Attention(10, 6, 4, 2).products(True))
    assert len(whole) == 6
    monkeypatch.setattr(products, "SCORES", 18)
    parts = list(Attention(10, 6, 4, 2).products(True))
    assert len(parts) == 6 * 4  # 3, 3, 3 and 1 queries
    assert sum(p.flops for p in parts) == sum(p.flops for p in whole)


def test_all_products_run(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(BY_NAME["tiny"], model=GPT(11, 2, 8, 2, max_len=64), batch=2, length=9)
    matmul, done = np.matmul, []

    def counted(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        assert out is matmul(a, b, out=out)
        done.append(Product(*a.shape, b.shape[1]))

    monkeypatch.setattr(np, "matmul", counted)
    light = Light(shape)
    light.run()
    assert done == products.products(shape)
    assert light.flops == sum(p.flops for p in done)
