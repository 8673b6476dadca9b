"""nanoGPT's setting for a CPU (Andrej Karpathy, 2022) on tinyshakespeare, character by character.

Its README: 4 layers, 4 heads, width 128, context 64, batches of 12, no dropout, 2,000 steps, and a
validation loss of 1.88 nats. Model, initial weights, optimiser and schedule are those of its
train.py; the windows come in another order, and validation reads all of the last tenth of the text.
In a checkout, with tinyshakespeare.txt in a folder (without it the script says where to get it):

    XFORMER_DATA=folder python truths/nanogpt.py

A run that was stopped goes on when it is called again; `xformer plot runs/nanogpt` draws it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
from needed import DATA, require_files
from tqdm import tqdm

from xformer import GPT, backends, optim, tree
from xformer.models import LanguageModel
from xformer.training import (
    Characters,
    Run,
    State,
    Step,
    TrainConfig,
    Windows,
    interruptible,
    loss_of,
    start,
    train,
)

STEPS, WARMUP, LR, BATCH = 2000, 100, 1e-3, 12
PUBLISHED, LOW, HIGH = 1.88, 1.85, 1.92


def main() -> int:
    """Train, and compare the best validation loss with the published one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/nanogpt"), help="of the run")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a shorter run, to try it")
    args = parser.parse_args()
    require_files(DATA, "tinyshakespeare.txt")
    text = (DATA / "tinyshakespeare.txt").read_text(encoding="utf-8")
    state = trained(text, args.out, args.steps)
    print(
        f"best validation loss {state.best:.4f} nats after step {state.best_step} of {state.step}, "
        f"{state.seconds:.0f} s; published: {PUBLISHED}"
    )
    return 0 if LOW <= state.best <= HIGH else 1


def trained(text: str, folder: Path, steps: int = STEPS) -> State:
    """The state after the last step of a run in `folder`, begun or gone on with."""
    words = Characters.of([text])
    tokens = np.array(words.encode(text), np.uint8)
    cut = int(0.9 * len(tokens))
    model = GPT(words.size, 4, 128, 4, 64, activation="gelu", bias=False)
    source = Windows(tokens[:cut], model.context, BATCH, seed=0)
    held_out = list(Windows(tokens[cut:], model.context, 16).held_out())
    config = TrainConfig(steps, BATCH, eval_every=250)
    optimiser = optim.grouped(*optim.decay_matrices("adamw", 0.1, betas=(0.9, 0.99)))
    cosine = optim.schedules.cosine(LR, STEPS - WARMUP, final=0.1)
    schedule = optim.schedules.warmup(cosine, WARMUP, how="nanogpt")
    about = {
        "model": dataclasses.asdict(model),
        "training": dataclasses.asdict(config),
        "data": source.fingerprint(),
    }
    backend = backends.get("numpy")
    with Run(folder, backend, about, model=model, every=250) as run:
        words.save(folder)
        state = run.begin(start(initial(model), config, optimiser))
        options: Any = {"optimiser": optimiser, "schedule": schedule, "donate": True}
        bar = tqdm(total=steps, initial=state.step, unit="step", disable=None)
        with bar, interruptible() as stopping:
            updates = train(
                loss_of(model), state, source, config, backend, held_out=held_out, **options
            )
            for step in run.record(updates, stopping):
                state = step.state
                show(bar, step)
    return state


def show(bar: Any, step: Step) -> None:
    """A step on the bar, and a line for each validation; where there is no bar, more lines."""
    bar.update()
    bar.set_postfix_str(f"loss {step.loss:.3f}", refresh=False)
    if step.validation is not None:
        bar.write(f"step {step.step}: validation {step.validation:.4f}")
    elif bar.disable and step.step % 20 == 0:
        bar.write(f"step {step.step}: loss {step.loss:.3f}")
    sys.stdout.flush()


def initial(model: LanguageModel) -> Any:
    """Normal weights of standard deviation 0.02, those that end a branch less, as GPT-2's.

    `GPT.init` differs in the standard deviation alone: d_model^-1/2.
    """
    scale = 0.02 * model.d_model**0.5
    return tree.map(lambda p: p * scale if p.ndim == 2 else p, model.init(seed=0))


if __name__ == "__main__":
    raise SystemExit(main())
