"""Checkpoints of llama2.c (`.bin`, version 0) and its tokenizer file.

A checkpoint has 7 int32 and then the tensors in float32, all little-endian. Each tensor is for all
layers together; matrices are (out, in). `export.py` and `train.py` of llama2.c write version 0 by
default. RoPE rotates the pairs (2i, 2i + 1).
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xformer.base.files import replacing
from xformer.pretrained.mapped import Tensor
from xformer.pretrained.reading import PretrainedError, opened, read_bytes

FLOAT = np.dtype("<f4")
HEADER = struct.Struct("<7i")
PIECE = struct.Struct("<fi")
LATER = 0x616B3432  # the first bytes of versions 1 and 2
TOKENIZER_LIMIT, MAX_PIECE = 2 << 20, 256  # bytes
FIRST_PIECE = 259  # after <unk>, <s>, </s> and 256 bytes
# Ids in the tokenizers of llama2.c. run.c also ends a text at <s>, the start of the next one.
TOKENS = {"bos_token_id": 1, "eos_token_id": [1, 2]}


class Header(NamedTuple):
    """The sizes of a model. tied: the output head is the embedding."""

    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    max_len: int
    tied: bool


def shapes(header: Header) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each tensor, in the order of the file."""
    d, f, n, heads, kv_heads, v, t, tied = header
    width = d // heads
    kv = width * kv_heads
    by_name: dict[str, tuple[int, ...]] = {
        "token_embedding": (v, d),
        "rms_att": (n, d),
        "wq": (n, d, d),
        "wk": (n, kv, d),
        "wv": (n, kv, d),
        "wo": (n, d, d),
        "rms_ffn": (n, d),
        "w1": (n, f, d),
        "w2": (n, d, f),
        "w3": (n, f, d),
        "rms_final": (d,),
        "freq_cis_real": (t, width // 2),
        "freq_cis_imag": (t, width // 2),
    }
    return by_name if tied else by_name | {"wcls": (v, d)}


def read(path: str | os.PathLike[str]) -> tuple[Header, dict[str, Tensor]]:
    """The sizes, and the tensors in the memory-mapped file.

    FileNotFoundError if there is no file, PretrainedError if it is damaged.
    """
    path = Path(path)
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        header = _header(file.read(HEADER.size), path)
        wanted = HEADER.size + FLOAT.itemsize * sum(map(math.prod, shapes(header).values()))
        if size != wanted:
            message = f"{path}: {header} makes {wanted} bytes, it has {size}"
            raise PretrainedError(message)
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tensors, start = dict[str, Tensor](), HEADER.size
    for name, shape in shapes(header).items():
        end = start + FLOAT.itemsize * math.prod(shape)
        tensors[name] = Tensor(name, path, data, "F32", shape, start, end)
        start = end
    return header, tensors


def write(path: str | os.PathLike[str], header: Header, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a checkpoint. An interrupted write leaves the old file.

    ValueError unless `arrays` has exactly the names and shapes of `shapes(header)`.
    """
    wanted, have = shapes(_require_sizes(header)), {name: a.shape for name, a in arrays.items()}
    if wrong := sorted(n for n in wanted.keys() | have.keys() if wanted.get(n) != have.get(n)):
        name = wrong[0]
        raise ValueError(
            f"llama2c.write: {name} must have shape {wanted.get(name)}, got {have.get(name)}"
        )
    sign = 1 if header.tied else -1
    sizes = (*header[:5], sign * header.vocab_size, header.max_len)
    with replacing(Path(path)) as (part,), part.open("xb") as file:
        file.write(HEADER.pack(*sizes))
        for name in wanted:
            file.write(np.ascontiguousarray(arrays[name], FLOAT).data)


def read_pieces(path: str | os.PathLike[str]) -> list[tuple[str, float]]:
    """(piece, score) by id, with spaces as SentencePiece writes them.

    The file starts with the length of the longest piece. Then it has the score, the length and the
    bytes of each piece. FileNotFoundError if there is no file, PretrainedError if it is damaged.
    """
    path = Path(path)
    data = read_bytes(path, TOKENIZER_LIMIT)
    try:
        pieces = [
            (piece.decode().strip("\n") if i < 3 else piece.decode().replace(" ", "\u2581"), score)
            for i, (score, piece) in enumerate(_pieces(data))
        ]
    except (ValueError, struct.error) as error:
        raise PretrainedError(f"{path}: is no tokenizer of llama2.c: {error}") from error
    names = [piece for piece, _ in pieces]
    wanted = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    if names[:FIRST_PIECE] != wanted or len(set(names)) < len(names):
        message = "it must begin with <unk>, <s>, </s> and 256 bytes, and have no piece twice"
        raise PretrainedError(f"{path}: is no tokenizer of llama2.c: {message}")
    return pieces


def _pieces(data: bytes) -> Iterator[tuple[float, bytes]]:
    start = 4
    while start < len(data):
        score, length = PIECE.unpack_from(data, start)
        start += PIECE.size
        piece = data[start : start + length]
        if not math.isfinite(score) or not 0 < length <= MAX_PIECE or len(piece) < length:
            raise ValueError(f"a score of {score} or a length of {length} before byte {start}")
        yield score, piece
        start += length


def _header(data: bytes, path: Path) -> Header:
    if len(data) < HEADER.size:
        raise PretrainedError(f"{path}: is no llama2.c checkpoint: it has {len(data)} bytes")
    d_model, d_ff, n_layers, heads, kv_heads, vocab_size, max_len = HEADER.unpack(data)
    if d_model == LATER:
        message = f"{path}: is of llama2.c's version {d_ff}, only version 0 is supported"
        raise PretrainedError(message)
    sizes = (d_model, d_ff, n_layers, heads, kv_heads, abs(vocab_size), max_len)
    try:
        return _require_sizes(Header(*sizes, tied=vocab_size > 0))
    except ValueError as error:
        raise PretrainedError(f"{path}: is no llama2.c checkpoint: {error}") from error


def _require_sizes(header: Header) -> Header:
    if min(header[:7]) < 1:
        raise ValueError(f"sizes must be at least 1, got {header}")
    if header.d_model % (2 * header.n_heads) or header.n_heads % header.n_kv_heads:
        raise ValueError(
            "heads must divide d_model, into even widths, and key heads must divide heads, "
            f"got {header}"
        )
    return header
