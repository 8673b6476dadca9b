"""The exercises of the lectures, the grades they give, and `xformer exercise`."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import solutions
from hostile import files_of_at_most

from xformer import backends, tree
from xformer.backends import Backend
from xformer.cli import main
from xformer.exercises import EXERCISES, Exercise, Grade, get, grade, load
from xformer.exercises.hints import PLANTED

ROOT = Path(__file__).resolve().parent.parent
NUMPY = backends.get("numpy")
SOLUTIONS = vars(solutions)
TO_FIND = [name for name, exercise in EXERCISES.items() if exercise.planted]
MISTAKES = [
    (exercise.name, i)
    for exercise in EXERCISES.values()
    for i, mistake in enumerate(exercise.mistakes)
    if mistake.says not in exercise.planted
]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def graded(name: str, names: dict[str, Any], library: Backend = NUMPY) -> Grade:
    return grade(get(name), names, [library])


def names_of(stub: str) -> dict[str, Any]:
    path = Path("file.py")
    path.write_text(stub, encoding="utf-8")
    return load(path)


def softmax_with(**functions: Callable[..., Any]) -> str:
    """What the grade of softmax says if these functions take the place of the right ones."""
    return str(graded("softmax", {**SOLUTIONS, **functions}))


@pytest.mark.parametrize("name", EXERCISES)
def test_solutions_are_right(name: str, library: Backend) -> None:
    result = graded(name, SOLUTIONS, library)
    assert result.ok, result
    exercise = get(name)
    assert {f.case for f in result.findings} == set(exercise.draws)
    rows = {f.row.partition(".")[0] for f in result.findings}
    assert rows == {*exercise.outputs, *exercise.gradient_names}


@pytest.mark.parametrize("name", EXERCISES)
def test_files_are_graded_as_wrong(name: str) -> None:
    """They can be imported. What is to be written is named, and so is a planted mistake."""
    exercise = get(name)
    names = names_of(exercise.stub)
    assert max(map(len, exercise.stub.splitlines())) <= 100
    assert callable(names[exercise.function_name])
    result = graded(name, names)
    assert not result.ok
    if exercise.planted:
        hints = {hint for texts in result.hints.values() for hint in texts}
        assert hints == {PLANTED}
        wrong = {f.row for f in result.wrong}
        assert wrong <= {*exercise.outputs, *exercise.gradient_names}
    else:
        assert "is still to be written" in str(result)


@pytest.mark.parametrize("name", TO_FIND)
def test_planted_mistakes_are_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By --solution, and by nothing before."""
    exercise = get(name)
    assert set(exercise.planted) <= {mistake.says for mistake in exercise.mistakes}
    assert main(["exercise", name, "--solution"]) == 0
    said = capsys.readouterr().out
    for says in exercise.planted:
        assert says in said
        assert says not in exercise.stub


class Replaced(SimpleNamespace):
    """A cache with some gradients by a wrong formula."""

    def backward(self, dy: Any) -> Any:
        grads = self.cache.backward(dy)
        grads = grads if isinstance(grads, tuple) else (grads,)
        named = dict(zip(self.exercise.gradient_names, grads, strict=False))
        named |= {k: v for k, v in self.formula(self.a, dy).items() if k in named}
        return tuple(named.values())


def wrong_functions(exercise: Exercise, mistake: Any) -> dict[str, Any]:
    """Our own op with what the mistake's formula gives in the place of the right values."""
    keys, _ = exercise.draw(next(iter(exercise.draws)))

    def forward(*arrays: Any, **options: Any) -> Any:
        a = SimpleNamespace(**dict(zip(keys, arrays, strict=True)), **options)
        result = exercise.reference(*arrays, **options)
        y, cache = result if exercise.has_backward else (result, None)
        named = dict(zip(exercise.outputs, y if isinstance(y, tuple) else (y,), strict=True))
        try:
            wrong = mistake.formula(a, None)
        except (AttributeError, TypeError):  # it needs dy: it is of gradients
            wrong = {}
        except ValueError:  # it does not fit this case
            wrong = {}
        values = tree.flatten(named)
        values |= {row: value for row, value in tree.flatten(wrong).items() if row in values}
        named = tree.unflatten(named, values)
        y = next(iter(named.values())) if len(named) == 1 else tuple(named.values())
        if not exercise.has_backward:
            return y
        return y, Replaced(a=a, cache=cache, exercise=exercise, formula=mistake.formula)

    def backward(dy: Any, saved: Any) -> Any:
        return saved.backward(dy)

    name = exercise.function_name
    return {name: forward, f"{name}_backward": backward}


@pytest.mark.parametrize(("name", "i"), MISTAKES)
def test_mistakes_are_named(name: str, i: int) -> None:
    """Each wrong formula fails, for the rows that it is about, and the hint says which it is."""
    exercise = get(name)
    mistake = exercise.mistakes[i]
    result = graded(name, wrong_functions(exercise, mistake))
    hinted = {row for row, hints in result.hints.items() if mistake.says in hints}
    assert hinted, result
    assert hinted <= {f.row for f in result.wrong}
    assert f"hint: {mistake.says}" in str(result)


def test_every_wrong_gradient_of_the_errata_is_in_the_bank() -> None:
    page = (ROOT / "docs/errata.md").read_text(encoding="utf-8")
    of_page = set(re.findall(r"test_wrong_gradient_fails\[([\w-]+)\]", page))
    of_bank = [m.errata for e in EXERCISES.values() for m in e.mistakes if m.errata]
    assert set(of_bank) == of_page


# --- what is said of wrong files --------------------------------------------------------------


def test_general_hints() -> None:
    w = np.zeros((3, 7))

    def hint(change: Callable[..., Any]) -> str:
        """Of linear, with (dx, dw, db) changed."""

        def backward(dy: Any, saved: Any) -> Any:
            return change(*solutions.linear_backward(dy, saved))

        return str(graded("linear", {**SOLUTIONS, "linear_backward": backward}))

    assert "dw wrong:\n  relative error" in hint(lambda dx, dw, db: (dx, -dw, db))
    assert "hint: the sign is wrong" in hint(lambda dx, dw, db: (dx, -dw, db))
    said = hint(lambda dx, dw, db: (dx, 3 * dw, db))
    assert "hint: it is 3 times too large: 3 is a size, or a product of sizes, of x" in said
    assert "hint: it is 7.5 times too small" in hint(lambda dx, dw, db: (dx, dw, db / 7.5))
    assert "hint: it is zero" in hint(lambda dx, dw, db: (dx, 0 * dw, db))
    said = hint(lambda dx, dw, db: (dx, dw.T, db))
    assert (
        "dw wrong:\n  must have shape (3, 7), got (7, 3)" in said
        and "hint: it is transposed" in said
    )
    said = hint(lambda dx, dw, db: (dx, dw, np.stack([db / 2, db / 2])))
    assert "hint: sum it over the axes that the argument does not have" in said
    assert (
        "dx, dw, db wrong:\n  linear_backward must return 3 gradients (dx, dw, db), got 2"
        in hint(lambda dx, dw, db: (dx, dw))
    )
    assert "db wrong:\n  must be an array, float64 of shape (7,), got None" in hint(
        lambda dx, dw, db: (dx, dw, None)
    )
    assert "db wrong:\n  must be float64 of shape (7,), got float32" in hint(
        lambda dx, dw, db: (dx, dw, db.astype("float32"))
    )
    said = hint(lambda dx, dw, db: (dx, 2 * dw, None))
    assert "dw wrong:\n  relative error 1" in said and re.search(r"^dx +ok$", said, re.M)
    assert "db wrong:\n  must be finite, got nan at db[0]" in hint(
        lambda dx, dw, db: (dx, dw, db * np.nan)
    )
    assert np.all(w == 0)


def test_one_gradient_in_the_place_of_another() -> None:
    def backward(dy: Any, saved: Any) -> Any:
        dq, dk, dv = solutions.attention_backward(dy, saved)
        return (dk, dq, dv) if dq.shape == dk.shape else (dq, dk, dv)

    said = str(graded("attention", {**SOLUTIONS, "attention_backward": backward}))
    assert "hint: this is the right dk" in said and "hint: this is the right dq" in said


def test_functions_that_do_not_work() -> None:
    def raises(x: Any) -> Any:
        raise KeyError("key")

    def writes(x: Any) -> Any:
        result = solutions.softmax(x)
        x[...] = 0
        return result

    def writes_dy(dy: Any, saved: Any) -> Any:
        dx = solutions.softmax_backward(dy, saved)
        dy[...] = 0
        return dx

    def changes(dy: Any, saved: Any) -> Any:
        dx = solutions.softmax_backward(dy, saved)
        saved[...] = saved * 2
        return dx

    missing = {k: v for k, v in SOLUTIONS.items() if k != "softmax_backward"}
    assert "y wrong:\n  softmax raises KeyError: 'key'" in softmax_with(softmax=raises)
    assert "inputs wrong:\n  softmax writes to its argument x" in softmax_with(softmax=writes)
    assert "dx wrong:\n  softmax_backward writes to dy" in softmax_with(softmax_backward=writes_dy)
    assert "it changes `saved`" in softmax_with(softmax_backward=changes)
    assert "dx wrong:\n  the file has no function softmax_backward" in str(
        graded("softmax", missing)
    )
    said = softmax_with(softmax=lambda x: solutions.softmax(x)[0])
    assert "y wrong:\n  softmax must return (y, saved), got an array of shape (5, 7)" in said
    said = softmax_with(softmax=lambda x: (1.0, None))
    assert "y wrong:\n  must be an array, float64 of shape (5, 7), got float" in said
    said = str(graded("clip", {"clip": lambda g, **_: [*solutions.clip(g, max_norm=1.5), g[0]]}))
    assert "clip must return grads.0, grads.1, grads.2; grads.3 is too many" in said
    assert "softmax raises SystemExit" in softmax_with(softmax=lambda x: sys.exit())

    def writes_ids(table: Any, *, ids: Any) -> Any:
        result = solutions.embedding(table, ids=ids)
        ids[...] = 0
        return result

    said = str(graded("embedding", {**SOLUTIONS, "embedding": writes_ids}))
    assert "embedding writes to its argument ids" in said and re.search(r"^dtable +ok$", said, re.M)
    said = str(graded("adamw_step", {"adamw_step": lambda p, *_, **__: p}))
    assert "adamw_step must return (p, m, v), got an array of shape (3, 5)" in said


def test_a_wrong_forward_leaves_a_right_backward_right() -> None:
    """Finite differences are of our own forward."""
    result = softmax_with(softmax=lambda x: (2 * solutions.softmax(x)[0], solutions.softmax(x)[0]))
    assert "hint: it is 2 times too large" in result
    assert re.search(r"^y +wrong$", result, re.M) and re.search(r"^dx +ok$", result, re.M)


def test_arrays_of_another_library_are_told() -> None:
    strict = pytest.importorskip("array_api_strict")

    def softmax(x: Any) -> Any:
        y, saved = solutions.softmax(x)
        return np.asarray(y), saved

    result = grade(
        get("softmax"), {**SOLUTIONS, "softmax": softmax}, [NUMPY, backends.get("array-api-strict")]
    )
    assert "y wrong:\n  must be an array of array-api-strict, got one of numpy" in str(result)
    assert {f.library for f in result.wrong} == {"array-api-strict"}
    assert strict


# --- the command ------------------------------------------------------------------------------


def test_the_list_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exercise"]) == 0
    said = capsys.readouterr().out
    for name, exercise in EXERCISES.items():
        assert f"  {name} " in said and exercise.summary in said
    assert [exercise.lecture for exercise in EXERCISES.values()] == sorted(
        exercise.lecture for exercise in EXERCISES.values()
    )
    assert {exercise.lecture for exercise in EXERCISES.values()} == set(range(1, 7))


def test_write_then_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exercise", "relu"]) == 0
    path = Path("relu.py")
    assert path.read_text(encoding="utf-8") == get("relu").stub
    assert "xformer exercise relu --check" in capsys.readouterr().out
    path.write_text("mine", encoding="utf-8")
    assert main(["exercise", "relu"]) == 1
    assert "relu.py exists and is kept" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == "mine"

    assert main(["exercise", "relu", "--out", "other.py"]) == 0
    assert "--check other.py" in capsys.readouterr().out
    assert main(["exercise", "relu", "--check", "other.py"]) == 1
    said = capsys.readouterr().out
    assert "y wrong:\n  relu is still to be written" in said and "numpy" in said
    path.write_text(Path(solutions.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    assert main(["exercise", "relu", "--check"]) == 0
    said = capsys.readouterr().out
    assert "relu: all is right" in said
    for name in backends.names():
        if name not in backends.ON_NUMPY:
            assert name in said  # it ran there, or was skipped


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def relu(x:\n", "relu.py, line 1: not valid Python"),
        (
            "x = 1\ny = 1 / 0\n",
            "relu.py cannot be imported: ZeroDivisionError: division by zero (line 2)",
        ),
        ("import sys\nsys.exit()\n", "relu.py cannot be imported: SystemExit"),
        ("import nowhere\n", "relu.py cannot be imported: ModuleNotFoundError"),
        ("\0", "relu.py"),
    ],
)
def test_files_that_are_not_python(
    text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("relu.py").write_text(text, encoding="utf-8")
    assert main(["exercise", "relu", "--check"]) == 1
    assert says in capsys.readouterr().err


def test_wrong_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for command, says in {
        ("softmx",): "there is no exercise 'softmx'; did you mean softmax?",
        ("qqq",): "`xformer exercise` lists them",
        ("relu", "--check"): "relu.py does not exist: `xformer exercise relu` writes relu.py",
        ("--check",): "need the NAME of an exercise",
    }.items():
        assert main(["exercise", *command]) == 1
        assert says in capsys.readouterr().err


def test_lines_of_errors_are_those_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("relu.py").write_text("def relu(x):\n    return x.nothing\n", encoding="utf-8")
    assert main(["exercise", "relu", "--check"]) == 1
    assert "relu raises AttributeError" in (said := capsys.readouterr().out)
    assert "(line 2)" in said


@pytest.mark.parametrize("name", EXERCISES)
def test_sources_and_pages_exist(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exercise", name, "--solution"]) == 0
    paths = re.findall(r"^(?:source|explanation): +(.*)$", capsys.readouterr().out, re.M)
    assert len(paths) == 2
    for path in paths:
        assert (ROOT / path).is_file()


ENDLESS = """
import numpy as np

def relu(x):
    total = np.zeros(3)
    while True:
        {body}
"""
BODIES = {
    "Python": "pass",
    "NumPy": "total = total + np.exp(np.zeros(1000))[:3]",
    "the error is caught": """\
try:
            total = total + 1
        except Exception:
            pass""",
}


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers")
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_loop_without_an_end_is_stopped(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGALRM)
    Path("relu.py").write_text(ENDLESS.format(body=body), encoding="utf-8")
    assert main(["exercise", "relu", "--check", "--time-limit", "0.2"]) == 1
    err = capsys.readouterr().err
    said = re.search(r"error: relu still runs after 0.2 s \(line (\d+)\): is there a loop", err)
    assert said is not None and 6 <= int(said[1]) <= 10 and err.count("\n") == 1
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers")
def test_a_file_without_an_end_is_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    Path("relu.py").write_text("while True:\n    pass\n", encoding="utf-8")
    assert main(["exercise", "relu", "--check", "--time-limit", "0.2"]) == 1
    assert "relu.py still runs after 0.2 s (line " in capsys.readouterr().err


def test_a_call_that_no_exception_stops_ends_the_process() -> None:
    """A single call of C without an end. The traceback names its line."""
    text = "import itertools\ndef relu(x):\n    return sum(itertools.repeat(0))\n"
    Path("relu.py").write_text(text, encoding="utf-8")
    program = (
        "import sys; from xformer.cli import main; from xformer.exercises import limit; "
        "limit.SLACK = 0.5; sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "exercise", "relu", "--check", "--time-limit", "0.2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "Timeout" in done.stderr
    assert 'File "relu.py", line 3 in relu' in done.stderr


def test_a_thread_that_goes_on_ends_the_process() -> None:
    """Python waits at its end for threads, also for ever. A thread that ends does no harm."""
    text = """
import threading, time

END = {end}

def wait():
    while END is None or time.monotonic() < END:
        time.sleep(0.01)

def relu(x):
    threading.Thread(target=wait).start()
    return x, None
"""
    command = [sys.executable, "-m", "xformer", "exercise", "relu", "--check", "--time-limit", "2"]
    for end, said in (("None", True), ("time.monotonic() + 0.5", False)):
        Path("relu.py").write_text(text.format(end=end), encoding="utf-8")
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and "dx wrong" in done.stdout
        assert ("relu.py: a thread still runs after 2 s" in done.stderr) == said
        assert ('File "relu.py", line 8 in wait' in done.stderr) == said


def test_a_time_limit_that_is_no_number_of_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exercise", "relu"]) == 0
    for limit in ("-1", "nan", "inf"):
        assert main(["exercise", "relu", "--check", "--time-limit", limit]) == 1
        assert "--time-limit must be a number of seconds" in capsys.readouterr().err
    assert main(["exercise", "relu", "--check", "--time-limit", "0"]) == 1
    assert "still to be written" in capsys.readouterr().out


def test_a_full_disk_leaves_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    with files_of_at_most(64):
        assert main(["exercise", "relu"]) == 1
    assert capsys.readouterr().err == "xformer: error: relu.py: file too large\n"
    assert not [*Path().iterdir()]
    assert main(["exercise", "relu", "--out", "absent/relu.py"]) == 1
    assert "there is no file or folder absent/relu.py" in capsys.readouterr().err
