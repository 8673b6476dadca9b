"""The speed of light: the matrix products that a step cannot do without, and nothing else.

Of every linear map the product forward, and two backward in training: of the weights, and of what
came in; of a frozen one none of the weights. Projections of the same vectors are one product; of
experts those that a token goes to. Of attention two products forward, four backward, over all keys,
or half of them where it is causal; windows and padding are not deducted. On a GPU without those of
attention: one after the other they would write scores to memory, which no kernel of attention does.
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

DRAWN = 1 << 20  # numbers, of which the operands are made
SCORES = 1 << 19  # at a time: what does not stay in cache would time the memory


class Product(NamedTuple):
    """(m, k) times (k, n)."""

    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        """A multiplication and an addition are two."""
        return 2 * self.m * self.k * self.n


class Linear(NamedTuple):
    """A linear map of N rows from I to O; frozen: its weights have no gradient."""

    rows: int
    width_in: int
    width_out: int
    frozen: bool = False

    def products(self, training: bool) -> Iterator[Product]:
        """y = x w; dx = dy w^T, dw = x^T dy."""
        n, i, o, frozen = self
        yield Product(n, i, o)
        if training:
            yield Product(n, o, i)
        if training and not frozen:
            yield Product(i, n, o)


class Maps(NamedTuple):
    """Linear maps of the same N rows from I to several O, each with an adapter where asked."""

    rows: int
    width_in: int
    widths_out: tuple[int, ...]
    adapted: bool = True  # a head that is the embedding's table is not

    def linear_many(self, rank: int | None) -> Iterator[Linear]:
        """One product for all; with adapters the frozen maps, one product in, and each one out."""
        n, i, widths, adapted = self
        yield Linear(n, i, sum(widths), frozen=rank is not None)
        if rank is not None and adapted:
            yield Linear(n, i, rank * len(widths))
            yield from (Linear(n, rank, width) for width in widths)


class Attention(NamedTuple):
    """The heads of a batch side by side: N = B H T queries, each with S keys."""

    queries: int
    keys: int
    width: int  # K of queries and keys
    value_width: int  # M

    def products(self, training: bool) -> Iterator[Product]:
        """q k^T, p v; dp = dctx v^T, dv = p^T dctx, dq = ds k, dk = ds^T q: some rows at a time."""
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
    """The linear maps and attentions of a forward, or of those of a cycle."""
    for length in shape.lengths or (shape.length,):
        for part in _parts(shape, length):
            if isinstance(part, Attention):
                yield part
            else:
                yield from part.linear_many(shape.lora_rank)


def _parts(shape: Shape, length: int) -> Iterator[Maps | Attention]:
    """Of a batch of texts, or sources, of that length."""
    network, batch = shape.network, shape.batch
    last = shape.target_length or length
    if isinstance(network, LanguageModel):
        for config in network.blocks:
            yield from _block(config, batch, length, causal=network.causal)
    else:
        for config in network.encoder:
            yield from _block(config, batch, length, causal=False)
        for config in network.decoder:
            yield from _block(config, batch, last, causal=True)
            yield from _cross(config, batch, last, length)
    width, head = config.d_model, network.head
    if isinstance(head, LMHead):
        embed = network.embed if isinstance(network, LanguageModel) else network.target_embed
        yield Maps(batch * last, width, (embed.vocab_size,), adapted=not head.tied)
    elif isinstance(head, Classifier):
        if head.dense is not None:
            yield Maps(batch, width, (width,))
        yield Maps(batch, width, (head.n_labels,))


def _block(
    config: BlockConfig, batch: int, length: int, *, causal: bool
) -> Iterator[Maps | Attention]:
    """Self-attention, and the feed-forward network, or a router and experts."""
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
    """Attention to the memory, whose keys and values have a product of their own."""
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
    """All products of a step, or of a forward where the shape is not for training."""
    found = parts(shape)
    if shape.device == "cuda":
        found = (part for part in found if isinstance(part, Linear))
    return [p for part in found for p in part.products(shape.training)]


class Light:
    """The contestant that only multiplies, by NumPy's BLAS; its operands lie in one buffer each.

    By cuBLAS, through CuPy, where torch's device is "cuda"; in a precision of 16 bits those of
    float16, which take as long as bfloat16's.
    """

    def __init__(self, shape: Shape) -> None:
        found = products(shape)
        self.on_cuda = shape.device == "cuda"
        self.backend = backends.get("cupy" if self.on_cuda else "numpy")
        xp = self.backend.xp
        two_bytes = shape.precision is not None and self.on_cuda
        some = xp.astype(
            self.backend.generator(0).uniform((DRAWN,)), xp.float16 if two_bytes else xp.float32
        )
        sizes = (max(getattr(p, a) * getattr(p, b) for p in found) for a, b in ("mk", "kn", "mn"))
        left, right, out = (xp.empty(n, dtype=some.dtype) for n in sizes)
        for operand in (left, right):
            for at in range(0, len(operand), DRAWN):
                operand[at : at + DRAWN] = some[: len(operand) - at]
        self._context: Any = nullcontext
        if shape.tf32:
            from xformer.backends.cupy import tf32

            self._context = tf32
        self.flops = sum(p.flops for p in found)
        self._operands = [
            (
                left[: p.m * p.k].reshape(p.m, p.k),
                right[: p.k * p.n].reshape(p.k, p.n),
                out[: p.m * p.n].reshape(p.m, p.n),
            )
            for p in found
        ]

    def about(self) -> dict[str, Any]:
        """What there is to do, and the memory that it takes."""
        now, most = self.backend.memory()
        now = machine.held() if self.on_cuda else now
        return {"flops": self.flops, "bytes": now, "most_bytes": most}

    def run(self) -> None:
        """All products, one after the other."""
        with self._context():
            for left, right, out in self._operands:
                if self.on_cuda:
                    left.dot(right, out)
                else:
                    np.matmul(left, right, out=out)
            self.backend.synchronize()
