"""The peer's decoding: one token at a time, with a preallocated KV cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.eager import EagerLanguageModel
from benchmarks.eager_layers import SelfAttention, merge, rotated, split


class Cached(nn.Module):
    """An `EagerLanguageModel` with a KV cache: `n_texts` sequences of at most `length` tokens."""

    def __init__(self, model: EagerLanguageModel, n_texts: int, length: int) -> None:
        super().__init__()
        self.model = model
        attn = model.blocks[0].attn
        groups = attn.qkv.widths[1] // attn.head_width
        shape = (len(model.blocks), 2, n_texts, groups, length, attn.head_width)
        self.register_buffer("kv_cache", torch.zeros(shape))
        self.register_buffer("slots", torch.arange(length))

    def forward(self, token: Tensor, at: Tensor) -> Tensor:
        """Return the greedy ids (B, 1) after the ids `token` (B, 1) at position `at` (1,)."""
        model = self.model
        x = F.embedding(token, model.table)
        if model.positions is not None:
            x = x + model.positions[at]
        rotary = (model.cos[at], model.sin[at]) if model.has_rope else None
        mask = (self.slots <= at)[None, None, None, :]
        for block, kv in zip(model.blocks, self.kv_cache, strict=True):
            attn = block.attn
            x = block._residual(
                x,
                block.attn_norm,
                lambda x, attn=attn, kv=kv: self._attended(attn, x, kv, at, mask, rotary),
            )
            x = block._residual(x, block.ffn_norm, block.ffn)
        x = model.norm(x)
        logits = F.linear(x, model.table) if model.tied else model.head(x)
        return logits.argmax(dim=-1)

    def _attended(
        self,
        attn: SelfAttention,
        x: Tensor,
        kv: Tensor,
        at: Tensor,
        mask: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Return self-attention of one token; its key and value are written to `kv` at `at`.

        kv: (2, B, KV heads, length, K), one layer's cache   mask: True for slots up to `at`.
        """
        parts = attn.qkv(x).split(attn.qkv.widths, dim=-1)
        q, k, v = (split(part, attn.head_width) for part in parts)
        if rotary is not None:
            q, k = rotated(q, *rotary), rotated(k, *rotary)
        kv[0].index_copy_(2, at, k)
        kv[1].index_copy_(2, at, v)
        ctx = F.scaled_dot_product_attention(q, kv[0], kv[1], mask, enable_gqa=attn.grouped)
        return attn.o(merge(ctx))
