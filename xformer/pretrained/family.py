"""What a family of models is to the loader, and what families have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from xformer import models
from xformer.pretrained.config import Config
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

    heads: architecture -> what stands on top: "lm", "masked-lm", "classifier", "hidden", ...
    build: (configuration, head, names of the file's tensors, None without one) -> model
    links: model -> links between the file's tensors and its parameters
    in_memory: model -> links of the tensors that transformers 5 names otherwise in memory
    prefix: of all names but the head's, in models that have a head
    tied: names of tensors that repeat another one -> that one's name
    buffers: patterns of names that hold no parameters
    unused: patterns of names of parameters that transformers leaves unused too: told by a warning
    aliases: other names of keys, which transformers reads as the family's own -> the family's
    free: keys that all other families have at one value only (`config.NEUTRAL`)
    """

    heads: dict[str, str]
    build: Callable[[Config, str, Collection[str] | None], Any]
    links: Callable[[Any], Iterable[Link]]
    in_memory: Callable[[Any], Iterable[Link]] = lambda model: ()
    prefix: str = ""
    tied: dict[str, str] = {}  # noqa: RUF012 - never written to
    buffers: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    aliases: dict[str, str] = {}  # noqa: RUF012 - never written to
    free: tuple[str, ...] = ()


def activation(c: Config, name: str, default: str) -> str:
    """The activation under a key."""
    return ACTIVATIONS[c.text(name, choices=tuple(ACTIVATIONS), default=default)]


def rate(c: Config, name: str, default: float) -> float:
    """The rate of a dropout."""
    return float(c.number(name, low=0, high=1, default=default))


def layers(c: Config, name: str = "num_hidden_layers", default: Any = None) -> int:
    """The number of layers."""
    options = {} if default is None else {"default": default}
    return int(c.integer(name, low=1, high=MAX_LAYERS, **options))


def decoder_head(
    c: Config, head: str, *, tied: bool, **options: Any
) -> models.LMHead | models.Classifier | None:
    """The head of a decoder: a language model's, a classifier of the last token, or none."""
    if head == "classifier":
        return models.Classifier(c.labels(), "last", dense=None, bias=False)
    return models.LMHead(tied=tied, **options) if head == "lm" else None
