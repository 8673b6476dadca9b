"""`python -m benchmarks.speed`: the newest runs, as they were stored."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import speed

ORIGIN: dict[str, Any] = {
    "date": "2026-11-22 10:00 UTC",
    "commit": "0123456789abcdef",
    "dirty": False,
    "machine": {"cpu": "A processor", "system": "Linux", "architecture": "x86_64", "cpus": 2},
    "python": "3.11.7",
    "versions": {"numpy": "2.4.6"},
    "backends": {"numpy": "numpy 2.4.6 on cpu, float32, float64"},
    "threads": {"cpus": 2},
}


def times(least: float, peer: float) -> dict[str, float]:
    return {"min_ms": least, "median_ms": least + 1, "ratio": least / peer}


STEP = ORIGIN | {
    "shape": "char-gpt",
    "work": "step",
    "works": ["step"],
    "rows": [
        {"name": "torch eager", "step": times(1200, 1200), "peak_bytes": 1000, "light": 0.8},
        {"name": "torch compile", "step": times(1260, 1200), "peak_bytes": 1100, "light": 0.7},
        {"name": "numpy kernel", "step": times(1080, 1200), "peak_bytes": 800, "light": 0.89},
        {"name": "numba kernel", "step": times(900, 1200), "peak_bytes": 900, "light": 0.95},
    ],
}
TOKEN = ORIGIN | {
    "shape": "gpt2",
    "peer": "transformers",
    "rows": [
        {"name": "transformers", "token": times(40, 40)},
        {"name": "xformer numpy", "token": times(24, 40)},
        {"name": "xformer numba", "token": times(20, 40)},
    ],
}
START = ORIGIN | {
    "shape": "gpt2",
    "commit": None,
    "peer": "torch eager",
    "rows": [
        {"name": "torch eager", "start": times(2000, 2000)},
        {"name": "xformer numpy", "start": times(300, 2000)},
    ],
}
ELSEWHERE = copy.deepcopy(START) | {"date": "2026-11-20 10:00 UTC"}
ELSEWHERE["machine"]["cpu"] = "Another"
ELSEWHERE["rows"][1]["start"] = times(400, 2000)
TABLE = """\
|                         | torch eager, ms | torch.compile, x | NumPy, x | \
NumPy with numba, x | peak memory, x | speed of light |
| ----------------------- | --------------: | ---------------: | -------: | \
------------------: | -------------: | -------------: |
| char-GPT, training step |            1200 |             1.05 |     0.90 | \
               0.75 |    0.80 / 0.90 |      89% / 95% |

|                                           |         peer | peer, ms | NumPy, ms |    x | \
with numba, x |
| ----------------------------------------- | -----------: | -------: | --------: | ---: | \
------------: |
| GPT-2 124M, a token                       | transformers |       40 |        24 | 0.60 | \
         0.50 |
| GPT-2 124M, process start to first logits |  torch eager |     2000 |       300 | 0.15 | \
            - |

2026-11-22, A processor, 2 threads. Python 3.11.7; numpy 2.4.6 on cpu.
Commit 012345678, none.

x: minimum over the peer's minimum in one interleaved run; below 1 is \
faster, or smaller.
Peak memory and speed of light: of NumPy / with numba. Speed of light: the time of the matrix
products that the work needs, by NumPy's BLAS (numba's own may be faster), over that of the work."""


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """With an older run, and one of other works, which are not shown."""
    folder = tmp_path / "results"
    folder.mkdir()
    older = copy.deepcopy(STEP) | {"date": "2026-11-21 10:00 UTC"}
    older["rows"][2]["step"] = times(2000, 1200)
    other = STEP | {"date": "2026-11-23 10:00 UTC", "works": ["forward"]}
    for name, run in (
        ("step-char-gpt-2026-11-21-b", older),
        ("step-char-gpt-2026-11-22-a", STEP),
        ("step-char-gpt-2026-11-23-c", other),
        ("decoding-gpt2-2026-11-22-a", TOKEN),
        ("start-gpt2-2026-11-22-a", START),
        ("start-gpt2-2026-11-20-d", ELSEWHERE),
    ):
        (folder / f"{name}.json").write_text(json.dumps(run))
    return folder


def test_the_newest_runs_are_shown(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{speed.BEGIN}old\n{speed.END}after\n")
    for _ in range(2):
        assert speed.main(["--results", str(results), "--page", str(page)]) == 0
        assert capsys.readouterr().out == TABLE + "\n"
        new = f"{TABLE}\n[All figures](results).\n"
        assert page.read_text() == f"before\n{speed.BEGIN}{new}{speed.END}after\n"


def test_machine_by_machine(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["--machine", "Another", "--machine", "A processor"]
    assert speed.main(["--results", str(results), *names]) == 0
    first, _, second = capsys.readouterr().out.partition("Commit none.\n\n")
    assert "2026-11-20, Another, 2 threads" in first and " 400 | 0.20 |" in first
    assert "training step" not in first and second == TABLE + "\n"
    with pytest.raises(SystemExit):
        speed.main(["--results", str(results), *names, "--machine", "a third"])
    assert "no run of a shape of a machine named 'a third' in" in capsys.readouterr().err


def test_a_page_without_marks_stays_as_it_is(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match="must hold the lines <!-- speed --> and <!-- end -->"):
        speed.main(["--results", str(results), "--page", str(page)])
    assert page.read_text() == "nothing\n"


def test_without_runs_there_is_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        speed.main(["--results", str(tmp_path)])
    assert "there is no run of a shape in" in capsys.readouterr().err


def test_the_picture_is_the_same_each_time(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = []
    for name in ("a.svg", "b.svg"):
        assert speed.main(["--results", str(results), "--picture", str(tmp_path / name)]) == 0
        drawn.append((tmp_path / name).read_text())
    assert drawn[0] == drawn[1]
    for label in ("char-GPT, training step", "torch.compile", "NumPy"):
        assert f"<!-- {label} -->" in drawn[0]
    assert "<!-- jax.jit -->" not in drawn[0]
    both = ["--machine", "Another", "--machine", "A processor"]
    given = ["--results", str(results), "--picture", str(tmp_path / "c.svg")]
    assert speed.main([*given, *both]) == 0
    assert (tmp_path / "c.svg").read_text() == drawn[0]  # nothing of the other one to draw
