"""`python -m benchmarks.gpu --dry-run`: what would run on a GPU, on CuPy's stand-in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda_shim
import numpy as np
import pytest
from hanging import SECONDS
from libraries import STAND_IN
from test_benchmarks import InProcess
from test_cuda_failures import Failing

import xformer.backends.cupy
from benchmarks import (
    contestants,
    gpu,
    gpu_attention,
    gpu_decoder,
    gpu_decoding,
    gpu_kernels,
    gpu_libraries,
    gpu_page,
    gpu_plan,
    gpu_tests,
    harness,
    machine,
    shapes,
    step,
    worker,
)
from benchmarks.contestants import CUDNN, DETERMINISTIC, GRAPH, JITTED, OURS_ON_GPU, PEER
from benchmarks.harness import ROOT, Disagreement, OutOfMemory
from xformer import backends, dispatch, tree
from xformer.backends.cupy import activation, linear_cross_entropy
from xformer.backends.cupy.module import DRIVERS
from xformer.dispatch.backend import Memory
from xformer.ops import gelu

SECTIONS = ["libraries", "costs", "rates", "kernels", "tests", "gpt2-bfloat16", "llama-bfloat16"]
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
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", machine.COMPILING):
        monkeypatch.setenv(name, "1")  # so that it is left as it was


def run(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and what was written. No time is over unless the options say so."""
    status = gpu.main(["--dry-run", "--out", str(folder), "--minutes", "600", *options])
    (path,) = folder.glob("gpu-dry-run-*.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return status, found


def only(*names: str) -> list[str]:
    return [option for name in names for option in ("--section", name)]


def test_every_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "LIMITS", {})
    monkeypatch.setattr(gpu, "TESTING", SECONDS)
    status, found = run(tmp_path, *only(*SECTIONS))
    assert (status, found["wrong"]) == (0, [])
    assert found["left_out"] == {} and found["running"] is None
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
    for name in SECTIONS[5:7]:
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
    runs = done["libraries"]["runs"]
    assert runs["sdpa, bfloat16"] == "cupy.flash.sdpa" and "| linear, bfloat16 " in shown
    assert "- sdpa, bfloat16, not cupy.sdpa_cudnn.sdpa: on the stand-in cuDNN" in shown
    assert "A dry run: no figure means anything." in shown and "Not complete" not in shown
    assert {"cuda_shim", "torch", "numpy"} <= found["versions"].keys()
    (table,) = tmp_path.glob("gpu-dry-run-*.md")
    assert table.read_text(encoding="utf-8") in shown
    for row in done["kernels"]:
        assert row["seconds"] > 0 and row["floor"] > 0
        kind = next((kind for kind in ("bfloat16", "float16") if kind in row["name"]), None)
        assert row["error"] <= {"bfloat16": 1.6e-2, "float16": 2e-3, None: 1e-5}[kind]
        assert row["median"] >= row["seconds"] and row["n"] == 1
        assert f"| {row['name']} " in shown


def test_every_kernel_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels in the sources, but for a copy that only products by cuBLASLt need.

    Each op's row names the implementation that ran.
    """
    folder = Path(xformer.backends.cupy.__file__).parent
    sources = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.cu"))
    launched: set[str] = set()
    launch = DRIVERS[cuda_shim.Array].launch

    def noted(source: Any, name: str, *rest: Any) -> None:
        launched.add(name)
        launch(source, name, *rest)

    monkeypatch.setattr(DRIVERS[cuda_shim.Array], "launch", noted)
    status, found = run(tmp_path, *only("kernels"))
    assert status == 0
    names = re.findall(r"__global__[^;{(]*void\s+(?:__\w+\([^)]*\)\s+)?(\w+)\(", sources)
    assert launched == {*names} - {"side_by_side"}
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
        f"decoding: Disagreement: {OURS_ON_GPU} and the peer write different texts"
    )
    assert f"- {wrong[:60]}" in capsys.readouterr().out


def test_kernels_are_measured_as_gpt2_calls_them() -> None:
    """In bfloat16, with rows of logits that are padded, and weights that are rounded."""
    assert gpu_kernels.LARGE.padded == 50257 != linear_cross_entropy.row_width(50257)
    assert gpu_kernels.LARGE.tokens >= linear_cross_entropy.ROWS
    place = cuda_shim.backend()
    by_name = {case.name: case for case in gpu_kernels.cases(place, gpu_kernels.SMALL)}
    for name in ("add_norm, layer", "add_norm, rms", "linear_cross_entropy"):
        case = by_name[f"{name}, bfloat16"]
        assert {leaf.dtype.name for leaf in tree.flatten(case.args).values()} == {"bfloat16"}
        assert 1e-5 < gpu_kernels._error(place, case) <= case.tolerance
    weights = by_name["weights"]
    assert gpu_kernels._error(place, weights) == weights.tolerance == 0.0
    twice = weights._replace(reference=lambda leaves: tree.map(lambda leaf: 2 * leaf, leaves))
    assert gpu_kernels._error(place, twice) == pytest.approx(0.5, rel=1e-2)


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
    with pytest.raises(Disagreement, match=r"^it and the peer .*id 3 is 7, not 3, .*1.0e-04"):
        same(1, 2, 7, 7)
    apart = float("nan")
    with pytest.raises(Disagreement, match=r"their logits are nan apart"):
        same(1, 2, 7, 7)
    with pytest.raises(
        Disagreement, match=r"^it and the peer write different texts: 2 ids, not 4$"
    ):
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
LOOP = "print('begun', flush=True)\nopen(r'{}', 'w').close()\nimport time\ntime.sleep(3600)"


@pytest.mark.parametrize("code", [HANDLED + LOOP, STUBBORN + LOOP], ids=("interrupted", "killed"))
def test_a_program_that_takes_too_long_is_stopped(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time begins once it has begun, as the start may take long."""
    begun = tmp_path / "begun"

    class Begun(subprocess.Popen[str]):
        def communicate(self, *args: Any, **options: Any) -> Any:
            while not begun.exists() and self.poll() is None:
                time.sleep(0.01)
            return super().communicate(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", Begun)
    # Only time ends the stubborn one; the other may be slow to say why it ends.
    monkeypatch.setattr(gpu_tests, "STOPPING", 0.1 if code.startswith(STUBBORN) else SECONDS)
    said, over = gpu_tests.outcome([sys.executable, "-c", code.format(begun)], 0.1)
    assert over and said.startswith("begun")
    assert ("KeyboardInterrupt" in said) == code.startswith(HANDLED)
    assert gpu_tests.outcome([sys.executable, "-c", "print(3)"], SECONDS) == ("3\n", False)


def test_a_section_is_stopped_when_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "print('ready', flush=True)\nimport time\ntime.sleep(3600)"]
    begun, stopping = threading.Event(), gpu.stopping

    def section(run: Any, end: float) -> None:
        run.result["sections"]["slow"] = "the result so far"
        with harness.Process("it", command, {}) as process:
            begun.set()
            process.ask(run={})

    def stopping_later(done: threading.Event, seconds: float) -> None:
        begun.wait(SECONDS)
        stopping(done, seconds)

    monkeypatch.setattr(gpu, "stopping", stopping_later)
    run: Any = types.SimpleNamespace(result={"sections": {}, "wrong": []}, write=lambda: None)
    gpu.run_section("slow", section, run, time.monotonic() + 0.1)
    (wrong,) = run.result["wrong"]
    assert wrong.startswith("slow: stopped, time was over: Stopped: it ended: it was stopped")
    assert run.result["sections"] == {"slow": "the result so far"}


def test_no_kernel_is_begun_when_time_is_over() -> None:
    plan = gpu_plan.planned(dry=True)
    rates = {"copy": 1.0, "product": 1.0}
    found = gpu_kernels.kernels(plan.backend, plan.sizes, rates, 1, lambda: True)
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


# ---- What runs, and is not what was asked for ----


def test_another_kernel_is_named_below_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where cuBLASLt fails at an epilogue, call by call and in graphs, which are still graphs."""

    def failing() -> Failing:
        lt = Failing()
        lt.names = ("BIAS", "BGRADA", "BGRADB")
        return lt

    monkeypatch.setattr(cuda_shim, "CublasLt", failing)
    for module in (contestants, gpu_decoder):
        monkeypatch.setattr(module, "nullcontext", lambda: cuda_shim.calling(failing()))
    with pytest.warns(RuntimeWarning, match="a product by cuBLASLt failed"):
        status, found = run(tmp_path, *only("gpt2-bfloat16", "decoding"))
    assert (status, found["wrong"]) == (0, [])
    said = "backend cupy: a product by cuBLASLt failed (cuBLASLtError: status 7); such products"
    rows = {row["name"]: row for row in found["sections"]["gpt2-bfloat16"]["rows"]}
    tokens = found["sections"]["decoding"]["tokens"]
    shown = capsys.readouterr().out
    for row in (rows[OURS_ON_GPU], rows[GRAPH], tokens[OURS_ON_GPU], tokens[GRAPH]):
        (text,) = row["warnings"]
        assert text.startswith(said)
    for name in (OURS_ON_GPU, GRAPH):
        assert shown.count(f"\n\n{name} warned: {said}") == 2
    assert not any(row["warnings"] for row in (rows[PEER], rows[DETERMINISTIC], tokens[PEER]))


def test_no_graph_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its times would be those of steps that are made call by call."""
    monkeypatch.setattr(cuda_shim, "calling", lambda lt: nullcontext())  # products are cuBLAS's
    status, found = run(tmp_path, *only("gpt2-bfloat16", "decoding"))
    assert status == 1 and len(found["wrong"]) == 2
    assert all("RuntimeWarning: backend cuda_shim: no graph: " in what for what in found["wrong"])


# ---- Killed, out of memory, left out ----


class Killed(BaseException):
    """What no section catches, as nobody does a signal that kills."""


def when(start: Any, name: str, request: str, error: Callable[[], BaseException | None]) -> Any:
    """Contestants as `start` makes them; one raises what `error` says where it is asked."""

    def begin(own: str, folder: Path) -> Any:
        one = start(own, folder)
        if own == name:
            ask = one.ask

            def asked(**given: Any) -> Any:
                wrong = error() if request in given else None
                if wrong is not None:
                    raise wrong
                return ask(**given)

            one.ask = asked
        return one

    return begin


def written(folder: Path) -> tuple[dict[str, Any], str]:
    """JSON and table as they are on the disk."""
    (path,) = folder.glob("gpu-dry-run-*.json")
    return json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".md").read_text("utf-8")


def nth(n: int, error: Callable[[], BaseException]) -> Callable[[], BaseException | None]:
    """None but the n-th time, from 1 on."""
    times: list[None] = []

    def ask() -> BaseException | None:
        times.append(None)
        return error() if len(times) == n else None

    return ask


def test_what_is_killed_has_written_all_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every contestant's turns, of steps and of texts, and every kernel, up to the last."""
    second = nth(2, Killed)  # the first warms up
    monkeypatch.setattr(step, "start", when(step.start, GRAPH, "run", second))
    with pytest.raises(Killed):
        run(tmp_path / "steps", *only("costs", "gpt2-bfloat16"))
    found, table = written(tmp_path / "steps")
    assert found["running"] == "gpt2-bfloat16" and len(found["sections"]["costs"]) == 5
    rows = {row["name"] for row in found["sections"]["gpt2-bfloat16"]["rows"]}
    order = random_order([PEER, OURS_ON_GPU, GRAPH, DETERMINISTIC, "products"])
    assert rows == set(order[: order.index(GRAPH)]) - {"products"} and rows
    assert "Not complete: `gpt2-bfloat16` was running when this was written." in table
    assert all(f"| {name} " in table for name in rows)

    third = nth(3, Killed)  # it writes once to be compared
    monkeypatch.setattr(gpu_decoding, "start", when(gpu_decoding.start, GRAPH, "write", third))
    with pytest.raises(Killed):
        run(tmp_path / "texts", *only("decoding"))
    order = random_order([PEER, OURS_ON_GPU, GRAPH])
    sections = written(tmp_path / "texts")[0]["sections"]
    assert set(sections.get("decoding", {"tokens": {}})["tokens"]) == set(
        order[: order.index(GRAPH)]
    )

    measured, kill = gpu_kernels.measured, nth(3, Killed)

    def until_killed(*given: Any) -> Any:
        if (wrong := kill()) is not None:
            raise wrong
        return measured(*given)

    monkeypatch.setattr(gpu_kernels, "measured", until_killed)
    rates = {"copy": 1.0, "product": 1.0, "product, float16": 1.0}
    monkeypatch.setattr(gpu_kernels, "rates", lambda *given: rates)
    with pytest.raises(Killed):
        run(tmp_path / "kernels", *only("kernels"))
    names = [row["name"] for row in written(tmp_path / "kernels")[0]["sections"]["kernels"]]
    assert names == [f"{n}, {way}" for n in ("layer_norm", "rms_norm") for way in DIRECTIONS]


DIRECTIONS = ("forward", "backward")


def random_order(names: list[str]) -> list[str]:
    """That of the first counted round."""
    seen: list[str] = []
    turns = {name: (lambda name=name: seen.append(name) or [1.0]) for name in names}
    harness.interleave(turns, 1, lambda: None)
    return seen[len(names) :]


def test_a_command_that_is_killed(tmp_path: Path) -> None:
    """By the signal that no program sees: JSON and table are whole, and have what came before."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--out", str(tmp_path)]
    command += only("libraries", "costs", "decoding", "rates")
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + SECONDS
            while True:
                assert process.poll() is None and time.monotonic() < end, "it was to be killed"
                found, table = written(tmp_path) if list(tmp_path.glob("*.md")) else ({}, "")
                # The table is written after the JSON.
                if found.get("running") == "decoding" and "Not complete: `decoding`" in table:
                    break
                time.sleep(0.02)
        finally:
            process.kill()
    found, table = written(tmp_path)
    assert (
        list(found["sections"])[:2] == ["libraries", "costs"] and "rates" not in found["sections"]
    )
    assert "Not complete: `decoding`" in table and "| launch of a RawKernel " in table


@pytest.mark.parametrize("at", [0, 1])  # at its first request, or in the rounds
def test_out_of_memory_means_later(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the peer, then alone, after the others; who fails alone too is named."""

    def short() -> BaseException:
        return OutOfMemory("it ended: CUDA out of memory")

    request = ("outcome", "run")[at]
    # Among the others: beside the peer it is tried again, unless nobody else was there yet.
    answers = {step: [[short()], [None, short(), short(), short()]][at]}
    answers[gpu_decoding] = [*[None] * at, short()]
    for module, asked in ((step, request), (gpu_decoding, "write")):
        times = iter(answers[module])
        start = when(module.start, OURS_ON_GPU, asked, lambda times=times: next(times, None))
        monkeypatch.setattr(module, "start", when(start, GRAPH, asked, short))
    status, found = run(tmp_path, *only("gpt2-bfloat16", "decoding"))
    steps = found["sections"]["gpt2-bfloat16"]
    rows = {row["name"]: row for row in steps["rows"]}
    assert list(rows) == [PEER, OURS_ON_GPU, DETERMINISTIC]
    together = [[PEER, DETERMINISTIC], [OURS_ON_GPU]]
    assert [run["contestants"] for run in steps["runs"] if run["contestants"]] == together
    ours, peer = rows[OURS_ON_GPU], rows[PEER]["step"]["min_ms"]
    assert ours["alone"] and ours["step"]["ratio"] == ours["step"]["min_ms"] / peer
    assert ours["light"] == steps["products"]["min_ms"] / ours["step"]["min_ms"]
    (gone,) = steps["left_out"]
    assert gone == f"{GRAPH}: out of memory, alone too: it ended: CUDA out of memory"
    tokens = found["sections"]["decoding"]["tokens"]
    assert list(tokens) == [PEER, OURS_ON_GPU] and tokens[OURS_ON_GPU]["alone"]
    table = written(tmp_path)[1]
    assert table.count(f"| {OURS_ON_GPU} (alone) ") == 2 and f"Not measured: {gone}." in table
    said = f"decoding: {GRAPH}: out of memory, alone too: it ended: CUDA out of memory"
    assert status == 1 and found["wrong"] == [said]


def test_who_fails_in_the_rounds_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> BaseException:
        return harness.Ended("it ended, exit status 1\nTraceback\nValueError: of no use")

    monkeypatch.setattr(step, "start", when(step.start, GRAPH, "run", nth(2, fails)))
    status, found = run(tmp_path, *only("gpt2-bfloat16"))
    names = [row["name"] for row in found["sections"]["gpt2-bfloat16"]["rows"]]
    assert status == 1 and names == [PEER, OURS_ON_GPU, DETERMINISTIC]
    (said,) = found["wrong"]
    assert said.startswith("gpt2-bfloat16: cupy graph: it ended, exit status 1\n")
    short = "- gpt2-bfloat16: cupy graph: it ended, exit status 1 ... ValueError: of no use\n"
    assert short in written(tmp_path)[1]


def test_who_is_wrong_is_named_and_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = step.error

    def error(*given: Any) -> Any:
        return (1.0, "w") if wrong() else right(*given)

    wrong = nth(3, lambda: Killed())
    monkeypatch.setattr(step, "error", error)
    status, found = run(tmp_path, *only("gpt2-bfloat16"))
    names = [row["name"] for row in found["sections"]["gpt2-bfloat16"]["rows"]]
    assert status == 1 and names == [PEER, OURS_ON_GPU, DETERMINISTIC]
    said = "gpt2-bfloat16: cupy graph is wrong in w: relative error 1.0e+00 to float64, allowed"
    assert [what.rpartition(" ")[0] for what in found["wrong"]] == [said]


def test_attention_and_kernels_that_run_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = gpu_plan.planned(dry=True)
    ours, of_torch = gpu_attention.ours, gpu_attention.of_torch
    first = nth(1, MemoryError)

    def want(*given: Any) -> Any:
        if (wrong := first()) is not None:
            raise wrong
        return ours(*given)

    def never(hosts: Any, device: Any, dtype: str) -> Any:
        if dtype == "bfloat16":
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return of_torch(hosts, device, dtype)

    monkeypatch.setattr(gpu_attention, "ours", want)
    monkeypatch.setattr(gpu_attention, "of_torch", never)
    lengths = plan.lengths._replace(lengths=(16,))
    rows = gpu_attention.attention(plan.backend, lengths, 1, None, lambda: None)
    for row in rows:
        assert row["times"].keys() == {"flash"} and row["times"]["flash"]["alone"]
        assert row["left_out"] == ["torch: out of memory, alone too"]

    case = next(iter(gpu_kernels.cases(plan.backend, plan.sizes)))
    three = [case._replace(name=name) for name in ("fits later", "never fits", "fails")]
    monkeypatch.setattr(gpu_kernels, "cases", lambda *given: iter(three))
    checked, tries = gpu_kernels._error, list[str]()

    def error(place: Any, case: Any) -> float:
        tries.append(case.name)
        if case.name == "never fits" or tries.count("fits later") == 1 == len(tries):
            raise MemoryError("it is too large")
        if case.name == "fails":
            raise ValueError("it is of no use")
        return checked(place, case)

    monkeypatch.setattr(gpu_kernels, "_error", error)
    rates = {"copy": 1.0, "product": 1.0}
    found, wrong = gpu_kernels.kernels(plan.backend, plan.sizes, rates, 1)
    assert tries == ["fits later", "never fits", "fails", "fits later", "never fits"]
    assert [row["name"] for row in found] == [f"fits later, {way}" for way in DIRECTIONS]
    assert wrong == [
        "fails: ValueError: it is of no use",
        "never fits: out of memory, alone too: MemoryError: it is too large",
    ]


def test_who_is_left_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "torch compile: there is no C++ compiler"
    plan = gpu_plan.planned(dry=True)
    monkeypatch.setattr(gpu, "planned", lambda dry: plan._replace(writers=(PEER, "torch compile")))
    monkeypatch.setattr(gpu_plan, "why_not", lambda name: why if "compile" in name else None)
    status, found = run(tmp_path, *only("decoding"))
    assert status == 0 and found["left_out"] == {"decoding": [why]}
    assert f"Left out:\n\n- decoding: {why}\n" in capsys.readouterr().out


def test_jax_is_asked_where_it_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []
    monkeypatch.setattr(gpu_plan, "jax_sees_gpu", lambda: bool(asked.append(None)))
    gpu_plan.planned(dry=True)
    assert gpu_plan.able([PEER, OURS_ON_GPU], dry=True) == ([PEER, OURS_ON_GPU], []) and not asked
    names, why = gpu_plan.able([PEER, JITTED], dry=False)
    assert (names, len(asked)) == ([PEER], 1)
    assert why == ["jax jit: JAX is not installed, or sees no GPU"]


def test_the_first_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one command runs, each for so long that what follows has its turn."""
    log: list[tuple[str, float]] = []
    monkeypatch.setattr(gpu, "time", types.SimpleNamespace(monotonic=lambda: 1000.0))

    def noted(name: str) -> Callable[[Any, float], Any]:
        return lambda given, end: log.append((name, end - 1000.0))

    monkeypatch.setattr(gpu, "sections_of", lambda plan: {name: noted(name) for name in SECTIONS})
    monkeypatch.setattr(gpu_page, "text", lambda found: "")
    minutes = ("--minutes", f"{gpu.MINUTES}")
    assert run(tmp_path, *minutes)[0] == 0
    assert [name for name, _ in log] == list(gpu.FIRST)
    seconds = dict(log)
    assert seconds["gpt2-bfloat16"] == gpu.LIMITS["gpt2-bfloat16"] and seconds["kernels"] == 570
    limits = sum(gpu.LIMITS[name] for name in gpu.FIRST if name in gpu.LIMITS) + gpu.TESTING
    assert limits <= 60 * gpu.MINUTES
    log.clear()
    assert run(tmp_path / "one", *minutes, *only("gpt2-bfloat16"))[0] == 0
    assert log[0][1] == 570  # nothing follows
    command = ["--dry-run", "--out", str(tmp_path), *only("costs")]
    assert gpu.main(command, began=400.0) == 1  # so long ago


def test_a_process_knows_how_old_it_is() -> None:
    """Whatever was imported, or done, before it is asked."""
    code = "import time\ntime.sleep(1.5)\nfrom benchmarks import machine\nprint(machine.age())"
    command, start = [sys.executable, "-c", code], time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    least = 1.45 if Path("/proc/self/stat").exists() else 0.0
    assert least <= float(done.stdout) <= time.monotonic() - start + 0.05


@pytest.mark.parametrize("uptime", [5, 90, 290, 3600, 86400])
@pytest.mark.parametrize("ticks", ["0", "-1", str(10**12), "", "x"])
def test_a_process_of_which_the_system_says_nonsense(
    uptime: float, ticks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its age is the time since the import, however long ago the machine was started."""
    clock = types.SimpleNamespace(
        CLOCK_BOOTTIME=7, clock_gettime=lambda _: uptime, monotonic=lambda: uptime
    )
    monkeypatch.setattr(machine, "time", clock)
    monkeypatch.setattr(machine, "LOADED", uptime - 3)
    stat = "1 (a) b) " + "0 " * 19 + ticks + " 0" * 9 * bool(ticks)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: stat)
    assert machine.age() == 3


def test_the_age_that_the_system_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that was started a moment ago, too."""
    per_second = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0
    if not per_second:
        pytest.skip("the system has no ticks")
    clock = types.SimpleNamespace(
        CLOCK_BOOTTIME=7, clock_gettime=lambda _: 90.0, monotonic=lambda: 90.0
    )
    monkeypatch.setattr(machine, "time", clock)
    monkeypatch.setattr(machine, "LOADED", 87)
    stat = "1 (a) b) " + "0 " * 19 + f"{80 * per_second}" + " 0" * 9
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: stat)
    assert machine.age() == 10


def test_versions_of_all_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = {"cuBLASLt": "130100", "cuDNN": "cuDNN cannot be called: a package is missing"}
    monkeypatch.setattr(backends, "beside", lambda name: beside)
    monkeypatch.setattr(machine, "nvidia_smi", lambda field: "580.1")
    found = gpu_libraries.versions(cuda_shim.backend())
    assert found["cuBLASLt"] == "130100" and "cuDNN" not in found and found["driver"] == "580.1"
    names = {"nvmath-python", "nvidia-cudnn-frontend", "cuda-bindings", "cuda-core"}
    assert names <= set(gpu_libraries.PACKAGES)


def test_unknown_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, *only("steps"))
    err = capsys.readouterr().err
    assert "--section must be one of libraries, " in err and "got 'steps'" in err
    assert all(name in err for name in SECTIONS)


def test_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    if backends.unavailable_reason("cupy") is None:
        pytest.skip("there is a CUDA device")
    with pytest.raises(backends.Unusable, match=r"^backend cupy cannot be used: "):
        gpu.main(["--section", "costs"])
