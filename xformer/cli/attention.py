"""`xformer attention`: draw the attention weights of each head of a layer."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np

from xformer.cli.open_model import LoadedModel, opened, start_id
from xformer.cli.parser import Parser
from xformer.cli.paths import add_computation, add_model
from xformer.cli.plot import add_out
from xformer.cli.texts import shown
from xformer.generation import generate, prefill
from xformer.generation.constraints import constrained, constraints
from xformer.generation.prefix import backend_of_params
from xformer.generation.settings import settings_of
from xformer.generation.text import end_of, ends_of, prompt_ids
from xformer.models import EncoderDecoder
from xformer.plots.attention import LABELS, MOST, attention_picture
from xformer.plots.maps import attention_maps
from xformer.plots.style import require_drawable, save

KINDS = ("encoder", "decoder", "cross")  # of an encoder-decoder
NAMES = {"self": "self-attention", "cross": "cross-attention"} | {
    kind: f"self-attention of the {kind}" for kind in KINDS[:2]
}


class Read(NamedTuple):
    """The token ids of one text, for the model and for the labels of its attention maps."""

    tokens: list[int]
    target: list[int] | None  # for an encoder-decoder: the decoder's input, with the start token
    written: list[int]  # for an encoder-decoder: the token that follows each of `target`


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer attention`."""
    add = parser.add_argument
    add("text", help="the text; for an encoder-decoder, the source text")
    add_model(add)
    add("--layer", type=int, metavar="N", help="layer number, from 0 (default: the last layer)")
    add("--kind", choices=KINDS, help="attention of an encoder-decoder (default: cross)")
    target = "target text of an encoder-decoder (default: the text that the model generates)"
    add("--target", metavar="TEXT", help=target)
    add_computation(add)
    add_out(parser, "attention.png")


def run(args: argparse.Namespace) -> int:
    """Draw the picture and print its path."""
    require_drawable(args.out)
    loaded = opened(args)
    is_pair = isinstance(loaded.model, EncoderDecoder)
    if not is_pair and (args.kind is not None or args.target is not None):
        raise ValueError("--kind and --target need an encoder-decoder, and this model is not one")
    read = _read(args, loaded, is_pair)
    for ids in (read.tokens, read.written):
        if len(ids) > MOST:
            raise ValueError(
                f"a picture shows at most {MOST} tokens, got {len(ids)}: give a shorter text"
            )
    backend = backend_of_params(loaded.params)
    arrays = (
        None if ids is None else backend.asarray(np.array([ids]))
        for ids in (read.tokens, read.target)
    )
    kind = (args.kind or "cross") if is_pair else "self"
    layers = attention_maps(loaded.model, loaded.params, *arrays)[kind]
    layer = len(layers) - 1 if args.layer is None else args.layer
    if not 0 <= layer < len(layers):
        raise ValueError(f"--layer must lie in [0, {len(layers)}), got {layer}")
    own = read.target if kind == "decoder" else read.tokens
    # A row of cross-attention is labelled with the token that the decoder generates at it.
    axes = (read.written, read.tokens) if kind == "cross" else (own, own)
    queries, keys = ([name_of(loaded.tokenizer, i) for i in ids or ()] for ids in axes)
    title = f"{NAMES[kind]}, layer {layer} (of 0 to {len(layers) - 1})"
    labels = ("token written", "token of the source") if kind == "cross" else LABELS
    figure = attention_picture(layers[layer][0], queries, keys, title=title, labels=labels)
    print(save(figure, args.out))
    if is_pair and args.target is None:
        print(f"target: {shown(loaded.tokenizer.decode(read.written))}")
    return 0


def _read(args: argparse.Namespace, loaded: LoadedModel, is_pair: bool) -> Read:
    tokens = loaded.prompt(args.text, "text")
    if not is_pair:
        return Read(tokens, None, [])
    start = start_id(loaded)
    if args.target is None:
        ends = ends_of(loaded.tokenizer, loaded.model)
        prefix = prefill(loaded.model, loaded.params, [tokens], start_id=start)
        filters = constraints(settings_of(loaded.model), ends, prefix.width, MOST)
        options: Any = {"sampler": constrained(filters, None), "stop": ends}
        (written,) = generate(loaded.model, loaded.params, prefix, max_new_tokens=MOST, **options)
    else:
        written = prompt_ids(loaded.tokenizer, loaded.model, args.target, "target")
        end = end_of(loaded.tokenizer, loaded.model)
        written += [end] if end is not None and written[-1] != end else []
    return Read(tokens, [start, *written[:-1]], written)


def name_of(words: Any, i: int) -> str:
    """The label of a token on an axis: its text, or `<id>` if the text is empty."""
    words = getattr(words, "tokenizer", words)
    special = i in getattr(words, "special_ids", ())
    text = words.token(i) if special else words.decode([i])
    return text or f"<{i}>"
