"""Save and load adapters in PEFT's format: `adapter_config.json`, `adapter_model.safetensors`.

The file has two tensors for each adapted module of transformers' model,
`base_model.model.<module>.lora_A.weight` (R, I) and `...lora_B.weight` (O, R). They are the
transposes of a and b, for any layout of the module's weight (GPT-2's is fan_in_fan_out).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xformer import backends
from xformer.base import tree
from xformer.base.tree import value
from xformer.base.typing import Array
from xformer.finetune.lora import adapters, dtype_of, with_adapter
from xformer.finetune.modules import Adapter, joined, maps, modules, split
from xformer.finetune.peft_config import CONFIG, Scales, written
from xformer.finetune.peft_whole import like, replaced
from xformer.layers import LinearParams, LoRAParams
from xformer.models import EncoderDecoder, LMHead
from xformer.pretrained import PretrainedError
from xformer.pretrained.files import write
from xformer.pretrained.foreign import PICKLE, converting
from xformer.pretrained.mapped import Tensor, open_file
from xformer.pretrained.reading import listed, read_json

WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"  # of older versions of PEFT
PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
WHOLE = re.compile(re.escape(PREFIX) + r"(?!.*\.lora_).*\.(weight|bias|\w+_proj)")


def save(
    model: Any, params: Any, folder: str | os.PathLike[str], *, base: str | None = None
) -> None:
    """Write the adapters of `params` for `peft.PeftModel.from_pretrained(base, folder)`.

    An interrupted write leaves the old files.

    base: the model's name or folder, for the configuration
    ValueError if there is no adapter, if other parameters are trained too, and for linear layers
    that are not modules of transformers' model.
    """
    if not adapters(params):
        raise ValueError("save: there are no adapters (lora.attach)")
    if more := others(params):
        raise ValueError(
            f"save: trained beside the adapters: {listed(more)}; freeze them, or write the whole "
            "model: pretrained.save(model, lora.merge(params), folder)"
        )
    known, nodes = modules(model, params), adapters(params)
    if unknown := nodes.keys() - {name for link in known.values() for name in maps(link)}:
        raise ValueError(f"save: no modules of a model of transformers: {listed(unknown)}")
    leaves = tree.flatten(params)
    by_module: dict[str, Adapter] = {}
    for module, link in known.items():
        parts = [_host(nodes[name]) if name in nodes else None for name in maps(link)]
        if any(parts):
            widths = [_weight(leaves, name).shape[1] for name in maps(link)]
            by_module[module] = joined(link, parts, widths)
    tensors: dict[str, np.ndarray] = {}
    for module, adapter in by_module.items():
        tensors[PREFIX + module + DOWN] = adapter.a.T
        tensors[PREFIX + module + UP] = adapter.b.T
    config = written(by_module) | {
        "base_model_name_or_path": base,
        "fan_in_fan_out": any(not known[module].flip for module in by_module),
        "task_type": _task_type(model),
    }
    write(folder, tensors, config, (WEIGHTS, CONFIG))


def load(model: Any, params: Any, folder: str | os.PathLike[str]) -> Any:
    """Frozen `params` with the adapters in a folder that PEFT or `save` wrote.

    The adapters have the dtype and device of the parameters. Whole parameters in the file (a head
    below its adapter, `modules_to_save`) replace the model's. `save` does not write these again;
    `pretrained.save(model, lora.merge(params), folder)` does.

    FileNotFoundError if there is no adapter. ValueError if params have adapters already.
    PretrainedError if a file is damaged, does not fit the model, or needs something that is not
    supported, such as DoRA or trained biases.
    """
    if adapters(params):
        raise ValueError("load: params have adapters already; merge them first (lora.merge)")
    root = Path(folder)
    if not os.path.lexists(root / CONFIG):
        raise FileNotFoundError(f"{root} is no adapter: it has no {CONFIG}")
    scales = Scales(read_json(root / CONFIG), str(root / CONFIG))
    pairs, whole = _tensors(root)
    known = modules(model, params, in_memory=False) | modules(model, params)
    if unknown := pairs.keys() - known.keys():
        raise PretrainedError(
            f"{root}: the model has no linear maps {listed(unknown)}; a head that is tied to the "
            "embedding is none"
        )
    params = replaced(model, params, whole, root / WEIGHTS)
    leaves, by_name = tree.flatten(params), dict[str, Adapter]()
    for module, pair in pairs.items():
        link = known[module]
        adapter = _read(pair, [_weight(leaves, name) for name in maps(link)])
        by_name |= split(link, adapter._replace(scale=scales.of(module, adapter.a.shape[1])))

    def adapted(name: str, node: LinearParams) -> Any:
        if name not in by_name:
            return node
        a, b, scale = by_name[name]
        return with_adapter(node, like(a, value(node.w)), like(b, value(node.w)), scale)

    return tree.map_nodes(adapted, tree.freeze(params), LinearParams)


def others(params: Any) -> set[str]:
    """The names of trained parameters beside the adapters, which `save` cannot write."""
    in_adapters = {f"{name}.{part}" for name in adapters(params) for part in ("a", "b")}
    return tree.flatten(tree.trained(params)).keys() - in_adapters


def _weight(leaves: Mapping[str, Any], name: str) -> Array:
    """The weight of a linear layer, with or without an adapter."""
    return value(leaves[f"{name}.w"] if f"{name}.w" in leaves else leaves[f"{name}.base.w"])


def _host(node: LoRAParams) -> Adapter:
    a, b = (backends.backend_of(value(x)).to_numpy(value(x)) for x in (node.a, node.b))
    return Adapter(a, b, node.scale.value)


def _task_type(model: Any) -> str | None:
    """PEFT's task_type of the model; None: any model."""
    if isinstance(model, EncoderDecoder):
        return None if model.head is None else "SEQ_2_SEQ_LM"
    return "CAUSAL_LM" if isinstance(model.head, LMHead) else None


def _tensors(root: Path) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """The two tensors of each adapted module, and whole parameters, both by name."""
    if not os.path.lexists(root / WEIGHTS):
        if (root / PICKLED).is_file():
            command = converting(root / PICKLED, root / WEIGHTS)
            raise PretrainedError(f"{root}: {PICKLED} is {PICKLE}; to convert it: {command}")
        raise FileNotFoundError(f"{root} is no adapter: it has no {WEIGHTS}")
    tensors = open_file(root / WEIGHTS)
    ends = (DOWN, UP)
    names = {n.removeprefix(PREFIX).removesuffix(end) for n in tensors for end in ends}
    names = {name for name in names if all(PREFIX + name + end in tensors for end in ends)}
    unpaired = tensors.keys() - {PREFIX + name + end for name in names for end in ends}
    if extra := [name for name in unpaired if not WHOLE.fullmatch(name)]:
        raise PretrainedError(f"{root / WEIGHTS}: not supported: {listed(extra)}")
    pairs = {
        name: (tensors[PREFIX + name + DOWN], tensors[PREFIX + name + UP]) for name in sorted(names)
    }
    plain = {name: name.removeprefix(PREFIX).replace(".base_layer.", ".") for name in unpaired}
    return pairs, {plain[name]: tensors[name] for name in sorted(unpaired)}


def _read(pair: tuple[Tensor, Tensor], weights: list[Array]) -> Adapter:
    """The adapter in the two tensors of a module, with scale 1. weights: of its linear layers."""
    down, up = pair
    n_in, n_out = weights[0].shape[0], sum(w.shape[1] for w in weights)
    rank = down.shape[0] if down.shape else 0
    for tensor, shape in ((down, (rank, n_in)), (up, (n_out, rank))):
        if tensor.shape != shape or not rank:
            raise PretrainedError(
                f"{tensor.path}: {tensor.name} must be {shape}, got shape {tensor.shape}"
            )
    dtype = dtype_of(weights[0])
    return Adapter(down.read(dtype).T, up.read(dtype).T, 1.0)
