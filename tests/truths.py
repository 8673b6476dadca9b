"""Files that other people published, for tests: where they lie, and what to say without them."""

from __future__ import annotations

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
