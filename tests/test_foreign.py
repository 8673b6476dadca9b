"""`xformer gradcheck --arrays`, what arrays must have, and docs/bring-your-own-array.md."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from xformer.cli import main
from xformer.proofs.foreign import (
    ATTRIBUTES,
    FUNCTIONS,
    OPERATORS,
    distance,
    foreign,
    missing,
    works,
)

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "bring-your-own-array.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_lists_and_the_page_are_what_is_called() -> None:
    made = runpy.run_path(str(DOCS / "make_arrays_page.py"))
    found = made["calls"]()
    names = (*(f"xp.{n}" for n in FUNCTIONS), *(f"x.{n}" for n in ATTRIBUTES), *OPERATORS)
    assert sorted(found) == sorted(names)
    assert made["page"](found) == PAGE, "run `python -m docs.make_arrays_page`"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module whose arrays wrap NumPy's and are read number by number; and its namespace."""
    made = runpy.run_path(str(DOCS / "make_arrays_page.py"))
    module: Any = ModuleType("toyarrays")
    module.xp, module.kind = made["XP"], made["Noted"]
    module.asarray = module.xp.asarray
    module.__version__ = "7.1"
    monkeypatch.setitem(sys.modules, "toyarrays", module)
    return module


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["gradcheck", "--arrays", *words])
    return status, *capsys.readouterr()


def test_a_library_that_has_all(toy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = checked(capsys, "toyarrays", "--only", "tanh")
    assert (status, err) == (0, "")
    assert out.startswith("toyarrays 7.1 in float64, beside NumPy\n")
    assert "missing" not in out
    assert re.search(r"^tanh +2 / 2 +0e\+00$", out, re.MULTILINE)
    assert out.endswith("checks, 0 failed\n")
    _, out, _ = checked(capsys, "toyarrays", "--only", "adam", "--verbose")
    assert re.findall(r"^(\S+) +1 / 1 +0e", out, re.MULTILINE) == ["adam", "adamw"]


def test_a_function_that_is_wrong(toy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    toy.xp.tanh = lambda x: x * 0.999
    status, out, _ = checked(capsys, "toyarrays", "--only", "tanh: x (5")
    assert status == 1
    assert re.search(r"^tanh +0 / 1 +-$", out, re.MULTILINE)
    assert "\nthe result differs from NumPy's\n  tanh: x (5, 11)\n" in out
    toy.xp.tanh = lambda x: x * float("nan")
    assert checked(capsys, "toyarrays", "--only", "tanh: x (5")[0] == 1


def test_a_function_that_raises(toy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def tanh(x: Any) -> Any:
        raise NotImplementedError("no tanh\nof this")

    toy.xp.tanh = tanh
    status, out, _ = checked(capsys, "toyarrays", "--only", "tanh: x")
    assert status == 1
    assert "\nNotImplementedError: no tanh\n  tanh: x (5, 11), and 1 others\n" in out
    assert "2 checks, 2 failed" in out


def test_a_shape_that_is_wrong(toy: Any) -> None:
    toy.xp.tanh = lambda x: x[..., :1]
    (work,) = (work for work in works() if work.name == "tanh: x (5, 11)")
    with pytest.raises(ValueError, match="other shapes than NumPy's"):
        distance(work, foreign("toyarrays"))


def test_what_is_missing(
    toy: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = type(toy.xp).__getattr__

    def lacking(self: Any, name: str) -> Any:
        if name in ("roll", "searchsorted"):
            raise AttributeError(name)
        return usual(self, name)

    monkeypatch.setattr(type(toy.xp), "__getattr__", lacking)
    monkeypatch.delattr(toy.kind, "mT")
    monkeypatch.delattr(toy.kind, "__rshift__")
    assert missing(foreign("toyarrays")) == ["xp.roll", "xp.searchsorted", "x.mT", "x.__rshift__"]
    status, out, _ = checked(capsys, "toyarrays", "--only", "mse")
    assert status == 1  # though the case passed
    assert "\nmissing: xp.roll, xp.searchsorted, x.mT, x.__rshift__\n" in out
    assert "1 checks, 0 failed" in out


def test_float32_without_float64(
    toy: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = toy.xp.asarray
    toy.xp.asarray = lambda x, dtype=None, **options: usual(
        x, dtype=np.float32 if dtype == np.float64 else dtype, **options
    )
    status, out, _ = checked(capsys, "toyarrays", "--only", "tanh")
    assert status == 0
    assert out.startswith("toyarrays 7.1 in float32, beside NumPy\n")


class NoDtype:
    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return ModuleType("empty")


class Broken:
    def __array_namespace__(self, api_version: str | None = None) -> Any:
        raise NotImplementedError("not yet")


class NoFloats(NoDtype):
    dtype = "whole"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (None, "module badarrays has no asarray"),
        (lambda x: x, "badarrays.asarray makes list, which has no __array_namespace__"),
        (lambda x: NoDtype(), "badarrays.asarray makes NoDtype, which has no dtype"),
        (
            lambda x: NoFloats(),
            "badarrays.asarray makes NoFloats, whose namespace has neither float64 nor float32",
        ),
        (lambda x: Broken(), "module badarrays makes no arrays: NotImplementedError: not yet"),
        (lambda x: 1 / 0, "module badarrays makes no arrays: ZeroDivisionError: division by zero"),
    ],
)
def test_modules_without_arrays(
    make: Any, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module: Any = ModuleType("badarrays")
    if make is not None:
        module.asarray = make
    monkeypatch.setitem(sys.modules, "badarrays", module)
    assert checked(capsys, "badarrays") == (1, "", f"xformer: error: arrays: {said}\n")


def test_wrong_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = checked(capsys, "nosucharrays")
    assert status == 1
    assert "arrays: module nosucharrays makes no arrays: ModuleNotFoundError: No module" in err
    for name in ("", ".", "a b", "os."):
        status, _, err = checked(capsys, name)
        assert (status, err.count("\n")) == (1, 1)
    for option in (["--exact"], ["--digits", "20"], ["--backend", "numpy"]):
        status, _, err = checked(capsys, "array_api_strict", *option)
        assert (status, "--arrays is not possible with" in err) == (1, True)
    status, _, err = checked(capsys, "array_api_strict", "--only", "no such thing")
    assert (status, "no case or optimiser has 'no such thing' in its name" in err) == (1, True)


@pytest.mark.slow
def test_all_of_array_api_strict(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = checked(capsys, "array_api_strict")
    assert (status, out.endswith("checks, 0 failed\n")) == (0, True)


# ---- The two libraries of the page ----


def quoted(module: str) -> str:
    """The output that the page shows for a module."""
    (text,) = re.findall(rf"```text\n({re.escape(module)} .*?)```", PAGE, re.DOTALL)
    return text


def failures(text: str) -> list[str]:
    return re.findall(r"^\w+Error: .*", text, re.MULTILINE)


def test_mparray(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mparray", reason="mparray is not installed")
    status, out, _ = checked(capsys, "mparray", "--only", "softmax")
    assert (status, "missing" in out) == (0, False)
    status, out, _ = checked(capsys, "mparray", "--only", "shaw: S > T")
    assert status == 1
    assert failures(out) == failures(quoted("mparray"))


def test_dask(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("dask.array", reason="dask is not installed")
    status, out, _ = checked(capsys, "dask.array", "--only", "linear: x (5,)")
    assert status == 1
    assert failures(out) == failures(quoted("dask.array"))
    assert re.findall("missing: .*", out) == re.findall("missing: .*", quoted("dask.array"))


def test_dask_with_the_lines_of_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    array = pytest.importorskip("dask.array", reason="dask is not installed")
    for name in ("device", "mT"):  # so that both are removed afterwards
        monkeypatch.setattr(array.Array, name, None, raising=False)
    module = ModuleType("mydask")
    (block,) = re.findall(r"```python\n(# mydask.py.*?)```", PAGE, re.DOTALL)
    exec(block, vars(module))
    monkeypatch.setitem(sys.modules, "mydask", module)
    status, out, _ = checked(capsys, "mydask", "--only", "adam")
    assert "\n2 checks, 0 failed" in out
    assert "\nmissing: xp.take_along_axis\n" in out
    assert status == 1
    _, out, _ = checked(capsys, "mydask", "--only", "layer_norm: x (5, 7)")
    assert re.search(r"^layer_norm +4 / 4 ", out, re.MULTILINE)
