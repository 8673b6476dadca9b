"""How a model prints, and errors if it is called, or used without its parameters."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NoReturn


def in_short(model: Any) -> str:
    """`repr` of a model: what is not the default; equal layers once."""
    parts = []
    for field in fields(model):
        value = getattr(model, field.name)
        if not field.repr or value == field.default:
            continue
        text = repr(value)
        if isinstance(value, tuple) and len(value) > 1 and value.count(value[0]) == len(value):
            text = f"({value[0]!r},) * {len(value)}"
        parts.append(f"{field.name}={text}")
    return f"{type(model).__name__}({', '.join(parts)})"


def not_called(model: Any, *_: Any, **__: Any) -> NoReturn:
    """`__call__` of a model: a TypeError that says what to call."""
    inputs = "src, tgt" if hasattr(model, "decoder") else "tokens"
    name = type(model).__name__
    article = "an" if name[0] in "AEIO" else "a"
    raise TypeError(
        f"{article} {name} is not called: y, cache = model.forward(params, {inputs}), with "
        "params = model.init(seed) or those that load returned"
    )


def require_params(op: str, params: Any, kind: type) -> None:
    """TypeError unless `params` are of the NamedTuple `kind`."""
    if not isinstance(params, kind):
        got = "None" if params is None else type(params).__name__
        raise TypeError(
            f"{op}: params must be {kind.__name__}, as from model.init(seed) or load, got {got}"
        )
