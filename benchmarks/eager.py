"""The peer: the same models in plain PyTorch, eager, with autograd and its fused AdamW.

Written as a PyTorch user would: packed projections, `scaled_dot_product_attention`, and nothing of
xformer but the parameter types, in which weights come and gradients go.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contestants import LR
from benchmarks.shapes import Shape
from xformer import GPT, Transformer, backends, tree
from xformer.layers import (
    AttentionParams,
    BlockParams,
    EmbedParams,
    FeedForwardParams,
    KeyValueParams,
    LinearParams,
    NormParams,
    StackParams,
    sinusoidal,
)
from xformer.models import EncoderDecoderParams, LanguageModelParams


class Eager:
    """The contestant: see `contestants.Ours`, whose methods these are."""

    def __init__(self, shape: Shape) -> None:
        self.backend = backends.get("torch")
        params = shape.params(backends.get("numpy"))
        kind = EagerGPT if isinstance(shape.model, GPT) else EagerTransformer
        self.model = kind(shape.model, params)
        self.data = shape.data(self.backend)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)

    def forward(self) -> Tensor:
        """The loss, with the graph that backward needs."""
        loss: Tensor = self.model(*self.data)
        return loss

    def backward(self) -> Tensor:
        """The loss; gradients are left in the parameters."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward()
        loss.backward()
        return loss

    def step(self) -> Tensor:
        """The loss before a step of AdamW."""
        loss = self.backward()
        self.optimizer.step()
        return loss

    def gradients(self) -> tuple[float, dict[str, np.ndarray]]:
        """The loss and its gradients by dotted name, on the host."""
        loss = self.backward()
        return loss.item(), tree.flatten(self.model.grads())


class Linear(nn.Linear):
    """One product for several projections of the same input."""

    def __init__(self, *parts: LinearParams) -> None:
        w = np.concatenate([p.w for p in parts], axis=1)
        super().__init__(*w.shape)
        self.widths = [p.w.shape[1] for p in parts]
        self.weight = _parameter(w.T)
        self.bias = _parameter(np.concatenate([p.b for p in parts]))

    def grads(self) -> list[LinearParams]:
        """Gradients of the parts."""
        dw = self.weight.grad.T.split(self.widths, dim=1)
        db = self.bias.grad.split(self.widths)
        return [LinearParams(*_host(pair)) for pair in zip(dw, db, strict=True)]


class LayerNorm(nn.LayerNorm):
    """A norm with given parameters."""

    def __init__(self, params: NormParams, eps: float) -> None:
        super().__init__(params.w.shape[0], eps=eps)
        self.weight, self.bias = _parameter(params.w), _parameter(params.b)

    def grads(self) -> NormParams:
        """Gradients of the parameters."""
        return NormParams(*_host((self.weight.grad, self.bias.grad)))


class SelfAttention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, params: AttentionParams, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.o = Linear(params.q, *params.kv[:2]), Linear(params.o)

    def forward(self, x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """mask: boolean, True = may attend."""
        q, k, v = (_split(part, self.n_heads) for part in self.qkv(x).chunk(3, dim=-1))
        return self.o(_merge(F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)))

    def grads(self) -> AttentionParams:
        """Gradients of the parameters."""
        q, k, v = self.qkv.grads()
        return AttentionParams(q, KeyValueParams(k, v), *self.o.grads())


class CrossAttention(nn.Module):
    """Attention of a sequence to the memory."""

    def __init__(self, params: AttentionParams, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q, self.kv, self.o = Linear(params.q), Linear(*params.kv[:2]), Linear(params.o)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """mask: boolean, True = may attend."""
        q = _split(self.q(x), self.n_heads)
        k, v = (_split(part, self.n_heads) for part in self.kv(memory).chunk(2, dim=-1))
        return self.o(_merge(F.scaled_dot_product_attention(q, k, v, mask)))

    def grads(self) -> AttentionParams:
        """Gradients of the parameters."""
        return AttentionParams(*self.q.grads(), KeyValueParams(*self.kv.grads()), *self.o.grads())


class Block(nn.Module):
    """One layer of an encoder or a decoder."""

    def __init__(self, params: BlockParams, model: GPT | Transformer) -> None:
        super().__init__()
        self.pre, self.activation = model.norm == "pre", model.activation
        self.attn_norm = LayerNorm(params.attn_norm, model.eps)
        self.attn = SelfAttention(params.attn, model.n_heads)
        self.has_cross = params.cross is not None
        if self.has_cross:
            self.cross_norm = LayerNorm(params.cross_norm, model.eps)
            self.cross = CrossAttention(params.cross, model.n_heads)
        self.ffn_norm = LayerNorm(params.ffn_norm, model.eps)
        self.up, self.down = Linear(params.ffn.up), Linear(params.ffn.down)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        """The sublayers, each with its residual and its norm."""
        x = self._residual(x, self.attn_norm, lambda x: self.attn(x, mask, causal))
        if self.has_cross:
            x = self._residual(x, self.cross_norm, lambda x: self.cross(x, memory, memory_mask))
        return self._residual(x, self.ffn_norm, self._feed_forward)

    def _feed_forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        gelu = self.activation == "gelu_tanh"
        return self.down(F.gelu(hidden, approximate="tanh") if gelu else F.relu(hidden))

    def _residual(self, x: Tensor, norm: LayerNorm, sublayer: Any) -> Tensor:
        return x + sublayer(norm(x)) if self.pre else norm(x + sublayer(x))

    def grads(self) -> BlockParams:
        """Gradients of the parameters."""
        return BlockParams(
            self.attn_norm.grads(),
            self.attn.grads(),
            self.cross_norm.grads() if self.has_cross else None,
            self.cross.grads() if self.has_cross else None,
            self.ffn_norm.grads(),
            FeedForwardParams(*self.up.grads(), *self.down.grads()),
        )


class EagerGPT(nn.Module):
    """The counterpart of `xformer.GPT` with its defaults: pre-LN, learned positions, tied head."""

    def __init__(self, model: GPT, params: LanguageModelParams) -> None:
        super().__init__()
        self.table = _parameter(params.embed.table)
        self.positions = _parameter(params.embed.positions)
        self.blocks = nn.ModuleList(Block(p, model) for p in params.stack.blocks)
        self.norm = LayerNorm(params.stack.norm, model.eps)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss."""
        x = F.embedding(tokens, self.table) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, causal=True)
        logits = F.linear(self.norm(x), self.table)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def grads(self) -> LanguageModelParams:
        """Gradients of the parameters."""
        blocks = tuple(block.grads() for block in self.blocks)
        table, positions = _host((self.table.grad, self.positions.grad))
        embed = EmbedParams(table, positions, None)
        return LanguageModelParams(embed, StackParams(blocks, self.norm.grads(), None), None)


class EagerTransformer(nn.Module):
    """The counterpart of `xformer.Transformer` with its defaults: post-LN, sinusoidal positions."""

    def __init__(self, model: Transformer, params: EncoderDecoderParams) -> None:
        super().__init__()
        self.pad_id = model.pad_id
        self.src_table = _parameter(params.src_embed.table)
        self.tgt_table = _parameter(params.tgt_embed.table)
        positions = sinusoidal(model.max_len, model.d_model, like=params.src_embed.table)
        self.register_buffer("positions", torch.tensor(positions))
        self.encoder = nn.ModuleList(Block(p, model) for p in params.encoder.blocks)
        self.decoder = nn.ModuleList(Block(p, model) for p in params.decoder.blocks)
        self.head = Linear(params.head)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """The mean loss over what is no padding."""
        tgt, targets = tgt[:, :-1], tgt[:, 1:]
        src_mask = (src != self.pad_id)[:, None, None, :]
        past = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()
        tgt_mask = (tgt != self.pad_id)[:, None, None, :] & past
        memory = F.embedding(src, self.src_table) + self.positions[: src.shape[1]]
        for block in self.encoder:
            memory = block(memory, src_mask)
        x = F.embedding(tgt, self.tgt_table) + self.positions[: tgt.shape[1]]
        for block in self.decoder:
            x = block(x, tgt_mask, memory=memory, memory_mask=src_mask)
        logits = self.head(x).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=self.pad_id)

    def grads(self) -> EncoderDecoderParams:
        """Gradients of the parameters."""
        src, tgt = _host((self.src_table.grad, self.tgt_table.grad))
        return EncoderDecoderParams(
            EmbedParams(src, None, None),
            EmbedParams(tgt, None, None),
            StackParams(tuple(block.grads() for block in self.encoder), None, None),
            StackParams(tuple(block.grads() for block in self.decoder), None, None),
            *self.head.grads(),
        )


def _parameter(values: np.ndarray) -> nn.Parameter:
    return nn.Parameter(torch.tensor(np.ascontiguousarray(values)))


def _host(tensors: tuple[Tensor, ...]) -> list[np.ndarray]:
    return [t.numpy().copy() for t in tensors]


def _split(x: Tensor, n_heads: int) -> Tensor:
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def _merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)
