"""`python -m benchmarks`: what it reports is sane, and what is wrong is not reported."""

from __future__ import annotations

import json
import math
import platform
import re
import sys
import timeit
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks import (
    contestants,
    dispatching,
    fitting,
    harness,
    machine,
    report,
    shapes,
    step,
    worker,
)
from benchmarks.__main__ import main
from benchmarks.contestants import COMPILED, PEER
from benchmarks.shapes import BY_NAME, LLAMA, MINILM, Shape
from benchmarks.stored import default_name
from benchmarks.worker import LIGHT
from xformer import GPT, Transformer, backends, ops, optim, pretrained, tree
from xformer.dispatch import Kernel, overridable
from xformer.ops.gelu import GeluCache
from xformer.ops.linear import LinearCache

ROWS: dict[str, Any] = {"batch": 2, "length": 9, "rounds": 1, "repeats": 2}
LLAMA_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 13,
}
BERT_SIZES = LLAMA_SIZES | {"max_position_embeddings": 12}
GPT_SHAPE = Shape("gpt", GPT(11, n_layers=1, d_model=8, n_heads=2, max_len=12), **ROWS)
SMALL = (
    GPT_SHAPE,
    Shape(
        "encdec",
        Transformer(
            11, 13, d_model=8, n_heads=2, n_encoder_layers=1, n_decoder_layers=1, max_len=32
        ),
        tolerance=1e-3,
        **ROWS,
    ),
    Shape("llama", pretrained.model(LLAMA | LLAMA_SIZES), **ROWS),
    Shape("bert", pretrained.model(MINILM | BERT_SIZES, names=()), training=False, **ROWS),
)
RUN = ["--shape", "tiny", "--rounds", "1", "--out"]


class InProcess:
    """In the place of a contestant's process, so that what runs there can be changed."""

    def __init__(self, name: str, folder: Path) -> None:
        self.answers = worker.answers(folder, name)

    def ask(self, **request: Any) -> Any:
        ((name, arguments),) = request.items()
        return self.answers[name](**arguments)

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "start", InProcess)
    monkeypatch.setattr(harness, "SETTLE", 0.0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name of `tiny`, what runs at once."""
    monkeypatch.setitem(BY_NAME, "tiny", replace(GPT_SHAPE, name="tiny"))


def checked(shape: Shape, names: list[str], folder: Path) -> dict[str, float]:
    shapes.store(shape, folder)
    check = step.Check(shape, folder)
    errors = {name: check(name, InProcess(name, folder)) for name in names}
    check.finish()
    return errors


def of(names: list[str]) -> list[str]:
    """As options."""
    return [word for name in names for word in ("--contestant", name)]


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_a_run_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["numpy kernel", "numpy reference"]
    names += [PEER] if contestants.why_not(PEER) is None else []
    works = ["forward", "forward+backward", "step"]
    options = [word for work in works for word in ("--work", work)]
    assert main([*RUN, str(tmp_path), *of(names), *options]) == 0
    (out,) = tmp_path.iterdir()
    printed, stored = capsys.readouterr().out, out.read_text(encoding="utf-8")
    found = json.loads(stored)
    assert out.name == default_name(found, "step-tiny")
    assert report.text(found) in printed

    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == names
    for name, row in rows.items():
        assert f"| {name} " in printed
        for work in works:
            assert 0 < row[work]["min_ms"] <= row[work]["median_ms"]
        least = row["step"]["min_ms"]
        assert row["tokens_per_s"] == pytest.approx(2 * 9 / (least / 1e3))
        assert row["light"] == pytest.approx(found["products"]["min_ms"] / least)
        assert row["peak_bytes"] is None or 1e7 < row["peak_bytes"] < 1e10
        assert 0 < row["error"] <= found["tolerance"]
        assert ("dispatch" in row) == (name == "numpy kernel")
        if found["peer"]:
            assert row["step"]["ratio"] == pytest.approx(least / rows[PEER]["step"]["min_ms"])
        # What only another contestant needs would be in the peak of this one's memory.
        assert ("torch" in row["threads"]) == (name == PEER)
        assert set(row["threads"]["blas"]) <= {machine.n_cpus()}
    assert found["peer"] == (PEER if PEER in names else None)
    assert found["work"] == "step" and found["rounds"] == 1 and found["repeats"] == 2
    assert found["products"]["gflop"] > 0
    for private in (str(Path.home()), str(harness.ROOT), sys.prefix, str(tmp_path)):
        assert private not in stored
    assert platform.node() not in stored.replace('"', " ").split()


@pytest.mark.usefixtures("in_process")
def test_without_the_peer_there_are_no_ratios() -> None:
    found = step.measure(GPT_SHAPE, ["numpy reference"], 1, ["step"])
    assert found["peer"] is None
    assert found["rows"][0]["step"]["ratio"] is None
    assert "| - |" in " ".join(report.table(found).split())


@pytest.mark.usefixtures("in_process")
def test_inference_is_a_forward() -> None:
    shape = SMALL[-1]
    calls = []
    found = step.measure(shape, ["numpy kernel"], 2, step.works(shape), lambda: calls.append(1))
    assert found["work"] == "forward" and found["rows"][0]["light"] > 0
    assert len(calls) == step.ticks(["numpy kernel"], 2, step.works(shape))


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("shape", SMALL, ids=lambda s: s.name)
@pytest.mark.parametrize("name", ["numpy kernel", PEER, "torch kernel", "jax jit"])
def test_contestants_agree(name: str, shape: Shape, tmp_path: Path) -> None:
    if why := contestants.why_not(name):
        pytest.skip(why)
    assert 0 < checked(shape, [name], tmp_path)[name] < shape.tolerance


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_the_compiled_peer_agrees(tmp_path: Path) -> None:
    if why := contestants.why_not(COMPILED):
        pytest.skip(why)
    shapes.store(GPT_SHAPE, tmp_path)
    with harness.Process(
        COMPILED,
        [sys.executable, "-m", "benchmarks.worker", tmp_path, COMPILED],
        machine.environment(),
    ) as one:
        check = step.Check(GPT_SHAPE, tmp_path)
        assert check(COMPILED, one) < GPT_SHAPE.tolerance
        assert len(one.ask(run={"work": "step", "repeats": 3})) == 3


def test_without_a_compiler_the_compiled_peer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(contestants.shutil, "which", lambda _: None)
    why = contestants.why_not(COMPILED)
    assert why == "torch compile: there is no C++ compiler (g++ or clang++)"
    assert COMPILED not in contestants.default(GPT_SHAPE)


@pytest.mark.usefixtures("in_process", "small")
def test_a_kernel_with_a_wrong_gradient_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wrong(GeluCache):
        def backward(self, dy: np.ndarray) -> np.ndarray:
            return 1.001 * super().backward(dy)

    def wrong(x: np.ndarray, *, approximate: str) -> tuple[np.ndarray, Wrong]:
        y, cache = ops.gelu.reference(x, approximate=approximate)
        return y, Wrong(*cache)

    ops.gelu.import_kernels("numpy")
    monkeypatch.setitem(ops.gelu.kernels, "numpy", [Kernel(wrong, "numpy", None)])
    names = ["numpy kernel", "numpy reference"]
    assert main([*RUN, str(tmp_path), *of(names)]) == 1
    captured = capsys.readouterr()
    assert "nothing is reported of tiny.\ntiny: numpy kernel is wrong in gradient" in captured.err
    assert "numpy reference" not in captured.err
    assert captured.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("in_process", "small")
def test_a_shape_without_a_result_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(name: str, folder: Path) -> InProcess:
        if shapes.load(folder)[0].name == "tiny":
            with program("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)") as process:
                process.ask(about={})
        return InProcess(name, folder)

    monkeypatch.setattr(step, "start", killed)
    monkeypatch.setitem(BY_NAME, "other", replace(GPT_SHAPE, name="other"))
    names = ["numpy kernel", "numpy reference"]
    assert main([*RUN, str(tmp_path), "--shape", "other", *of(names)]) == 1
    err = capsys.readouterr().err
    assert (
        "nothing is reported of tiny.\n" in err and "exit status -9 (killed, as the system" in err
    )
    assert [path.name[:10] for path in tmp_path.iterdir()] == ["step-other"]


def test_a_peer_with_a_wrong_gradient_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is the judge that is wrong in the same way: then all others differ."""
    pytest.importorskip("torch")
    monkeypatch.setattr(step, "start", InProcess)
    from benchmarks import eager_layers

    grads = eager_layers.Norm.grads

    def wrong(self: Any) -> Any:
        found = grads(self)
        return found._replace(w=1.001 * found.w)

    shapes.store(GPT_SHAPE, tmp_path)
    check = step.Check(GPT_SHAPE, tmp_path)
    monkeypatch.setattr(eager_layers.Norm, "grads", wrong)
    check(PEER, InProcess(PEER, tmp_path))
    with pytest.raises(harness.Disagreement, match=r"^gpt: torch eager is wrong in .*norm"):
        check.finish()
    with pytest.raises(harness.Disagreement, match=r"^gpt: numpy kernel is wrong in .*norm"):
        checked(GPT_SHAPE, [PEER, "numpy kernel"], tmp_path)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("factor", [1.001, math.nan])
def test_a_reference_with_a_wrong_gradient_fails(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    backward = LinearCache.backward

    def wrong(self: LinearCache, dy: np.ndarray) -> tuple[Any, ...]:
        dx, dw, db = backward(self, dy)
        return dx, factor * dw, db

    monkeypatch.setattr(LinearCache, "backward", wrong)
    with pytest.raises(harness.Disagreement, match=r"numpy reference is wrong in .* to float64"):
        checked(GPT_SHAPE, ["numpy reference"], tmp_path)


@pytest.mark.usefixtures("in_process")
def test_a_wrong_optimiser_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    adamw = optim.adamw
    monkeypatch.setattr(
        optim, "adamw", lambda *trees, **options: adamw(*trees, **options, weight_decay=1.0)
    )
    with pytest.raises(harness.Disagreement, match="wrong in loss after steps"):
        checked(GPT_SHAPE, ["numpy kernel"], tmp_path)


def test_missing_gradients_and_wrong_shapes_fail(tmp_path: Path) -> None:
    def stored(name: str, **arrays: np.ndarray) -> Path:
        save_file(arrays, tmp_path / name)
        return tmp_path / name

    losses, w = {"loss": 1.0}, np.ones((2, 3), np.float32)
    truth = stored("truth", w=w.astype(np.float64))
    assert step.error(stored("same", w=w), truth, losses, losses)[0] == 0
    assert step.error(stored("same", w=w), truth, {"loss": 1.5}, losses) == (0.5, "loss")
    more = stored("more", w=w, b=np.ones(3, np.float32))
    only = "arrays that only one side has, b"
    assert step.error(more, truth, losses, losses) == (math.inf, only)
    turned = stored("turned", w=np.ones((3, 2), np.float32))
    where = "w, which must be (2, 3), not (3, 2)"
    assert step.error(turned, truth, losses, losses) == (math.inf, where)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "huge"], "--shape must be one of tiny, char-gpt, gpt2, llama, encdec, long,"),
        (["--contestant", "tensor"], "--contestant must be one of torch eager, torch compile,"),
        (["--work", "rest"], "--work must be one of forward, forward+backward, step, got 'rest'"),
        (["--shape", "minilm-1", "--work", "step"], "--work must be forward for minilm-1, got"),
        (["--rounds", "0"], "--rounds: must be a whole number of at least 1, got 0"),
        (["--rounds", "many"], "--rounds: must be a whole number of at least 1, got many"),
        (["--threads", "2"], "unrecognized: --threads 2"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_contestant_that_cannot_take_part_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        backends, "unavailable_reason", lambda name: f"backend {name} cannot be used: why"
    )
    with pytest.raises(SystemExit):
        main(["--contestant", "cupy kernel"])
    assert "--contestant: cupy kernel: backend cupy cannot be used: why" in capsys.readouterr().err


def test_where_all_scores_do_not_fit_only_those_in_blocks_take_part() -> None:
    there = contestants.default(BY_NAME["char-gpt"])
    assert "numpy kernel" in there and "numpy reference" not in there
    kept = (PEER, COMPILED, *(f"{name} kernel" for name in ("numpy", "numba", "mkl")))
    left = set(there) - set(contestants.default(BY_NAME["long"]))
    assert left == {n for n in there if n not in kept}


def test_rounds_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "SETTLE", 0.0)
    done: list[str] = []

    def turn(name: str) -> Callable[[], list[float]]:
        return lambda: harness.timed(lambda: done.append(name), 3)

    ticks: list[None] = []
    turns = {name: turn(name) for name in "abcd"}
    seconds = harness.interleave(turns, 8, lambda: ticks.append(None))
    assert [len(seconds[name]) for name in "abcd"] == [8 * 3] * 4
    assert len(ticks) == 4 * 9  # one round warms up
    assert len(done) == 3 * 4 * 9
    order = done[::3]
    assert all(done[3 * i : 3 * i + 3] == [name] * 3 for i, name in enumerate(order))
    rounds = ["".join(order[i : i + 4]) for i in range(0, len(order), 4)]
    assert all(sorted(r) == list("abcd") for r in rounds)
    assert len(set(rounds)) > 4


class Clock:
    """A clock that stands still unless it is told that seconds pass by."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_times_are_those_of_the_runs(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "time", types.SimpleNamespace(perf_counter=clock))
    assert harness.timed(lambda: clock.pass_by(2), 3) == [2, 2, 2]
    found = harness.summary([0.003, 0.001, 0.002], [0.004, 0.002])
    assert found == {"min_ms": 1.0, "median_ms": 2.0, "ratio": 0.5}


def program(code: str) -> harness.Process:
    return harness.Process("it", [sys.executable, "-c", code], {})


def test_what_libraries_print_is_no_answer() -> None:
    code = "from benchmarks.harness import serve\nserve({'twice': lambda n: print(n) or 2 * n})"
    with program(code) as process:
        assert [process.ask(twice={"n": n}) for n in (1, 4)] == [2, 8]


def test_a_process_that_ends_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"it did not start: .*exit status 1\n.*No, not so"):
        program("raise SystemExit('No, not so')")
    code = "from benchmarks.harness import serve\nserve({'fail': lambda: 1 / 0})"
    process = program(code)
    with pytest.raises(RuntimeError, match=r"(?s)it ended, exit status 1\n.*ZeroDivisionError"):
        process.ask(fail={})


def test_warnings_are_answered() -> None:
    """Each once, of what runs before `about`; what is no RuntimeWarning is not among them."""
    texts = list[str]()

    def run(text: str) -> str:
        for category in (RuntimeWarning, RuntimeWarning, PendingDeprecationWarning):
            warnings.warn(text, category, stacklevel=1)
        return text

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        with harness.noting(texts):
            run("a")
        answers = harness.noted({"run": run, "about": lambda: {"bytes": 1}}, texts)
        assert answers["run"](text="b") == "b"
        assert answers["about"]() == {"bytes": 1, "warnings": ["a", "b"]}
    assert [str(w.message) for w in shown].count("b") == 3  # on standard error, as ever
    rows = {"numpy kernel": answers["about"](), "torch eager": {"warnings": []}}
    assert report.warned(rows) == ["numpy kernel warned: a", "numpy kernel warned: b"]


def test_an_unknown_contestant_does_not_start(tmp_path: Path) -> None:
    shapes.store(GPT_SHAPE, tmp_path)
    with pytest.raises(RuntimeError, match=r"(?s)nobody kernel did not start.*ValueError"):
        step.start("nobody kernel", tmp_path)


class Holds:
    def __init__(self, now: int | None, peak: int) -> None:
        self.found = {"bytes": now, "most_bytes": peak}

    def ask(self, about: Any) -> dict[str, Any]:
        return self.found


def test_processes_must_fit_into_memory() -> None:
    running = {"a": Holds(2, 5), "b": Holds(3, 4)}  # 5 held, and 3 more while a runs
    fitting.require_memory(running, 8)
    fitting.require_memory(running, None)
    with pytest.raises(MemoryError, match=r"a, b together need .* name fewer with --contestant"):
        fitting.require_memory(running, 7)
    unknown = running | {"c": Holds(None, 99)}
    assert fitting.memory(unknown) == (5, 3)


def test_another_process_starts_where_there_is_room() -> None:
    running = {LIGHT: Holds(1, 1), PEER: Holds(2, 5), "b": Holds(3, 9)}  # 6, and twice the peer's 5
    assert fitting.has_room(running, 16, None) and not fitting.has_room(running, 15, None)
    assert fitting.has_room(running, None, None)
    assert fitting.has_room(running, 0, "cuda")  # what finds no room there says so
    assert fitting.has_room({LIGHT: Holds(9, 9), PEER: Holds(9, 9)}, 0, None)


class Large(InProcess):
    """Each holds one byte, as do the products."""

    def ask(self, **request: Any) -> Any:
        found = super().ask(**request)
        return found | {"bytes": 1, "most_bytes": 1} if "about" in request else found


THREE = ["numpy reference", "numpy kernel", "array-api-strict reference"]


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Contestants take a byte each, the first of THREE is the peer, and there are so many bytes."""
    monkeypatch.setattr(step, "start", Large)
    for module in (fitting, step):
        monkeypatch.setattr(module, "PEER", THREE[0])

    def limit(n_bytes: int, spare: int) -> None:
        monkeypatch.setattr(machine, "free_memory", lambda device: n_bytes)
        monkeypatch.setattr(fitting, "SPARE", spare)

    return limit


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("spare", [0, 1])  # they start and do not fit, or do not start
@pytest.mark.parametrize("names", [THREE, THREE[::-1]])
def test_who_does_not_fit_has_turns_beside_the_peer_later(
    names: list[str], spare: int, small_memory: Callable[[int, int], None]
) -> None:
    small_memory(3, spare)
    peer, *others = sorted(names, key=lambda name: name != THREE[0])
    found = step.measure(GPT_SHAPE, names, 1, ["step"])
    assert [run["contestants"] for run in found["runs"]] == [[peer, name] for name in others]
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == names and found["left_out"] == []
    for run, name in zip(found["runs"], others, strict=True):
        least = rows[name]["step"]["min_ms"]
        assert rows[name]["step"]["ratio"] == least / run["peer"]["step"]["min_ms"]
        assert rows[name]["light"] == run["products"]["min_ms"] / least
    first = found["runs"][0]
    assert found["products"] == first["products"]
    assert rows[peer]["step"]["min_ms"] == first["peer"]["step"]["min_ms"]
    shown = report.further(found).strip()
    assert shown.startswith(f"Later, for want of memory: {others[1]}; beside them numpy reference")
    assert re.search(r"reference, step [\d.]+ ms\.$", shown)


@pytest.mark.usefixtures("in_process")
def test_who_does_not_fit_beside_the_peer_is_left_out(
    small_memory: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_memory(2, 1)
    with pytest.raises(MemoryError, match="products, numpy reference, numpy kernel together need"):
        step.measure(GPT_SHAPE, THREE[:2], 1, ["step"])
    small_memory(3, 1)
    sizes = {"array-api-strict reference": 9}

    def memory(running: Any) -> tuple[int, int]:
        return sum(sizes.get(name, 1) for name in running), 0

    monkeypatch.setattr(fitting, "memory", memory)
    found = step.measure(GPT_SHAPE, THREE, 1, ["step"])
    assert [row["name"] for row in found["rows"]] == THREE[:2] and len(found["runs"]) == 1
    (why,) = found["left_out"]
    assert why.startswith("array-api-strict reference: products, numpy reference, array-api-strict")
    assert report.further(found) == f"\n\nNot measured: {why}."


@pytest.mark.usefixtures("in_process")
def test_who_fails_in_a_later_run_is_named(
    small_memory: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_memory(3, 1)

    def fails(name: str, folder: Path) -> Large:
        if name == THREE[2]:
            raise harness.Ended("it ended")
        return Large(name, folder)

    monkeypatch.setattr(step, "start", fails)
    failed: list[str] = []
    found = step.measure(GPT_SHAPE, THREE, 1, ["step"], failed=failed)
    assert failed == [f"gpt: {THREE[2]}: it ended"] and len(found["runs"]) == 1
    with pytest.raises(harness.Ended):
        step.measure(GPT_SHAPE, THREE, 1, ["step"])


def test_a_processor_is_named_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 207\nmodel name\t: A CPU @ 2 GHz: B\n"
    more = text.replace("207", "1").replace("A CPU", "Another")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text + more)
    assert machine.cpu_model() == "A CPU @ 2 GHz: B (cpu family 6, model 207)"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "model name\t: Of another kind\n")
    assert machine.cpu_model() == "Of another kind"


def test_free_memory_is_that_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.free_memory("cuda") is None
    asked.write_text('#!/bin/sh\n[ "$1 $2" = "--id=3 --query-gpu=memory.free" ] && echo 81000\n')
    asked.chmod(0o755)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert machine.free_memory("cuda") == 81000 << 20
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert machine.free_memory("cuda") is None  # it fails


def test_dispatch_costs_what_comes_before_the_kernel(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeat = partial(timeit.repeat, timer=clock)
    monkeypatch.setattr(dispatching, "timeit", types.SimpleNamespace(repeat=repeat))

    def check(args: tuple[np.ndarray, ...], kwargs: dict[str, np.ndarray], op: Any) -> None:
        clock.pass_by(2)

    def slow(x: np.ndarray) -> tuple[np.ndarray, None]:
        clock.pass_by(100)
        return x, None

    slow.check = check  # type: ignore[attr-defined]
    op = overridable(slow)
    x = np.zeros(3)
    try:
        found = dispatching.cost(lambda: [op(x), op(x), op(x)])
    finally:
        from xformer import dispatch

        dispatch.op._ops.remove(op)
    assert found == {"calls": 3, "seconds": 3 * 2}
    assert op.reference is slow


def test_every_parameter_is_disturbed_and_stored(tmp_path: Path) -> None:
    for shape in SMALL:
        weights = tree.flatten(shape.weights())
        assert all(np.std(w) > 0 for w in weights.values())
        assert {w.dtype for w in weights.values()} == {np.dtype("float32")}
        shapes.store(shape, tmp_path)
        same, stored = shapes.load(tmp_path)
        assert same == shape
        for name, w in tree.flatten(stored).items():
            np.testing.assert_array_equal(w, weights[name])


def test_shapes_are_described() -> None:
    assert BY_NAME["llama"].describe() == (
        "decoder, 8 layers, width 512, 8/2 heads, vocabulary 32000, batch 4 of 512 tokens"
    )
    assert "encoder-decoder, 3+3 layers" in BY_NAME["encdec"].describe()
    assert BY_NAME["minilm-1"].describe().startswith("encoder, 6 layers, width 384, 12 heads")


def test_outside_a_repository_there_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    found = machine.describe(["numpy"])
    assert found["commit"] is found["dirty"] is None
    found |= {"threads": {"cpus": 1}, "load": 0.5, "judge": "torch eager", "work": "step"}
    assert "no commit" in report.header(found)
    assert default_name(found) == f"step-{found['date'][:10]}-no-commit.json"
