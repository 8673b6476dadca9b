"""Write the generated table of docs/bring-your-own-array.md: what the library calls of arrays.

python -m docs.make_arrays_page

The catalogue and the optimisers run on arrays that note each function, its options, and who called
it. tests/test_foreign.py compares the page, and `xformer.proofs.foreign`, with what this finds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import array_api_compat.numpy as xnp
import numpy as np

from xformer.dispatch import reference_only
from xformer.dispatch.backend import Backend
from xformer.proofs.foreign import outcome, works

PAGE = Path(__file__).resolve().parent / "bring-your-own-array.md"
ROOMS = ("ops", "layers", "models", "optim")
PLACES = {f"{Path(outcome.__code__.co_filename).parent.parent / room}/": room for room in ROOMS}

Calls = dict[str, tuple[set[str], set[str]]]  # name -> (options, rooms)


class Noting(Backend):
    """Makes arrays that note what is called."""

    def to_numpy(self, array: Any) -> np.ndarray:
        return array.array

    def _from_host(self, host: np.ndarray) -> Any:
        return Noted(host)


class Noted:
    """A NumPy array that notes the operators and attributes that are used."""

    __hash__ = None
    __array_ufunc__ = None
    __xformer_library__ = "numpy"

    def __init__(self, array: Any) -> None:
        self.array = array

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return XP

    def __getitem__(self, key: Any) -> Any:
        note("__getitem__", kinds_of(key))
        return wrapped(self.array[unwrapped(key)])


def kinds_of(key: Any) -> list[str]:
    """The kinds of the parts of an index."""
    parts = key if isinstance(key, tuple) else (key,)
    names = {"ellipsis": "...", "NoneType": "None", "Noted": "array"}
    return [names.get(kind, kind) for kind in (type(part).__name__ for part in parts)]


def operator(name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        note(name)
        return wrapped(getattr(args[0].array, name)(*map(unwrapped, args[1:])))

    return call


def attribute(name: str) -> Any:
    def get(self: Noted) -> Any:
        note(f"x.{name}")
        return wrapped(getattr(self.array, name))

    return property(get)


TWO = ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow")
BITS = ("and", "or", "xor", "lshift", "rshift")
COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
ONE = ("neg", "pos", "abs", "invert", "bool", "int", "float", "index")
for _name in (*TWO, *BITS, *(f"r{name}" for name in (*TWO, *BITS)), *COMPARED, *ONE):
    setattr(Noted, f"__{_name}__", operator(f"__{_name}__"))
for _name in ("dtype", "device", "shape", "ndim", "size", "T", "mT"):
    setattr(Noted, _name, attribute(_name))


class Namespace:
    """array-api-compat's namespace of NumPy; notes what is used of it."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(xnp, name)
        if not callable(found) or isinstance(found, type):
            note(f"xp.{name}")
            return found

        def call(*args: Any, **options: Any) -> Any:
            note(f"xp.{name}", options)
            named = {key: unwrapped(value) for key, value in options.items()}
            return wrapped(found(*map(unwrapped, args), **named))

        return call


XP = Namespace()
CALLS: Calls = {}


def note(name: str, options: Any = ()) -> None:
    known, rooms = CALLS.setdefault(name, (set(), set()))
    known.update(options)
    frame: Any = sys._getframe(1)
    while frame is not None:
        for folder, room in PLACES.items():
            if frame.f_code.co_filename.startswith(folder):
                rooms.add(room)
                return
        frame = frame.f_back


def wrapped(x: Any) -> Any:
    if isinstance(x, tuple) and any(isinstance(each, np.ndarray) for each in x):
        return tuple(map(wrapped, x))
    return Noted(np.asarray(x)) if isinstance(x, np.ndarray | np.generic) else x


def unwrapped(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return type(x)(map(unwrapped, x))
    return x.array if isinstance(x, Noted) else x


def calls() -> Calls:
    """What ops, layers, models and optimisers call: names, options, and who uses them."""
    CALLS.clear()
    backend = Noting("noting", XP, None, ("float64",), "")
    with reference_only():
        for work in works():
            outcome(work, backend, "float64")
    return {name: found for name, found in sorted(CALLS.items()) if found[1]}


def page(found: Calls) -> str:
    """The text of docs/bring-your-own-array.md with its generated table made anew."""
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition("<!-- calls -->\n")
    return f"{before}{begin}{table(found)}\n{''.join(rest.partition('<!-- end -->')[1:])}"


def table(found: Calls) -> str:
    """A row for each function, attribute and operator: keyword options, and who uses it."""
    lines = ["| name | options, kinds of index | used by |", "| --- | --- | --- |"]
    for name, (options, rooms) in sorted(found.items(), key=lambda item: order(item[0])):
        listed = ", ".join(f"`{option}`" for option in sorted(options))
        lines.append(
            f"| `{name}` | {listed} | {', '.join(room for room in ROOMS if room in rooms)} |"
        )
    return "\n".join(lines)


def order(name: str) -> tuple[int, str]:
    """Functions, then attributes, then operators, by name."""
    return ("xp.", "x.").index(name[: name.find(".") + 1]) if "." in name[:3] else 2, name.lower()


if __name__ == "__main__":
    PAGE.write_text(page(calls()), encoding="utf-8")
