"""docs/backward.md, private-training.md, attribution-patching.md: the code prints what is said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from truths import minilm

import xformer

DOCS = Path(__file__).resolve().parent.parent / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def test_backward(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks("backward.md"):
        exec(block, names)
    printed = capsys.readouterr().out
    assert printed.startswith("stack.blocks.0.ffn (16, 16, 16) |dy| ")
    told = (DOCS / "backward.md").read_text(encoding="utf-8").partition("```text\n")[2]
    assert re.findall("^ready: .*$", printed, re.M) == told.partition("```")[0].splitlines()
    rows = dict(re.findall(r"^(\w+) +(layer 0 .*)$", printed, re.MULTILINE))
    numbers = {name: re.findall(r"layer \d ([\d.]+)", row) for name, row in rows.items()}
    assert numbers.keys() == {"plain", "without", "stopped", "louder"}
    assert numbers["without"][1] == "0.0000"
    assert numbers["without"][0] == numbers["stopped"][0] != numbers["plain"][0]
    assert numbers["stopped"][1] == numbers["plain"][1] == numbers["louder"][1]
    assert "the same bits: True\n" in printed
    found = re.search(r"loss ([\d.]+), after the gradient ([\d.]+), after K-FAC ([\d.]+)", printed)
    assert found is not None
    before, gradient, natural = map(float, found.groups())
    assert natural < gradient < before


def test_private_training(capsys: pytest.CaptureFixture[str]) -> None:
    """With fewer steps; the epsilon of all steps is that of the page."""
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks("private-training.md"):
        exec(block.replace("BATCH, STEPS = 16, 64, 200", "BATCH, STEPS = 16, 64, 6"), names)
    printed = capsys.readouterr().out
    one, alone = re.findall(r"the first norm: ([\d.]+), alone ([\d.]+)", printed)[0]
    assert one == alone
    page = (DOCS / "private-training.md").read_text(encoding="utf-8")
    spent = dict(re.findall(r"^noise ([\d.]+): .*, epsilon ([\d.]+)$", page, re.MULTILINE))
    assert spent.keys() == {"0.5", "1.0"}
    for noise, epsilon in spent.items():
        assert f"{names['epsilon'](float(noise), 200):.2f}" == epsilon
    # Each private gradient is the clipped sum with noise of the stated size.
    losses = names["curves"]
    assert [len(curve) for curve in losses.values()] == [6, 6, 6]
    assert losses[0.0][-1] < losses[0.0][0]


@pytest.mark.filterwarnings("ignore")  # of transformers and TransformerLens
def test_attribution_patching(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    (tmp_path / "all-MiniLM-L6-v2").symlink_to(minilm())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    *ours, theirs = blocks("attribution-patching.md")
    for block in ours:
        exec(block, names)
    printed = capsys.readouterr().out
    page = (DOCS / "attribution-patching.md").read_text(encoding="utf-8")
    shown = "".join(re.findall(r"```text\n(.*?)```", page, re.DOTALL)[:-1])
    assert printed == shown
    # The last layer's input is nearest: after it there are only a few steps.
    errors = np.abs(names["exact"] - names["by_token"]).max(axis=1)
    assert errors[-1] == errors.min() < 0.02
    assert theirs.startswith("# transformer-lens")
    pytest.importorskip("transformer_lens", reason="transformer-lens is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    exec(theirs, names)
    assert names["worst"] < 1e-14


def test_an_op_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    *_, block = blocks("private-training.md")
    exec(block, {"__name__": "page", "np": np, "xf": xformer})
    assert capsys.readouterr().out == "the norms of each example alone: True\n"
