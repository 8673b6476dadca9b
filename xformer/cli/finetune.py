"""`xformer finetune`: a pretrained model on one's own data, to a folder that transformers loads."""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from xformer import backends, finetune, tree
from xformer.backends import Backend
from xformer.cli.models import is_own, opened
from xformer.cli.paths import nonempty
from xformer.cli.progress import each
from xformer.cli.texts import watched
from xformer.cli.train import STOPPING, new_folder
from xformer.cli.train_options import by_option
from xformer.finetune import Record, Task, TrainConfig, lora
from xformer.pretrained.convert import as_llama
from xformer.sentences import settings
from xformer.training import Diverged, Step, interruptible
from xformer.training.config import SCHEDULES

RATES = {True: 5e-4, False: 5e-5}  # of adapters, of whole models
EVERY = 100  # steps at least between validations, of which there are four at most
LINES = 10  # of progress, where there is no terminal


def add_parser(subparsers: Any) -> None:
    """Add `xformer finetune`."""
    parser = subparsers.add_parser(
        "finetune",
        help="train a pretrained model further, whole or by low-rank adapters",
        description=f"Of a .jsonl file a task reads these fields: {_fields()}.",
    )
    add = parser.add_argument
    add(
        "--model",
        metavar="FOLDER",
        type=nonempty,
        required=True,
        help="with its tokenizer, as on the Hub",
    )
    add(
        "--data",
        metavar="FILE",
        type=nonempty,
        required=True,
        help=".jsonl; or each line of it is a text",
    )
    add("--task", choices=finetune.TASKS, help="unless given, what the fields and the model suit")
    add(
        "--out",
        metavar="DIR",
        type=nonempty,
        help="a new folder; unless given runs/finetuned, -2, -3, ...",
    )
    add("--tokenizer", metavar="PATH", type=nonempty, help="where it does not lie beside the model")
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
    add(
        "--validation-fraction",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="default: 0.1; 0: none",
    )
    add("--seed", type=int, default=0)
    add("--backend", default="numpy", choices=backends.NAMES)
    add("--device", help="of the backend, such as cuda:1; its default one unless given")
    add("--dtype", default="float32", choices=("float32", "float64"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, validate before and now and then, and keep the best model."""
    config = _config(args)
    if is_own(Path(args.model)):
        command = f"xformer train --from {shlex.quote(args.model)} --data {shlex.quote(args.data)}"
        raise ValueError(f"{args.model} was made by xformer train, which trains it on: {command}")
    if args.task is None:
        args.task = finetune.suited(args.data, args.model)
        print(f"task: {args.task}")
    records = finetune.read(args.data, finetune.TASKS[args.task].fields)
    training, held_out = finetune.split(records, args.validation_fraction, args.seed)
    model, params, words, is_new = _opened(args, records)
    place = backends.get(args.backend, args.device)  # float64 of JAX is there by now
    task = _task(args, model, words)
    read = partial(each, what="tokenising", unit="texts")
    examples = finetune.examples(task, read(training))
    validation = finetune.examples(task, read(held_out)) if held_out else []
    params = _chosen(args, params, is_new)
    out = new_folder(args.out, "finetuned")
    _require_space(out, params)

    _introduce(model, params, place)
    cut = sum(example.is_cut for example in (*examples, *validation))
    note = f"; {cut:,} are cut to {task.max_len} tokens" if cut else ""
    print(f"examples: {len(examples):,} to train on, {len(validation):,} to validate on{note}")
    before = _measured(task, params, validation, args, place)
    kept = _Kept(out, partial(finetune.save, model, folder=out, tokenizer=words, base=args.model))
    steps = finetune.train(task, params, examples, config, place, validation, donate=True)
    last = _train(steps, config, kept)
    if last.validation is None:  # stopped early, or there is nothing to validate on
        kept.offer(last)  # first, so that it is not lost where validating is stopped too
        with suppress(KeyboardInterrupt):
            kept.offer(last, _measured(task, last.params, validation, args, place))
    _conclude(args, kept, last, before)
    return 0


class _Kept:
    """The model in a folder: the best validated one, or the last while none is validated."""

    def __init__(self, out: Path, save: Callable[[Any], Path | None]) -> None:
        self.out, self.save = out, save
        self.step, self.loss = 0, math.inf
        self.adapter: Path | None = None

    def offer(self, step: Step, loss: float | None = None) -> None:
        """Save the model after a step, unless a better one is there."""
        loss = math.inf if loss is None else loss
        if not self.step or loss < self.loss:
            if self.step != step.step:
                self.adapter = self.save(step.params)
            self.step, self.loss = step.step, loss


def _conclude(args: argparse.Namespace, kept: _Kept, last: Step, before: float | None) -> None:
    """Say what came of it."""
    if before is not None and kept.loss < math.inf:
        which = "" if kept.step == last.step else f"; of step {kept.step}, which was the best"
        print(f"validation loss {kept.loss:.3f} nats, {before:.3f} before{which}")
    print(f"saved to {kept.out} after {last.step} steps, {last.seconds:.0f} s")
    if kept.adapter is not None:
        print(f"the adapter alone: {kept.adapter}")
    elif args.lora is not None:
        print("more than adapters was trained: they are merged, and not saved alone")


def _config(args: argparse.Namespace) -> TrainConfig:
    if args.lora is None and (args.alpha is not None or args.targets):
        raise ValueError("--alpha and --targets are of adapters, and go with --lora")
    with by_option():
        return TrainConfig(
            steps=args.steps,
            batch_size=args.batch,
            lr=RATES[args.lora is not None] if args.lr is None else args.lr,
            warmup=max(1, args.steps // 10),
            schedule=args.schedule,
            betas=(0.9, 0.999),
            weight_decay=0.0,
            eval_every=max(EVERY, args.steps // 4),
            seed=args.seed,
        )


def _opened(args: argparse.Namespace, records: Sequence[Record]) -> tuple[Any, Any, Any, bool]:
    """The model, its parameters, its tokenizer, and whether its head is new."""
    words: Any  # more than what generating asks for
    model, params, words, *_ = opened(args)
    if model.hf_config["model_type"] == "llama2.c":
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
    kind = model.hf_config.get("architectures", [type(model).__name__])[0]
    own = sum(_size((node.a, node.b)) for node in lora.adapters(params).values())
    trained = _size(tree.trained(params))
    adapters = f" and adapters of {own:,}" if own else ""
    print(f"model: {kind}, {_size(params) - own:,} parameters{adapters}; {trained:,} are trained")
    print(f"on {place.describe()}")


def _size(params: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in tree.flatten(tree.thaw(params)).values())


def _require_space(out: Path, params: Any) -> None:
    """OSError where the disk has no room for the model, and for it once more as it is replaced."""
    needed, free = 2 * tree.nbytes(params), shutil.disk_usage(out).free
    if needed > free:
        raise OSError(
            f"{out}: the model needs {needed / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free"
        )


def _measured(
    task: Task, params: Any, examples: Sequence[Any], args: argparse.Namespace, place: Backend
) -> float | None:
    if not examples:
        return None
    with watched("validating", len(examples)) as options:
        options |= {"batch_size": args.batch, "seed": args.seed}
        return finetune.evaluate(task, params, examples, place, **options)


def _train(steps: Iterator[Step], config: TrainConfig, kept: _Kept) -> Step:
    """The last step made, the best validated ones kept; Ctrl-C ends training early."""
    bar = tqdm(total=config.steps, unit="step", disable=not sys.stderr.isatty())
    last: Step | None = None
    try:
        with bar, interruptible(STOPPING) as stopping:
            for last in steps:
                if last.validation is not None:
                    kept.offer(last, last.validation)
                bar.set_postfix_str(f"loss {last.loss:.3f}")
                bar.update()
                if bar.disable:
                    _report(last, config.steps)
                if stopping():
                    break
    except KeyboardInterrupt:  # pressed twice, in an update perhaps: then some numbers are new
        if last is None:
            raise
    except Diverged as error:
        saved = f"{kept.out} has the model of step {kept.step}, the best that was validated"
        error.add_note(saved if kept.step else "no model was validated before, and none is saved")
        raise
    assert last is not None  # there is at least one step
    if last.step < config.steps:
        print("\nstopped early", file=sys.stderr)
    return last


def _report(step: Step, n_steps: int) -> None:
    if step.validation is not None or step.step % max(1, n_steps // LINES) == 0:
        found = "" if step.validation is None else f"  validation {step.validation:.3f}"
        rate = step.tokens / step.seconds
        print(f"step {step.step}/{n_steps}  loss {step.loss:.3f}{found}  {rate:,.0f} tokens/s")


def _fields() -> str:
    return "; ".join(f"{name}: {', '.join(kind.fields)}" for name, kind in finetune.TASKS.items())
