"""`python -m benchmarks.gpu --dry-run`: what would run on a GPU, on CuPy's stand-in."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda_shim
import numpy as np
import pytest
import xformer.backends.cupy
from libraries import STAND_IN
from test_benchmarks import InProcess
from xformer.backends.base import Memory
from xformer.backends.cupy import activation
from xformer.backends.cupy.module import LAUNCHERS

from benchmarks import (
    gpu,
    gpu_decoder,
    gpu_decoding,
    gpu_kernels,
    gpu_page,
    gpu_plan,
    harness,
    machine,
    shapes,
    step,
    worker,
)
from benchmarks.contestants import CUDNN, DETERMINISTIC, GRAPH, OURS_ON_GPU, PEER
from benchmarks.harness import Disagreement
from xformer import backends, dispatch
from xformer.ops import gelu

SECTIONS = ["costs", "rates", "kernels", "tests", "gpt2-bfloat16", "llama-bfloat16"]
SECTIONS += ["decoding", "decoding-64", "attention", "curve-float32", "curve-bfloat16"]
SECTIONS += ["gpt2", "llama"]


class Decoder(InProcess):
    """In the place of the process of a decoding contestant."""

    def __init__(self, name: str, folder: Path) -> None:
        self.answers = gpu_decoder.answers(folder, name)


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    try:
        cuda_shim.backend()
    except backends.Unusable as error:
        pytest.skip(str(error))
    monkeypatch.setattr(step, "start", InProcess)
    monkeypatch.setattr(gpu_decoding, "start", Decoder)
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
    for name in SECTIONS[-2:]:
        assert [row["name"] for row in done[name]["rows"]] == [PEER, OURS_ON_GPU]
        assert all(row["error"] < 1e-5 and row["step"]["min_ms"] > 0 for row in done[name]["rows"])
        assert done[name]["rows"][1]["dispatch"]["calls"] > 10
    for name in SECTIONS[4:6]:
        assert done[name]["dtype"] == "bfloat16"
        rows = done[name]["rows"]
        assert [row["name"] for row in rows] == [PEER, OURS_ON_GPU, GRAPH, DETERMINISTIC]
        assert all(1e-5 < row["error"] < 5e-2 and row["step"]["min_ms"] > 0 for row in rows)
    for name, n_texts in (("decoding", 1), ("decoding-64", 2)):
        assert done[name]["texts"] == n_texts
        assert list(done[name]["tokens"]) == [PEER, OURS_ON_GPU, GRAPH]
        assert all(row["min_ms"] > 0 for row in done[name]["tokens"].values())
        assert all(row["same_ids"] == 9 * n_texts for row in done[name]["tokens"].values())
    for row in done["attention"]:
        assert row["times"].keys() == row["errors"].keys() == {"flash", "torch"}
        assert max(row["errors"].values()) < 2e-2
    off = done["curve-float32"]["off"]
    assert off.keys() == {"here", "numpy", "reference"} and 0 < max(off.values()) < 1e-5
    validation = done["curve-bfloat16"]["validation"]
    assert validation["bfloat16"] == pytest.approx(validation["float32"], rel=1e-2)
    assert validation["bfloat16"] != validation["float32"]
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
                answer["ids"] = [[*text, 0] for text in answer["ids"]]
            return answer

    first: list[Any] = []

    def decoder(name: str, folder: Path) -> Other:
        first.append(Other(name, folder))
        return first[-1]

    monkeypatch.setattr(gpu_decoding, "start", decoder)
    status, found = run(tmp_path, *only("decoding", "costs"))
    assert status == 1 and list(found["sections"]) == ["costs"]
    (wrong,) = found["wrong"]
    assert wrong.startswith(
        f"decoding: Disagreement: {OURS_ON_GPU} writes another text than the peer"
    )
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

    def same(*own: int) -> int:
        return gpu_decoding.agreement("it", 9, list(own), [1, 2, 3, 4], Ours())

    asked: list[Any] = []
    apart = 1e-6
    assert same(1, 2, 3, 4) == 4 and same(1, 2, 7, 7) == 2
    assert asked == [{"ids": [9, 1, 2], "pair": [7, 3]}]
    apart = 1e-4
    with pytest.raises(Disagreement, match=r"^it writes another .*id 3 is 7, not 3, .*1.0e-04"):
        same(1, 2, 7, 7)
    apart = float("nan")
    with pytest.raises(Disagreement, match=r"their logits are nan apart"):
        same(1, 2, 7, 7)
    with pytest.raises(Disagreement, match=r"^it writes another text than the peer: 2 ids, not 4$"):
        same(1, 2)
    with pytest.raises(Disagreement, match=r"their logits are nan apart"):  # ours has failed
        gpu_decoding.agreement("it", 9, [1, 7], [1, 2], None)


def test_a_gap_between_logits(tmp_path: Path) -> None:
    plan = gpu_plan.planned(dry=True)
    shapes.store(plan.texts[0], tmp_path)
    ask = gpu_decoder.answers(tmp_path, OURS_ON_GPU)
    ids = ask["write"]([gpu_decoding.FIRST], 2)["ids"][0]
    assert ask["gap"]([gpu_decoding.FIRST], [ids[0], ids[0]]) == {"gap": 0.0}
    assert ask["gap"]([gpu_decoding.FIRST, ids[0]], [ids[1], (ids[1] + 1) % 11])["gap"] > 0
    assert "gap" not in gpu_decoder.answers(tmp_path, PEER)


# Interrupts may be ignored where tests run in the background of a shell.
HANDLED = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
LOOP = "print('begun', flush=True)\nimport time\ntime.sleep(60)"


@pytest.mark.parametrize("code", [HANDLED + LOOP, STUBBORN + LOOP], ids=("interrupted", "killed"))
def test_a_program_that_takes_too_long_is_stopped(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if code.startswith(STUBBORN):  # only time ends it; the other may be slow to say why it ends
        monkeypatch.setattr(gpu, "STOPPING", 1)
    said, over = gpu.outcome([sys.executable, "-c", code], 2)
    assert over and said.startswith("begun")
    assert ("KeyboardInterrupt" in said) == code.startswith(HANDLED)
    assert gpu.outcome([sys.executable, "-c", "print(3)"], 60) == ("3\n", False)


def test_a_section_is_stopped_when_time_is_over() -> None:
    command = [sys.executable, "-c", "print('ready', flush=True)\nimport time\ntime.sleep(60)"]

    def run() -> None:
        with harness.Process("it", command, {}) as process:
            process.ask(run={})

    found: dict[str, Any] = {"sections": {}, "wrong": []}
    gpu.run_section("slow", run, found, time.monotonic() + 1)
    (wrong,) = found["wrong"]
    assert wrong.startswith("slow: stopped, time was over: Ended: it ended, exit status -9")


def test_no_kernel_is_begun_when_time_is_over() -> None:
    plan = gpu_plan.planned(dry=True)
    rates = {"copy": 1.0, "product": 1.0}
    found = gpu_kernels.kernels(plan.place, plan.sizes, rates, 1, lambda: True)
    assert found == ([], ["layer_norm and what follows: not begun, time was over"])


def test_time_that_is_over(tmp_path: Path) -> None:
    status, found = run(tmp_path, "--minutes", "0", *only("costs"))
    assert status == 1 and not found["sections"]
    assert found["wrong"] == ["costs: not begun, 0 minutes were over"]


def test_goals() -> None:
    """What this library reaches, of what was measured."""

    def row(ms: float, peak: int = 100) -> dict[str, Any]:
        return {"step": {"min_ms": ms}, "light": 50 / ms, "peak_bytes": peak}

    rows = {PEER: row(300), CUDNN: row(200), OURS_ON_GPU: row(120, 60), GRAPH: row(100, 70)}
    rows |= {DETERMINISTIC: row(126)}
    done: dict[str, Any] = {
        "gpt2-bfloat16": {"rows": [{"name": name} | own for name, own in rows.items()]},
        "decoding": {"tokens": {name: own["step"] for name, own in rows.items()}},
        "kernels": [
            {"moves": True, "floor": 8, "seconds": 10},
            {"moves": True, "floor": 7.9, "seconds": 10},
            {"moves": False, "floor": 10, "seconds": 10},
        ],
        "attention": [{"length": 16, "direction": "whole", "times": {"flash": {"ratio": 0.9}}}],
        "curve-float32": {"steps": 9, "off": {"here": 3, "numpy": 1, "reference": 2}},
        "curve-bfloat16": {"steps": 9, "validation": {"float32": 1.0, "bfloat16": 1.004}},
    }
    found = {figure: own for figure, _, own in gpu_page.goals(done)}
    assert found == {
        "gpt2-bfloat16, tokens/s over torch eager": "3.00",
        "gpt2-bfloat16, tokens/s over torch cudnn": "2.00",
        "gpt2-bfloat16, share of the product rate": "50%",
        "gpt2-bfloat16, peak memory over torch eager": "0.70",
        "gpt2-bfloat16, deterministic, time over cupy kernel": "1.05",
        "decoding, tokens/s over torch eager": "3.00",
        "kernels bound by memory, of their floor": "1 of 2 kernels",
        "flash, 16 tokens, whole, time over torch's": "0.90",
        "losses of 9 steps, off float64, over NumPy's": "1.50",
        "validation after 9 steps, over float32's": "1.0040",
    }
    assert gpu_page.goals({}) == []
    failed = {PEER: row(300), DETERMINISTIC: row(126)}
    done = {"gpt2-bfloat16": {"rows": [{"name": name} | own for name, own in failed.items()]}}
    done["decoding"] = {"tokens": {PEER: row(300)["step"]}}
    assert gpu_page.goals(done) == [["decoding, tokens/s over torch eager", "3", "-"]]


def test_judging_in_parts() -> None:
    """The same loss and gradients, of as many rows at a time as a shape says."""
    from benchmarks import eager  # which needs torch

    shape = gpu_plan.planned(dry=True).steps[2][0]
    whole, parts = (eager.Judge(replace(shape, judged=rows), shape.weights()) for rows in (None, 1))
    (loss, grads), (again, others) = whole.gradients(), parts.gradients()
    assert again == pytest.approx(loss, rel=1e-12)
    for name, grad in grads.items():
        assert np.allclose(others[name], grad, rtol=1e-9, atol=1e-12), name
    with pytest.raises(ValueError, match="judged must divide the batch of 2, got 3"):
        eager.Judge(replace(shape, judged=3), shape.weights())


def test_memory_is_given_back_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After a check and after a turn; a run that is not timed comes before the next; peaks are of
    what is timed, and what all of it has taken is known."""
    log: list[str] = []
    sizes = [40]

    class Place:
        def synchronize(self) -> None:
            log.append("waited")

        def memory(self) -> Memory:
            return Memory(1, sizes[-1])

    class Contestant:
        backend = Place()

        def step(self) -> None:
            log.append("step")

        def gradients(self) -> tuple[float, dict[str, Any]]:
            log.append("gradients")
            return 1.0, {"w": np.ones(2)}

    def give_back() -> None:
        log.append("given back")
        sizes.append(7)

    monkeypatch.setattr(machine, "give_back", give_back)
    monkeypatch.setattr(machine, "held", lambda: 5)
    given = gpu_plan.planned(dry=True).steps[0][0]
    for device in ("cuda", STAND_IN, None):
        log.clear()
        own: Any = worker.Worker(replace(given, device=device), Contestant())  # type: ignore[arg-type]
        back = ["given back"] * (device == "cuda")
        n_steps = 1 if device is None else 3
        assert own.outcome(str(tmp_path / "found")).keys() == {"loss", "loss after steps"}
        wanted = ["gradients", *back, *n_steps * ["step"], *back, "gradients", *back]
        assert log == wanted
        log.clear()
        assert len(own.run("step", 2)) == 2
        assert log == ["step", "waited"] * (2 + len(back)) + back
        about = own.about()
        if device == "cuda":
            assert (about["bytes"], about["most_bytes"], about["peak_bytes"]) == (5, 40, 7)
        else:
            assert (about["bytes"], about["most_bytes"], about["peak_bytes"]) == (1, 7, 7)


def test_one_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps and in texts; it is named."""

    def failing(start: Any) -> Any:
        def one(name: str, folder: Path) -> Any:
            if name == GRAPH:
                raise RuntimeError("it did not start")
            return start(name, folder)

        return one

    monkeypatch.setattr(step, "start", failing(step.start))
    monkeypatch.setattr(gpu_decoding, "start", failing(gpu_decoding.start))
    status, found = run(tmp_path, *only("gpt2-bfloat16", "decoding"))
    names = [PEER, OURS_ON_GPU, DETERMINISTIC]
    assert [row["name"] for row in found["sections"]["gpt2-bfloat16"]["rows"]] == names
    assert list(found["sections"]["decoding"]["tokens"]) == names[:2]
    said = "cupy graph: it did not start"
    assert status == 1 and found["wrong"] == [f"{n}: {said}" for n in ("gpt2-bfloat16", "decoding")]


def test_unknown_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, *only("steps"))
    assert f"--section must be one of {', '.join(SECTIONS)}, got 'steps'" in capsys.readouterr().err


def test_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    if backends.why_not("cupy") is None:
        pytest.skip("there is a CUDA device")
    with pytest.raises(backends.Unusable, match=r"^backend cupy cannot be used: "):
        gpu.main(["--section", "costs"])
