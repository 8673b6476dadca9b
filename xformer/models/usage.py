"""Errors for a model that is used as another library's: called, or without its parameters."""

from __future__ import annotations

from typing import Any, NoReturn


def not_called(model: Any, *_: Any, **__: Any) -> NoReturn:
    """`__call__` of a model: a TypeError that says what to call."""
    inputs = "src, tgt" if hasattr(model.network, "decoder") else "tokens"
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
