"""The peer's layers, in plain PyTorch: packed projections, `scaled_dot_product_attention`.

Constructors take xformer's parameter types, and `grads` returns gradients in the same types.
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
    """`F.layer_norm` or `F.rms_norm`, with the parameters `params`."""

    def __init__(self, params: NormParams, config: NormConfig) -> None:
        super().__init__()
        self.rms, self.eps = config.kind == "rms", config.eps
        self.weight = parameter(params.w)
        self.bias = None if params.b is None else parameter(params.b)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last axis."""
        if self.rms:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def grads(self) -> NormParams:
        """Return the gradients in xformer's parameter types."""
        return NormParams(grad(self.weight), grad(self.bias))


class SelfAttention(nn.Module):
    """Self-attention; dropout: the rate for the attention probabilities."""

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
        """Return the attention's output. mask: True = may attend. rotary: cos and sin, (T, K)."""
        parts = self.qkv(x).split(self.qkv.widths, dim=-1)
        q, k, v = (split(part, self.head_width) for part in parts)
        if rotary is not None:
            q, k = rotated(q, *rotary), rotated(k, *rotary)
        ctx = F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout, is_causal=causal, enable_gqa=self.grouped
        )
        return self.o(merge(ctx))

    def grads(self) -> AttentionParams:
        """Return the gradients in xformer's parameter types."""
        q, k, v = self.qkv.grads()
        return AttentionParams(q, KeyValueParams(k, v), *self.o.grads())


class CrossAttention(nn.Module):
    """Cross-attention of a decoder to the encoder's output, `memory`."""

    def __init__(self, params: AttentionParams, config: AttentionConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.q, self.kv, self.o = linear(params.q), linear(*params.kv[:2]), linear(params.o)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Return the attention's output. mask: True = may attend."""
        q = split(self.q(x), self.head_width)
        k, v = (split(part, self.head_width) for part in self.kv(memory).chunk(2, dim=-1))
        return self.o(merge(F.scaled_dot_product_attention(q, k, v, mask)))

    def grads(self) -> AttentionParams:
        """Return the gradients in xformer's parameter types."""
        return AttentionParams(*self.q.grads(), KeyValueParams(*self.kv.grads()), *self.o.grads())


class FeedForward(nn.Module):
    """The feed-forward network; if gated, one matmul computes gate and up projection."""

    def __init__(self, params: FeedForwardParams, config: FeedForwardConfig) -> None:
        super().__init__()
        self.gated, self.act = config.gated, ACTIVATIONS[config.activation]
        projections = (params.gate, params.up) if params.gate is not None else (params.up,)
        self.up, self.down = linear(*projections), linear(params.down)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to each position."""
        if self.gated:
            gate, up = self.up(x).chunk(2, dim=-1)
            return self.down(self.act(gate) * up)
        return self.down(self.act(self.up(x)))

    def grads(self) -> FeedForwardParams:
        """Return the gradients in xformer's parameter types."""
        *gate, up = self.up.grads()
        return FeedForwardParams(up, *self.down.grads(), *gate)


class Block(nn.Module):
    """One layer of an encoder or a decoder, pre-LN or post-LN; dropped: apply dropout."""

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
        """Apply all sublayers, each with a residual connection and a norm."""
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
        """Return the gradients in xformer's parameter types."""
        return BlockParams(
            self.attn_norm.grads(),
            self.attn.grads(),
            self.cross_norm.grads() if self.has_cross else None,
            self.cross.grads() if self.has_cross else None,
            self.ffn_norm.grads(),
            self.ffn.grads(),
        )


def split(x: Tensor, head_width: int) -> Tensor:
    """Return x (B, T, H K) as (B, H, T, K)."""
    return x.unflatten(-1, (-1, head_width)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """Return x (B, H, T, K) as (B, T, H K)."""
    return x.transpose(1, 2).flatten(2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE: rotate the pairs (i, i + K/2) of x (B, H, T, K) by the angles (T, K)."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin
