"""The peer: the same models in eager PyTorch, with autograd and torch's fused AdamW.

The models are written as a PyTorch user would write them, with the layers of
`benchmarks.eager_layers`.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.contestants import LR, torch_device
from benchmarks.eager_layers import Block, Norm
from benchmarks.eager_linear import Linear, grad, host, parameter
from benchmarks.feed import Feed
from benchmarks.shapes import TRANSFORMERS, Shape
from xformer import backends
from xformer.base import tree
from xformer.layers import EmbedParams, StackParams, sinusoidal
from xformer.models import EncoderDecoderParams, LanguageModel, LanguageModelParams

CUDNN_ATTENTION = SDPBackend.CUDNN_ATTENTION


class Eager:
    """PyTorch as a contestant, with the methods of `contestants.Contestant`.

    weights: as `Shape.weights` returns them. compiled: run under `torch.compile`. cudnn: attention
    by cuDNN.
    """

    def __init__(
        self,
        shape: Shape,
        weights: Any,
        *,
        dtype: str = "float32",
        compiled: bool = False,
        cudnn: bool = False,
    ) -> None:
        self.backend = backends.get("torch", torch_device(shape.device))
        self.training = shape.training
        torch.set_float32_matmul_precision("high" if shape.tf32 else "highest")
        options = {"device": self.backend.device, "dtype": getattr(torch, dtype)}
        self.model = network_of(shape, shape.parameters(weights)).to(**options)
        self.run = torch.compile(self.model) if compiled else self.model
        self.feed = Feed(shape, self.backend)
        self.precision = None if dtype == "float64" else shape.precision
        self.attention: Any = partial(sdpa_kernel, CUDNN_ATTENTION) if cudnn else nullcontext
        if shape.training:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.AdamW(trained, lr=LR, fused=True)

    def forward(self) -> Tensor:
        """Return the loss with autograd's graph; for inference, the mean hidden states."""
        arrays, options = self.feed.next()
        options.pop("dropout_key", None)  # torch draws the masks by its generator
        return self._run(*arrays, **options)

    def backward(self) -> Tensor:
        """Return the loss; gradients are stored in `grad` of the parameters."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward()
        loss.backward()
        return loss

    def step(self) -> Tensor:
        """Run a step of AdamW; return the loss before it."""
        loss = self.backward()
        self.optimizer.step()
        return loss.detach()

    def output(self) -> np.ndarray:
        """Return the output of inference as a NumPy array."""
        return host(self.forward())[0]

    def gradients(self) -> tuple[float, dict[str, np.ndarray]]:
        """Return the loss, and its gradients as NumPy arrays by dotted name."""
        loss = self.backward()
        return loss.item(), tree.flatten(self.model.grads())

    def _run(self, *data: Tensor, **masks: Tensor) -> Tensor:
        with torch.inference_mode(not self.training), self._rounding(), self.attention():
            output: Tensor = self.run(*data, **masks)
            return output

    def _rounding(self) -> Any:
        """Return autocast's context: weights stay float32, matmuls round weights and inputs."""
        if self.precision is None:
            return nullcontext()
        device_type = torch.device(self.backend.device or "cpu").type
        return torch.autocast(device_type, dtype=getattr(torch, self.precision))


class Judge(Eager):
    """The judge: the peer in float64, on `shape.judged` rows of the batch at a time."""

    def __init__(self, shape: Shape, weights: Any) -> None:
        super().__init__(shape, weights, dtype="float64")
        self.rows = shape.judged or shape.batch
        if shape.batch % self.rows:
            raise ValueError(f"judged must divide the batch of {shape.batch}, got {self.rows}")

    def backward(self) -> Tensor:
        """Return the mean loss of parts of equal size; gradients are stored in the parameters."""
        self.optimizer.zero_grad(set_to_none=True)
        arrays, _ = self.feed.next()
        parts = list(zip(*(x.split(self.rows) for x in arrays), strict=True))
        losses = []
        for data in parts:
            loss = self._run(*data) / len(parts)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()


def network_of(shape: Shape, params: Any) -> Any:
    """Return the model of `shape` in torch with these weights: of this file or of transformers."""
    if shape.peer == TRANSFORMERS:
        from benchmarks.eager_transformers import Hugging

        return Hugging(shape.model, params)
    if isinstance(shape.model, LanguageModel):
        return EagerLanguageModel(shape.model, params, shape.dropout)
    return EagerTransformer(shape.model, params)


class EagerLanguageModel(nn.Module):
    """The counterpart of `xformer.models.LanguageModel` for GPT-2, Llama and BERT.

    dropped: apply dropout, at the rates of the model.
    """

    def __init__(self, model: Any, params: LanguageModelParams, dropped: bool = False) -> None:
        super().__init__()
        embed = params.embed
        self.causal, self.tied = model.causal, params.head is None
        self.table = parameter(embed.table)
        self.positions = None if embed.positions is None else parameter(embed.positions)
        self.types = None if embed.types is None else parameter(embed.types)
        self.embed_norm = None if embed.norm is None else Norm(embed.norm, model.embed.norm)
        self.dropout = model.embed.dropout if dropped else 0.0
        pairs = zip(params.stack.blocks, model.blocks, strict=True)
        self.blocks = nn.ModuleList(Block(block, config, dropped) for block, config in pairs)
        last = params.stack.norm
        self.norm = None if last is None else Norm(last, model.blocks[-1].norm)
        self.head = None if self.tied else Linear(params.head)
        if model.rotary is not None:
            angles = _angles(model.hf_config["max_position_embeddings"], model.rotary)
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())
        self.has_rope = model.rotary is not None

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the mean loss; without targets, each sequence's mean hidden state, (B, D)."""
        x = self._embedded(tokens)
        length = tokens.shape[1]
        rotary = (self.cos[:length], self.sin[:length]) if self.has_rope else None
        for block in self.blocks:
            x = block(x, causal=self.causal, rotary=rotary)
        if self.norm is not None:
            x = self.norm(x)
        if targets is None:
            return x.mean(dim=1)
        logits = F.linear(x, self.table) if self.tied else self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _embedded(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.table)
        if self.types is not None:
            x = x + self.types[0]
        if self.positions is not None:
            x = x + self.positions[: tokens.shape[1]]
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        return F.dropout(x, self.dropout) if self.dropout else x

    def grads(self) -> LanguageModelParams:
        """Return the gradients in xformer's parameter types; for decoders only."""
        embed = EmbedParams(grad(self.table), grad(self.positions), None)
        blocks = tuple(block.grads() for block in self.blocks)
        head = None if self.tied else self.head.grads()[0]
        return LanguageModelParams(embed, StackParams(blocks, self.norm.grads(), None), head)


class EagerTransformer(nn.Module):
    """The counterpart of `xformer.Transformer` with its defaults: post-LN, sinusoidal positions."""

    def __init__(self, model: Any, params: EncoderDecoderParams) -> None:
        super().__init__()
        self.pad_id = model.pad_id
        self.src_table = parameter(params.src_embed.table)
        self.tgt_table = parameter(params.tgt_embed.table)
        like = params.src_embed.table.astype(np.float64)
        positions = sinusoidal(model.src_embed.max_len, model.src_embed.d_model, like=like)
        self.register_buffer("positions", torch.tensor(positions))
        self.encoder = nn.ModuleList(map(Block, params.encoder.blocks, model.encoder))
        self.decoder = nn.ModuleList(map(Block, params.decoder.blocks, model.decoder))
        self.head = Linear(params.head)

    def forward(self, src: Tensor, tgt: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over the targets that are not padding."""
        src_mask = (src != self.pad_id)[:, None, None, :]
        causal = torch.ones(2 * tgt.shape[1:], dtype=torch.bool, device=tgt.device).tril()
        tgt_mask = (tgt != self.pad_id)[:, None, None, :] & causal
        memory = F.embedding(src, self.src_table) + self.positions[: src.shape[1]]
        for block in self.encoder:
            memory = block(memory, src_mask)
        x = F.embedding(tgt, self.tgt_table) + self.positions[: tgt.shape[1]]
        for block in self.decoder:
            x = block(x, tgt_mask, memory=memory, memory_mask=src_mask)
        logits = self.head(x).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=self.pad_id)

    def grads(self) -> EncoderDecoderParams:
        """Return the gradients in xformer's parameter types."""
        src, tgt = host(self.src_table.grad, self.tgt_table.grad)
        return EncoderDecoderParams(
            EmbedParams(src, None, None),
            EmbedParams(tgt, None, None),
            StackParams(tuple(block.grads() for block in self.encoder), None, None),
            StackParams(tuple(block.grads() for block in self.decoder), None, None),
            *self.head.grads(),
        )


def _angles(length: int, config: Any) -> Tensor:
    """Return the angles of unscaled RoPE, (T, K), in float64."""
    pairs = torch.arange(0, config.width, 2, dtype=torch.float64)
    frequencies = config.theta ** (-pairs / config.width)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return torch.cat([angles, angles], dim=-1)
