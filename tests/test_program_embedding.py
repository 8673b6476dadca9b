"""Embeddings in programs: rows of a table, and gradients of ids that are there many times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="needs extra numba")

from programs import THREADS, judged

from xformer import ops


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, *shape])
    return rng.normal(size=shape).astype(np.float32)


def looked_up(table: Any, ids: Any, dy: Any) -> list[Any]:
    y, cache = ops.embedding(table, ids=ids)
    return [y, cache.backward(dy)]


@pytest.mark.parametrize("shape", [(7, 33), (1,), (300,), (0,)])
@pytest.mark.parametrize("width", [1, 17, 130])
def test_embedding(shape: tuple[int, ...], width: int) -> None:
    """61 rows: some ids are there often, some rows are of none."""
    ids = np.random.default_rng(0).integers(0, 30, shape)
    arrays = [normal(61, width), ids, normal(*shape, width)]
    for threads in THREADS:
        judged(looked_up, arrays, threads, others=("in_range 61",))


def test_a_transposed_table_and_other_integers() -> None:
    """As a tied head's weights lie; ids of a slice."""
    ids = np.random.default_rng(0).integers(0, 61, (4, 12)).astype(np.int32)

    def fn(table: Any, ids: Any, dy: Any) -> list[Any]:
        return looked_up(table.T, ids[:, ::2], dy)

    others = "in_range 61", "copy", "astype"
    judged(fn, [normal(24, 61), ids, normal(4, 6, 24)], others=others)


def test_ids_are_checked() -> None:
    arrays = [normal(61, 24), np.array([0, 60]), normal(2, 24)]
    run = judged(looked_up, arrays, others=("in_range 61",))
    for wrong in -1, 61:
        with pytest.raises(ValueError, match=r"ids must lie in \[0, 61\)"):
            run(arrays[0], np.array([0, wrong]), arrays[2])


@pytest.mark.parametrize("width", [1, 17, 130])
def test_index_add(width: int) -> None:
    def fn(x: Any, y: Any, ids: Any, dout: Any) -> list[Any]:
        out, cache = ops.index_add(x, y, ids=ids)
        return [out, cache.backward(dout)[1]]

    ids = np.random.default_rng(0).integers(0, 30, 200)
    arrays = [normal(61, width), normal(200, width), ids, normal(61, width, seed=1)]
    for threads in THREADS:
        judged(fn, arrays, threads, others=("in_range 61", "take"))
