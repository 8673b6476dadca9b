"""`python -m benchmarks`: what it reports is sane, and what is wrong is not reported."""

from __future__ import annotations

import json
import math
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import contestants, harness, machine, report, step
from benchmarks.__main__ import default_name, main
from benchmarks.shapes import BY_NAME, DEFAULT
from xformer import GPT, Transformer, backends, ops, optim, tree
from xformer.dispatch import Kernel
from xformer.ops.gelu import GeluCache
from xformer.ops.linear import LinearCache

TINY = ["--shape", "tiny", "--backend", "numpy", "--rounds", "1"]

SMALL = (
    replace(BY_NAME["tiny"], model=GPT(11, n_layers=1, d_model=8, n_heads=2, max_len=32), length=9),
    replace(
        BY_NAME["encdec"],
        length=9,
        model=Transformer(
            11, 13, d_model=8, n_heads=2, n_encoder_layers=1, n_decoder_layers=1, max_len=32
        ),
    ),
)


def test_a_run_prints_a_table_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(BY_NAME, "tiny", replace(BY_NAME["tiny"], repeats=2))
    out = tmp_path / "result.json"
    assert main([*TINY, "--out", str(out)]) == 0
    printed, stored = capsys.readouterr().out, out.read_text(encoding="utf-8")
    result = json.loads(stored)
    assert report.text(result) in printed
    assert list(tmp_path.iterdir()) == [out]

    (shape,) = result["shapes"]
    rows = {row["name"]: row for row in shape["rows"]}
    assert list(rows) == contestants.names(["numpy"])
    assert {"numpy kernel", "numpy reference"} <= rows.keys()
    for name, row in rows.items():
        assert f"| {name} " in printed
        for work in ("forward", "forward+backward", "step"):
            assert 0 < row[work]["min_ms"] <= row[work]["median_ms"]
        assert row["tokens_per_s"] == pytest.approx(4 * 32 / (row["step"]["min_ms"] / 1e3))
        assert row["peak_bytes"] is None or 1e7 < row["peak_bytes"] < 1e10
        assert 0 < row["error"]["numpy float64"] <= shape["tolerance"]
        if shape["peer"]:
            best = rows["torch eager"]["step"]["min_ms"]
            assert row["step"]["ratio"] == pytest.approx(row["step"]["min_ms"] / best)
    has_torch = "torch" in backends.available()
    assert shape["peer"] == ("torch eager" if has_torch else None)
    assert result["backends"].keys() == {"numpy", *(["torch"] if has_torch else [])}
    assert shape["rounds"] == 1
    for private in (str(Path.home()), str(harness.ROOT), sys.prefix, str(tmp_path)):
        assert private not in stored
    assert platform.node() not in stored.replace('"', " ").split()


def test_without_torch_there_are_no_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants, "names", lambda _: ["numpy reference"])
    result = step.measure(SMALL[0], ["numpy"], rounds=1)
    assert result["peer"] is None
    assert result["rows"][0]["step"]["ratio"] is None
    assert "| - |" in " ".join(report.table(result).split())


@pytest.mark.parametrize("shape", SMALL, ids=lambda s: s.name)
@pytest.mark.parametrize("name", ["numpy kernel", "torch eager", "torch kernel", "jax jit"])
def test_contestants_agree(name: str, shape: Any) -> None:
    if (library := name.split()[0]) not in backends.available():
        pytest.skip(backends.why_not(library))
    errors = step.check(shape, {name: contestants.make(name, shape)})
    assert errors[name]["numpy float64"] < shape.tolerance


def test_a_kernel_with_a_wrong_gradient_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wrong(GeluCache):
        def backward(self, dy: np.ndarray) -> np.ndarray:
            return 1.001 * super().backward(dy)

    def wrong(x: np.ndarray, *, approximate: str) -> tuple[np.ndarray, Wrong]:
        y, cache = ops.gelu.reference(x, approximate=approximate)
        return y, Wrong(*cache)

    monkeypatch.setitem(ops.gelu.kernels, "numpy", [Kernel(wrong, "numpy", None)])
    out = tmp_path / "result.json"
    assert main([*TINY, "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert "tiny: numpy kernel is wrong in gradient" in captured.err
    assert "numpy reference" not in captured.err
    assert captured.out == ""
    assert not out.exists()


@pytest.mark.parametrize("factor", [1.001, math.nan])
def test_a_reference_with_a_wrong_gradient_fails(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The float64 judge shares its mistake: torch eager does not."""
    pytest.importorskip("torch")
    backward = LinearCache.backward

    def wrong(self: LinearCache, dy: np.ndarray) -> tuple[Any, ...]:
        dx, dw, db = backward(self, dy)
        return dx, factor * dw, db

    monkeypatch.setattr(LinearCache, "backward", wrong)
    taking_part = {name: contestants.make(name, SMALL[0]) for name in contestants.names(["numpy"])}
    with pytest.raises(step.Disagreement, match=r"numpy reference is wrong in .* to torch eager"):
        step.check(SMALL[0], taking_part)


def test_a_wrong_optimiser_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    adamw = optim.adamw
    monkeypatch.setattr(
        optim, "adamw", lambda p, g, state, *, lr: adamw(p, g, state, lr=lr, weight_decay=1.0)
    )
    taking_part = {name: contestants.make(name, SMALL[0]) for name in contestants.names(["numpy"])}
    with pytest.raises(step.Disagreement, match="wrong in loss after a step"):
        step.check(SMALL[0], taking_part)


def test_missing_gradients_and_wrong_shapes_fail() -> None:
    truth = step.Outcome(1.0, {"w": np.ones((2, 3))}, 0.9)
    assert step.error(truth, truth)[0] == 0
    more = truth._replace(grads={**truth.grads, "b": np.ones(3)})
    assert step.error(more, truth) == (math.inf, "gradients that only one side has, b")
    turned = truth._replace(grads={"w": np.ones((3, 2))})
    where = "gradient w, which must be (2, 3), not (3, 2)"
    assert step.error(turned, truth) == (math.inf, where)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "huge"], "--shape must be one of tiny, encdec, char-gpt, got 'huge'"),
        (["--backend", "tensor"], "--backend: backend must be one of numpy, cupy, torch"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--rounds", "many"], "--rounds: invalid int value: 'many'"),
        (["--out", "no/such/folder/x.json"], "--out: there is no folder"),
        (["--threads", "2"], "unrecognized arguments"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unusable_backend_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    missing = [name for name in backends.NAMES if name not in backends.available()]
    if not missing:
        pytest.skip("every backend can be used here")
    with pytest.raises(SystemExit):
        main(["--backend", missing[0]])
    assert f"backend {missing[0]} cannot be used" in capsys.readouterr().err


def test_rounds_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "SETTLE", 0.0)
    done: list[str] = []
    runs = {name: lambda name=name: done.append(name) for name in "abcd"}
    ticks: list[None] = []
    seconds = harness.interleave(runs, rounds=8, repeats=3, tick=lambda: ticks.append(None))
    assert [len(seconds[name]) for name in "abcd"] == [8 * 3] * 4
    assert len(ticks) == 4 * 9  # one round warms up
    assert len(done) == 3 * 4 * 9
    turns = done[::3]
    assert all(done[3 * i : 3 * i + 3] == [name] * 3 for i, name in enumerate(turns))
    rounds = ["".join(turns[i : i + 4]) for i in range(0, len(turns), 4)]
    assert all(sorted(r) == list("abcd") for r in rounds)
    assert len(set(rounds)) > 4


def test_memory_of_an_unknown_contestant_fails() -> None:
    with pytest.raises(RuntimeError, match="memory of nobody reference failed"):
        harness.peak_memory(BY_NAME["tiny"], "nobody reference")


def test_every_parameter_is_disturbed() -> None:
    backend = backends.get("numpy")
    for shape in SMALL:
        params = tree.flatten(shape.params(backend))
        assert all(np.std(p) > 0 for p in params.values())
        assert {p.dtype for p in params.values()} == {np.dtype("float32")}


def test_the_shapes_of_the_default_run_are_known() -> None:
    assert set(DEFAULT) < set(BY_NAME)
    assert all(name in shape.describe() for name, shape in [("GPT", BY_NAME["char-gpt"])])


def test_outside_a_repository_there_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    found = machine.describe(["numpy"]) | {"threads": {"cpus": 1}, "shapes": []}
    assert found["commit"] is found["dirty"] is None
    assert "no commit" in report.header(found)
    assert default_name(found) == f"step-{found['date'][:10]}-no-commit.json"
