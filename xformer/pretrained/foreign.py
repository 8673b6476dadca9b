"""Messages for a path without a model in Hugging Face's format: what it is, and what to do next.

The first bytes of a file decide, then its name. Only a few bytes, lists of names and the
configuration of an adapter are read.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Collection
from pathlib import Path

from xformer.base.choices import near_path
from xformer.pretrained.files import CONFIG, INDEX, WEIGHTS
from xformer.pretrained.reading import PretrainedError, listed, opened, read_json

ADAPTER = "adapter_config.json"
ORIGINAL = f"load the folder with {CONFIG} and {WEIGHTS} that it was made from"
UNPACK = "unpack it, and load the folder in it"
PICKLE = "a pickle, which can run any code when it is read"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt")
# The name of a model or a data set on the Hub, or the address of a model's page.
HUB_NAME = re.compile(r"(?:https://(?:huggingface\.co|hf\.co)/)?(\w[\w.-]*/)?(\w[\w.-]*)")
WRITTEN_BY = {  # first bytes -> what the file is, and the next step
    b"GGUF": ("a GGUF file of llama.cpp", ORIGINAL),
    **dict.fromkeys((b"lmgg", b"fmgg", b"tjgg"), ("an old file of llama.cpp", ORIGINAL)),
    b"\x89HDF": ("an HDF5 file, as Keras and TensorFlow write", ORIGINAL),
    **dict.fromkeys((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc"), ("an archive", UNPACK)),
}
WRAPPERS = {  # attribute of a module around a model -> what makes it
    "module": "torch's DataParallel and DistributedDataParallel",
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "torch's FSDP",
}
CALLED = {  # end of a name -> the same, for formats that have no distinct first bytes
    ".msgpack": ("a file of Flax", ORIGINAL),
    ".onnx": ("an ONNX file", ORIGINAL),
    ".pb": ("a file of TensorFlow", ORIGINAL),
    ".tflite": ("a file of TensorFlow Lite", ORIGINAL),
}


def require_model(path: Path) -> None:
    """Raise unless a folder or a file is a model that can be loaded. The message says what it is.

    FileNotFoundError if something is missing, PretrainedError for a file of another kind.
    """
    if path.is_dir():
        _require_folder(path)
    elif not path.exists():
        raise FileNotFoundError(f"there is no folder or file {path}{elsewhere(path)}")
    elif path.suffix == ".json" or _is_safetensors(path):
        raise PretrainedError(f"{path}: is one file of a model; load its folder, {path.parent}")
    elif kind := _kind(path):
        raise PretrainedError(f"{path}: is {kind[0]}; {kind[1]}")


def require_unwrapped(root: Path, names: Collection[str]) -> None:
    """Raise PretrainedError if the tensors were saved with a module around the model."""
    for inner, by in WRAPPERS.items():
        if names and all(name.startswith(f"{inner}.") for name in names):
            raise PretrainedError(
                f"{root}: the name of each tensor begins with '{inner}.', as {by} makes them; save "
                f"`model.{inner}` instead, with save_pretrained"
            )


def _require_folder(root: Path) -> None:
    exists = {name: os.path.lexists(root / name) for name in (CONFIG, WEIGHTS, INDEX, ADAPTER)}
    if exists[CONFIG] and (exists[WEIGHTS] or exists[INDEX]):
        return
    if exists[ADAPTER] and not exists[CONFIG]:
        raise PretrainedError(_adapter(root))
    names = sorted(p.name for p in root.iterdir())
    missing = CONFIG if not exists[CONFIG] else f"{WEIGHTS} and no {INDEX}"
    message = f"{root} is no model: it has no {missing}"
    if not names:
        raise FileNotFoundError(f"{root} is no model: it is an empty folder")
    if models := _models_below(root):
        raise FileNotFoundError(f"{message}; load {' or '.join(map(str, models))}")
    if exists[CONFIG] and (pickles := [n for n in names if re.match(r"pytorch_model.*\.bin$", n)]):
        _kind(root / pickles[0])  # raises if it is a git-lfs pointer
        raise PretrainedError(_pickled(root, pickles[0]))
    for name in names:
        if (root / name).is_file() and (kind := _kind(root / name)):
            raise PretrainedError(f"{message}; {name} is {kind[0]}; {kind[1]}")
    others = [name for name in names if name.endswith(".safetensors")]
    if exists[CONFIG] and others:
        message += f"; the weights must be in {WEIGHTS}, there is {listed(others)}"
    raise FileNotFoundError(message)


def _models_below(root: Path) -> list[Path]:
    """Folders of models below `root`: direct subfolders, and snapshots in the Hub's cache."""
    below = [*root.glob(f"*/{CONFIG}"), *root.glob(f"snapshots/*/{CONFIG}")]
    below += root.glob(f"models--*/snapshots/*/{CONFIG}")
    weights = (WEIGHTS, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
    return sorted(p.parent for p in below if any((p.parent / n).exists() for n in weights))[:5]


def _kind(path: Path) -> tuple[str, str] | None:
    """(kind, next step) for a file of another format; None if the format is unknown."""
    with opened(path) as file:
        start = file.read(8)
    if start.startswith(b"PK\x03\x04"):
        return _zipped(path)
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return PICKLE, _from_torch(path)
    if start.startswith(b"\x93NUMPY"):
        return "an array of NumPy", ORIGINAL
    by_name = next((kind for end, kind in CALLED.items() if path.name.endswith(end)), None)
    return next((kind for head, kind in WRITTEN_BY.items() if start.startswith(head)), by_name)


def _zipped(path: Path) -> tuple[str, str]:
    """(kind, next step) for a ZIP archive: PyTorch's, NumPy's, or another."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return "a damaged ZIP archive", ORIGINAL
    if any(name.rpartition("/")[2] == "data.pkl" for name in names):
        return f"of PyTorch: {PICKLE}", _from_torch(path)
    if names and all(name.endswith(".npy") for name in names):
        target = str(path.parent / WEIGHTS)
        # save_file stores the memory of an array as if it were in C order.
        arrays = f"{{n: a.copy('C') for n, a in numpy.load({str(path)!r}).items()}}"
        code = f"safetensors.numpy.save_file({arrays}, {target!r})"
        return "arrays of NumPy", f"beside a {CONFIG}, this makes a model of them: " + _python(
            f"import numpy, safetensors.numpy; {code}"
        )
    return "a ZIP archive", UNPACK


def _from_torch(path: Path) -> str:
    command = converting(path, path.parent / WEIGHTS)
    return f"beside a {CONFIG}, this makes a model of a state dict: {command}"


def converting(path: Path, target: Path) -> str:
    """The command that converts a state dict of PyTorch without running its code (weights_only)."""
    tensors = f"torch.load({str(path)!r}, weights_only=True, map_location='cpu').items()"
    arrays = f"{{n: t.contiguous().clone() for n, t in {tensors}}}"
    code = f"safetensors.torch.save_file({arrays}, {str(target)!r})"
    return _python(f"import torch, safetensors.torch; {code}")


def _pickled(root: Path, name: str) -> str:
    """The message for a folder of transformers from before safetensors."""
    kinds = read_json(root / CONFIG).get("architectures")
    what = f"{root}: {name} is {PICKLE}"
    if not isinstance(kinds, list) or not kinds or not str(kinds[0]).isidentifier():
        return f"{what}; {CONFIG} must name its class (architectures), for transformers to convert"
    target = f"{str(root).rstrip('/')}-safetensors"
    calls = [kinds[0]]
    calls += ["AutoTokenizer"] if any((root / n).exists() for n in TOKENIZER_FILES) else []
    code = "; ".join(
        f"t.{call}.from_pretrained({str(root)!r}).save_pretrained({target!r})" for call in calls
    )
    return f"{what}. Where you trust it, transformers converts it: " + _python(
        f"import transformers as t; {code}"
    )


def _adapter(root: Path) -> str:
    base = read_json(root / ADAPTER).get("base_model_name_or_path")
    base = base if isinstance(base, str) else None
    target = f"{str(root).rstrip('/')}-merged"
    code = (
        "from xformer import finetune, pretrained; "
        f"model, params = pretrained.load({base or 'BASE'!r}); "
        f"params = finetune.lora.merge(finetune.peft.load(model, params, {str(root)!r})); "
        f"pretrained.save(model, params, {target!r})"
    )
    of = f"of {base!r:.200}" if base else "of a model, BASE below, that it does not name"
    return f"{root}: is an adapter {of}. This merges the two into a model: " + _python(code)


def _python(code: str) -> str:
    return f"in Python, `{code}`"


def elsewhere(path: Path, kind: str = "model") -> str:
    """The end of a message for a missing path: a path like it, or how to download from the Hub.

    kind: "model", which the Hub calls NAME or OWNER/NAME; or "dataset", OWNER/NAME only
    """
    near, here = near_path(path), Path.cwd()
    path = path.relative_to(here) if path.is_relative_to(here) else path
    text = str(path).replace("https:/hug", "https://hug").replace("https:/hf", "https://hf")
    match = HUB_NAME.fullmatch(text)
    if near or match is None or (path.parent.is_dir() if match[1] else kind == "dataset"):
        return near
    name, of_kind = (match[1] or "") + match[2], "" if kind == "model" else f"--repo-type {kind} "
    return (
        f". If it is a {kind} on the Hugging Face Hub, fetch it first, as nothing is "
        f"downloaded, then name {match[2]}: `hf download {name} {of_kind}--local-dir {match[2]}`"
    )


def _is_safetensors(path: Path) -> bool:
    """Whether a file is named .safetensors, or starts with the length and header of the format."""
    if path.suffix == ".safetensors":
        return True
    with opened(path) as file:
        start = file.read(10)
    return start[8:10] == b'{"' and int.from_bytes(start[:8], "little") < path.stat().st_size
