"""The peer's layers, in plain PyTorch: packed projections, `scaled_dot_product_attention`.

Of xformer they know only the parameter types, in which weights come and gradients go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.eager_linear import grad, linear, parameter
from xformer.layers import (
    AttentionConfig,
    AttentionParams,
    BlockConfig,
    BlockParams,
    FeedForwardConfig,
    FeedForwardParams,
    KeyValueParams,
    NormConfig,
    NormParams,
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class Norm(nn.Module):
    """A norm with given parameters: `F.layer_norm`, or `F.rms_norm`."""

    def __init__(self, params: NormParams, config: NormConfig) -> None:
        super().__init__()
        self.rms, self.eps = config.kind == "rms", config.eps
        self.weight = parameter(params.w)
        self.bias = None if params.b is None else parameter(params.b)

    def forward(self, x: Tensor) -> Tensor:
        """Of the last axis."""
        if self.rms:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def grads(self) -> NormParams:
        """Gradients of the parameters."""
        return NormParams(grad(self.weight), grad(self.bias))


class SelfAttention(nn.Module):
    """Attention of a sequence to itself; dropout: of the probabilities."""

    def __init__(
        self, params: AttentionParams, config: AttentionConfig, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.head_width, self.grouped = config.head_width, config.kv_heads != config.n_heads
        self.dropout = dropout
        self.qkv, self.o = linear(params.q, *params.kv[:2]), linear(params.o)

    def forward(
        self, x: Tensor, mask: Tensor | None, causal: bool, rotary: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """mask: boolean, True = may attend   rotary: cos and sin, (T, K)."""
        parts = self.qkv(x).split(self.qkv.widths, dim=-1)
        q, k, v = (split(part, self.head_width) for part in parts)
        if rotary is not None:
            q, k = turned(q, *rotary), turned(k, *rotary)
        ctx = F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout, is_causal=causal, enable_gqa=self.grouped
        )
        return self.o(merge(ctx))

    def grads(self) -> AttentionParams:
        """Gradients of the parameters."""
        q, k, v = self.qkv.grads()
        return AttentionParams(q, KeyValueParams(k, v), *self.o.grads())


class CrossAttention(nn.Module):
    """Attention of a sequence to the memory."""

    def __init__(self, params: AttentionParams, config: AttentionConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.q, self.kv, self.o = linear(params.q), linear(*params.kv[:2]), linear(params.o)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """mask: boolean, True = may attend."""
        q = split(self.q(x), self.head_width)
        k, v = (split(part, self.head_width) for part in self.kv(memory).chunk(2, dim=-1))
        return self.o(merge(F.scaled_dot_product_attention(q, k, v, mask)))

    def grads(self) -> AttentionParams:
        """Gradients of the parameters."""
        return AttentionParams(*self.q.grads(), KeyValueParams(*self.kv.grads()), *self.o.grads())


class FeedForward(nn.Module):
    """Plain, or gated with one product for both ways in."""

    def __init__(self, params: FeedForwardParams, config: FeedForwardConfig) -> None:
        super().__init__()
        self.gated, self.act = config.gated, ACTIVATIONS[config.activation]
        ways_in = (params.gate, params.up) if params.gate is not None else (params.up,)
        self.up, self.down = linear(*ways_in), linear(params.down)

    def forward(self, x: Tensor) -> Tensor:
        """Of each position alone."""
        if self.gated:
            gate, up = self.up(x).chunk(2, dim=-1)
            return self.down(self.act(gate) * up)
        return self.down(self.act(self.up(x)))

    def grads(self) -> FeedForwardParams:
        """Gradients of the parameters."""
        *gate, up = self.up.grads()
        return FeedForwardParams(up, *self.down.grads(), *gate)


class Block(nn.Module):
    """One layer of an encoder or a decoder, pre-LN or post-LN; dropped: with dropout."""

    def __init__(self, params: BlockParams, config: BlockConfig, dropped: bool = False) -> None:
        super().__init__()
        self.dropout = config.dropout if dropped else 0.0
        self.pre, norm = config.norm_placement == "pre", config.norm
        self.attn_norm = Norm(params.attn_norm, norm)
        self.attn = SelfAttention(params.attn, config.attn, config.attn.dropout if dropped else 0.0)
        self.has_cross = params.cross is not None
        if self.has_cross:
            self.cross_norm = Norm(params.cross_norm, norm)
            self.cross = CrossAttention(params.cross, config.attn)
        self.ffn_norm = Norm(params.ffn_norm, norm)
        self.ffn = FeedForward(params.ffn, config.ffn)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
        rotary: tuple[Tensor, Tensor] | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        """The sublayers, each with its residual and its norm."""
        x = self._residual(x, self.attn_norm, lambda x: self.attn(x, mask, causal, rotary))
        if self.has_cross:
            x = self._residual(x, self.cross_norm, lambda x: self.cross(x, memory, memory_mask))
        return self._residual(x, self.ffn_norm, self.ffn)

    def _residual(self, x: Tensor, norm: Norm, sublayer: Any) -> Tensor:
        if self.pre:
            return x + self._dropped(sublayer(norm(x)))
        return norm(x + self._dropped(sublayer(x)))

    def _dropped(self, y: Tensor) -> Tensor:
        return F.dropout(y, self.dropout) if self.dropout else y

    def grads(self) -> BlockParams:
        """Gradients of the parameters."""
        return BlockParams(
            self.attn_norm.grads(),
            self.attn.grads(),
            self.cross_norm.grads() if self.has_cross else None,
            self.cross.grads() if self.has_cross else None,
            self.ffn_norm.grads(),
            self.ffn.grads(),
        )


def split(x: Tensor, head_width: int) -> Tensor:
    """(B, T, H K) to (B, H, T, K)."""
    return x.unflatten(-1, (-1, head_width)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """(B, H, T, K) to (B, T, H K)."""
    return x.transpose(1, 2).flatten(2)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (B, H, T, K), its pairs (i, i + K/2) turned."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin
