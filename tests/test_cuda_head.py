"""The head and its loss on CUDA: how rows of logits and chunks of them are laid out.

Values of small heads are in test_cuda_kernels.py and test_cuda_precision.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from cuda_shim import CublasLt, calling
from libraries import STAND_IN, only
from stored import in_both, normal, require_exact

from xformer import ops
from xformer.backends import Backend
from xformer.backends.cupy import linear_cross_entropy


@pytest.mark.parametrize(
    ("n_classes", "width"), [(2, 8), (65, 72), (511, 512), (513, 576), (640, 640), (50257, 50304)]
)
def test_row_width(n_classes: int, width: int) -> None:
    assert linear_cross_entropy.row_width(n_classes) == width


@pytest.mark.parametrize(
    ("n", "row_bytes", "rows"),
    [
        (0, 8, 1),  # the first chunk has no row
        (100, 1 << 20, 100),
        (32768, 2 * 50304, 5632),  # six chunks
        (32768, 4 * 50304, 2816),
        (32768, 1 << 20, 512),
        (4096, 1 << 22, 128),  # fewer than a tile has
        (300, 1024, 300),
    ],
)
def test_rows_of_a_chunk(n: int, row_bytes: int, rows: int) -> None:
    assert linear_cross_entropy.chunk_rows(n, row_bytes) == rows


@only(STAND_IN)
@in_both
@pytest.mark.parametrize("by_cublaslt", [False, True])
def test_a_head_of_many_tokens(
    library: Backend, monkeypatch: pytest.MonkeyPatch, precision: str, by_cublaslt: bool
) -> None:
    """Of 515 classes and 150 tokens, in padded rows and two chunks."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK", 64 * 576 * 2)
    monkeypatch.setattr(linear_cross_entropy, "ROWS", 64)
    x, w, b = normal(1, 150, 16), normal(2, 16, 515) / 4, normal(3, 515)
    targets = np.random.default_rng(1).integers(-1, 515, 150)
    options: Any = {"targets": targets, "ignore_index": -1, "kinds": "fsff", "roundings": 4}
    lt = CublasLt()
    with calling(lt) if by_cublaslt else nullcontext():
        require_exact(library, precision, ops.linear_cross_entropy, x, w, b, **options)
    assert bool(lt.products) == by_cublaslt
    sizes = {size for p in lt.products for m in p.layouts for size in (m.cols, m.rows, m.ld)}
    assert sizes <= {16, 576, 128, 22}  # and none of 515: all but 22 rows are whole packs
