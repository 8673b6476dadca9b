"""The README's examples run as they stand, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import xformer as xf

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_protocol_says_that_it_binds_the_caller() -> None:
    """Buffers of a batch that are refilled before backward; with copies gradients are right."""
    page = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert "This binds the caller too, until `backward` has been called." in page
    (advice,) = re.findall(r"pass a copy: `(model\.loss\(.*\))`", page)
    model = xf.GPT(vocab_size=11, n_layers=1, d_model=6, n_heads=2, max_len=4)
    params = model.init(dtype="float64")
    tokens, targets = np.array([[1, 2, 3]]), np.array([[4, 5, 6]])
    _, cache = model.loss(params, tokens, targets)
    want = xf.tree.flatten(cache.backward())
    _, cache = eval(
        advice, {"model": model, "params": params, "tokens": tokens, "targets": targets}
    )
    tokens[:], targets[:] = 7, 8
    got = xf.tree.flatten(cache.backward())
    assert all(np.array_equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
