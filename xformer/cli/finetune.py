"""`xformer finetune`: a pretrained model on one's own data, to a folder that transformers loads."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from xformer import backends, finetune, tree
from xformer.backends import Backend
from xformer.cli.models import opened
from xformer.cli.progress import each
from xformer.cli.texts import watched
from xformer.cli.train import new_folder
from xformer.finetune import Record, Task, TrainConfig, lora
from xformer.pretrained.convert import as_llama
from xformer.sentences import settings
from xformer.training import Step
from xformer.training.config import SCHEDULES

RATES = {True: 5e-4, False: 5e-5}  # of adapters, of whole models
LINES = 10  # of progress, where there is no terminal


def add_parser(subparsers: Any) -> None:
    """Add `xformer finetune`."""
    parser = subparsers.add_parser(
        "finetune",
        help="train a pretrained model further, whole or by low-rank adapters",
        description=f"Of a .jsonl file a task reads these fields: {_fields()}.",
    )
    add = parser.add_argument
    add("--model", metavar="FOLDER", required=True, help="with its tokenizer, as on the Hub")
    add("--data", metavar="FILE", required=True, help=".jsonl; or each line of it is a text")
    add("--task", choices=finetune.TASKS, help="unless given, what the fields and the model suit")
    add("--out", metavar="DIR", help="a new folder; unless given runs/finetuned, -2, -3, ...")
    add("--tokenizer", metavar="PATH", help="where it does not lie beside the model")
    add("--lora", metavar="RANK", type=int, help="train adapters of that rank, not the model")
    add("--alpha", type=float, help="of adapters; twice the rank unless given")
    patterns: dict[str, Any] = {"metavar": "PATTERN", "nargs": "+", "default": ()}
    usual = " ".join(lora.TARGETS)
    add("--targets", **patterns, help=f"linear maps with adapters; {usual} unless given")
    add(
        "--freeze",
        **patterns,
        help="parameters not to train, as xformer summary --verbose names them",
    )
    add("--train", **patterns, help="parameters to train, and no others but adapters")
    add("--steps", type=int, default=200, help="default: 200")
    add("--batch", type=int, default=8, help="texts or pairs in a step (default: 8)")
    add("--lr", type=float, help=f"{RATES[False]} unless given, of adapters {RATES[True]}")
    rise = "after a rise of a tenth of the steps (default: cosine)"
    add("--schedule", choices=SCHEDULES, default="cosine", help=rise)
    add("--max-len", type=int, metavar="N", help="tokens of a text; unless given at most 512")
    add("--validate", type=float, default=0.1, metavar="SHARE", help="default: 0.1; 0: none")
    add("--seed", type=int, default=0)
    add("--backend", default="numpy", choices=backends.NAMES)
    add("--device", help="of the backend, such as cuda:1; its default one unless given")
    add("--dtype", default="float32", choices=("float32", "float64"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, validate before and after, and save."""
    config = _config(args)
    if args.task is None:
        args.task = finetune.suited(args.data, args.model)
        print(f"task: {args.task}")
    records = finetune.read(args.data, finetune.TASKS[args.task].fields)
    training, held_out = finetune.split(records, args.validate, args.seed)
    model, params, words, is_new = _opened(args, records)
    place = backends.get(args.backend, args.device)  # float64 of JAX is there by now
    task = _task(args, model, words)
    read = partial(each, what="tokenising", unit="texts")
    examples = finetune.examples(task, read(training))
    validation = finetune.examples(task, read(held_out)) if held_out else []
    params = _chosen(args, params, is_new)
    out = new_folder(args.out, "finetuned")

    _introduce(model, params, place)
    cut = sum(example.is_cut for example in (*examples, *validation))
    note = f"; {cut:,} are cut to {task.max_len} tokens" if cut else ""
    print(f"examples: {len(examples):,} to train on, {len(validation):,} to validate on{note}")
    before = _measured(task, params, validation, args, place)
    last = _train(finetune.train(task, params, examples, config, place), config.steps)
    after = _measured(task, last.params, validation, args, place)
    if before is not None and after is not None:
        print(f"validation loss {after:.3f} nats, {before:.3f} before")
    adapter = finetune.save(model, last.params, out, tokenizer=words, base=args.model)
    print(f"saved to {out} after {last.step} steps, {last.seconds:.0f} s")
    if adapter is not None:
        print(f"the adapter alone: {adapter}")
    elif args.lora is not None:
        print("more than adapters was trained: they are merged, and not saved alone")
    return 0


def _config(args: argparse.Namespace) -> TrainConfig:
    if args.lora is None and (args.alpha is not None or args.targets):
        raise ValueError("--alpha and --targets are of adapters, and go with --lora")
    return TrainConfig(
        steps=args.steps,
        batch_size=args.batch,
        lr=RATES[args.lora is not None] if args.lr is None else args.lr,
        warmup=max(1, args.steps // 10),
        schedule=args.schedule,
        betas=(0.9, 0.999),
        weight_decay=0.0,
        seed=args.seed,
    )


def _opened(args: argparse.Namespace, records: Sequence[Record]) -> tuple[Any, Any, Any, bool]:
    """The model, its parameters, its tokenizer, and whether its head is new."""
    words: Any  # more than what generating asks for
    model, params, words, is_checkpoint = opened(args)
    if is_checkpoint:
        raise ValueError(f"{args.model} was made by xformer train, which trains; give another one")
    if model.source["model_type"] == "llama2.c":
        model, params = as_llama(model, params)
    if args.task != "classify" or finetune.is_classifier(model):
        return model, params, words, False
    pad_id = words.eos_id if words.pad_id is None else words.pad_id
    names = finetune.labels_in(records)
    new = finetune.with_classifier(model, params, names, seed=args.seed, pad_id=pad_id)
    return *new, words, True


def _task(args: argparse.Namespace, model: Any, words: Any) -> Task:
    options: dict[str, Any] = {}
    if args.task == "contrastive" and Path(args.model).is_dir():
        own = settings(args.model)
        options = {"pooling": own.pooling, "prompt": own.prompt}
    return finetune.task(args.task, model, words, args.max_len, **options)


def _chosen(args: argparse.Namespace, params: Any, is_new: bool) -> Any:
    """The parameters, some of them frozen; a new head is not."""
    patterns = tuple(args.train)
    if args.lora is not None:
        alpha = 2 * args.lora if args.alpha is None else args.alpha
        params = lora.attach(params, args.lora, alpha, args.targets or lora.TARGETS, args.seed)
    elif patterns:
        params = tree.freeze(params)
    if patterns or (is_new and args.lora is not None):
        params = tree.thaw(params, *patterns, *(["head.*"] if is_new else []))
    return tree.freeze(params, *args.freeze) if args.freeze else params


def _introduce(model: Any, params: Any, place: Backend) -> None:
    kind = model.source.get("architectures", [type(model).__name__])[0]
    own = sum(_size((node.a, node.b)) for node in lora.adapters(params).values())
    trained = _size(tree.trained(params))
    adapters = f" and adapters of {own:,}" if own else ""
    print(f"model: {kind}, {_size(params) - own:,} parameters{adapters}; {trained:,} are trained")
    print(f"on {place.describe()}")


def _size(params: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in tree.flatten(tree.thaw(params)).values())


def _measured(
    task: Task, params: Any, examples: Sequence[Any], args: argparse.Namespace, place: Backend
) -> float | None:
    if not examples:
        return None
    with watched("validating", len(examples)) as options:
        options |= {"batch_size": args.batch, "seed": args.seed}
        return finetune.evaluate(task, params, examples, place, **options)


def _train(steps: Any, n_steps: int) -> Step:
    """The last step made; Ctrl-C ends training early."""
    bar = tqdm(total=n_steps, unit="step", disable=not sys.stderr.isatty())
    last: Step | None = None
    with bar:
        try:
            for last in steps:
                bar.set_postfix_str(f"loss {last.loss:.3f}")
                bar.update()
                if bar.disable and last.step % max(1, n_steps // LINES) == 0:
                    rate = last.tokens / last.seconds
                    print(f"step {last.step}/{n_steps}  loss {last.loss:.3f}  {rate:,.0f} tokens/s")
        except KeyboardInterrupt:
            if last is None:
                raise
            print("\nstopped early", file=sys.stderr)
    assert last is not None  # there is at least one step
    return last


def _fields() -> str:
    return "; ".join(f"{name}: {', '.join(kind.fields)}" for name, kind in finetune.TASKS.items())
