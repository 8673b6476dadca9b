"""Models of llama2.c: Llama with interleaved RoPE pairs, in one `.bin` file.

The file has one tensor of each kind for all layers together. Here layer i of `wq` is named `wq.i`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from xformer.layers import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    NormConfig,
    RopeConfig,
    rope_tables,
)
from xformer.models import LanguageModel, LMHead
from xformer.pretrained import llama2c
from xformer.pretrained.config import Config
from xformer.pretrained.family import MAX_LAYERS, Family, embedding, layers
from xformer.pretrained.files import Tensors
from xformer.pretrained.names import Link, Links, same
from xformer.pretrained.reading import PretrainedError

MODEL_TYPE = "llama2.c"
MAPS = {
    "wq": "attn.q.w",
    "wk": "attn.kv.k.w",
    "wv": "attn.kv.v.w",
    "wo": "attn.o.w",
    "w1": "ffn.gate.w",
    "w2": "ffn.down.w",
    "w3": "ffn.up.w",
}
NORMS = {"rms_att": "attn_norm.w", "rms_ffn": "ffn_norm.w"}
TABLES = ("freq_cis_real", "freq_cis_imag")


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration, which has the sizes of the file's header."""
    attn = AttentionConfig(
        d_model=c.integer("d_model", low=1),
        n_heads=c.integer("n_heads", low=1),
        n_kv_heads=c.integer("n_kv_heads", low=1),
        bias=False,
    )
    ffn = FeedForwardConfig(c.integer("d_ff", low=1), "silu", gated=True, bias=False)
    embed = embedding(c, attn.d_model, max_len=c.integer("max_len", low=1))
    turned = RopeConfig(attn.head_width, interleaved=True)
    head_config = LMHead(tied=c.flag("tied"))
    blocks = (BlockConfig(attn, ffn, NormConfig("rms")),) * layers(c, "n_layers")
    return LanguageModel(embed, blocks, rotary=turned, head=head_config)


def links(model: LanguageModel) -> Links:
    """Yield which tensor of a file is which leaf of the parameters (`names.Link`)."""
    yield from same("token_embedding", "embed.table")
    for i in range(len(model.blocks)):
        for theirs, ours in MAPS.items():
            yield Link((f"{theirs}.{i}",), (f"stack.blocks.{i}.{ours}",), flip=True)
        for theirs, ours in NORMS.items():
            yield from same(f"{theirs}.{i}", f"stack.blocks.{i}.{ours}")
    yield from same("rms_final", "stack.norm.w")
    yield Link(("wcls",), ("head.w",), flip=True)


FAMILY = Family(heads={}, build=build, links=links, buffers=TABLES)


def open_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Tensors]:
    """The configuration and the tensors of a `.bin` file.

    FileNotFoundError if there is no file, PretrainedError if it is damaged.
    """
    header, tensors = llama2c.read(path)
    if header.n_layers > MAX_LAYERS:
        message = f"{path}: n_layers must be at most {MAX_LAYERS}, got {header.n_layers}"
        raise PretrainedError(message)
    config = {"model_type": MODEL_TYPE, **header._asdict(), **llama2c.TOKENS}
    for name in (*MAPS, *NORMS):
        whole = tensors.pop(name)
        size = (whole.end - whole.start) // header.n_layers
        for i in range(header.n_layers):
            start = whole.start + i * size
            part = whole._replace(shape=whole.shape[1:], start=start, end=start + size)
            tensors[f"{name}.{i}"] = part
    return config, Tensors(tensors)


def write_file(
    path: str | os.PathLike[str], config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> None:
    """Write a `.bin` file. An interrupted write leaves the old file.

    config: the sizes, by the names of `llama2c.Header`
    tensors: by the names of `links`
    """
    header = llama2c.Header(*(config[name] for name in llama2c.Header._fields))
    arrays = {name: array for name, array in tensors.items() if "." not in name}
    for name in (*MAPS, *NORMS):
        arrays[name] = np.stack([tensors[f"{name}.{i}"] for i in range(header.n_layers)])
    width = header.d_model // header.n_heads
    turned = rope_tables(RopeConfig(width), like=arrays["rms_final"], length=header.max_len)
    arrays |= dict(zip(TABLES, (turned.cos, turned.sin), strict=True))
    llama2c.write(path, header, arrays)
