"""`xformer generate`: continue a prompt with a trained checkpoint."""

from __future__ import annotations

import argparse
import codecs
import sys
from typing import Any

from xformer import backends
from xformer.generation import sample
from xformer.models import GPT
from xformer.training import load
from xformer.training.data import VOCAB_SIZE


def add_parser(subparsers: Any) -> None:
    """Add `xformer generate`."""
    parser = subparsers.add_parser(
        "generate",
        help="continue a prompt",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--checkpoint", metavar="DIR", required=True, help="made by xformer train")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--backend", default="numpy", choices=backends.NAMES)
    parser.add_argument("--max-new", type=int, default=300, help="bytes to generate")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest byte")
    parser.add_argument("--top-k", type=int, help="draw from the k likeliest bytes only")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation as it comes."""
    backend = backends.get(args.backend)
    model, params = load(args.checkpoint, backend)
    if not isinstance(model, GPT) or model.vocab_size != VOCAB_SIZE:
        raise ValueError(f"generate continues a GPT over bytes; {args.checkpoint} holds {model}")
    stream(
        model,
        params,
        args.prompt.encode(),
        backend,
        max_new=args.max_new,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    return 0


def stream(model: Any, params: Any, prompt: bytes, backend: Any, **options: Any) -> None:
    """Write the prompt and its continuation to stdout, a byte at a time; broken UTF-8 as U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    new = sample(model, params, prompt, backend=backend, **options)
    sys.stdout.write(decoder.decode(prompt))
    for token in new:
        sys.stdout.write(decoder.decode(bytes([token])))
        sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True) + "\n")
