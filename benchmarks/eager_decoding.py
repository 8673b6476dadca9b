"""The peer's decoder: one token at a time, in arrays whose shapes never change."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.eager import EagerLanguageModel
from benchmarks.eager_layers import SelfAttention, merge, split, turned


class Cached(nn.Module):
    """A decoder of `EagerLanguageModel`'s weights on texts of at most `length` tokens."""

    def __init__(self, model: EagerLanguageModel, n_texts: int, length: int) -> None:
        super().__init__()
        self.model = model
        attn = model.blocks[0].attn
        groups = attn.qkv.widths[1] // attn.head_width
        shape = (len(model.blocks), 2, n_texts, groups, length, attn.head_width)
        self.register_buffer("past", torch.zeros(shape))
        self.register_buffer("places", torch.arange(length))

    def forward(self, token: Tensor, at: Tensor) -> Tensor:
        """The likeliest ids (B, 1) after those of token (B, 1), which stand at `at` (1,)."""
        model = self.model
        x = F.embedding(token, model.table)
        if model.positions is not None:
            x = x + model.positions[at]
        rotary = (model.cos[at], model.sin[at]) if model.turns else None
        seen = (self.places <= at)[None, None, None, :]
        for block, past in zip(model.blocks, self.past, strict=True):
            own = block.attn
            x = block._residual(
                x,
                block.attn_norm,
                lambda x, a=own, p=past: self._attended(a, x, p, at, seen, rotary),
            )
            x = block._residual(x, block.ffn_norm, block.ffn)
        x = model.norm(x)
        logits = F.linear(x, model.table) if model.tied else model.head(x)
        return logits.argmax(dim=-1)

    def _attended(
        self,
        attn: SelfAttention,
        x: Tensor,
        past: Tensor,
        at: Tensor,
        seen: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """As SelfAttention.forward, with the keys and values before."""
        parts = attn.qkv(x).split(attn.qkv.widths, dim=-1)
        q, k, v = (split(part, attn.head_width) for part in parts)
        if rotary is not None:
            q, k = turned(q, *rotary), turned(k, *rotary)
        past[0].index_copy_(2, at, k)
        past[1].index_copy_(2, at, v)
        ctx = F.scaled_dot_product_attention(q, past[0], past[1], seen, enable_gqa=attn.grouped)
        return attn.o(merge(ctx))
