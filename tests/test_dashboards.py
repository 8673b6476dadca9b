"""A run's numbers in TensorBoard and Weights & Biases: those of its log, each step once."""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import runs
from runs import CONFIG, begun

from xformer.cli import main, train
from xformer.training import Diverged, dashboard
from xformer.training.dashboards import require_dashboard

Curves = dict[int, dict[str, float]]  # step -> numbers


def trained(folder: Path, name: str, n: int, at: int | None = None, again: bool = False) -> None:
    """Train the next n steps with a dashboard."""
    with runs.opened(folder) as run:
        state = run.begin(begun(), at)
        with dashboard(name, folder, {"lr": CONFIG.lr}, again=again) as report:
            for step in itertools.islice(run.record(runs.steps(state)), n):
                report(step)


def logged(folder: Path) -> Curves:
    """What a dashboard must show, by the log."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    curves, tokens, seconds = Curves(), 0, 0.0
    for line in lines:
        names = ["loss", "lr", "norm"] + ["validation"] * (line["validation"] is not None)
        speed = (line["tokens"] - tokens) / (line["seconds"] - seconds)
        curves[line["step"]] = {name: line[name] for name in names} | {"tokens_per_second": speed}
        tokens, seconds = line["tokens"], line["seconds"]
    return curves


def lose_the_end(folder: Path, steps: int) -> None:
    """As a killed process leaves a run: without the newest checkpoint, of these last steps."""
    newest = max((folder / "checkpoints").glob("step-*"))
    assert int(newest.stem.removeprefix("step-")) % 3 == steps
    newest.unlink()


# ---- TensorBoard ----


def crc32c(data: bytes) -> int:
    """The CRC of TensorBoard's files: Castagnoli's polynomial, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def events(folder: Path) -> list[Any]:
    """The events of the newest file in a folder. Each is behind its length, and has two CRCs."""
    from tensorboardX.proto.event_pb2 import Event

    paths = sorted(folder.glob("events.out.tfevents.*"), key=os.path.getmtime)
    assert 0 < len(paths) <= 2
    content, events = paths[-1].read_bytes(), list[Any]()
    while content:
        length, crc = struct.unpack("<QI", content[:12])
        data, (crc_of_data,) = (
            content[12 : 12 + length],
            struct.unpack_from("<I", content, 12 + length),
        )
        assert (crc, crc_of_data) == (masked(content[:8]), masked(data))
        events.append(Event.FromString(data))
        content = content[16 + length :]
    return events


def require_curves(folder: Path, n: int) -> list[Any]:
    """AssertionError unless TensorBoard shows the log's n steps. Returns the events of steps."""
    head, purge, *steps = events(folder)
    assert head.file_version == "brain.Event:2"
    assert purge.session_log.status == purge.session_log.START and purge.step == 1
    assert [event.step for event in steps] == list(range(1, n + 1))
    shown = [{v.tag: v.simple_value for v in event.summary.value} for event in steps]
    wanted = [{k: np.float32(v) for k, v in row.items()} for row in logged(folder).values()]
    assert shown == wanted and "validation" in shown[3]
    return steps


@pytest.fixture
def tensorboard() -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")


def test_tensorboard_has_the_log(tensorboard: None, tmp_path: Path) -> None:
    trained(tmp_path, "tensorboard", 8)
    steps = require_curves(tmp_path, 8)
    seconds = [
        json.loads(line)["seconds"] for line in (tmp_path / "log.jsonl").read_text().splitlines()
    ]
    times = [event.wall_time - steps[0].wall_time for event in steps]
    np.testing.assert_allclose(times, np.array(seconds) - seconds[0], atol=1e-5)


def test_a_resumed_run_continues_its_curve(tensorboard: None, tmp_path: Path) -> None:
    """Also steps that were run twice, and a start without TensorBoard."""
    runs.trained(tmp_path, n=5)
    trained(tmp_path, "tensorboard", 3)
    require_curves(tmp_path, 8)
    lose_the_end(tmp_path, 2)
    trained(tmp_path, "tensorboard", 5)
    steps = require_curves(tmp_path, 11)
    assert all(a.wall_time < b.wall_time for a, b in itertools.pairwise(steps))
    with pytest.warns(UserWarning, match="the old log is kept"):
        trained(tmp_path, "tensorboard", 2, at=8)
    require_curves(tmp_path, 10)


def test_others_files_stay(tensorboard: None, tmp_path: Path) -> None:
    trained(tmp_path, "tensorboard", 1)
    *others, ours = (
        tmp_path / f"events.out.tfevents.{end}"
        for end in ("1.a", "before.xformer", "1.a (1).xformer", "1.a.xformer")
    )
    for path in (*others, ours):
        path.write_text("a")
    trained(tmp_path, "tensorboard", 1)
    assert all(path.read_text() == "a" for path in others) and not ours.exists()


def test_the_file_grows_while_training(
    tensorboard: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xformer.training.dashboards.PAUSE", 0.0)
    with runs.opened(tmp_path) as run:
        state = run.begin(begun())
        with dashboard("tensorboard", tmp_path, {}) as report:
            for step in itertools.islice(run.record(runs.steps(state)), 4):
                report(step)
                assert len(events(tmp_path)) == 2 + step.step


# ---- Weights & Biases: a stand-in that records, then the package itself, offline ----


class Refused(Exception):
    """As wandb.Error."""


class Recorded(NamedTuple):
    """A run as W&B's server has it."""

    options: dict[str, Any]
    curves: Curves
    ends: list[int]  # exit codes


class StandIn:
    """The part of the module wandb that is used. W&B refuses steps that it has."""

    Error = Refused

    def __init__(self) -> None:
        self.runs: dict[str, Recorded] = {}
        self.is_online, self.refusal = True, ""

    def Settings(self, **settings: Any) -> dict[str, Any]:
        assert settings == {"console": "off"}
        return settings

    def init(self, *, id: str, **options: Any) -> Any:
        if self.refusal:
            raise Refused(self.refusal)
        assert options["resume"] == "allow" and Path(options["dir"]).is_dir()
        if id not in self.runs or not self.is_online:
            self.runs[id] = Recorded(options, {}, [])
        curves, ends = self.runs[id].curves, self.runs[id].ends

        def log(numbers: dict[str, float], step: int) -> None:
            assert step not in curves and step > max(curves, default=-1)
            curves[step] = numbers

        def finish(exit_code: int) -> None:
            ends.append(exit_code)

        first = max(curves, default=-1) + 1
        return types.SimpleNamespace(step=first, log=log, finish=finish)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", module)  # type: ignore[arg-type]
    return module


@pytest.mark.parametrize("is_online", [True, False], ids=["online", "offline"])
def test_wandb_has_the_log(is_online: bool, wandb: StandIn, tmp_path: Path) -> None:
    wandb.is_online = is_online
    folder = tmp_path / "gpt"
    runs.trained(folder, n=2)
    trained(folder, "wandb", 6)
    lose_the_end(folder, 2)
    (run,) = wandb.runs.values()
    before = dict(run.curves)
    assert run.curves == logged(folder) and [*run.curves] == list(range(1, 9))
    assert run.options["name"] == "gpt" and run.options["config"] == {"lr": CONFIG.lr}
    trained(folder, "wandb", 5)  # steps 7 and 8 are run again
    ((name, run),) = wandb.runs.items()
    assert [*run.curves] == list(range(1, 12)) and run.ends == [0, 0][: 1 + is_online]
    speed = "tokens_per_second"
    shown, wanted = (
        [{**row, speed: 0} for row in c.values()] for c in (run.curves, logged(folder))
    )
    assert shown == wanted
    if is_online:
        assert {step: run.curves[step] for step in before} == before
    else:
        assert run.curves == logged(folder)
    assert (folder / "wandb" / "run-id").read_text() == name


def test_other_numbers_for_old_steps_are_another_run_there(wandb: StandIn, tmp_path: Path) -> None:
    trained(tmp_path, "wandb", 8)
    with pytest.warns(UserWarning, match="the old log is kept"):
        trained(tmp_path, "wandb", 2, at=6, again=True)
    old, new = wandb.runs.values()
    assert len(old.curves) == 8 and [*new.curves] == list(range(1, 9))
    assert new.curves == logged(tmp_path)


def test_wandb_is_told_of_an_error(wandb: StandIn, tmp_path: Path) -> None:
    with runs.opened(tmp_path) as run:
        run.begin(begun())
        with (
            pytest.raises(Diverged),
            dashboard("wandb", tmp_path, {}),
        ):
            raise Diverged("the loss")
    (shown,) = wandb.runs.values()
    assert shown.ends == [1]


def test_wandb_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "gpt"
    trained(folder, "wandb", 5)
    trained(folder, "wandb", 3)
    *_, newest = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"), key=os.path.getmtime)
    assert newest.stem.endswith((folder / "wandb" / "run-id").read_text())
    shown, options, ends = read_wandb(newest)
    assert shown == logged(folder) and [*shown] == list(range(1, 9))
    assert options["lr"] == CONFIG.lr and ends == [0]


def read_wandb(path: Path) -> tuple[Curves, dict[str, Any], list[int]]:
    """The curves, the options and the exit codes in a file of W&B: records in LevelDB's log format.

    A record is in one chunk, or in a first, middle ones and a last; none crosses a block.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, data = path.read_bytes(), 7, b""  # a header of 7 bytes
    curves, options, ends = Curves(), dict[str, Any](), list[int]()
    while at + 7 <= len(content):
        if (left := -at % 32768) and left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        data += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind not in (1, 4):  # whole, last
            continue
        record, data = Record.FromString(data), b""
        if record.HasField("history"):
            items = record.history.item
            row = {"".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
            step = record.history.step.num or row["_step"]
            curves[step] = {key: value for key, value in row.items() if key[0] != "_"}
        if record.HasField("run"):
            options |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
        if record.HasField("exit"):
            ends.append(record.exit.exit_code)
    return curves, options, ends


# ---- The command ----


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_sample", lambda *_, **__: None)
    Path("fox.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    options = ["--data", "fox.txt", "--preset", "tiny", "--layers", "1", "--batch", "2"]
    options += ["--schedule", "constant", "--validate-every", "4", "--out", "run"]

    def call(*more: str) -> int:
        return main(["train", *(() if "--resume" in more else options), *more])

    return call


def test_the_command_with_tensorboard(tensorboard: None, command: Callable[..., int]) -> None:
    assert command("--steps", "4", "--log-to", "tensorboard") == 0
    require_curves(Path("run"), 4)
    assert command("--resume", "run", "--steps", "6", "--log-to", "none") == 0
    assert len(events(Path("run"))) == 2 + 4
    assert command("--resume", "run", "--steps", "8") == 0  # the run's own option
    require_curves(Path("run"), 8)
    assert 'log-to = "tensorboard"' in Path("run/config.toml").read_text()


def test_the_command_with_wandb(wandb: StandIn, command: Callable[..., int]) -> None:
    assert command("--steps", "4", "--log-to", "wandb") == 0
    assert command("--resume", "run", "--steps", "6") == 0
    (run,) = wandb.runs.values()
    assert run.curves == logged(Path("run")) and len(run.curves) == 6
    options = run.options["config"]
    assert (options["d-model"], options["batch"], options["steps"]) == (64, 2, 4)
    Path("run/checkpoints/step-00000006.safetensors").unlink()
    assert command("--resume", "run", "--resume-step", "4", "--log-to", "wandb") == 0
    assert len(wandb.runs) == 2 and len([*wandb.runs.values()][1].curves) == 6


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_extra_is_named_first(
    name: str,
    module: str,
    command: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    assert command("--log-to", name) == 1
    message = f"{module} is not installed: pip install 'xformer-array[{name}]'"
    assert capsys.readouterr().err == f"xformer: error: {message}\n"
    assert not Path("run").exists()


def test_a_refusal_is_one_line(
    wandb: StandIn, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    wandb.refusal = "No API key configured."
    assert command("--steps", "2", "--log-to", "wandb") == 1
    assert capsys.readouterr().err == "xformer: error: wandb: No API key configured.\n"
    assert not Path("run/log.jsonl").exists() or not Path("run/log.jsonl").read_text()
    wandb.refusal = ""
    assert command("--resume", "run") == 0 and len(wandb.runs) == 1


def test_an_unknown_dashboard() -> None:
    with pytest.raises(ValueError, match=r"^dashboard must be one of tensorboard, wandb, got 'x'"):
        require_dashboard("x")


def test_a_log_of_other_people(wandb: StandIn, tmp_path: Path) -> None:
    """Columns that are missing or not finite are left out."""
    lines = [{"step": 1, "loss": 2.0, "norm": None}, {"step": 2, "loss": 1.0, "tokens": 5}]
    lines.append({"step": 4, "loss": 1.5, "tokens": 9, "seconds": 2.0})
    lines.append({"step": 5, "loss": "a", "tokens": 19, "seconds": 4.0})
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with dashboard("wandb", str(tmp_path), {}):
        pass
    (run,) = wandb.runs.values()
    assert [*run.curves.items()] == [
        (1, {"loss": 2.0}),
        (2, {"loss": 1.0}),
        (4, {"loss": 1.5}),
        (5, {"tokens_per_second": 5.0}),
    ]
    assert math.isfinite(run.curves[5]["tokens_per_second"])
