"""Files that take their place whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from xformer.base import files


@pytest.fixture
def old(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "a", tmp_path / "b"
    for path in paths:
        path.write_text("old")
    return paths


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(paths: tuple[Path, Path]) -> None:
    with files.replacing(*paths) as parts:
        for part in parts:
            part.write_text("new")


def test_files_are_replaced_together(old: tuple[Path, Path]) -> None:
    write(old)
    assert [path.read_text() for path in old] == ["new", "new"]
    assert names(old[0].parent) == ["a", "b"]


def test_an_error_while_writing_leaves_the_old_files(old: tuple[Path, Path]) -> None:
    with pytest.raises(KeyboardInterrupt), files.replacing(*old) as (first, _):
        first.write_text("half")
        raise KeyboardInterrupt
    assert [path.read_text() for path in old] == ["old", "old"]
    assert names(old[0].parent) == ["a", "b"]


def test_a_disk_that_is_full_at_the_end_leaves_the_old_files(
    old: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(old)
    assert [path.read_text() for path in old] == ["old", "old"]
    assert names(old[0].parent) == ["a", "b"]


def test_everything_is_on_the_disk_before_it_gets_its_name(
    old: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: done.append("sync"))
    rename = os.replace

    def replace(part: Path, target: Path) -> None:
        done.append(target.name)
        rename(part, target)

    monkeypatch.setattr(os, "replace", replace)
    write(old)
    assert done[:4] == ["sync", "sync", "a", "b"]


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    with files.making(tmp_path / "above" / "new") as part:
        (part / "a").write_text("a")
        assert not (tmp_path / "above" / "new").exists()
    assert names(tmp_path / "above") == ["new"] and names(tmp_path / "above" / "new") == ["a"]


def test_nothing_lies_there_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), files.making(tmp_path / "new") as part:
        (part / "a").write_text("half")
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_a_folder_in_use_is_not_replaced(old: tuple[Path, Path]) -> None:
    for target in (old[0], old[0].parent):
        with pytest.raises(FileExistsError, match="in use"), files.making(target):
            pass
    assert [path.read_text() for path in old] == ["old", "old"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such pipes")
def test_a_pipe_or_device_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with (
            pytest.raises(OSError, match="is a device or a pipe, which no file can replace"),
            files.replacing(tmp_path / name) as (part,),
        ):
            part.write_text("new")
        assert not (tmp_path / name).is_file() and names(tmp_path) == ["link", "pipe"]
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("absent")
    with files.replacing(tmp_path / "link") as (part,):
        part.write_text("new")
    assert (tmp_path / "link").read_text() == "new"


@pytest.mark.parametrize("dtype", ["<f4", ">f4", ">f8", "<i8", ">i2", "?", "<f2"])
@pytest.mark.parametrize(
    "layout",
    [
        np.asfortranarray,
        lambda x: x.T,
        lambda x: x[::-1, ::2],
        lambda x: np.broadcast_to(x[:1], x.shape),
        lambda x: x[1, 1],
        lambda x: x[:0],
    ],
    ids=["fortran", "transposed", "strided", "broadcast", "scalar", "empty"],
)
def test_arrays_of_any_memory_come_back(layout: Any, dtype: str, tmp_path: Path) -> None:
    array = np.asarray(layout(np.asarray(np.arange(20).reshape(4, 5) % 7, dtype)))
    files.write_arrays({"a": array}, tmp_path / "a", tmp_path / "a", {})
    back = load_file(tmp_path / "a")["a"]
    assert back.shape == array.shape and back.dtype == array.dtype.newbyteorder("=")
    assert np.array_equal(back, array)
