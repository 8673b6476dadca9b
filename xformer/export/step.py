"""Export whole training steps as ONNX."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from xformer import optim
from xformer.arrays.onnx import Array
from xformer.base import tree
from xformer.base.choices import require_one_of
from xformer.export.model import data_inputs, host, largest, named, require_model
from xformer.export.recording import Input, recorded
from xformer.export.writing import Exported, require_onnx, require_path, write
from xformer.models import Classifier, LanguageModel
from xformer.ops import RandomKey


def onnx_step(
    model: Any,
    params: Any,
    path: str | os.PathLike[str],
    *,
    optimiser: str | optim.Optimiser = "adamw",
    options: Mapping[str, Any] | None = None,
    clip: float | None = 1.0,
    loss: Mapping[str, Any] | None = None,
    mask: bool = False,
    dropout_seed: int | None = None,
    sizes: Mapping[str, int] | None = None,
    max_len: int | None = None,
) -> Exported:
    """Write a training step as an ONNX file, and return what was written.

    The graph has the forward, the backward, clipping and the optimiser's step. It computes the same
    numbers as `model.loss`, its backward, `optim.clip_by_global_norm` and the optimiser on NumPy,
    up to rounding. The parameters are inputs and outputs. Their first values, and those of the
    optimiser's state, are written to a file beside it: to step.first.safetensors for step.onnx.

    Inputs, with dynamic sizes by name:

    - params.NAME for each parameter, and state.NAME for each array and counter of the optimiser's
      state
    - tokens (batch, length) or vectors; src (batch, source_length) and tgt (batch, target_length)
    - targets (batch, length), or (batch,) of a Classifier
    - mask (batch, length) or src_mask (batch, source_length): bool, with `mask`
    - lr (), the learning rate, in the parameters' dtype
    - number (), int64, with `dropout_seed`: the number of the step, from 1

    Outputs: loss (), norm () of all gradients before clipping, and new.params.NAME and
    new.state.NAME for the next step. Frozen parameters are inputs only.

    path: the file; its name ends with .onnx
    optimiser: a name in `optim.OPTIMISERS`, or an `optim.Optimiser`
    options: of the optimiser's step, such as {"weight_decay": 0.1}
    clip: max_norm of `optim.clip_by_global_norm`; None: no clipping
    loss: options of the model's loss, such as {"ignore_index": -100}
    mask: whether there is an input for the padding
    dropout_seed: the seed of the dropout masks; None: no dropout
    sizes: sizes that are fixed, such as {"batch": 8, "length": 128}; the others are dynamic
    max_len: the largest length; None: the model's context

    NotExported, a ValueError, names what has no ONNX graph; nothing is written then. ValueError for
    other arguments, FileExistsError if the file of first values exists and was not written by an
    export, ImportError without the extra `onnx`.
    """
    require_onnx()
    file = require_path(path)
    require_model("onnx_step", model)
    weights = host("onnx_step", params)
    if isinstance(optimiser, str):
        require_one_of("onnx_step: optimiser", optimiser, optim.OPTIMISERS)
        optimiser = optim.OPTIMISERS[optimiser]
    dtype = next(iter(weights.values())).dtype
    data = data_inputs(model, dtype)
    first = next(iter(data.values())).shape[:2]
    last = list(data.values())[-1].shape[:2]
    of_text = isinstance(getattr(model, "head", None), Classifier)
    data["targets"] = Input(last[:1] if of_text else last, np.int64)
    masked = "mask" if isinstance(model, LanguageModel) else "src_mask"
    others = {"lr": Input((), dtype)}
    if mask:
        others[masked] = Input(first, bool)
    if dropout_seed is not None:
        others["number"] = Input((), np.int64)
    state = optimiser.init(tree.trained(named(params, weights)))
    leaves = tree.flatten(state)

    def fn(arrays: dict[str, Array]) -> dict[str, Array]:
        model_params = named(params, arrays, "params.")
        old = tree.unflatten(state, {name: arrays[f"state.{name}"] for name in leaves})
        settings = dict(loss or {})
        if mask:
            settings[masked] = arrays[masked]
        if dropout_seed is not None:
            settings["dropout_key"] = RandomKey(dropout_seed, step=arrays["number"])
        value, cache = model.loss(model_params, *(arrays[n] for n in data), **settings)
        max_norm = math.inf if clip is None else clip
        grads, norm = optim.clip_by_global_norm(cache.backward(), max_norm=max_norm)
        trained = tree.trained(model_params)
        new, new_state = optimiser.step(trained, grads, old, lr=arrays["lr"], **options or {})
        outputs = {"loss": value, "norm": norm}
        outputs |= {f"new.params.{name}": x for name, x in tree.flatten(new).items()}
        return outputs | {f"new.state.{n}": x for n, x in tree.flatten(new_state).items()}

    values = {f"params.{name}": w for name, w in weights.items()}
    values |= {f"state.{name}": np.asarray(leaf) for name, leaf in leaves.items()}
    inputs = {name: Input(x.shape, x.dtype) for name, x in values.items()}
    limits = largest(model, max_len, sizes)
    graph, outputs = recorded(fn, inputs | data | others, limits, sizes)
    about = {"model": type(model).__name__}
    return write(file, graph, outputs, {}, about, first=values)
