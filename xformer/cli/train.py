"""`xformer train`: a GPT on bytes of real text, from nothing to a checkpoint and a sample."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from xformer import backends, tree
from xformer.cli.generate import write
from xformer.generation import Bytes, stream_text
from xformer.generation.samplers import temperature
from xformer.models import GPT
from xformer.training import Corpus, Step, TrainConfig, load_corpus, save, train, unigram_loss
from xformer.training.data import VOCAB_SIZE, require_length

SAMPLE_PROMPT = "def "


class Preset(NamedTuple):
    """Sizes of a model and of its training."""

    n_layers: int
    d_model: int
    n_heads: int
    max_len: int
    batch_size: int
    steps: int
    lr: float


PRESETS = {
    "tiny": Preset(2, 64, 2, 64, 16, 200, 5e-3),
    "small": Preset(4, 128, 4, 128, 8, 1500, 4e-3),
    "medium": Preset(6, 384, 6, 256, 12, 3000, 1e-3),
}


def add_parser(subparsers: Any) -> None:
    """Add `xformer train`."""
    parser = subparsers.add_parser(
        "train", help="train a GPT on text", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--data", metavar="PATH", help="UTF-8 file or folder; Python's own source unless given"
    )
    parser.add_argument("--backend", default="numpy", choices=backends.NAMES)
    parser.add_argument("--preset", default="small", choices=PRESETS)
    parser.add_argument("--steps", type=int, help="training steps; the preset's unless given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", metavar="DIR", help="folder for the checkpoint; runs/gpt, gpt-2, ... unless given"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, save, and print a sample."""
    preset = PRESETS[args.preset]
    backend = backends.get(args.backend)
    config = TrainConfig(
        steps=preset.steps if args.steps is None else args.steps,
        batch_size=preset.batch_size,
        lr=preset.lr,
        seed=args.seed,
    )
    corpus = load_corpus(args.data)
    for part in (corpus.train, corpus.validation):
        require_length(part, preset.max_len)
    out = new_folder(args.out)
    model = GPT(VOCAB_SIZE, preset.n_layers, preset.d_model, preset.n_heads, preset.max_len)
    params = model.init(args.seed, args.backend)
    baseline = unigram_loss(corpus)
    _introduce(args.preset, corpus, params, backend, baseline)

    last = _train(model, params, corpus, config, backend, out)
    save(out, model, last.params, backend)
    print(f"saved to {out} after {last.step} steps, {last.seconds:.0f} s")
    if last.validation is not None:
        print(
            f"validation loss {last.validation:.3f} nats per byte "
            f"(a unigram model has {baseline:.3f})"
        )
    print(f"\na sample, continuing {SAMPLE_PROMPT!r}:\n")
    options: Any = {"sampler": temperature(0.8), "seed": args.seed, "slide": True}
    sample = stream_text(model, last.params, Bytes(), SAMPLE_PROMPT, max_new=300, **options)
    write(sample, SAMPLE_PROMPT)
    print(f'\nmore: xformer generate --checkpoint {out} --prompt "class "')
    return 0


def _introduce(
    preset: str, corpus: Corpus, params: Any, backend: backends.Backend, baseline: float
) -> None:
    n_params = tree.nbytes(params) // 4
    megabytes = (len(corpus.train) / 1e6, len(corpus.validation) / 1e6)
    print(f"data: {corpus.description}")
    print(f"      {megabytes[0]:.1f} MB to train on, {megabytes[1]:.1f} MB to validate on")
    print(f"model: GPT, preset {preset}, {n_params:,} parameters, on {backend.describe()}")
    print(f"a unigram model has {baseline:.3f} nats per byte", flush=True)


def _train(
    model: GPT,
    params: Any,
    corpus: Corpus,
    config: TrainConfig,
    backend: backends.Backend,
    out: Path,
) -> Step:
    """The last step made; Ctrl-C ends training early. Logs every step to log.jsonl."""
    bar = tqdm(total=config.steps, unit="step", disable=not sys.stderr.isatty())
    last: Step | None = None
    validation = "-"
    with bar, (out / "log.jsonl").open("w") as log:
        try:
            for last in train(model, params, corpus, config, backend):
                log.write(json.dumps({k: v for k, v in last._asdict().items() if k != "params"}))
                log.write("\n")
                rate = last.tokens / last.seconds
                if last.validation is not None:
                    validation = f"{last.validation:.3f}"
                    if bar.disable:
                        print(_line(last, config.steps, rate), flush=True)
                bar.set_postfix_str(
                    f"loss {last.loss:.3f}, validation {validation}, {rate:,.0f} tokens/s"
                )
                bar.update()
        except KeyboardInterrupt:
            if last is None:
                raise
            print("\nstopped early", file=sys.stderr)
    assert last is not None  # config.steps is at least 1
    return last


def _line(step: Step, steps: int, rate: float) -> str:
    left = step.seconds / step.step * (steps - step.step)
    return (
        f"step {step.step}/{steps}  loss {step.loss:.3f}  validation {step.validation:.3f}  "
        f"{rate:,.0f} tokens/s  {left:.0f} s left"
    )


def new_folder(out: str | None, name: str = "gpt") -> Path:
    """An empty place to save to, made before any work is done. FileExistsError for a used one."""
    if out is not None:
        folder = Path(out)
        if folder.exists() and any(folder.iterdir()):
            raise FileExistsError(f"--out: {folder} is not empty; name a new folder")
    else:
        names = [name, *(f"{name}-{i}" for i in range(2, 10_000))]
        folder = next(p for p in (Path("runs", n) for n in names) if not p.exists())
    folder.mkdir(parents=True, exist_ok=True)
    return folder
