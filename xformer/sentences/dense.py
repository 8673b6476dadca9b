"""Dense modules of sentence-transformers: linear maps of a sentence's vector."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import device

from xformer import backends
from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.tree import value
from xformer.base.typing import Array
from xformer.layers.linear import LinearParams, linear
from xformer.ops.activation import ACTIVATIONS
from xformer.pretrained.config import Config
from xformer.pretrained.files import WEIGHTS, open_tensors
from xformer.pretrained.reading import PretrainedError, listed, read_json

NAMES = {  # torch's name -> a name in ACTIVATIONS; None: no activation
    "Identity": None,
    "GELU": "gelu",
    "ReLU": "relu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
}
PICKLE = "pytorch_model.bin"


class Dense(NamedTuple):
    """One Dense module: y = act(x w + b)."""

    params: LinearParams  # w: (I, O)
    activation: str | None = None  # a name in `ops.activation.ACTIVATIONS`; None: no activation


def dense(x: Array, modules: tuple[Dense, ...]) -> Array:
    """The vectors (..., O) of x (..., I) after all modules, in their order."""
    for module in modules:
        x, _ = linear(x, module.params)
        if module.activation is not None:
            x, _ = ACTIVATIONS[module.activation](x)
    return x


def width_after(what: str, modules: tuple[Dense, ...], width: int) -> int:
    """The width of vectors after all modules, before which they have `width` numbers.

    ValueError, which begins with `what`, for a module of another width.
    """
    for i, (w, _) in enumerate(module.params for module in modules):
        if w.shape[0] != width:
            raise ValueError(
                f"{what}: modules[{i}] must map {width} numbers, its w has shape {tuple(w.shape)}"
            )
        width = w.shape[1]
    return width


def maps_like(params: Any, modules: tuple[Dense, ...]) -> tuple[LinearParams, ...]:
    """The linear maps of the modules, on the backend and device of params and in their dtype."""
    table = value(params.embed.table)
    xp, backend = array_namespace(table), replace(backends.backend_of(table), device=device(table))
    made: tuple[LinearParams, ...] = tree.map(
        lambda a: xp.astype(backend.asarray(a), table.dtype),
        tuple(module.params for module in modules),
    )
    return made


def read_dense(folder: Path, what: str = "sentence_embedding") -> Dense:
    """The Dense module in a folder, with arrays of NumPy in the file's precision.

    what: the vectors that the module maps, as the files call them

    PretrainedError for damaged files, and for an activation or an option that is not supported.
    """
    path = folder / "config.json"
    c = Config(read_json(path), str(path))
    shape = c.integer("in_features", low=1), c.integer("out_features", low=1)
    has_bias = c.flag("bias", default=True)
    activation = _activation(c)
    for name in ("module_input_name", "module_output_name"):
        c.only(name, what)
    c.only("use_residual", False)
    c.finish()
    return Dense(read_linear(folder, "linear", shape, has_bias), activation)


def read_linear(
    folder: Path, name: str, shape: tuple[int, int], has_bias: bool, *, alone: bool = True
) -> LinearParams:
    """The linear map (I, O) called `name` in a folder's model.safetensors.

    alone: refuse other tensors in the file
    """
    if os.path.lexists(folder / PICKLE) and not os.path.lexists(folder / WEIGHTS):
        raise PretrainedError(
            f"{folder / PICKLE}: is a pickle, which can run any code when it is read; save the "
            f"model again with {WEIGHTS}"
        )
    tensors = open_tensors(folder)
    shapes = {f"{name}.weight": shape[::-1]} | ({f"{name}.bias": shape[1:]} if has_bias else {})
    where = folder / WEIGHTS
    if missing := [key for key in shapes if key not in tensors]:
        raise PretrainedError(f"{where}: has no {listed(missing)}")
    if alone and (unknown := [key for key in tensors if key not in shapes]):
        raise PretrainedError(f"{where}: not supported: {listed(unknown)}")
    arrays = []
    for key, wanted in shapes.items():
        tensor = tensors[key]
        if tensor.shape != wanted:
            raise PretrainedError(f"{where}: {key} must be of shape {wanted}, got {tensor.shape}")
        arrays.append(tensor.read("float64" if tensor.dtype == "F64" else "float32"))
    return LinearParams(np.ascontiguousarray(arrays[0].T), arrays[1] if has_bias else None)


def _activation(c: Config) -> Any:
    """The name of the activation. Without the key it is tanh, as in sentence-transformers."""
    module, _, name = c.text("activation_function", default="torch.nn.Tanh").rpartition(".")
    if f"{module}.".startswith("torch.nn.") and name in NAMES:
        return NAMES[name]
    raise c.refused("activation_function", f"of torch.nn, {' or '.join(NAMES)}")
