"""GPT: a decoder-only language model, by default with the layers of GPT-2."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xformer import ops
from xformer.base.typing import Array
from xformer.dispatch import registry
from xformer.dispatch.backend import Backend, Generator
from xformer.dispatch.checks import plain_numbers, require_layers
from xformer.layers.attention_config import AttentionConfig
from xformer.layers.block import BlockConfig
from xformer.layers.embed import EmbedConfig
from xformer.layers.feed_forward import FeedForwardConfig
from xformer.layers.norm import NormConfig
from xformer.models.language_model import (
    BalancedLossCache,
    LanguageModel,
    LanguageModelCache,
    LanguageModelParams,
)
from xformer.models.lm_head import LMHead
from xformer.models.loss import LossCache
from xformer.models.usage import not_called


@dataclass(frozen=True)
class GPT:
    """The configuration of a GPT. Its parameters are separate data, which `init` returns.

    gpt = GPT(vocab_size=256, n_layers=4, d_model=128, n_heads=4, max_len=128)
    params = gpt.init(seed=0, backend="numpy")
    loss, cache = gpt.loss(params, tokens, targets)
    grads = cache.backward()

    ValueError for sizes and options that do not fit together.
    """

    vocab_size: int
    n_layers: int
    d_model: int
    n_heads: int
    max_len: int
    d_ff: int | None = None  # None: 4 * d_model
    n_kv_heads: int | None = None  # None: n_heads
    activation: str = "gelu_tanh"
    norm_placement: str = "pre"
    eps: float = 1e-5
    bias: bool = True
    # "learned", "sinusoidal", "none"; "xl": relative positions of Transformer-XL in every layer,
    # with which max_len does not limit a text.
    positions: str = "learned"
    position_mode: str = "add"
    d_positions: int | None = None  # "concat": the width of a position's vector; None: d_model
    memory_len: int | None = None  # "xl": of `LanguageModel`
    tied: bool = True  # the output head shares the table of the embedding
    dropout: float = 0.0
    # Each block saves only its input, and runs again in backward.
    activation_checkpointing: bool = False
    residual_scale: float | None = None  # of `layers.BlockConfig`; 0: ReZero
    # Two streams (arXiv:2001.04451); backward rebuilds the input of each block from its output.
    reversible: bool = False

    __call__ = not_called

    def __post_init__(self) -> None:
        plain_numbers(self)
        require_layers("GPT", n_layers=self.n_layers)
        if self.d_positions is not None and self.position_mode != "concat":
            raise ValueError(
                f'GPT: d_positions needs position_mode "concat", got {self.position_mode!r}'
            )
        if self.positions == "xl" and self.position_mode != "add":
            raise ValueError(
                f'GPT: positions "xl" need position_mode "add", got {self.position_mode!r}'
            )
        self.network  # noqa: B018 - built here for its checks

    @cached_property
    def network(self) -> LanguageModel:
        """The `LanguageModel` of this configuration."""
        is_xl = self.positions == "xl"
        attn = AttentionConfig(
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            bias=self.bias,
            xl=is_xl,
            dropout=self.dropout,
        )
        d_ff = 4 * self.d_model if self.d_ff is None else self.d_ff
        ffn = FeedForwardConfig(d_ff, self.activation, bias=self.bias)
        norm = NormConfig(eps=self.eps, bias=self.bias)
        block = BlockConfig(
            attn,
            ffn,
            norm,
            self.norm_placement,
            dropout=self.dropout,
            residual_scale=self.residual_scale,
            reversible=self.reversible,
        )
        d_positions = self.d_model if self.d_positions is None else self.d_positions
        embed = EmbedConfig(
            vocab_size=self.vocab_size,
            width=self.d_model,
            d_model=self.d_model,
            max_len=None if is_xl else self.max_len,
            positions="none" if is_xl else self.positions,
            mode=self.position_mode,
            d_positions=attn.head_width if self.position_mode == "qkv" else d_positions,
            dropout=self.dropout,
        )
        return LanguageModel(
            embed,
            (block,) * self.n_layers,
            head=LMHead(tied=self.tied),
            memory_len=self.memory_len,
            activation_checkpointing=self.activation_checkpointing,
        )

    def init(
        self, seed: int = 0, backend: str | Backend = "numpy", dtype: str = "float32"
    ) -> LanguageModelParams:
        """Initial parameters: weights normal with variance 1 / d_model, biases 0, norms 1.

        The last weights of each residual branch are scaled by (2 n_layers)^-1/2, as in GPT-2,
        unless the block has a residual_scale.
        """
        return self.init_from(registry.get(backend).generator(seed, dtype))

    def init_from(self, rng: Generator) -> LanguageModelParams:
        """Initial parameters as from `init`, with random numbers, backend and dtype of `rng`."""
        return self.network.init_from(rng)

    def forward(
        self,
        params: LanguageModelParams,
        tokens: Array,
        *,
        mask: Array | None = None,
        dropout_key: ops.RandomKey | None = None,
    ) -> tuple[Array, LanguageModelCache]:
        """Logits (B, T, V) of the next token at every position.

        tokens: (B, T) integers in [0, V), T <= max_len except for positions "xl"
        mask: (B, T), True = a token, False = padding; None: no padding
        dropout_key: None: no dropout
        ValueError or TypeError for other tokens and masks.
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
        """The mean cross-entropy in nats of `targets`, the next token at every position.

        tokens: (B, T) integers in [0, V), T <= max_len except for positions "xl"
        targets: (B, T) integers in [0, V)
        mask: (B, T), True = a token, False = padding; None: no padding
        dropout_key: None: no dropout
        options: of `ops.cross_entropy`
        ValueError or TypeError for other tokens, targets and masks.
        """
        return self.network.loss(
            params, tokens, targets, mask=mask, dropout_key=dropout_key, **options
        )
