"""Model folders: what is read, what is refused, what is written."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hanging import SECONDS
from hostile import damaged, edited, refused_at_most, some
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from xformer import pretrained
from xformer.pretrained import files, mapped
from xformer.pretrained.files import INDEX, WEIGHTS, open_tensors, write
from xformer.pretrained.reading import PretrainedError, read_json

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured in Linux's /proc")
POSIX = pytest.mark.skipif(os.name != "posix", reason="pipes and devices are POSIX's")


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "embed.weight": rng.standard_normal((7, 5)).astype(np.float32),
        "head.bias": rng.standard_normal(11),
        "scale": np.float32(2.5) * np.ones((), np.float32),
        "half": rng.standard_normal((3, 2)).astype(np.float16),
        "none": np.empty((0, 4), np.float32),
    }


def bfloat16(values: np.ndarray) -> bytes:
    """Values that BF16 holds exactly, as it stores them."""
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


def pack(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write(tmp_path, arrays(), {"model_type": "gpt2"})
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    for i, names in enumerate((("a", "b"), ("c",))):
        shard = {name: np.full((i + 1, 3), ord(name), np.float32) for name in names}
        save_file(shard, tmp_path / f"model-{i}.safetensors")
    places = {"a": "model-0.safetensors", "b": "model-0.safetensors", "c": "model-1.safetensors"}
    index(tmp_path, places)
    return tmp_path


def index(folder: Path, places: Any) -> None:
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": places})
    (folder / INDEX).write_text(text)


# Reading


def test_tensors_come_back(model: Path) -> None:
    tensors = open_tensors(model)
    assert list(tensors) == ["embed.weight", "head.bias", "half", "scale", "none"]
    assert len(tensors) == 5 and "half" in tensors
    assert tensors.nbytes == 7 * 5 * 4 + 11 * 8 + 4 + 3 * 2 * 2
    for name, array in arrays().items():
        assert tensors[name].shape == array.shape
        assert tensors[name].dtype == {8: "F64", 4: "F32", 2: "F16"}[array.itemsize]
        for dtype in ("float32", "float64"):
            read = tensors[name].read(dtype)
            assert read.dtype == dtype and read.shape == array.shape
            np.testing.assert_array_equal(read, array.astype(dtype))


def test_the_dtype_of_the_file_is_a_view_of_it(model: Path) -> None:
    read = open_tensors(model)["embed.weight"].read("float32")
    assert read.base is not None and not read.flags.writeable
    again = open_tensors(model)["embed.weight"]
    assert np.shares_memory(again.read(), again.read().T)


@pytest.mark.parametrize(
    ("dtype", "files_of"),
    [("float32", ["b.safetensors"]), ("float64", ["c.safetensors"]), ("nonsense", [])],
)
def test_files_of_views_alone_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, files_of: list[str]
) -> None:
    f4, f8 = entry("F32", [2], 0, 8), entry("F64", [1], 8, 16)
    (tmp_path / "a.safetensors").write_bytes(pack({"a": f4, "b": f8}, bytes(16)))
    (tmp_path / "b.safetensors").write_bytes(pack({"c": f4}, b"b" * 8))
    (tmp_path / "c.safetensors").write_bytes(pack({"d": entry("F64", [1], 0, 8)}, b"c" * 8))
    index(
        tmp_path, {name: f"{file}.safetensors" for name, file in zip("abcd", "aabc", strict=True)}
    )
    fetched: list[bytes] = []
    monkeypatch.setattr(files, "fetch", lambda data: fetched.append(data[:]))
    open_tensors(tmp_path).fetch(dtype)
    assert fetched == [(tmp_path / name).read_bytes() for name in files_of]


@pytest.mark.parametrize(("backend", "wanted"), [("numpy", ["float64"]), ("array-api-strict", [])])
def test_loading_views_fetches_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, wanted: list[str]
) -> None:
    sizes = {"vocab_size": 11, "n_embd": 4, "n_head": 2, "n_layer": 1, "n_positions": 8}
    model = pretrained.model({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes})
    pretrained.save(model, model.init(0), tmp_path)
    fetched: list[str] = []
    monkeypatch.setattr(files.Tensors, "fetch", lambda _, dtype: fetched.append(dtype))
    pretrained.load(tmp_path, backend, "float64")
    assert fetched == wanted


@LINUX
def test_a_fetched_file_is_in_memory(tmp_path: Path) -> None:
    write(tmp_path, {"w": np.ones(1 << 20, np.float32)}, {})
    before = set(threading.enumerate())
    fetched, other = open_tensors(tmp_path), open_tensors(tmp_path)
    fetched.fetch("float32")
    for thread in set(threading.enumerate()) - before:
        thread.join()
    places = Path("/proc/self/smaps").read_text().split(f"{tmp_path / WEIGHTS}\n")[1:]
    kilobytes = sorted(int(re.search(r"Rss: +(\d+) kB", place)[1]) for place in places)  # type: ignore[index]
    assert len(fetched) == len(other) and kilobytes[0] < 100 and kilobytes[-1] > 4096


@LINUX
@pytest.mark.parametrize("allowed", [True, False])
def test_a_file_is_fetched_on_another_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    cores, wanted = os.sched_getaffinity(0), []

    def set_to(thread: int, others: set[int]) -> None:
        wanted.append((threading.current_thread(), thread, others))
        if not allowed:
            raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", set_to)
    write(tmp_path, {"w": np.ones(1 << 16, np.float32)}, {})
    before = set(threading.enumerate())
    open_tensors(tmp_path).fetch("float32")
    for thread in set(threading.enumerate()) - before:
        thread.join()  # one that has failed would fail this test
    assert len(wanted) == (len(cores) > 1)
    for own, thread, others in wanted:
        assert own not in before and thread == 0
        assert others < cores and len(others) == len(cores) - 1


def test_a_system_that_does_not_tell_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for stat in ("", "1 (python) R 1 2 x", "1 (python) R " + "x " * 50):
        monkeypatch.setattr(Path, "read_text", lambda *_, stat=stat, **__: stat)
        assert mapped._other_cores() == set()
    monkeypatch.undo()
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert mapped._other_cores() == set()


def test_a_view_survives_release_and_a_new_file(model: Path) -> None:
    tensors = open_tensors(model)
    read = tensors["embed.weight"].read()
    tensors["embed.weight"].release()
    tensors["none"].release()
    write(model, {"embed.weight": np.zeros((7, 5), np.float32)}, {})
    np.testing.assert_array_equal(read, arrays()["embed.weight"])
    assert not open_tensors(model)["embed.weight"].read().any()


def test_saving_into_the_folder_that_was_loaded(model: Path) -> None:
    tensors = open_tensors(model)
    write(model, {name: tensors[name].read().T for name in tensors}, {})
    for name, array in arrays().items():
        np.testing.assert_array_equal(open_tensors(model)[name].read(), np.float32(array.T))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bfloat16_is_the_upper_half_of_float32(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "PIECE", 1000)  # several, and a last one that is shorter
    bits = np.arange(1 << 16, dtype="<u2")
    data = bits.tobytes()
    (tmp_path / WEIGHTS).write_bytes(pack({"x": entry("BF16", [256, 256], 0, len(data))}, data))
    read = open_tensors(tmp_path)["x"].read(dtype)
    with np.errstate(invalid="ignore"):
        wanted = (bits.astype(np.uint32) << 16).view(np.float32).astype(dtype)
    np.testing.assert_array_equal(read.reshape(-1), wanted)


def test_bfloat16_as_torch_writes_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    save = pytest.importorskip("safetensors.torch").save_file
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    save({"x": x}, tmp_path / WEIGHTS)
    np.testing.assert_array_equal(open_tensors(tmp_path)["x"].read(), x.to(torch.float32).numpy())


def test_data_that_is_not_aligned_is_copied(tmp_path: Path) -> None:
    data = np.arange(4, dtype="<f4").tobytes()
    for pad in range(8):
        text = json.dumps({"x": entry("F32", [4], 0, 16)}).encode() + b" " * pad
        (tmp_path / WEIGHTS).write_bytes(pack(text, data))
        read = open_tensors(tmp_path)["x"].read()
        assert read.flags.aligned
        np.testing.assert_array_equal(read, np.arange(4, dtype=np.float32))


def test_other_types_are_listed_and_not_read(tmp_path: Path) -> None:
    save_file({"position_ids": np.arange(3), "w": np.ones(3, np.float32)}, tmp_path / WEIGHTS)
    tensors = open_tensors(tmp_path)
    assert tensors["position_ids"].dtype == "I64" and tensors["position_ids"].shape == (3,)
    with pytest.raises(PretrainedError, match=r"'position_ids' must be one of F64, .* got I64"):
        tensors["position_ids"].read()
    with pytest.raises(ValueError, match="dtype must be a floating-point type, got int64"):
        tensors["w"].read("int64")


def test_numbers_too_large_for_the_dtype_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {"x": np.array([1e300]), "y": np.array([np.inf, np.nan])}, {})
    tensors = open_tensors(tmp_path)
    with pytest.raises(PretrainedError, match="'x' holds numbers too large for float32"):
        tensors["x"].read("float32")
    assert np.isinf(tensors["y"].read("float32")[0])


def test_shards(sharded: Path) -> None:
    tensors = open_tensors(sharded)
    assert list(tensors) == ["c", "a", "b"]
    assert tensors["c"].read().tolist() == [[99.0] * 3] * 2
    assert tensors.nbytes == 4 * 12


def test_one_file_goes_before_an_index(sharded: Path) -> None:
    save_file({"z": np.ones(1, np.float32)}, sharded / WEIGHTS)
    assert list(open_tensors(sharded)) == ["z"]


@pytest.mark.parametrize("n_zeros", [1 << 14, (1 << 14) - 1])
def test_a_file_that_ends_in_zeros(sharded: Path, n_zeros: int) -> None:
    """64 KiB of them: no download ends so, but one that was stopped."""
    c = np.zeros(1 << 14, np.float32)
    c[: len(c) - n_zeros] = 1
    save_file({"c": c}, sharded / "model-1.safetensors")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert open_tensors(sharded)["c"].shape == c.shape
    named = f"{sharded / 'model-1.safetensors'}: ends in zeros, as a download that was stopped"
    found = [str(w.message) for w in caught]
    assert found == ([f"{named}; download it again"] if n_zeros == len(c) else [])


# What is refused


def refuses(folder: Path, message: str) -> None:
    with refused_at_most(), pytest.raises(PretrainedError, match=message):
        open_tensors(folder)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"a": 0, "c": 1}, "'b' not in the index"),
        ({"a": 0, "b": 0, "c": 1, "d": 1}, "'d' missing in their files"),
        ({"a": 0, "b": 1, "c": 1}, "'b' missing in their files"),
        ({"a": 0, "b": 0, "c": 7}, r"names 'model-7\.safetensors', which is missing"),
        ({"a": 0, "b": 0, "c": "twice"}, "does not agree with its files: 'a' in several files"),
        ({}, "must have a weight_map"),
        ([], "must have a weight_map"),
        (None, "must have a weight_map"),
        ({"a": "../model-0.safetensors"}, "files of its own folder, got '../model-0"),
        ({"a": "/model-0.safetensors"}, "files of its own folder"),
        ({"a": "sub/model-0.safetensors"}, "files of its own folder"),
        ({"a": "..\\model-0.safetensors"}, "files of its own folder"),
        ({"a": "C:model-0.safetensors"}, "files of its own folder"),
        ({"a": "model-0.bin"}, "files of its own folder"),
        ({"a": ".safetensors"}, "files of its own folder"),
        ({"a": "model\x00.safetensors"}, "files of its own folder"),
        ({"a": 3.5}, "files of its own folder, got 3.5"),
        ({"a": None}, "files of its own folder, got None"),
        ({str(i): f"{i}.safetensors" for i in range(1001)}, "at most 1000 files"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(
    sharded: Path, places: dict[str, Any], message: str
) -> None:
    save_file({k: np.ones(1, np.float32) for k in "ac"}, sharded / "model-twice.safetensors")
    if isinstance(places, dict):
        places = {
            k: f"model-{v}.safetensors" if type(v) is int or v == "twice" else v
            for k, v in places.items()
        }
    index(sharded, places)
    refuses(sharded, message)


ONE = {"x": entry("F32", [2], 0, 8)}
LARGE = 2**40
BAD = entry("\x1b[2J\n", [2], 0, 8)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "is cut short"),
        (b"\x01\x00", "is cut short"),
        (struct.pack("<Q", 2**63) + b"{}", "is no safetensors file: .* 8 bytes say 92233"),
        (b'{"error":"Repository not found"}', "is no safetensors file: its header must have at"),
        (pack(ONE, bytes(7))[:20], "is cut short, it has 20 bytes, and its header alone has 61"),
        (pack(ONE, bytes(7)), "is cut short, 76 B of 77 B are there; download it again"),
        (pack({"x": entry("F32", [10**6], 0, 4 * 10**6)}, bytes(10**6)), r"1\.0 MB of 4\.0 MB are"),
        (pack(ONE, bytes(9)), "has 1 bytes more than its header describes; download it again"),
        (bytes(1000), "begins with zeros, as a download that was stopped; download it again"),
        (pack(ONE | {"y": entry("F32", [1], 4, 8)}, bytes(8)), "offset|Offset"),
        (pack({"x": entry("F32", [3], 0, 8)}, bytes(8)), "shape, data type, or offset"),
        (pack({"x": entry("F32", [LARGE, LARGE], 0, 8)}, bytes(8)), "header"),
        (pack({"x": entry("Q9", [2], 0, 8)}, bytes(8)), "header"),
        (pack({"x": entry("F32", [-2], 0, 8)}, bytes(8)), "header"),
        (pack({"x": BAD}, bytes(8)), r"unknown variant `\\x1b\[2J\\n`"),  # nothing for a terminal
        (pack({"x": entry("F32", [2], 8, 0)}, bytes(8)), "header"),
        (pack({"x": {"dtype": "F32"}}, bytes(8)), "header"),
        (pack({"x": entry("F32", [1] * 60 + [2], 0, 8)}, bytes(8)), "does not fit bytes"),
        (pack({"x": entry("F32", [0, LARGE, 2], 0, 0)}), "does not fit bytes"),
        (pack(b'{"x":%s,"x":%s}' % ((json.dumps(ONE["x"]).encode(),) * 2), bytes(8)), "twice: 'x'"),
        (pack(b"[" * 100_000), "header"),
        (pack(b'{"x":' * 100_000), "header"),
        (pack(b"\xff\xfe"), "header"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, contents: bytes, message: str) -> None:
    (tmp_path / WEIGHTS).write_bytes(contents)
    refuses(tmp_path, message)


def test_a_long_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", 1 << 30))
        file.truncate(1 << 31)  # sparse: takes no room
    refuses(tmp_path, "must have at most 4194304 bytes, its first 8 bytes say 1073741824")


def test_a_header_as_long_as_allowed_takes_no_longer_an_entry(tmp_path: Path) -> None:
    def seconds(n: int) -> float:
        """The least CPU time of three, of a long one the only."""
        names = ",".join(f'"{i}":{json.dumps(entry("F32", [0], 0, 0))}' for i in range(n))
        text = b"{" + names.encode() + b"}"
        assert (len(text) > 0.9 * mapped.HEADER_LIMIT) == (n == 65_000)
        (tmp_path / WEIGHTS).write_bytes(pack(text))
        took = []
        for _ in range(3 if n < 10_000 else 1):
            start = time.process_time()
            assert len(open_tensors(tmp_path)) == n
            took.append(time.process_time() - start)
        return min(took)

    assert seconds(65_000) < 40 * seconds(6_500)  # tenfold; a hundredfold, were it quadratic


def test_a_folder_without_a_model_is_said_so(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(FileNotFoundError, match=r"is no model: it has no model\.safetensors"):
            open_tensors(folder)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "is a git-lfs pointer"),
        (b"<!doctype html><html>", "is a web page, not the file itself"),
        (b"\n<html><head>", "is a web page, not the file itself"),
    ],
)
def test_what_is_not_the_file_itself(tmp_path: Path, contents: bytes, message: str) -> None:
    (tmp_path / WEIGHTS).write_bytes(contents)
    refuses(tmp_path, message)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes(contents)
        with pytest.raises(PretrainedError, match=rf"{name}: {message}"):
            read_json(tmp_path / name)


# Links, pipes, devices


def test_a_link_out_of_the_folder_is_refused(model: Path, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("other")
    (folder / WEIGHTS).symlink_to(model / WEIGHTS)
    (folder / "config.json").symlink_to(model / "config.json")
    refuses(folder, "must lie in its folder, it is a link to")
    with pytest.raises(PretrainedError, match="must lie in its folder"):
        read_json(folder / "config.json")


def test_a_shard_that_is_a_link_out_of_the_folder_is_refused(
    sharded: Path, tmp_path_factory: Any
) -> None:
    outside = tmp_path_factory.mktemp("other") / "model-1.safetensors"
    (sharded / "model-1.safetensors").rename(outside)
    (sharded / "model-1.safetensors").symlink_to(outside)
    refuses(sharded, "must lie in its folder")


def test_links_inside_the_folder_and_to_the_folder_are_followed(model: Path) -> None:
    (model / WEIGHTS).rename(model / "weights")
    (model / WEIGHTS).symlink_to("weights")
    link = model.parent / f"{model.name}-link"
    link.symlink_to(model)
    assert len(open_tensors(model)) == len(open_tensors(link)) == 5
    assert read_json(link / "config.json") == {"model_type": "gpt2"}


def hub(cache: Path, model: Path, blob: str) -> Path:
    """The model in the layout of the Hub's cache: the snapshot's folder."""
    repo = cache / "models--a--b"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for i, name in enumerate((WEIGHTS, "config.json")):
        target = repo / blob.format(i)
        target.parent.mkdir(parents=True, exist_ok=True)
        (model / name).rename(target)
        (snapshot / name).symlink_to(os.path.relpath(target, snapshot))
    return snapshot


def test_the_layout_of_the_hubs_cache_is_read(model: Path) -> None:
    snapshot = hub(model / "cache", model, "blobs/{}")
    assert len(open_tensors(snapshot)) == 5
    assert read_json(snapshot / "config.json") == {"model_type": "gpt2"}


def test_blobs_that_repos_of_the_hubs_cache_share_are_read(model: Path) -> None:
    digits = "ab" + "{}" * 1 + "0" * 61
    snapshot = hub(model / "cache", model, "../blobs/ab/" + digits)
    repo = snapshot.parents[1]
    for i, name in enumerate((WEIGHTS, "config.json")):  # by way of the repo's own blobs
        (repo / "blobs" / str(i)).symlink_to(f"../../blobs/ab/{digits.format(i)}")
        (snapshot / name).unlink()
        (snapshot / name).symlink_to(f"../../blobs/{i}")
    assert len(open_tensors(snapshot)) == 5


@pytest.mark.parametrize("blob", ["../blobs/ab/abcd", "../secret", "refs/{}", "../other/blobs/{}"])
def test_links_to_elsewhere_in_the_hubs_cache_are_refused(model: Path, blob: str) -> None:
    blob = blob if "{" in blob else blob + "{}"
    refuses(hub(model / "cache", model, blob), "must lie in its folder")


@POSIX
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / WEIGHTS)
    refuses(tmp_path, "must be a regular file, it is a pipe")
    (tmp_path / WEIGHTS).unlink()
    (tmp_path / WEIGHTS).mkdir()
    refuses(tmp_path, "must be a regular file, it is a folder")
    (tmp_path / WEIGHTS).rmdir()
    (tmp_path / WEIGHTS).symlink_to("/dev/zero")
    refuses(tmp_path, "must lie in its folder")
    (tmp_path / WEIGHTS).unlink()
    (tmp_path / WEIGHTS).symlink_to(WEIGHTS)
    refuses(tmp_path, "leads nowhere")
    with pytest.raises(PretrainedError, match="it is a device"):
        read_json("/dev/zero")


# JSON


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is no valid JSON"),
        (b"[]", "must hold a JSON object, got list"),
        (b"3", "must hold a JSON object, got int"),
        (b'{"a": NaN}', "a number must be finite, got NaN"),
        (b'{"a": -Infinity}', "a number must be finite, got -Infinity"),
        (b'{"a": 1e999}', "a number must be finite, got 1e999"),
        (b'{"a": ' + b"9" * 401 + b"}", "no number may have more than 400 digits"),
        (b'{"a": -' + b"9" * 99_999 + b"}", "no number may have more than 400 digits"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "keys given twice: 'c'"),
        (b'{"a": "\xff"}', "must be UTF-8"),
        (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "objects and lists lie more than 64 deep"),
        (b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", "objects and lists lie more than 64 deep"),
        (b'{"a":' * 50_000, "is no valid JSON: maximum recursion"),
        (b'{"a":' + b"[" * 50_000, "is no valid JSON: maximum recursion"),
        (b'{"a": "' + b"x" * (1 << 20) + b'"}', "at most 1048576 bytes are read"),
    ],
)
def test_json_that_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with refused_at_most(), pytest.raises(PretrainedError, match=message):
        read_json(tmp_path / "config.json")


def test_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": [1, 2.5, null, true], "é": {"b": "c"}}')
    assert read_json(tmp_path / "config.json") == {"a": [1, 2.5, None, True], "é": {"b": "c"}}
    with pytest.raises(FileNotFoundError, match=r"there is no file .*absent\.json"):
        read_json(tmp_path / "absent.json")


# Writing


def test_what_is_written_is_what_the_format_wants(model: Path) -> None:
    loaded = load_file(model / WEIGHTS)
    assert loaded.keys() == arrays().keys()
    for name, array in arrays().items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)
    with safetensors.safe_open(model / WEIGHTS, "np") as file:
        assert file.metadata() == {"format": "pt"}
    length = int.from_bytes((model / WEIGHTS).read_bytes()[:8], "little")
    assert length % 8 == 0
    assert json.loads((model / "config.json").read_text()) == {"model_type": "gpt2"}
    assert sorted(p.name for p in model.iterdir()) == ["config.json", WEIGHTS]


def test_views_in_any_order_are_written(tmp_path: Path) -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    views = {"t": x.T, "s": x[:, ::2], "b": np.broadcast_to(x[0, 0], (3, 4)), "e": x.astype(">f4")}
    write(tmp_path, views, {})
    for name, view in views.items():
        np.testing.assert_array_equal(open_tensors(tmp_path)[name].read(), view)


def test_an_old_index_goes_and_its_shards_stay(sharded: Path) -> None:
    write(sharded, arrays(), {})
    left = sorted(p.name for p in sharded.iterdir())
    assert left == ["config.json", "model-0.safetensors", "model-1.safetensors", WEIGHTS]
    assert "embed.weight" in open_tensors(sharded)


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        ({"x": np.arange(3)}, {}),
        ({"x": np.ones(3, np.complex64)}, {}),
        (arrays(), {"a": object()}),
        (arrays(), {"a": float("nan")}),
    ],
)
def test_what_cannot_be_written_leaves_the_old_files(
    model: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]
) -> None:
    before = {p.name: p.read_bytes() for p in model.iterdir()}
    with pytest.raises((TypeError, ValueError), match=r"must be float64|JSON"):
        write(model, tensors, config)
    assert {p.name: p.read_bytes() for p in model.iterdir()} == before


def test_a_full_disk_leaves_the_old_files(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {p.name: p.read_bytes() for p in model.iterdir()}

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(model, {"x": np.ones(3, np.float32)}, {})
    assert {p.name: p.read_bytes() for p in model.iterdir()} == before


def test_transformers_loads_what_is_written(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=4)
    theirs = transformers.GPT2Model(config)
    theirs.save_pretrained(tmp_path / "theirs")
    tensors = open_tensors(tmp_path / "theirs")
    read = {name: tensors[name].read() for name in tensors}
    write(tmp_path / "ours", read, read_json(tmp_path / "theirs" / "config.json"))
    back = transformers.GPT2Model.from_pretrained(tmp_path / "ours")
    for name, parameter in theirs.state_dict().items():
        assert (back.state_dict()[name] == parameter).all(), name


# Damage at random


@some
@given(data=st.data())
def test_damaged_weights_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    write(tmp_path, arrays(), {})
    whole = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(data.draw(damaged(whole)))
    with refused_at_most():
        read_all(tmp_path)


@some
@given(data=st.data())
def test_edited_headers_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    write(tmp_path, arrays(), {})
    whole = (tmp_path / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = data.draw(edited(json.loads(whole[8:end])))
    (tmp_path / WEIGHTS).write_bytes(pack(header, whole[end:]))
    with refused_at_most():
        read_all(tmp_path)


@some
@given(data=st.data())
def test_edited_indices_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "m-1.safetensors")
    save_file({"b": np.ones(3, np.float32)}, tmp_path / "m-2.safetensors")
    whole = {"metadata": {}, "weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    text = json.dumps(whole).encode()
    (tmp_path / INDEX).write_bytes(data.draw(st.one_of(edited(whole), damaged(text))))
    with refused_at_most():
        read_all(tmp_path)


def read_all(folder: Path) -> None:
    tensors = open_tensors(folder)
    for name in tensors:
        read = tensors[name].read("float64")
        assert read.shape == tensors[name].shape


# Memory


@LINUX
@pytest.mark.parametrize(("dtype", "copied"), [("BF16", False), ("F16", False), ("F32", True)])
def test_loading_takes_little_more_than_the_model(tmp_path: Path, dtype: str, copied: bool) -> None:
    """Ten layers and an embedding of a third, 100 M weights in all, as float32."""
    sizes = {"embed": (50, 1 << 20)} | {f"layer.{i}": (5, 1 << 20) for i in range(10)}
    width = 4 if dtype == "F32" else 2
    header: dict[str, Any] = {}
    end = 0
    for name, shape in sizes.items():
        start, end = end, end + width * shape[0] * shape[1]
        header[name] = entry(dtype, list(shape), start, end)
    with (tmp_path / WEIGHTS).open("wb") as file:
        file.write(pack(header))
        for _ in range(end >> 20):
            file.write(bytes(1 << 20))
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), str(int(copied))],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    peak, model = map(int, done.stdout.split())
    print(f"{dtype}: peak {peak / 2**20:.0f} MiB for a model of {model / 2**20:.0f} MiB")
    assert model == 4 * 100 << 20
    assert peak <= 1.2 * model


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize(("one", "other"), [("BF16", "BF16"), ("F32", "BF16")])
def test_comparing_takes_little(tmp_path: Path, one: str, other: str) -> None:
    """Two tensors of 32 M ones, as a tied head that the file repeats."""
    ones = {"F32": np.ones(1 << 25, "<f4"), "BF16": np.full(1 << 25, 0x3F80, "<u2")}
    data = ones[one].tobytes() + ones[other].tobytes()
    middle, shape = ones[one].nbytes, [1 << 25]
    header = {"a": entry(one, shape, 0, middle), "b": entry(other, shape, middle, len(data))}
    (tmp_path / WEIGHTS).write_bytes(pack(header, data))
    code = LOAD.partition("model = {}")[0] + COMPARE
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 48 << 20  # three pieces of 1 M numbers, and pages read ahead


COMPARE = """
assert tensors["a"].equals(tensors["b"])
print(status("VmHWM") - before)
"""

# Prints how far the peak of resident memory rose, and the bytes of the model in float32. `copied`:
# as for a library that has memory of its own.
LOAD = """
import sys
import numpy as np
from xformer.pretrained.files import open_tensors

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(key))

before = status("VmRSS")
tensors = open_tensors(sys.argv[1])
model = {}
for name in tensors:
    model[name] = tensors[name].read("float32")
    if int(sys.argv[2]):
        model[name] = model[name].copy()
        tensors[name].release()
    assert not model[name][-1, -1]
print(status("VmHWM") - before, sum(a.nbytes for a in model.values()))
"""
