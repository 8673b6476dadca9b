"""A decoder-only language model in the manner of GPT-2."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from xformer import backends, ops
from xformer.backends import Generator
from xformer.checks import require_sizes
from xformer.initial import normal
from xformer.layers.block import BlockConfig
from xformer.layers.embed import EmbedConfig, EmbedParams, embed
from xformer.layers.linear import LinearParams
from xformer.layers.stack import StackParams, dropout_streams, stack
from xformer.models.parts import (
    LossCache,
    OutputHeadCache,
    output_head,
    require_params,
    token_loss,
)
from xformer.typing import Array


@dataclass(frozen=True)
class GPT:
    """Sizes and choices; parameters are data, made by `init`. ValueError where they do not fit.

    gpt = GPT(vocab_size=256, n_layers=4, d_model=128, n_heads=4, max_len=128)
    params = gpt.init(seed=0, backend="numpy")
    loss, cache = gpt.loss(params, tokens, targets)
    grads = cache.backward()
    """

    vocab_size: int
    n_layers: int
    d_model: int
    n_heads: int
    max_len: int
    d_ff: int | None = None  # 4 * d_model unless given
    n_kv_heads: int | None = None  # n_heads unless given
    activation: str = "gelu_tanh"
    norm: str = "pre"
    eps: float = 1e-5
    bias: bool = True
    positions: str = "learned"
    position_mode: str = "add"
    tied: bool = True  # the embedding is the output head too
    dropout: float = 0.0

    def __post_init__(self) -> None:
        require_sizes("GPT", 1, n_layers=self.n_layers)
        if self.position_mode == "concat":
            raise ValueError('GPT: position_mode must be "add" or "qkv", got "concat"')
        self.block_config, self.embed_config  # noqa: B018 - built here for their checks

    @property
    def block_config(self) -> BlockConfig:
        """The configuration of every block."""
        return BlockConfig(
            d_model=self.d_model,
            n_heads=self.n_heads,
            d_ff=4 * self.d_model if self.d_ff is None else self.d_ff,
            n_kv_heads=self.n_kv_heads,
            activation=self.activation,
            norm=self.norm,
            eps=self.eps,
            bias=self.bias,
            dropout=self.dropout,
        )

    @property
    def embed_config(self) -> EmbedConfig:
        """The configuration of the embedding."""
        return EmbedConfig(
            vocab_size=self.vocab_size,
            width=self.d_model,
            d_model=self.d_model,
            max_len=self.max_len,
            positions=self.positions,
            mode=self.position_mode,
            d_positions=self.d_model // self.n_heads if self.position_mode == "qkv" else None,
            dropout=self.dropout,
        )

    def init(self, seed: int = 0, backend: str = "numpy", dtype: str = "float32") -> GPTParams:
        """Initial parameters: normal of variance 1 / d_model, biases 0, norms 1.

        The weights that end a residual branch are scaled by (2 n_layers)^-1/2, as GPT-2's.
        """
        return self.init_from(backends.get(backend).generator(seed, dtype))

    def init_from(self, rng: Generator) -> GPTParams:
        """Initial parameters, drawn from `rng`."""
        out_scale = 1 / math.sqrt(2 * self.n_layers)
        draw = partial(normal, std=self.d_model**-0.5)
        embedding = self.embed_config.init(rng, draw=draw)
        blocks = StackParams.init(
            rng, self.block_config, self.n_layers, draw=draw, out_scale=out_scale
        )
        shape = (self.d_model, self.vocab_size)
        head = None if self.tied else LinearParams.init(rng, shape, draw=draw, bias=False)
        return GPTParams(embedding, blocks, head)

    def forward(
        self, params: GPTParams, tokens: Array, *, dropout_key: ops.Key | None = None
    ) -> tuple[Array, GPTCache]:
        """Logits of the next token at every position.

        tokens: (B, T) integers in [0, V), T <= max_len   logits: (B, T, V). dropout_key None: no
        dropout. ValueError, TypeError where tokens are not such.
        """
        require_params("GPT", params.stack, self.n_layers, self.norm, params.head, self.tied)
        embed_key, stack_key = dropout_streams(dropout_key, self.n_layers)
        (x, pos), embed_cache = embed(
            params.embed, ids=tokens, config=self.embed_config, dropout_key=embed_key
        )
        x, stack_cache = stack(
            x,
            params.stack,
            pos=pos,
            config=self.block_config,
            causal=True,
            dropout_key=stack_key,
        )
        logits, head_cache = output_head(x, params.head, params.embed.table)
        return logits, GPTCache(embed_cache, stack_cache, head_cache)

    def loss(
        self,
        params: GPTParams,
        tokens: Array,
        targets: Array,
        *,
        dropout_key: ops.Key | None = None,
        **options: Any,
    ) -> tuple[Array, LossCache]:
        """Mean cross-entropy in nats of targets (B, T), the token after each of tokens.

        options: those of `ops.cross_entropy`.
        """
        logits, cache = self.forward(params, tokens, dropout_key=dropout_key)
        return token_loss(logits, cache, targets, options)


class GPTParams(NamedTuple):
    """Parameters of a GPT."""

    embed: EmbedParams
    stack: StackParams
    head: LinearParams | None  # (D, V); None: tied to embed.table


class GPTCache(NamedTuple):
    """What `GPT.forward` keeps for its backward."""

    embed: Any
    stack: Any
    head: OutputHeadCache

    def backward(self, dlogits: Array) -> GPTParams:
        """Gradients of params; the two uses of a tied table add."""
        dx, dhead, dtable = self.head.backward(dlogits)
        dx, dstack, _, _, dpos, _ = self.stack.backward(dx)
        dembed = self.embed.backward(dx, dpos)
        if dtable is not None:
            dembed = dembed._replace(table=dembed.table + dtable)
        return GPTParams(dembed, dstack, dhead)
