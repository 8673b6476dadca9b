"""Options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from xformer import backends
from xformer.dispatch.shapes import FLOATING

MODEL = "a Hugging Face folder, a folder written by xformer train, or a llama2.c .bin file"
TOKENIZER = "the tokenizer, if it is not beside the model"
DEVICE = "device of the backend, such as cuda for torch (default: the backend's default device)"


class BackendNames:
    """For `choices=`: the names of backends. Those of other distributions take long to look up."""

    def __iter__(self) -> Iterator[str]:
        return iter(backends.names())

    def __contains__(self, name: object) -> bool:
        return name in backends.NAMES or name in backends.names()


# Arguments of `add_argument` for --backend. Choices in the usage would need more than 80 columns.
BACKEND: dict[str, Any] = {
    "metavar": "NAME",
    "choices": BackendNames(),
    "help": f"one of {', '.join(backends.NAMES)} (default: numpy)",
}


def nonempty(text: str) -> str:
    """The path `text`, unchanged. ArgumentTypeError for "", which would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("must name a file or a folder, got an empty path")
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"must name a file or a folder, got {text!r}")
    return text


def add_model(add: Callable[..., Any], what: str = MODEL) -> None:
    """Add --model and --tokenizer by `add`, the method `add_argument` of a parser or of a group."""
    add("--model", metavar="PATH", type=nonempty, required=True, help=what)
    add("--tokenizer", metavar="PATH", type=nonempty, help=TOKENIZER)


def add_computation(add: Callable[..., Any]) -> None:
    """Add --backend, --device and --dtype."""
    add("--backend", default="numpy", **BACKEND)
    add("--device", help=DEVICE)
    add("--dtype", default="float32", choices=FLOATING, help="default: float32")
