"""Export the inference of a model as ONNX."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from xformer import backends
from xformer.arrays.onnx import Array, NotExported
from xformer.base import tree
from xformer.dispatch import inference
from xformer.dispatch.checks import require_sizes
from xformer.dispatch.shapes import FLOATING, dtype_name, require_array
from xformer.export.recording import Input, recorded
from xformer.export.writing import Exported, require_onnx, require_path, write
from xformer.layers.recurrent_state import is_recurrent
from xformer.layers.rope_by_layer import distinct, max_unscaled_len
from xformer.models import EncoderDecoder, LanguageModel, Pooler
from xformer.models.pooled import require_pooling
from xformer.sentences.embed import pooling_of

__all__ = ["NotExported", "onnx"]

UNBOUNDED = 1 << 20  # tokens, for models of any length
BATCH = 1 << 10  # while recording; a run may have more
LENGTHS = ("length", "source_length", "target_length")


def onnx(
    model: Any,
    params: Any,
    path: str | os.PathLike[str],
    *,
    pooling: str | tuple[str, ...] | None = None,
    normalize: bool = True,
    mask: bool | None = None,
    types: bool = False,
    sizes: Mapping[str, int] | None = None,
    max_len: int | None = None,
) -> Exported:
    """Write the inference of a model as an ONNX file, and return what was written.

    The parameters have their dotted names (`xformer.tree`). If they have 1 GiB or more, they are in
    the file `path` + ".data". The graph computes the same numbers as the model's `forward` on
    NumPy, up to rounding.

    Inputs, with dynamic sizes by name:

    - a `LanguageModel`: tokens (batch, length), int64; vectors (batch, length, D) if the
      model has no embedding
    - an `EncoderDecoder`: src (batch, source_length), tgt (batch, target_length)
    - mask (batch, length), or src_mask (batch, source_length): bool, True = a token
    - types (batch, length), int64

    Output: logits; hidden (batch, length, D) without a head or with a Pooler; embeddings (batch, D)
    with a pooling.

    path: the file; its name ends with .onnx
    pooling: of `sentences.embed`, such as "mean" or ("max", "mean"): write the embeddings of texts
        instead of logits
    normalize: scale embeddings to length 1
    mask: whether there is an input for the padding; None: for an encoder, an `EncoderDecoder`
        without a pad_id, and with a pooling
    types: whether there is an input for BERT's token types
    sizes: sizes that are fixed, such as {"batch": 1, "length": 128}; the others are dynamic
    max_len: the largest length; None: the model's context

    NotExported, a ValueError, names what has no ONNX graph; nothing is written then. ValueError for
    other arguments, FileExistsError if `path` + ".data" exists and was not written by an export,
    ImportError without the extra `onnx`.
    """
    require_onnx()
    file = require_path(path)
    require_model("onnx", model)
    weights = host("onnx", params)
    if pooling is not None:
        pooling = pooling_of("onnx", model, pooling)
        require_pooling(pooling, getattr(model, "head", None))
    is_pair = isinstance(model, EncoderDecoder)
    if is_pair and (pooling is not None or types):
        name = "types" if types else "pooling"
        raise ValueError(f"onnx: {name} is for a LanguageModel, got an encoder-decoder")
    if mask is None:
        mask = model.pad_id is None if is_pair else not model.causal or pooling is not None
    if types and not (model.embed is not None and model.embed.n_types):
        raise ValueError("onnx: types are for a model with token types")
    inputs = data_inputs(model, next(iter(weights.values())).dtype)
    first = next(iter(inputs.values())).shape[:2]
    if mask:
        inputs["src_mask" if is_pair else "mask"] = Input(first, bool)
    if types:
        inputs["types"] = Input(first, np.int64)
    if pooling is None:
        call: Any = model.forward
        output = "hidden" if isinstance(model.head, Pooler | None) else "logits"
    else:
        call, output = partial(model.pooled, pooling=pooling, normalize=normalize), "embeddings"

    def fn(arrays: dict[str, Array]) -> dict[str, Array]:
        data = {name: arrays[name] for name in inputs}
        positional = [data.pop(name) for name in POSITIONAL if name in data]
        with inference():
            y, _ = call(named(params, arrays), *positional, **data)
        return {output: y}

    parameters = {name: Input(w.shape, w.dtype) for name, w in weights.items()}
    graph, outputs = recorded(fn, parameters | inputs, largest(model, max_len, sizes), sizes)
    return write(file, graph, outputs, weights, {"model": type(model).__name__})


POSITIONAL = ("tokens", "vectors", "src", "tgt")


def require_model(what: str, model: Any) -> None:
    """TypeError for another object than a model."""
    if not isinstance(model, LanguageModel | EncoderDecoder):
        got = type(model).__name__
        raise TypeError(f"{what}: model must be a LanguageModel or EncoderDecoder, got {got}")


def host(what: str, params: Any) -> dict[str, np.ndarray]:
    """The parameters by dotted name, as NumPy arrays. TypeError for other leaves and dtypes."""
    weights = {}
    for name, leaf in tree.flatten(params).items():
        leaf = tree.value(leaf)
        require_array(what, f"params.{name}", leaf)
        if dtype_name(leaf) not in FLOATING:
            raise NotExported(f"{what}: params.{name} must be float32 or float64, got {leaf.dtype}")
        weights[name] = backends.backend_of(leaf).to_numpy(leaf)
    return weights


def named(params: Any, arrays: Mapping[str, Any], prefix: str = "") -> Any:
    """`params` with the arrays of its leaves' names; frozen leaves stay frozen."""
    names = iter(tree.flatten(params))
    return tree.map(lambda _: arrays[prefix + next(names)], params)


def data_inputs(model: Any, dtype: Any) -> dict[str, Input]:
    """The tokens, or the vectors, that a model reads."""
    if isinstance(model, LanguageModel):
        shape = ("batch", "length")
        if model.embed is None:
            return {"vectors": Input((*shape, model.d_model), dtype)}
        return {"tokens": Input(shape, np.int64)}
    inputs = {}
    for name, length, embed, blocks in (
        ("src", "source_length", model.src_embed, model.encoder),
        ("tgt", "target_length", model.target_embed, model.decoder),
    ):
        width = (blocks[0].d_model,) if embed is None else ()
        inputs[name] = Input(("batch", length, *width), dtype if width else np.int64)
    return inputs


def largest(model: Any, max_len: int | None, sizes: Mapping[str, int] | None) -> dict[str, int]:
    """The largest value of each dynamic size of a model.

    ValueError if max_len is larger than the context. NotExported if RoPE frequencies change with
    the length, or a layer is recurrent.
    """
    if isinstance(model, EncoderDecoder):
        embeds = {"source_length": model.src_embed, "target_length": model.target_embed}
    else:
        embeds = {"length": model.embed}
    result = {"batch": BATCH}
    for name, embed in embeds.items():
        limit = None if embed is None else embed.context
        if max_len is not None:
            (max_len,) = require_sizes("onnx", 1, max_len=max_len)
            if limit is not None and max_len > limit:
                raise ValueError(f"onnx: max_len must be at most {limit}, got {max_len}")
            limit = min(_uncut(model, max_len), UNBOUNDED if limit is None else limit)
        result[name] = UNBOUNDED if limit is None else limit
    rotary: Any = getattr(model, "rotary", None)
    n = max_unscaled_len(rotary)
    if "length" not in (sizes or {}) and result.get("length", 0) > n:
        scaling = next(c.scaling for c in distinct(rotary) if c.max_unscaled_len == n)
        raise NotExported(
            f'onnx: rotary scaling "{scaling}" has other frequencies for more than {n} '
            f"tokens: give max_len={n}, or fix length with sizes"
        )
    recurrent = isinstance(model, LanguageModel) and any(map(is_recurrent, model.blocks))
    if "length" not in (sizes or {}) and recurrent:
        raise NotExported(
            "onnx: a gated DeltaNet reads a sequence in chunks, whose number must be known: fix "
            "length with sizes"
        )
    return result


def _uncut(model: Any, max_len: int) -> int:
    """The smallest length from max_len on, where tables of distances do not change their kind.

    One token less must have the same graph.
    """
    if isinstance(model, LanguageModel):
        if model.blocks[0].attn.xl:  # its table has a power of two of rows
            return 1 << (max_len - 1).bit_length()
        biases = [model.relative_bias]
    else:
        biases = [model.encoder_relative_bias, model.decoder_relative_bias]
    return max_len + any(bias is not None and bias.max_distance == max_len for bias in biases)
