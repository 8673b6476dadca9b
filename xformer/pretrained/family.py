"""The description of a model family for the loader, and readers that families share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from xformer import models
from xformer.layers import EmbedConfig
from xformer.pretrained.config import REQUIRED, Config
from xformer.pretrained.names import Link

MAX_LAYERS = 1000

ACTIVATIONS = {  # transformers' names -> ours
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
}


class Family(NamedTuple):
    """How the folders of a `model_type` are read and written.

    heads: architecture -> head: "lm", "masked-lm", "classifier", "hidden", ...
    build: (configuration, head) -> model. head: a value of `heads`, "hidden" if there are none
    links: model -> links (`names.Link`), which say which tensor of the file is which leaf of the
        model's parameters
    in_memory: model -> links of the tensors that have other names in memory in transformers 5
    prefix: of all names except the head's, in models with a head
    tied: name of a tensor that repeats another one -> name of the other one
    buffers: patterns of names of tensors that are not parameters
    unused: patterns of names of parameters that transformers does not use either; a warning names
        them
    aliases: another name of a key, which transformers also accepts -> the family's name
    free: keys that all other families require at one value (`config.NEUTRAL`)
    """

    heads: dict[str, str]
    build: Callable[[Config, str], Any]
    links: Callable[[Any], Iterable[Link]]
    in_memory: Callable[[Any], Iterable[Link]] = lambda model: ()
    prefix: str = ""
    tied: dict[str, str] = {}  # noqa: RUF012 - never written to
    buffers: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    aliases: dict[str, str] = {}  # noqa: RUF012 - never written to
    free: tuple[str, ...] = ()

    def named(self, head: str) -> str | None:
        """The first architecture with this head; None if there is none."""
        return next((name for name, own in self.heads.items() if own == head), None)


def encoder_heads(name: str) -> dict[str, str]:
    """The architectures of an encoder's family, whose names begin with `name`, and their heads."""
    return {
        f"{name}ForMaskedLM": "masked-lm",
        f"{name}ForSequenceClassification": "classifier",
        f"{name}ForTokenClassification": "token_classifier",
        f"{name}Model": "hidden",
    }


def embedding(c: Config, d_model: int, vocab_size: Any = REQUIRED, **options: Any) -> EmbedConfig:
    """The embedding of tokens, without positions unless `options` say so.

    vocab_size: the family's default if the key is missing
    options: further options of `EmbedConfig`
    """
    size = c.integer("vocab_size", low=1, default=vocab_size)
    plain: dict[str, Any] = {"width": d_model, "d_model": d_model, "positions": "none"}
    return EmbedConfig(vocab_size=size, **plain | options)


def activation(c: Config, name: str, default: str) -> str:
    """The name of the activation under the key `name`."""
    return ACTIVATIONS[c.text(name, choices=tuple(ACTIVATIONS), default=default)]


def rate(c: Config, name: str, default: float) -> float:
    """The dropout rate under the key `name`."""
    return float(c.number(name, low=0, high=1, default=default))


def layers(c: Config, name: str = "num_hidden_layers", default: Any = None) -> int:
    """The number of layers under the key `name`, an integer from 1 to `MAX_LAYERS`.

    default: the result if the key is missing; None: the key must be there
    PretrainedError if the key is missing without a default, and for another value.
    """
    options = {} if default is None else {"default": default}
    return int(c.integer(name, low=1, high=MAX_LAYERS, **options))


def decoder_head(
    c: Config, head: str, *, tied: bool, **options: Any
) -> models.LMHead | models.Classifier | None:
    """The head of a decoder: an LM head, a classifier of the last token, or None.

    head: "lm", "classifier" or another value for None.
    tied, options: arguments of `LMHead`.
    """
    if head == "classifier":
        return models.Classifier(c.labels(), "last", dense=None, bias=False)
    return models.LMHead(tied=tied, **options) if head == "lm" else None
