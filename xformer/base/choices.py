"""Choices by name: errors for an unknown name or a missing path, with what was probably meant."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OTHER_NAMES = {  # of choices and options: name here -> names in other libraries
    **{"cupy": "cuda gpu", "numpy": "cpu np", "jax": "jnp", "torch": "mps"},
    **{"backend": "cuda gpu cpu", "float16": "half fp16", "bfloat16": "bf16"},
    **{"float32": "float single fp32", "float64": "double fp64", "mean": "avg average"},
    **{"average": "avg mean", "tag": "ner", "masked": "mlm", "causal": "clm"},
    **{"classify": "classification", "contrastive": "embedding", "lr": "learning-rate"},
    **{"steps": "epochs num-epochs max-iters", "layers": "depth", "d-model": "n-embd hidden-size"},
    **{"max-len": "max-length max-seq-length seq-len block-size context-length"},
    **{"max-new-tokens": "max-length length", "tokenizer": "vocab-size", "data": "input text"},
    **{"mask": "attn-mask attention-mask", "axis": "dim", "dropout-rate": "dropout dropout-p"},
    **{"lora": "rank lora-rank lora-r", "alpha": "lora-alpha", "file": "input", "prompt": "text"},
}


def require_one_of(what: str, value: Any, known: Iterable[str], hint: str = "") -> None:
    """ValueError, with the name that was probably meant, unless `value` is one of `known`.

    what: names the value in the message, such as "wsd: shape"
    hint: the end of the message if `value` resembles none
    """
    known = tuple(known)
    if not isinstance(value, str) or value not in known:
        near = did_you_mean(value, known) or hint
        raise ValueError(f"{what} must be one of {', '.join(known)}, got {value!r:.100}{near}")


def did_you_mean(value: Any, known: Iterable[str]) -> str:
    """The end of a message, with the one of `known` that `value` resembles: "; did you mean adam?".

    Empty if it resembles none. Capitals, "_" for "-" and the dashes of an option make no
    difference. Names that differ in a number, such as float16 and float64, are no misspellings.
    """
    near = _meant(_plain(value), known) if isinstance(value, str) else None
    return "" if near is None else f"; did you mean {near}?"


def near_path(path: Path) -> str:
    """The end of a message, as `did_you_mean`, with the path that a missing `path` resembles.

    Any part of the path may be misspelt. For a link that leads nowhere, the end says so.
    """
    if path.is_symlink() and not path.exists():
        return f"; it is a link to {os.readlink(path)}, which leads nowhere"
    near = None if path.exists() else _similar(path)
    return "" if near is None else f"; did you mean {shlex.quote(str(near))}?"


def _similar(path: Path) -> Path | None:
    """The existing path that a missing one resembles; None if it resembles none."""
    parent = path.parent
    if parent == path:
        return None
    if not parent.exists():
        found = _similar(parent)
        if found is None or (found / path.name).exists():
            return found and found / path.name
        parent = found
    try:
        names = {_plain(name): name for name in sorted(os.listdir(parent))}
    except OSError:  # it may not be read, or is a file
        return None
    near = difflib.get_close_matches(_plain(path.name), names, 1)
    return parent / names[near[0]] if near else None


def _meant(plain: str, known: Iterable[str]) -> str | None:
    names = {_plain(name): name for name in known}
    same = [name for name in names if plain in OTHER_NAMES.get(name, "").split()]
    number = _number(plain)
    alike = [name for name in names if not number or _number(name) in ("", number)]
    near = same or difflib.get_close_matches(plain, alike, 1, 0.7)
    near = near or [name for name in alike if _begins(name, plain) or _begins(plain, name)]
    return names[near[0]] if near else None


def _begins(name: str, start: str) -> bool:
    return len(start) > 2 and name.startswith(start)


def _plain(name: str) -> str:
    return name[:100].lower().replace("_", "-").lstrip("-")


def _number(name: str) -> str:
    return "".join(sorted(filter(str.isdigit, name)))  # in order: 61 may be misspelt 16
