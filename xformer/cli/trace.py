"""`xformer trace`: each op of one training step, forward and backward."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from xformer import backends
from xformer.base.choices import require_one_of
from xformer.cli.open_model import LoadedModel, enable_float64, opened, start_id
from xformer.cli.parser import Parser
from xformer.cli.paths import MODEL, TOKENIZER, add_computation, nonempty
from xformer.cli.texts import shown
from xformer.cli.train_options import PRESETS
from xformer.dispatch import reference_only
from xformer.dispatch.checks import require_sizes
from xformer.generation import Bytes
from xformer.generation.prefix import backend_of_params
from xformer.inspection.trace import WIDTH, trace
from xformer.models import GPT, Classifier, Discriminator, EncoderDecoder, TokenClassifier
from xformer.ops import RandomKey

TEXT = "to be, or not to be"
ABOUT = (
    "Show each op of one training step on a text, in the order in which they run: formula, file "
    "and line, shapes, and the root mean square of what it computes. The backward follows with "
    "every gradient. Without --model, it is the step of a GPT with random weights and a "
    "vocabulary of bytes. Nothing is changed or saved."
)


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer trace`."""
    parser.description = ABOUT
    which = parser.add_mutually_exclusive_group()
    sizes = "sizes of the GPT, see xformer train --help (default: tiny)"
    which.add_argument("--preset", choices=PRESETS, help=sizes)
    which.add_argument("--model", metavar="PATH", type=nonempty, help=MODEL)
    add = parser.add_argument
    add("--tokenizer", metavar="PATH", type=nonempty, help=TOKENIZER)
    add("--text", default=TEXT, help=f"the text that is trained on (default: {TEXT})")
    layers = "only the first N layers (default: 1 of a preset, all of --model)"
    add("--layers", type=int, metavar="N", help=layers)
    add("--op", metavar="NAME", help="show only the steps of this op, such as linear")
    extremes = "also show the least and the greatest element of each array"
    add("--values", action="store_true", help=extremes)
    fast = "run the backend's kernels (default: the references, which the formulas describe)"
    add("--kernels", action="store_true", help=fast)
    add_computation(add)
    add("--json", action="store_true", help="print one JSON object, for programs")


def run(args: argparse.Namespace) -> int:
    """Print the tables, or the JSON."""
    if args.layers is not None:
        require_sizes("trace", 1, **{"--layers": args.layers})
    loaded = _random(args) if args.model is None else opened(args)
    model, params = _shortened(loaded.model, loaded.params, args.layers)
    examples = _examples(loaded, loaded.prompt(args.text, "text"))
    backend = backend_of_params(params)
    arrays = [backend.asarray(ids) for ids in examples]
    with backend.active(), nullcontext() if args.kernels else reference_only(), trace() as steps:
        loss, cache = model.loss(params, *arrays, dropout_key=RandomKey(0))
        cache.backward()
    loss = float(backend.to_numpy(loss))
    names = list(dict.fromkeys(step.op for step in steps))
    if args.op is not None:
        require_one_of("--op", args.op, names)
    if args.json:
        rows = [_data(step) for step in steps if args.op in (None, step.op)]
        print(json.dumps(_finite({"loss": loss, "steps": rows}), indent=2, allow_nan=False))
        return 0
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    shown_steps = steps.table(op=args.op, values=args.values, width=min(columns, WIDTH))
    n_layers = len(model.blocks)
    layers = f"{n_layers} layer{'s' if n_layers > 1 else ''}"
    what = f"{type(loaded.model).__name__}, {layers}, {examples[0].shape[1]} tokens"
    print(f"{what}: loss {loss:.4f} on {shown(args.text)!r}\n\n{shown_steps}")
    return 0


def _random(args: argparse.Namespace) -> LoadedModel:
    """A GPT of the preset's sizes with random weights, on bytes."""
    if args.tokenizer is not None:
        raise ValueError("--tokenizer needs --model: a preset has a vocabulary of bytes")
    enable_float64(args.backend, args.dtype)
    sizes = PRESETS[args.preset or "tiny"]
    n_layers = 1 if args.layers is None else args.layers
    model = GPT(Bytes.size, n_layers, sizes.d_model, sizes.heads, sizes.max_len)
    backend = backends.get(args.backend, args.device)
    return LoadedModel(model, model.init_from(backend.generator(0, args.dtype)), Bytes())


def _shortened(model: Any, params: Any, n_layers: int | None) -> tuple[Any, Any]:
    """The model and its parameters with the first layers; of encoder and decoder each."""
    if n_layers is None:
        return model, params
    if getattr(model, "n_shared_layer_groups", None) is not None:
        raise ValueError("--layers: the layers of this model share parameters; all must run")
    parts = {"stack": model.blocks}
    if isinstance(model, EncoderDecoder):
        parts = {"encoder": model.encoder, "decoder": model.decoder}
    most = max(map(len, parts.values()))
    if n_layers > most:
        raise ValueError(f"--layers must be at most the model's {most}, got {n_layers}")
    if isinstance(model, EncoderDecoder):
        model = replace(model, **{name: blocks[:n_layers] for name, blocks in parts.items()})
    else:
        model = model.with_layers(range(n_layers))
    stacks = {name: getattr(params, name) for name in parts}
    cut = {name: stack._replace(blocks=stack.blocks[:n_layers]) for name, stack in stacks.items()}
    return model, params._replace(**cut)


def _examples(loaded: LoadedModel, ids: list[int]) -> list[np.ndarray]:
    """The arrays of a training step on one text: tokens, and each token's successor."""
    model = loaded.model
    tokens = np.array([ids])
    if isinstance(model, EncoderDecoder):
        return [tokens, np.array([[start_id(loaded), *ids[:-1]]]), tokens]
    if isinstance(model.head, Classifier):
        return [tokens, np.zeros(1, tokens.dtype)]  # a label
    if isinstance(model.head, Discriminator | TokenClassifier):
        return [tokens, np.zeros_like(tokens)]
    if not model.causal:
        return [tokens, tokens]
    if len(ids) < 2:
        raise ValueError(f"--text must have at least 2 tokens, got {len(ids)}")
    return [tokens[:, :-1], tokens[:, 1:]]


def _finite(data: Any) -> Any:
    """The data with null in place of numbers that are not finite, which JSON does not have."""
    if isinstance(data, dict):
        return {key: _finite(part) for key, part in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(part) for part in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _data(step: Any) -> dict[str, Any]:
    arrays = {name: [a._asdict() for a in getattr(step, name)] for name in ("inputs", "outputs")}
    return step._asdict() | arrays
