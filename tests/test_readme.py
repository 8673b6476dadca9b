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


def test_the_library_example_learns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    exec(EXAMPLES[0], {})
    assert float(capsys.readouterr().out) < 3.5  # from 5.5, the logarithm of 256
    assert len(EXAMPLES[0].splitlines()) <= 15


def test_the_op_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(EXAMPLES[1], {"xf": xf, "rng": np.random.default_rng(0)})  # of the first example
    assert "gradients agree" in capsys.readouterr().out


def test_the_pretrained_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"n_embd": 6, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
    model = xf.pretrained.model(config)
    xf.pretrained.save(model, model.init(), "SmolLM2-135M")
    rng = np.random.default_rng(0)
    names = {
        "xf": xf,
        "tokens": rng.integers(0, 11, (2, 3)),
        "dlogits": rng.normal(size=(2, 3, 11)).astype(np.float32),
    }
    exec(EXAMPLES[2], names)
    assert xf.tree.flatten(names["grads"]).keys() == xf.tree.flatten(names["params"]).keys()
    assert xf.pretrained.load("copy")[0].hf_config["n_embd"] == 6


def test_the_example_of_kernels_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba", reason="extra numba is not installed")
    model = xf.GPT(vocab_size=11, n_layers=1, d_model=6, n_heads=2, max_len=4)
    names = {
        "xf": xf,
        "np": np,
        "model": model,
        "params": model.init(),
        "tokens": np.array([[1, 2, 3]]),
    }
    exec(EXAMPLES[3], names)
    (said,) = re.findall(r"# (gelu on numpy: .*)", EXAMPLES[3])
    assert capsys.readouterr().out.splitlines()[0] == said


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
