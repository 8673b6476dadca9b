"""`python -m benchmarks.finetuning`: fine-tune a small Llama, the whole model or by LoRA adapters.

stories260K, trained on children's stories, is fine-tuned on lines of Shakespeare, on NumPy. The
table has the trained parameters, the memory saved for backward, the loss, and tokens per second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command, machine, report, stored
from benchmarks.embeddings_page import BEGIN, END
from xformer import backends, finetune, pretrained
from xformer.base import tree
from xformer.finetune import Task, TrainConfig, lora
from xformer.pretrained.convert import as_llama
from xformer.pretrained.tokenizer import tokenizer

MODEL, WORDS, TEXT = "stories260K.bin", "tok512.bin", "tinyshakespeare.txt"
RANK, BATCH, HELD_OUT = 8, 16, 0.02
EVERYTHING = ("*",)
# By name: what is trained, and the peak learning rate (the best of 1e-3, 3e-3 and 1e-2 after 200
# steps).
WAYS: dict[str, tuple[Callable[[Any], Any], float]] = {
    "the whole model": (lambda params: params, 3e-3),
    "adapters of queries and values": (lambda params: lora.attach(params, RANK, 2 * RANK), 1e-2),
    "adapters of all linear maps": (
        lambda params: lora.attach(params, RANK, 2 * RANK, EVERYTHING),
        1e-2,
    ),
    "these, and the embedding": (
        lambda params: tree.thaw(lora.attach(params, RANK, 2 * RANK, EVERYTHING), "embed.*"),
        1e-2,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON."""
    parser = command.parser("benchmarks.finetuning", __doc__)
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", required=True, help=f"of {MODEL}, {WORDS}, {TEXT}"
    )
    options: Any = {"type": command.count, "metavar": "N", "default": 500}
    parser.add_argument("--steps", **options, help="default: %(default)s")
    command.add_out_file(parser)
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="put the table there too")
    args = parser.parse_args(argv)
    if args.page is not None:
        report.around(args.page, BEGIN, END)
    result = machine.describe(["numpy"]) | {"threads": machine.share_threads()}
    with command.ticking("fine-tuning", args.steps * len(WAYS), "steps") as tick:
        result |= measure(args.data, args.steps, tick)
    print(text(result))
    out = args.out or stored.path_of(result, "finetuning")
    stored.write(result, out)
    print(f"\nWritten: {out}")
    if args.page is not None:
        update(args.page, result, out)
    return 0


def measure(data: Path, steps: int, tick: Callable[[], Any]) -> dict[str, Any]:
    """Fine-tune in each of WAYS, from the same model, on the same batches. Returns the result."""
    model, params = as_llama(*pretrained.load(data / MODEL))
    task = finetune.task("causal", model, tokenizer(data / WORDS), max_len=128)
    parts = finetune.split(finetune.read(data / TEXT), HELD_OUT)
    examples, held_out = (finetune.examples(task, part) for part in parts)
    settings = {"model": MODEL, "steps": steps, "batch": BATCH, "rank": RANK}
    sizes = {"examples": len(examples), "held_out": len(held_out)}
    before = _loss(task, params, held_out)
    rows = [
        {"name": name, "lr": lr}
        | trained(task, way(params), examples, held_out, steps=steps, lr=lr, tick=tick)
        for name, (way, lr) in WAYS.items()
    ]
    return settings | sizes | {"before": before, "rows": rows}


def trained(
    task: Task, params: Any, examples: Any, held_out: Any, *, steps: int, lr: float, tick: Any
) -> dict[str, Any]:
    """Train `params` for `steps` steps; return sizes, the loss on `held_out`, and the time."""
    backend = backends.get("numpy")
    batch = task.batch(examples[:BATCH], np.random.default_rng(0))
    _, cache = task.loss(params, batch, backend)
    saved_bytes, weight_bytes = tree.nbytes(cache), tree.nbytes(params)
    n_trained = sum(leaf.size for leaf in tree.flatten(tree.trained(params)).values())
    config = TrainConfig(steps, BATCH, lr=lr, warmup=steps // 10, weight_decay=0.0)
    for step in finetune.train(task, params, examples, config, backend):
        last = step
        tick()
    return {
        "trained": n_trained,
        "kept_bytes": saved_bytes,
        "weight_bytes": weight_bytes,
        "loss": _loss(task, last.params, held_out),
        "seconds": last.seconds,
        "tokens_per_s": last.tokens / last.seconds,
    }


def _loss(task: Task, params: Any, held_out: Any) -> float:
    return finetune.evaluate(task, params, held_out, backends.get("numpy"), batch_size=32)


def text(result: Mapping[str, Any]) -> str:
    """Return the table, and lines on machine, versions and commit."""
    lines = [
        "| trained | numbers | kept for backward | loss | tokens a second |",
        "|---|---:|---:|---:|---:|",
        f"| nothing | 0 | | {result['before']:.2f} | |",
    ]
    for row in result["rows"]:
        saved_mb = (row["kept_bytes"] - result["rows"][0]["weight_bytes"]) / 1e6
        lines.append(
            f"| {row['name']} | {row['trained']:,} | {saved_mb:.1f} MB | {row['loss']:.2f} | "
            f"{row['tokens_per_s']:,.0f} |"
        )
    commit = (result["commit"] or "none")[:9] + (" with local changes" if result["dirty"] else "")
    lines += [
        "",
        f"{result['date']}, {result['machine']['cpu']}, {result['machine']['system']}, "
        f"{result['threads']['cpus']} threads.",
        f"Python {result['python']}, NumPy {result['versions']['numpy']}. Commit {commit}.",
        f"{result['steps']} steps of {result['batch']} lines of {result['examples']:,}, rank "
        f"{result['rank']}; the loss is of {result['held_out']:,} other lines, in nats a token.",
    ]
    return "\n".join(lines)


def update(page: Path, result: Mapping[str, Any], path: Path) -> None:
    """Replace the result on `page` by `result`; path: of its JSON, for the link."""
    link = Path(os.path.relpath(path, page.parent)).as_posix()
    shown = f"{text(result)}\n[All figures]({link}).\n"
    report.put(page, BEGIN, END, shown)


if __name__ == "__main__":
    sys.exit(command.run(main))
