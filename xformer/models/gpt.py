"""A decoder-only language model in the manner of GPT-2."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xformer import backends, ops, renamed
from xformer.backends import Generator
from xformer.checks import plain_numbers, require_layers, require_sizes
from xformer.layers.block import BlockConfig
from xformer.layers.embed import EmbedConfig
from xformer.models.language_model import (
    BalancedLossCache,
    LanguageModel,
    LanguageModelCache,
    LanguageModelParams,
)
from xformer.models.lm_head import LMHead
from xformer.models.loss import LossCache
from xformer.typing import Array


@renamed.arguments(norm="norm_placement", checkpoint="activation_checkpointing")
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
    norm_placement: str = "pre"
    eps: float = 1e-5
    bias: bool = True
    positions: str = "learned"
    position_mode: str = "add"
    tied: bool = True  # the embedding is the output head too
    dropout: float = 0.0
    activation_checkpointing: bool = (
        False  # each block runs again in its backward, and keeps its input alone
    )

    def __post_init__(self) -> None:
        plain_numbers(self)
        require_layers("GPT", n_layers=self.n_layers)
        if self.position_mode == "concat":
            raise ValueError('GPT: position_mode must be "add" or "qkv", got "concat"')
        self.network  # noqa: B018 - built here for its checks

    @cached_property
    def network(self) -> LanguageModel:
        """The model that this configuration stands for."""
        (d_model,) = require_sizes("block", 1, d_model=self.d_model)
        block = BlockConfig(
            d_model=d_model,
            n_heads=self.n_heads,
            d_ff=4 * d_model if self.d_ff is None else self.d_ff,
            n_kv_heads=self.n_kv_heads,
            activation=self.activation,
            norm_placement=self.norm_placement,
            eps=self.eps,
            bias=self.bias,
            dropout=self.dropout,
        )
        embed = EmbedConfig(
            vocab_size=self.vocab_size,
            width=self.d_model,
            d_model=self.d_model,
            max_len=self.max_len,
            positions=self.positions,
            mode=self.position_mode,
            d_positions=self.d_model // self.n_heads if self.position_mode == "qkv" else None,
            dropout=self.dropout,
        )
        return LanguageModel(
            embed,
            (block,) * self.n_layers,
            head=LMHead(tied=self.tied),
            activation_checkpointing=self.activation_checkpointing,
        )

    def init(
        self, seed: int = 0, backend: str = "numpy", dtype: str = "float32"
    ) -> LanguageModelParams:
        """Initial parameters: normal of variance 1 / d_model, biases 0, norms 1.

        The weights that end a residual branch are scaled by (2 n_layers)^-1/2, as GPT-2's.
        """
        return self.init_from(backends.get(backend).generator(seed, dtype))

    def init_from(self, rng: Generator) -> LanguageModelParams:
        """Initial parameters, drawn from `rng`."""
        return self.network.init_from(rng)

    def forward(
        self,
        params: LanguageModelParams,
        tokens: Array,
        *,
        mask: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
    ) -> tuple[Array, LanguageModelCache]:
        """Logits of the next token at every position.

        tokens: (B, T) integers in [0, V), T <= max_len   logits: (B, T, V). mask: as in
        `LanguageModel.forward`. dropout_key None: no dropout. ValueError, TypeError where tokens
        are not such.
        """
        return self.network.forward(params, tokens, mask=mask, dropout_key=dropout_key)

    def loss(
        self,
        params: LanguageModelParams,
        tokens: Array,
        targets: Array,
        *,
        mask: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
        **options: Any,
    ) -> tuple[Array, LossCache[LanguageModelParams] | BalancedLossCache]:
        """Mean cross-entropy in nats of targets (B, T), the token after each of tokens.

        options: those of `ops.cross_entropy`.
        """
        return self.network.loss(
            params, tokens, targets, mask=mask, dropout_key=dropout_key, **options
        )
