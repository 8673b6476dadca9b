"""The speed of light: the time of the necessary matmuls of a step, and nothing else.

- A linear map: one matmul forward, and two backward in training (gradients of input and weights).
  Frozen weights have no gradient.
- Projections of the same input are one matmul.
- Experts: only the experts that a token is routed to.
- Attention: two matmuls forward and four backward, over all keys, or half of them if it is causal.
  Windows and padding are not deducted.

On a GPU attention is left out: separate matmuls would write the scores to memory, and no attention
kernel does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from benchmarks import machine
from benchmarks.shapes import Shape
from xformer import backends
from xformer.layers import BlockConfig
from xformer.models import Classifier, LanguageModel, LMHead

DRAWN = 1 << 20  # random numbers, repeated to fill the operands
SCORES = 1 << 19  # per matmul of attention: larger ones would time the memory, not the matmul


class Product(NamedTuple):
    """The sizes of a matmul (m, k) times (k, n)."""

    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        """The FLOPs; a multiplication and an addition count as two."""
        return 2 * self.m * self.k * self.n


class Linear(NamedTuple):
    """A linear map of N rows from I to O; frozen: its weights have no gradient."""

    rows: int
    width_in: int
    width_out: int
    frozen: bool = False

    def products(self, training: bool) -> Iterator[Product]:
        """Yield the matmuls y = x w and, in training, dx = dy w^T and dw = x^T dy."""
        n, i, o, frozen = self
        yield Product(n, i, o)
        if training:
            yield Product(n, o, i)
        if training and not frozen:
            yield Product(i, n, o)


class Maps(NamedTuple):
    """Linear maps of the same N rows from I to several O."""

    rows: int
    width_in: int
    widths_out: tuple[int, ...]
    adapted: bool = True  # whether LoRA adapts them; False for a tied head and a router

    def linear_many(self, rank: int | None) -> Iterator[Linear]:
        """Yield one linear map for all.

        rank: of LoRA, or None. With LoRA the map is frozen, and one map into all adapters and one
        out of each adapter follow.
        """
        n, i, widths, adapted = self
        yield Linear(n, i, sum(widths), frozen=rank is not None)
        if rank is not None and adapted:
            yield Linear(n, i, rank * len(widths))
            yield from (Linear(n, rank, width) for width in widths)


class Attention(NamedTuple):
    """Attention of all heads of a batch: N = B H T queries, each with S keys."""

    queries: int
    keys: int
    width: int  # K of queries and keys
    value_width: int  # M

    def products(self, training: bool) -> Iterator[Product]:
        """Yield the matmuls for chunks of queries, so that the scores of a chunk stay in cache.

        Forward: q k^T, p v. Backward: dp = dctx v^T, dv = p^T dctx, dq = ds k, dk = ds^T q.
        """
        _, s, k, m = self
        step = max(SCORES // s, 1)
        for start in range(0, self.queries, step):
            n = min(step, self.queries - start)
            yield Product(n, k, s)
            yield Product(n, s, m)
            if training:
                yield Product(n, m, s)
                yield Product(s, n, m)
                yield Product(n, s, k)
                yield Product(s, n, k)


def parts(shape: Shape) -> Iterator[Linear | Attention]:
    """Yield the linear maps and attentions of a forward pass; for `lengths`, of all its batches."""
    for length in shape.lengths or (shape.length,):
        for part in _parts(shape, length):
            if isinstance(part, Attention):
                yield part
            else:
                yield from part.linear_many(shape.lora_rank)


def _parts(shape: Shape, length: int) -> Iterator[Maps | Attention]:
    """Yield the maps and attentions for a batch of sequences (or sources) of `length` tokens."""
    model, batch = shape.model, shape.batch
    last = shape.target_length or length
    if isinstance(model, LanguageModel):
        for config in model.blocks:
            yield from _block(config, batch, length, causal=model.causal)
    else:
        for config in model.encoder:
            yield from _block(config, batch, length, causal=False)
        for config in model.decoder:
            yield from _block(config, batch, last, causal=True)
            yield from _cross(config, batch, last, length)
    width, head = config.d_model, model.head
    if isinstance(head, LMHead):
        embed = model.embed if isinstance(model, LanguageModel) else model.target_embed
        yield Maps(batch * last, width, (embed.vocab_size,), adapted=not head.tied)
    elif isinstance(head, Classifier):
        if head.dense is not None:
            yield Maps(batch, width, (width,))
        yield Maps(batch, width, (head.n_labels,))


def _block(
    config: BlockConfig, batch: int, length: int, *, causal: bool
) -> Iterator[Maps | Attention]:
    """Yield those of self-attention and the feed-forward network, or of a router and experts."""
    rows, width, queries = batch * length, config.d_model, _queries(config)
    yield Maps(rows, width, (queries, *_key_value(config)))
    yield from _heads(config, rows, (length + 1) // 2 if causal else length)
    if (experts := config.experts) is not None:
        yield Maps(rows, width, (experts.n_experts,), adapted=False)
        rows *= experts.top_k
    d_ff, gated = config.ffn.d_ff, getattr(config.ffn, "gated", True)
    yield Maps(rows, width, (d_ff,) * (2 if gated else 1))
    yield Maps(rows, d_ff, (width,))


def _cross(config: BlockConfig, batch: int, length: int, source: int) -> Iterator[Maps | Attention]:
    """Yield those of cross-attention; source: the encoder's number of tokens."""
    rows, width = batch * length, config.d_model
    yield Maps(rows, width, (_queries(config),))
    yield Maps(batch * source, width, _key_value(config))
    yield from _heads(config, rows, source)


def _heads(config: BlockConfig, rows: int, keys: int) -> Iterator[Maps | Attention]:
    attn = config.attn
    yield Attention(attn.n_heads * rows, keys, attn.head_width, attn.value_width)
    yield Maps(rows, attn.n_heads * attn.value_width, (config.d_model,))


def _queries(config: BlockConfig) -> int:
    return config.attn.n_heads * config.attn.head_width


def _key_value(config: BlockConfig) -> tuple[int, int]:
    attn = config.attn
    return attn.kv_heads * attn.head_width, attn.kv_heads * attn.value_width


def products(shape: Shape) -> list[Product]:
    """Return all necessary matmuls of a training step, or of a forward pass for inference."""
    counted = parts(shape)
    if shape.device == "cuda":
        counted = (part for part in counted if isinstance(part, Linear))
    return [p for part in counted for p in part.products(shape.training)]


class Light:
    """A contestant that runs only the necessary matmuls of `shape`.

    It uses NumPy's BLAS, or cuBLAS through CuPy for the device "cuda". For a precision of 16 bits
    its operands are float16, whose matmuls take as long as in bfloat16. All left operands share one
    buffer, and so do all right operands and all outputs.
    """

    def __init__(self, shape: Shape) -> None:
        matmuls = products(shape)
        self.on_cuda = shape.device == "cuda"
        self.backend = backends.get("cupy" if self.on_cuda else "numpy")
        xp = self.backend.xp
        two_bytes = shape.precision is not None and self.on_cuda
        numbers = xp.astype(
            self.backend.generator(0).uniform((DRAWN,)), xp.float16 if two_bytes else xp.float32
        )
        sizes = (max(getattr(p, a) * getattr(p, b) for p in matmuls) for a, b in ("mk", "kn", "mn"))
        left, right, out = (xp.empty(n, dtype=numbers.dtype) for n in sizes)
        for operand in (left, right):
            for at in range(0, len(operand), DRAWN):
                operand[at : at + DRAWN] = numbers[: len(operand) - at]
        self._context: Any = nullcontext
        if shape.tf32:
            from xformer.backends.cupy import tf32

            self._context = tf32
        self.flops = sum(p.flops for p in matmuls)
        self._operands = [
            (
                left[: p.m * p.k].reshape(p.m, p.k),
                right[: p.k * p.n].reshape(p.k, p.n),
                out[: p.m * p.n].reshape(p.m, p.n),
            )
            for p in matmuls
        ]

    def about(self) -> dict[str, Any]:
        """Return the FLOPs of a run, and the memory in bytes: now, and at its peak."""
        now, most = self.backend.memory()
        now = machine.held() if self.on_cuda else now
        return {"flops": self.flops, "bytes": now, "most_bytes": most}

    def run(self) -> None:
        """Run all matmuls, one after the other."""
        with self._context():
            for left, right, out in self._operands:
                if self.on_cuda:
                    left.dot(right, out)
                else:
                    np.matmul(left, right, out=out)
            self.backend.synchronize()
