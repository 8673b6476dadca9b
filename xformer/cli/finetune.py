"""`xformer finetune`: train a pretrained model on own data; transformers loads the result."""

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
from xformer.cli.paths import BACKEND, DEVICE, TOKENIZER, nonempty
from xformer.cli.progress import each
from xformer.cli.texts import watched
from xformer.cli.train import STOPPING, new_folder
from xformer.cli.train_options import by_option
from xformer.finetune import Record, Task, TrainConfig, lora
from xformer.pretrained.convert import as_llama
from xformer.sentences import settings
from xformer.showing import size
from xformer.training import Diverged, Step, interruptible
from xformer.training.config import SCHEDULES

RATES = {True: 5e-4, False: 5e-5}  # learning rates, with and without LoRA
EVERY = 100  # least number of steps between validations; there are at most four
LINES = 10  # lines of progress if stderr is no terminal
SHOWN = 60  # most characters of a text in the suggested command
# Task -> the command that uses its model, by folder and fields of a record. masked has none.
USES = {
    **dict.fromkeys(("causal", "prefix", "seq2seq"), "generate --model {} --prompt={}"),
    "classify": "classify --model {} -- {}",
    "contrastive": "embed --model {} -- {} {}",
}


def add_parser(subparsers: Any) -> None:
    """Add `xformer finetune`."""
    parser = subparsers.add_parser(
        "finetune",
        help="fine-tune a pretrained model, all parameters or LoRA adapters",
        description=f"Fields of a .jsonl file that each task reads: {_fields()}.",
    )
    add = parser.add_argument
    add(
        "--model",
        metavar="FOLDER",
        type=nonempty,
        required=True,
        help="a Hugging Face folder with its tokenizer",
    )
    add(
        "--data",
        metavar="FILE",
        type=nonempty,
        required=True,
        help="a .jsonl file, or a text file with one text a line",
    )
    tasks = f"{', '.join(finetune.TASKS)} (default: chosen by the fields and the model)"
    add("--task", metavar="TASK", choices=finetune.TASKS, help=tasks)
    add(
        "--out",
        metavar="DIR",
        type=nonempty,
        help="a new folder (default: runs/finetuned, -2, -3, ...)",
    )
    add("--tokenizer", metavar="PATH", type=nonempty, help=TOKENIZER)
    add("--lora", metavar="RANK", type=int, help="train LoRA adapters of this rank")
    add("--alpha", type=float, help="scale of the LoRA adapters (default: twice the rank)")
    patterns: dict[str, Any] = {"metavar": "PATTERN", "nargs": "+", "default": ()}
    usual = " ".join(lora.TARGETS)
    add("--targets", **patterns, help=f"linear layers that get an adapter (default: {usual})")
    add(
        "--freeze",
        **patterns,
        help="parameters not to train, by the names of xformer summary --verbose",
    )
    add("--train", **patterns, help="train only these parameters, and adapters")
    add("--steps", type=int, default=200, help="default: 200")
    add("--batch", type=int, default=8, help="texts or pairs a step (default: 8)")
    lr = f"peak learning rate (default: {RATES[False]}; with --lora {RATES[True]})"
    add("--lr", type=float, help=lr)
    rise = "after a linear warmup over a tenth of the steps (default: cosine)"
    add("--schedule", choices=SCHEDULES, default="cosine", help=rise)
    add("--max-len", type=int, metavar="N", help="cut texts to N tokens (default: at most 512)")
    add(
        "--validation-fraction",
        type=float,
        default=0.1,
        metavar="FRACTION",
        help="fraction of the data to validate on (default: 0.1; 0: no validation)",
    )
    add("--seed", type=int, default=0, help="default: 0")
    add("--backend", default="numpy", **BACKEND)
    add("--device", help=DEVICE)
    add("--dtype", default="float32", choices=("float32", "float64"), help="default: float32")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Validate, train, and save the model with the lowest validation loss."""
    config = _config(args)
    if is_own(Path(args.model)):
        command = f"xformer train --from {shlex.quote(args.model)} --data {shlex.quote(args.data)}"
        raise ValueError(
            f"{args.model} was written by xformer train, which trains it further: {command}"
        )
    if args.task is None:
        args.task = finetune.suited(args.data, args.model)
        print(f"task: {args.task}")
    records = finetune.read(args.data, finetune.TASKS[args.task].fields)
    training, held_out = finetune.split(records, args.validation_fraction, args.seed)
    model, params, words, is_new = _opened(args, records)
    backend = backends.get(args.backend, args.device)  # `_opened` has enabled float64 of JAX
    task = _task(args, model, words)
    read = partial(each, what="tokenising", unit="texts")
    examples = finetune.examples(task, read(training))
    validation = finetune.examples(task, read(held_out)) if held_out else []
    params = _chosen(args, params, is_new)
    out = new_folder(args.out, "finetuned")
    _require_space(out, params)

    _introduce(model, params, backend)
    cut = sum(example.is_cut for example in (*examples, *validation))
    note = f"; {cut:,} cut to {task.max_len} tokens" if cut else ""
    print(f"examples: {len(examples):,} to train on, {len(validation):,} to validate on{note}")
    before = _measured(task, params, validation, args, backend)
    best = _Kept(out, partial(finetune.save, model, folder=out, tokenizer=words, base=args.model))
    steps = finetune.train(task, params, examples, config, backend, validation, donate=True)
    last = _train(steps, config, best)
    if last.validation is None:  # stopped early, or no validation data
        best.offer(last)  # saved first, in case validation is interrupted too
        with suppress(KeyboardInterrupt):
            best.offer(last, _measured(task, last.params, validation, args, backend))
    _conclude(args, best, last, before)
    if args.task in USES:
        texts = (str(records[0].fields[name]).strip() for name in task.fields)
        words = (str(best.out), *(text.partition("\n")[0][:SHOWN] for text in texts))
        print(f"to use it: xformer {USES[args.task].format(*map(shlex.quote, words))}")
    return 0


class _Kept:
    """The saved model: the one with the lowest validation loss; before validation, the last."""

    def __init__(self, out: Path, save: Callable[[Any], Path | None]) -> None:
        self.out, self.save = out, save
        self.step, self.loss = 0, math.inf
        self.adapter: Path | None = None

    def offer(self, step: Step, loss: float | None = None) -> None:
        """Save the model after `step`, unless a better one is saved. loss: its validation loss."""
        loss = math.inf if loss is None else loss
        if not self.step or loss < self.loss:
            if self.step != step.step:
                self.adapter = self.save(step.params)
            self.step, self.loss = step.step, loss


def _conclude(args: argparse.Namespace, best: _Kept, last: Step, before: float | None) -> None:
    """Print the validation loss and where the model is saved."""
    if before is not None and best.loss < math.inf:
        which = "" if best.step == last.step else f"; the best model is from step {best.step}"
        print(f"validation loss {best.loss:.3f} nats, {before:.3f} before training{which}")
    print(f"saved to {best.out} after {last.step} steps, {last.seconds:.0f} s")
    if best.adapter is not None:
        print(f"the adapter alone: {best.adapter}")
    elif args.lora is not None:
        print("parameters beside the adapters were trained: only the merged model is saved")


def _config(args: argparse.Namespace) -> TrainConfig:
    if args.lora is None and (args.alpha is not None or args.targets):
        raise ValueError("--alpha and --targets need --lora")
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
    words: Any  # a tokenizer with more methods than `Codec`
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
        saved = settings(args.model)
        options = {"pooling": saved.pooling, "prompt": saved.prompt}
    return finetune.task(args.task, model, words, args.max_len, **options)


def _chosen(args: argparse.Namespace, params: Any, is_new: bool) -> Any:
    """The parameters with adapters and frozen leaves as the options say. A new head is trained."""
    patterns = tuple(args.train)
    if args.lora is not None:
        alpha = 2 * args.lora if args.alpha is None else args.alpha
        params = lora.attach(params, args.lora, alpha, args.targets or lora.TARGETS, args.seed)
    elif patterns:
        params = tree.freeze(params)
    if patterns or (is_new and args.lora is not None):
        params = tree.thaw(params, *patterns, *(["head.*"] if is_new else []))
    return tree.freeze(params, *args.freeze) if args.freeze else params


def _introduce(model: Any, params: Any, backend: Backend) -> None:
    kind = model.hf_config.get("architectures", [type(model).__name__])[0]
    added = sum(_size((node.a, node.b)) for node in lora.adapters(params).values())
    trained = _size(tree.trained(params))
    adapters = f" and {added:,} in adapters" if added else ""
    print(f"model: {kind}, {_size(params) - added:,} parameters{adapters}; {trained:,} trained")
    print(f"on {backend.describe()}")


def _size(params: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in tree.flatten(tree.thaw(params)).values())


def _require_space(out: Path, params: Any) -> None:
    """OSError unless the disk has room for two copies: a save replaces the model by a new file."""
    needed, free = 2 * tree.nbytes(params), shutil.disk_usage(out).free
    if needed > free:
        raise OSError(f"{out}: the model needs {size(needed)}, and {size(free)} are free")


def _measured(
    task: Task, params: Any, examples: Sequence[Any], args: argparse.Namespace, backend: Backend
) -> float | None:
    if not examples:
        return None
    with watched("validating", len(examples)) as options:
        options |= {"batch_size": args.batch, "seed": args.seed}
        return finetune.evaluate(task, params, examples, backend, **options)


def _train(steps: Iterator[Step], config: TrainConfig, best: _Kept) -> Step:
    """Run the steps, save the best validated models, and return the last step. Ctrl-C ends it."""
    bar = tqdm(total=config.steps, unit="step", disable=not sys.stderr.isatty())
    last: Step | None = None
    try:
        with bar, interruptible(STOPPING) as stopping:
            for last in steps:
                if last.validation is not None:
                    best.offer(last, last.validation)
                bar.set_postfix_str(f"loss {last.loss:.3f}")
                bar.update()
                if bar.disable:
                    _report(last, config.steps)
                if stopping():
                    break
    except KeyboardInterrupt:  # pressed twice; if in an update, some parameters are updated
        if last is None:
            raise
    except Diverged as error:
        saved = f"{best.out} has the model of step {best.step}, the best validated one"
        error.add_note(saved if best.step else "no model was validated, so none is saved")
        raise
    assert last is not None  # there is at least one step
    if last.step < config.steps:
        print("\nstopped early", file=sys.stderr)
    return last


def _report(step: Step, n_steps: int) -> None:
    if step.validation is not None or step.step % max(1, n_steps // LINES) == 0:
        validation = "" if step.validation is None else f"  validation {step.validation:.3f}"
        rate = step.tokens / step.seconds
        print(f"step {step.step}/{n_steps}  loss {step.loss:.3f}{validation}  {rate:,.0f} tokens/s")


def _fields() -> str:
    return "; ".join(f"{name}: {', '.join(kind.fields)}" for name, kind in finetune.TASKS.items())
