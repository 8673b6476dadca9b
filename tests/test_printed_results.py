"""Commands print the results of a batch when it is done, in the order of the texts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentences import BERT, TEXTS, WORDS, write_model
from test_rank import CROSS
from test_tag import TAGGER

from xformer import pretrained
from xformer.cli import main
from xformer.pretrained.tokenizer import tokenizer
from xformer.sentences import batches, classify, embed, rank, tag

CLASSIFIER = BERT | {"architectures": ["BertForSequenceClassification"]}
COMMANDS = {
    "embed": (BERT, ["--json"]),
    "classify": (CLASSIFIER, ["--json"]),
    "tag": (TAGGER, ["--json"]),
    "rank": (CROSS, ["--json", "the cat"]),
}
LENGTHS = (3, 9, 1, 12, 7, 2, 11, 4, 8, 5)  # of the texts, in words
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from xformer.cli import main
from xformer.sentences import batches

batches.GROUPS, padded, n = (1,), batches._padded, 0

def around(*args):
    global n
    n += 1
    if n == 3:
        {third}
    return padded(*args)

batches._padded = around
status = main()
print(n, "batches", file=sys.stderr)
sys.exit(status)
"""


def texts() -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, n)) for n in LENGTHS]


def command(name: str, folder: Path) -> list[str]:
    config, options = COMMANDS[name]
    write_model(folder, config, "float32")
    return [name, "--model", str(folder), "--batch", "2", *options, *texts()]


def rows(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def program(third: str) -> list[str]:
    """A process that does something while it runs the third batch, of 2 texts."""
    return [sys.executable, "-c", PROGRAM.format(third=third)]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signal for one process")
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_keeps_what_is_done(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = command(name, tmp_path)
    assert main(run) == 0
    whole = rows(capsys.readouterr().out)
    interrupted = [*program("os.kill(os.getpid(), signal.SIGINT)"), *run]
    done = subprocess.run(interrupted, capture_output=True, text=True)
    assert done.returncode == 130
    errors = done.stderr.splitlines()
    assert errors[-2:] == ["xformer: interrupted", "3 batches"]
    if name == "rank":
        assert errors[:-2] == ["xformer: warning: the first 4 of 10 texts are ranked"]
        want = [row for row in whole if row["index"] < 4]
    else:
        assert errors[:-2] == []
        want = whole[:4]
    got = rows(done.stdout)
    assert [without_numbers(row) for row in got] == [without_numbers(row) for row in want]


def without_numbers(row: Any) -> Any:
    """The row; floats, whose last digits may depend on the batch, are rounded."""
    if isinstance(row, dict):
        return {key: without_numbers(value) for key, value in row.items()}
    if isinstance(row, list):
        return [without_numbers(value) for value in row]
    return round(row, 3) if isinstance(row, float) else row


@pytest.mark.skipif(sys.platform == "win32", reason="a closed pipe is another error on Windows")
@pytest.mark.parametrize("name", ["embed", "classify", "tag"])
def test_a_reader_that_stops_ends_the_work(name: str, tmp_path: Path) -> None:
    """As `| head -1` does. No error; the texts after that are not computed."""
    run, closed = command(name, tmp_path), tmp_path / "closed"
    waits = f"while not Path({str(closed)!r}).exists(): time.sleep(0.01)"
    with subprocess.Popen(
        [*program(waits), *run], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        assert json.loads(child.stdout.readline())["text"] == texts()[0]
        child.stdout.close()
        closed.touch()
        errors = child.stderr.read()
    assert child.returncode == 0 and re.fullmatch("[123] batches\n", errors)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_ends_the_work(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        run = [*program("pass"), *command("embed", tmp_path)]
        done = subprocess.run(run, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert "standard output cannot be written" in lines[0].lower() and lines[1] == "1 batches"


def results(name: str, folder: Path, **options: Any) -> Any:
    own = (*pretrained.load(folder, dtype="float64"), tokenizer(folder))
    if name == "rank":
        return sorted(rank(*own, "the cat", texts(), **options))
    function: Any = {"embed": embed, "classify": classify, "tag": tag}[name]
    return function(*own, texts(), **options)


def close(a: Any, b: Any) -> bool:
    if isinstance(a, float | np.ndarray):
        return bool(np.allclose(a, b, rtol=0, atol=1e-12))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(close, a, b))
    return bool(a == b)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 20])
@pytest.mark.parametrize("name", [*COMMANDS, "tag in windows"])
def test_finished_results_are_in_order_and_complete(
    name: str, batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more: dict[str, Any] = {"batch_size": batch_size}
    if name == "tag in windows":
        name, more = "tag", more | {"stride": 1, "max_len": 6}
    write_model(tmp_path, COMMANDS[name][0])
    want = results(name, tmp_path, **more)
    parts: list[Any] = []

    def finished(first: int, found: Any) -> None:
        assert first == sum(map(len, parts)) and len(found)
        parts.append(list(found))

    for groups in ((1,), (1, 2), (4, 8, 16, 32)):
        monkeypatch.setattr(batches, "GROUPS", groups)
        parts.clear()
        assert close(list(results(name, tmp_path, finished=finished, **more)), list(want))
        assert close([one for part in parts for one in part], list(want))
        if groups == (1,) and batch_size < 4:
            assert len(parts) >= 3
    parts.clear()
    own = (*pretrained.load(tmp_path), tokenizer(tmp_path))
    function: Any = {"embed": embed, "classify": classify, "tag": tag}.get(name)
    if function is not None:
        assert len(function(*own, [], finished=finished)) == 0 and parts == []


def test_groups_are_small_first() -> None:
    sizes = [len(group) for group in batches._groups(3000, 32)]
    assert sizes == [128, 256, 512, 1024, 1024, 56]
    assert [*batches._groups(0, 32)] == [] and [*batches._groups(1, 32)] == [range(1)]


def test_a_prompt_that_is_no_unicode(tmp_path: Path) -> None:
    write_model(tmp_path, BERT)
    own = (*pretrained.load(tmp_path), tokenizer(tmp_path))
    with pytest.raises(ValueError, match="embed: prompt"):
        embed(*own, TEXTS, prompt="\ud800")
