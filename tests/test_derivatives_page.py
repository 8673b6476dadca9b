"""docs/derivatives.md: its code runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs/derivatives.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch.func calls it
def test_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "derivatives"}
    for block in BLOCKS:
        if block.startswith("# torch"):
            pytest.importorskip("torch", reason="torch is not installed")
        exec(block.replace("STEPS, EVERY = 800, 40", "STEPS, EVERY = 200, 200"), names)
    printed = capsys.readouterr().out
    errors = [float(e) for e in re.findall(r"(?:along v:|differ by) (\S+)", printed)]
    assert len(errors) == 2
    assert max(errors) < 1e-12
    assert "layer_norm: gradients agree (relative error at most 1e-12)" in printed
    # Both begin at the same sharpness, and come near 2 / lr.
    starts, ends = zip(*names["curves"].values(), strict=True)
    assert starts[0] == starts[1] == pytest.approx(6.14, abs=0.1)
    assert ends == pytest.approx([2 / lr for lr in names["curves"]], rel=0.25)
    (least, _), (convex, largest) = (
        [float(x) for x in re.findall(r"-?[\d.]+", line)]
        for line in re.findall(r"^(?:Hessian|Gauss-Newton) \[(.*)\]", printed, re.MULTILINE)
    )
    assert least < -1 < -0.1 < convex < largest
    assert printed.rstrip().endswith("True")
