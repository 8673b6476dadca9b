"""`xformer classify`: classify texts with a sequence classifier."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from xformer.cli.embed import numbers
from xformer.cli.open_model import opened
from xformer.cli.parser import Parser
from xformer.cli.texts import add_options, printed, shown, texts_of, watched
from xformer.sentences import classify, labels


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer classify`."""
    parser.description = "Print the class probabilities of each text."
    add_options(parser)
    pairs = "each text is a pair of texts with a tab between them"
    parser.add_argument("--pairs", action="store_true", help=pairs)
    top = "print the N most likely classes (default: 5)"
    parser.add_argument("--top", type=int, default=5, metavar="N", help=top)


def run(args: argparse.Namespace) -> int:
    """Print each text and its most likely classes; with --json, one JSON object a text.

    In JSON the classes are a list in the order of their ids, because two may have the same name.
    """
    texts: list[Any] = texts_of(args)
    if args.pairs:
        texts = [_pair(text, i) for i, text in enumerate(texts)]

    def lines(i: int, probs: np.ndarray) -> str:
        if args.json:
            label = names[int(np.argmax(probs))]
            classes = [
                {"label": name, "probability": probability}
                for name, probability in zip(names, numbers(probs), strict=True)
            ]
            return json.dumps({"text": texts[i], "label": label, "probabilities": classes})
        title = " | ".join(texts[i]) if args.pairs else texts[i]
        return "\n".join([shown(title), *_lines(names, probs, args.top)])

    with watched("classifying", len(texts), prints=True) as progress:
        model, params, tokenizer, *_ = opened(args)
        names = labels(model)
        options: Any = {"max_len": args.max_len, "batch_size": args.batch}
        options |= {"finished": printed(lines), **progress}
        classify(model, params, tokenizer, texts, **options)
    return 0


def _pair(text: str, i: int) -> list[str]:
    pair = text.split("\t")
    if len(pair) != 2:
        raise ValueError(
            f"--pairs: text {i + 1} must be two texts with a tab between them, got {text!r:.40}"
        )
    return pair


def _lines(names: list[str], probs: np.ndarray, top: int) -> list[str]:
    ranked = [int(i) for i in np.argsort(-probs, kind="stable")[:top]]
    width = max(len(shown(names[i])) for i in ranked)
    return [f"  {shown(names[i]):{width}}  {probs[i]:.4f}" for i in ranked]
