"""Whole parameters in an adapter's file.

PEFT stores the weights below an adapter of the head (`lm_head.base_layer.weight`), modules that
were trained whole (`modules_to_save`: a classifier), and resized embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from array_api_compat import device, to_device

from xformer import backends
from xformer.base import tree
from xformer.base.typing import Array
from xformer.finetune.lora import dtype_of
from xformer.pretrained import PretrainedError
from xformer.pretrained.families import FAMILIES
from xformer.pretrained.loading import host_of, links_of
from xformer.pretrained.mapped import Tensor
from xformer.pretrained.names import Link
from xformer.pretrained.reading import listed


def replaced(model: Any, params: Any, tensors: Mapping[str, Tensor], path: Path) -> Any:
    """`params` with the whole parameters of an adapter's file.

    tensors: by the names of transformers, in memory or in files
    path: of the file, for messages
    PretrainedError if the model has no such parameter, or one of another shape, and if tied
    parameters would differ.
    """
    links = {
        link.theirs[0]: link
        for in_memory in (False, True)
        for link in links_of(model, in_memory=in_memory)
        if len(link.theirs) == 1
    }
    tied = FAMILIES[model.hf_config["model_type"]].tied
    if unknown := tensors.keys() - links.keys() - tied.keys():
        raise PretrainedError(f"{path}: not supported: {listed(unknown)}")
    params = tree.thaw(params)
    leaves = tree.flatten(params)
    for name, tensor in tensors.items():
        if name in links:
            leaves |= _leaves(links[name], tensor, leaves, path)
    if getattr(model.head, "tied", False):
        _require_ties(tied, tensors, links, tree.flatten(params), path)
    return tree.unflatten(params, leaves)


def _leaves(link: Link, tensor: Tensor, leaves: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """New leaves, by name, with the numbers of one tensor of the adapter's file.

    link: of the tensor to one leaf or several
    leaves: of the model, by name; new leaves are on their device, in float64 if theirs is, else in
        float32
    path: of the adapter's file, for the error message
    PretrainedError if the tensor has another shape than the leaves require.
    """
    (wanted,) = link.shapes({name: leaves[name].shape for name in link.ours}).values()
    if tensor.shape != wanted:
        raise PretrainedError(f"{path}: {tensor.name} must be {wanted}, got shape {tensor.shape}")
    read = link.read([tensor.read(dtype_of(leaves[link.ours[0]]))])
    return {name: like(array, leaves[name]) for name, array in read.items()}


def _require_ties(
    tied: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    links: Mapping[str, Link],
    leaves: Mapping[str, Any],
    path: Path,
) -> None:
    """PretrainedError if a tied head and the embedding would have different numbers.

    PEFT can train one of them alone, which the model's `tie_word_embeddings` cannot express.
    """
    for table in sorted({of for of in tied.values() if of in links}):
        stored = [name for name, of in tied.items() if of == table and name in tensors]
        stored += [table] if table in tensors else []
        link = links[table]
        (before,) = link.write([host_of(leaves[name]) for name in link.ours]).values()
        arrays = [tensors[name].read(dtype_of(before)) for name in stored]
        if table not in stored or stored == [table]:
            arrays.append(before)  # of the other one, which is unchanged
        if any(not np.array_equal(array, arrays[0]) for array in arrays):
            raise PretrainedError(
                f"{path}: {listed(stored)} would make head and embedding differ, but the model "
                "ties them (tie_word_embeddings)"
            )


def like(host: np.ndarray, array: Array) -> Array:
    """`host` as an array of the library and on the device of `array`."""
    return to_device(backends.backend_of(array).asarray(np.ascontiguousarray(host)), device(array))
