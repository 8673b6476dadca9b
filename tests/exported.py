"""Exported models, run by ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xformer import tree
from xformer.arrays import onnx_functions
from xformer.arrays.onnx import Array
from xformer.backends import Backend

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

SILENT = ort.SessionOptions()
SILENT.log_severity_level = 3
SILENT.intra_op_num_threads = 1
CPU = ["CPUExecutionProvider"]
# Options that a family needs: a recurrent layer reads a known number of steps.
FIXED: dict[str, dict[str, Any]] = {"qwen3_5_text": {"sizes": {"length": 7}}}


class Session:
    """A file, or a serialised model, that runs on named arrays."""

    def __init__(self, model: Path | bytes) -> None:
        path = str(model) if isinstance(model, Path) else model
        self.session = ort.InferenceSession(path, SILENT, providers=CPU)
        self.names = [x.name for x in self.session.get_outputs()]

    def __call__(self, **feeds: Any) -> dict[str, np.ndarray]:
        feeds = {name: np.asarray(x) for name, x in feeds.items()}
        return dict(zip(self.names, self.session.run(None, feeds), strict=True))


@dataclass(frozen=True)
class Constants(Backend):
    """Arrays of a graph whose values are known."""

    def _from_host(self, host: np.ndarray) -> Array:
        return Array.constant(host)

    def to_numpy(self, array: Array) -> np.ndarray:
        assert array.value is not None
        return array.value


CONSTANTS = Constants("onnx", onnx_functions, None, ("float32", "float64"), "")


def distance(got: Any, wanted: Any) -> float:
    """The largest difference, relative to the largest number."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert np.array_equal(np.isfinite(got), np.isfinite(wanted))
    got, wanted = (np.nan_to_num(x, posinf=1.0, neginf=-1.0) for x in (got, wanted))
    return float(np.abs(got - wanted).max(initial=0) / max(np.abs(wanted).max(initial=0), 1e-3))


def in_dtype(params: Any, dtype: str) -> Any:
    return tree.map(lambda a: a.astype(dtype), params)
