"""`python -m benchmarks.gpu --dry-run`: what would run on a GPU, on CuPy's stand-in."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_shim
import pytest
import xformer.backends.cupy
from libraries import STAND_IN
from test_benchmarks import InProcess
from xformer.backends.cupy import activation
from xformer.backends.cupy.module import LAUNCHERS

from benchmarks import gpu, gpu_decoding, gpu_kernels, harness, machine, shapes, step
from benchmarks.contestants import PEER
from benchmarks.harness import Disagreement
from xformer import backends, dispatch
from xformer.ops import gelu

SECTIONS = ["costs", "rates", "kernels", "tests", "gpt2", "decoding", "llama"]


class Decoder(InProcess):
    """In the place of the process of a decoding contestant."""

    def __init__(self, name: str, folder: Path) -> None:
        self.answers = gpu_decoding.answers(folder, name)


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    try:
        cuda_shim.backend()
    except backends.Unusable as error:
        pytest.skip(str(error))
    monkeypatch.setattr(step, "start", InProcess)
    monkeypatch.setattr(gpu, "decoder", Decoder)
    monkeypatch.setattr(harness, "SETTLE", 0.0)
    monkeypatch.setattr(backends, "keep_memory", lambda: None)  # of all tests after it
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", machine.COMPILING):
        monkeypatch.setenv(name, "1")  # so that it is left as it was


def run(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and what was written."""
    status = gpu.main(["--dry-run", "--out", str(folder), *options])
    (path,) = folder.glob("gpu-dry-run-*.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return status, found


def only(*names: str) -> list[str]:
    return [option for name in names for option in ("--section", name)]


def test_every_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run(tmp_path)
    assert (status, found["wrong"]) == (0, [])
    done, shown = found["sections"], capsys.readouterr().out
    assert list(done) == SECTIONS
    assert done["tests"] == {"passed": 2, "failed": 0, "skipped": 0}
    assert len(done["costs"]) == 5 and min(done["costs"].values()) > 0
    assert done["rates"].keys() == {"copy", "product", "product, float16"}
    assert min(done["rates"].values()) > 0
    for name in ("gpt2", "llama"):
        assert [row["name"] for row in done[name]["rows"]] == [PEER, gpu.OURS]
        assert all(row["error"] < 1e-5 and row["step"]["min_ms"] > 0 for row in done[name]["rows"])
        assert done[name]["rows"][1]["dispatch"]["calls"] > 10
    assert all(row["min_ms"] > 0 for row in done["decoding"].values())
    assert all(row["same_ids"] == 9 for row in done["decoding"].values())
    assert "A dry run: no figure means anything." in shown
    assert {"cuda_shim", "torch", "numpy"} <= found["versions"].keys()
    (table,) = tmp_path.glob("gpu-dry-run-*.md")
    assert table.read_text(encoding="utf-8") in shown
    for row in done["kernels"]:
        assert row["seconds"] > 0 and row["floor"] > 0
        assert row["error"] <= (2e-3 if "float16" in row["name"] else 1e-5)
        assert row["median"] >= row["seconds"] and row["n"] == 1
        assert f"| {row['name']} " in shown


def test_every_kernel_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that stand in the sources; each op's row names the implementation that ran."""
    folder = Path(xformer.backends.cupy.__file__).parent
    sources = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.cu"))
    launched: set[str] = set()
    launch = LAUNCHERS[cuda_shim.Array]

    def noted(source: Any, name: str, *rest: Any) -> None:
        launched.add(name)
        launch(source, name, *rest)

    monkeypatch.setitem(LAUNCHERS, cuda_shim.Array, noted)
    status, found = run(tmp_path, *only("kernels"))
    assert status == 0
    assert launched == set(
        re.findall(r"__global__[^;{(]*void\s+(?:__\w+\([^)]*\)\s+)?(\w+)\(", sources)
    )
    runs = {row["name"].partition(",")[0]: row["runs"] for row in found["sections"]["kernels"]}
    for op in dispatch.ops():
        if op.kernels.get(STAND_IN) and op.__name__ in runs:
            assert runs[op.__name__].startswith("xformer.backends.cupy."), op


def test_what_is_wrong_is_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable[..., Any] = activation.activation

    def wrong(x: Any, name: str) -> Any:
        y, cache = right(x, name)
        return y * (1.001 if name == "gelu_tanh" else 1.0), cache

    monkeypatch.setattr(activation, "activation", wrong)
    assert gelu.kernels[STAND_IN]
    status, found = run(tmp_path, *only("kernels"))
    names = {row["name"] for row in found["sections"]["kernels"]}
    assert status == 1
    assert found["wrong"] == ["kernels: gelu, tanh: relative error 1.0e-03, allowed 1e-05"]
    assert "gelu, forward" in names and "gelu, tanh, forward" not in names


def test_a_section_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Other(Decoder):
        def ask(self, **request: Any) -> Any:
            answer = super().ask(**request)
            if "ids" in answer and self is not first[0]:
                answer["ids"] = [*answer["ids"], 0]
            return answer

    first: list[Any] = []

    def decoder(name: str, folder: Path) -> Other:
        first.append(Other(name, folder))
        return first[-1]

    monkeypatch.setattr(gpu, "decoder", decoder)
    status, found = run(tmp_path, *only("decoding", "costs"))
    assert status == 1 and list(found["sections"]) == ["costs"]
    (wrong,) = found["wrong"]
    assert wrong.startswith(f"decoding: Disagreement: {gpu.OURS} writes another text than {PEER}")
    assert f"- {wrong[:60]}" in capsys.readouterr().out


def test_arrays_do_not_fit_in_a_cache() -> None:
    s = gpu_kernels.LARGE
    heads = s.batch * s.heads * 64
    least = min(s.rows * s.width, heads * s.length, heads * s.keys)
    assert 2 * least * gpu_kernels.REAL > gpu_kernels.CACHE  # read and written, or keys and values


def test_texts_that_part_where_two_ids_are_as_likely() -> None:
    class Ours:
        def ask(self, gap: Any) -> Any:
            asked.append(gap)
            return {"gap": apart}

    asked: list[Any] = []
    texts = {"peer": [1, 2, 3, 4], "same": [1, 2, 3, 4], "other": [1, 2, 7, 7], "short": [1, 2]}
    apart = 1e-6
    assert [gpu.agreement(name, texts, Ours()) for name in ("peer", "same", "other")] == [4, 4, 2]
    assert asked == [{"ids": [gpu.FIRST, 1, 2], "pair": [7, 3]}]
    apart = 1e-4
    with pytest.raises(Disagreement, match=r"^other writes another .*id 3 is 7, not 3, .*1.0e-04"):
        gpu.agreement("other", texts, Ours())
    apart = float("nan")
    with pytest.raises(Disagreement, match=r"their logits are nan apart"):
        gpu.agreement("other", texts, Ours())
    with pytest.raises(Disagreement, match=r"^short writes another text than peer: 2 ids, not 4$"):
        gpu.agreement("short", texts, Ours())


def test_a_gap_between_logits(tmp_path: Path) -> None:
    plan = gpu.planned(dry=True)
    shapes.store(plan.text, tmp_path)
    ask = gpu_decoding.answers(tmp_path, gpu.OURS)
    ids = ask["write"](gpu.FIRST, 2)["ids"]
    assert ask["gap"]([gpu.FIRST], [ids[0], ids[0]]) == {"gap": 0.0}
    assert ask["gap"]([gpu.FIRST, ids[0]], [ids[1], (ids[1] + 1) % 11])["gap"] > 0
    assert "gap" not in gpu_decoding.answers(tmp_path, PEER)


STUBBORN = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
LOOP = "print('begun', flush=True)\nimport time\ntime.sleep(60)"


@pytest.mark.parametrize("code", [LOOP, STUBBORN + LOOP], ids=("interrupted", "killed"))
def test_a_program_that_takes_too_long_is_stopped(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if code != LOOP:  # which nothing but time ends; the other may be slow to say why it ends
        monkeypatch.setattr(gpu, "STOPPING", 1)
    said, over = gpu.outcome([sys.executable, "-c", code], 2)
    assert over and said.startswith("begun")
    assert ("KeyboardInterrupt" in said) == (code == LOOP)
    assert gpu.outcome([sys.executable, "-c", "print(3)"], 60) == ("3\n", False)


def test_a_section_is_stopped_when_time_is_over() -> None:
    command = [sys.executable, "-c", "print('ready', flush=True)\nimport time\ntime.sleep(60)"]

    def run() -> None:
        with harness.Process("it", command, {}) as process:
            process.ask(run={})

    found: dict[str, Any] = {"sections": {}, "wrong": []}
    gpu.run_section("slow", run, found, time.monotonic() + 1)
    (wrong,) = found["wrong"]
    assert wrong.startswith("slow: stopped, time was over: RuntimeError: it ended, exit status -9")


def test_no_kernel_is_begun_when_time_is_over() -> None:
    plan = gpu.planned(dry=True)
    rates = {"copy": 1.0, "product": 1.0}
    found = gpu_kernels.kernels(plan.place, plan.sizes, rates, 1, lambda: True)
    assert found == ([], ["layer_norm and what follows: not begun, time was over"])


def test_time_that_is_over(tmp_path: Path) -> None:
    status, found = run(tmp_path, "--minutes", "0", *only("costs"))
    assert status == 1 and not found["sections"]
    assert found["wrong"] == ["costs: not begun, 0 minutes were over"]


def test_unknown_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, *only("steps"))
    assert f"--section must be one of {', '.join(SECTIONS)}, got 'steps'" in capsys.readouterr().err


def test_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    if backends.why_not("cupy") is None:
        pytest.skip("there is a CUDA device")
    with pytest.raises(backends.Unusable, match=r"^backend cupy cannot be used: "):
        gpu.main(["--section", "costs"])
