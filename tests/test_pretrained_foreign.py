"""What is no model is named for what it is, and what a message says to do next works."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from sentences import BERT, write_model

from xformer import pretrained
from xformer.cli import main
from xformer.pretrained.reading import PretrainedError

CODE = re.compile(r"`(.*)`")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 9\n"


def zipped(*names: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name in names:
            archive.writestr(name, b"")
    return data.getvalue()


FILES: list[tuple[str, bytes, str]] = [
    (
        "model-q4.gguf",
        b"GGUF\x03\0\0\0",
        "is a GGUF file of llama.cpp; load the folder with",
    ),
    ("weights.bin", b"GGUF\x03\0\0\0", "is a GGUF file of llama.cpp"),
    ("ggml-model.bin", b"lmgg\x01\0\0\0", "is an old file of llama.cpp"),
    ("tf_model.h5", b"\x89HDF\r\n\x1a\n", "is an HDF5 file, as Keras and TensorFlow write"),
    ("flax_model.msgpack", b"\xde\0\x10abc", "is a file of Flax"),
    ("model.onnx", b"\x08\x07\x12\x07pytorch", "is an ONNX file"),
    ("saved_model.pb", b"\x08\x01\x12", "is a file of TensorFlow"),
    ("model.tar.gz", b"\x1f\x8b\x08\0", "is an archive; unpack it"),
    (
        "model.pt",
        zipped("archive/data.pkl", "archive/data/0"),
        "is of PyTorch: a pickle, which",
    ),
    ("consolidated.00.pth", pickle.dumps({}, 2), "is a pickle, which can run any code"),
    ("model.pkl", pickle.dumps({}, 4), "is a pickle, which can run any code"),
    ("weights.npz", zipped("a.npy", "b.npy"), "is arrays of NumPy"),
    ("weights.npy", b"\x93NUMPY\x01\0", "is an array of NumPy"),
    ("model.zip", zipped("model/config.json"), "is a ZIP archive; unpack it"),
    ("broken.zip", b"PK\x03\x04abc", "is a damaged ZIP archive"),
    ("pointer.bin", POINTER, "is a git-lfs pointer, not the file itself; fetch it: `git lfs pull`"),
    ("page.bin", b"<!DOCTYPE html><html>", "is a web page, not the file itself"),
]


def refused(path: Path, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the library and, in one line, by commands."""
    with pytest.raises((pretrained.PretrainedError, FileNotFoundError), match=re.escape(message)):
        pretrained.load(path)
    for command in (["generate", "--prompt", "a"], ["summary"]):
        assert main([*command, "--model", str(path)]) == 1
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(("name", "contents", "message"), FILES, ids=[name for name, *_ in FILES])
def test_files_are_named(
    name: str, contents: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(contents)
    refused(path, message, capsys)
    refused(tmp_path, message, capsys)  # and where it is all that a folder has
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    refused(tmp_path, message, capsys)


def test_a_file_of_a_model_whatever_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path, BERT)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.bin")
    refused(tmp_path / "weights.bin", "is one file of a model; load its folder", capsys)
    refused(tmp_path / "config.json", "is one file of a model; load its folder", capsys)
    (tmp_path / "weights.bin").rename(tmp_path / "model.fp16.safetensors")
    message = "the weights must be in model.safetensors, there is 'model.fp16.safetensors'"
    refused(tmp_path, message, capsys)


@pytest.mark.parametrize("inner", ["module", "_orig_mod", "_fsdp_wrapped_module"])
def test_a_module_around_the_model_is_named(inner: str, tmp_path: Path) -> None:
    """The state dict of a model within torch.compile, say, has longer names."""
    path = write_model(tmp_path, BERT, "float32") / "model.safetensors"
    save_file({f"{inner}.{name}": tensor for name, tensor in load_file(path).items()}, path)
    with pytest.raises(PretrainedError, match=f"save `model.{inner}` instead"):
        pretrained.load(tmp_path)


def test_folders_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(tmp_path, "is no model: it is an empty folder", capsys)
    (tmp_path / "notes.txt").write_text("notes")
    refused(tmp_path, "is no model: it has no config.json", capsys)
    (tmp_path / "checkpoint-500").mkdir()
    write_model(tmp_path / "checkpoint-500", BERT)
    refused(tmp_path, f"has no config.json; load {tmp_path / 'checkpoint-500'}", capsys)
    (tmp_path / "checkpoint-500" / "model.safetensors").unlink()
    refused(tmp_path / "checkpoint-500", "no model.safetensors and no model.safet", capsys)


def test_the_roots_of_the_hubs_cache_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    write_model(snapshot, BERT)
    for folder in (tmp_path, snapshot.parents[1]):
        refused(folder, f"it has no config.json; load {snapshot}", capsys)
    pretrained.load(snapshot)  # as it says


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("gpt2", "hf download gpt2 --local-dir gpt2"),
        ("a-b/C.d_1", "hf download a-b/C.d_1 --local-dir C.d_1"),
        ("https://huggingface.co/a/b", "hf download a/b --local-dir b"),
        ("./a/b/c", None),
        ("/a/b", None),
    ],
)
def test_names_of_the_hub(
    name: str, command: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["embed", "--model", name, "text"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("xformer: error: there is no folder or file ")
    assert [command] * (command is not None) == CODE.findall(err)


@pytest.mark.parametrize(
    "command", ["attention", "classify", "embed", "finetune", "generate", "summary"]
)
def test_every_command_names_it(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "data.txt").write_text("text\n")
    more = {
        "finetune": ["--data", str(tmp_path / "data.txt"), "--out", str(tmp_path / "out")],
        "generate": ["--prompt", "a"],
        "summary": [],
    }
    assert main([command, "--model", str(tmp_path), *more.get(command, ["text"])]) == 1
    assert f"{tmp_path}: is an adapter of a model, BASE" in capsys.readouterr().err
