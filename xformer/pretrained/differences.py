"""The options in which two models differ."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

# Options that change only training or memory, and the files themselves.
FREE = (
    *("hf_config", "generation_config", "activation_checkpointing", "chunk_len"),
    *("load_balancing_weight", "router_z_weight"),
)


def difference(got: Any, wanted: Any) -> tuple[str, Any, Any] | None:
    """(dotted name, its value in `got`, in `wanted`) of the first option that differs, or None.

    got, wanted: configurations of models. Rates of dropout and the options of `FREE` may differ.
    """
    if is_dataclass(got) and type(got) is type(wanted):
        names = [f.name for f in fields(got) if f.name not in FREE]
        names = [name for name in names if not name.endswith("dropout")]
        pairs = [(name, getattr(got, name), getattr(wanted, name)) for name in names]
    elif isinstance(got, tuple) and isinstance(wanted, tuple) and len(got) == len(wanted):
        pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(got, wanted, strict=True))]
    else:
        return None if got == wanted else ("", got, wanted)
    for name, a, b in pairs:
        if unlike := difference(a, b):
            inner, *values = unlike
            return f"{name}.{inner}" if inner else name, values[0], values[1]
    return None
