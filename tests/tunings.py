"""A small fine-tuning of each task, to be stopped, killed and resumed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import runs
from finetuning import BERT, CLASSIFIER, GPT2, RANKER, T5, TAGGER, write_tokenizer
from test_finetune import NUMPY, examples, records

from xformer import finetune, pretrained, training, tree
from xformer.finetune import TrainConfig, lora
from xformer.pretrained.tokenizer import tokenizer
from xformer.training import State

PARTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
DROPOUT: dict[str, dict[str, Any]] = {  # models with dropout of a tenth
    "causal": GPT2 | dict.fromkeys(PARTS, 0.1),
    "prefix": GPT2 | dict.fromkeys(PARTS, 0.1),
    "masked": BERT,
    "classify": CLASSIFIER | {"hidden_dropout_prob": 0.1},
    "seq2seq": T5 | {"dropout_rate": 0.1},
    "contrastive": BERT,
    "classify-pairs": CLASSIFIER | {"hidden_dropout_prob": 0.1},
    "tag": TAGGER | {"hidden_dropout_prob": 0.1},
    "rank": RANKER | {"hidden_dropout_prob": 0.1},
}
CONFIG = TrainConfig(
    steps=12, batch_size=3, accumulate=2, lr=1e-2, warmup=3, eval_every=4, weight_decay=0.0, seed=2
)
EVERY = 3  # steps between checkpoints


class Killed(Exception):
    """Raised at a step: nothing is saved, as if the process had been killed there."""


class Tuning:
    """A fine-tuning to begin, to kill and to resume, each time from nothing but its folder."""

    def __init__(self, name: str, base: Path, adapters: bool = False) -> None:
        self.name, self.base, self.adapters = name, base, adapters
        base.mkdir(exist_ok=True)

    def begun(self, config: TrainConfig, seed: int = 0) -> tuple[Any, ...]:
        """The arguments of `finetune.train`."""
        config_of_model = DROPOUT[self.name]
        style = {"gpt2": "gpt"}.get(config_of_model["model_type"], config_of_model["model_type"])
        write_tokenizer(self.base, style)
        model = pretrained.model(config_of_model)
        task = finetune.task(self.name, model, tokenizer(self.base))
        params = model.init(0, dtype="float64")
        if self.adapters:
            params = lora.attach(params, 2, 4, ("*",), seed)
        else:
            params = tree.map(lambda a: a + seed, params)
        found, held_out = (examples(task, *records(self.name, 20, seed)) for seed in (0, 1))
        return task, params, found, config, NUMPY, held_out

    def train(
        self, folder: Path, n: int | None = None, *, kill: bool = False, **changes: Any
    ) -> State:
        """Train up to step n, or to the end. kill: save nothing after the last checkpoint."""
        seed = changes.pop("seed_of_params", 0)
        at, free = changes.pop("at", None), changes.pop("free", ())
        job = self.begun(TrainConfig(**(vars(CONFIG) | changes)), seed)
        task, params, *rest = job
        n = rest[1].steps if n is None else n
        run = finetune.run(folder, *job, every=EVERY, free=free)
        try:
            with run:
                state = run.begin(training.start(params, rest[1]), at)
                steps = finetune.train(task, state, *rest, donate=True)
                for step in run.record(itertools.islice(steps, n - state.step)):
                    state = step.state
                    if kill and step.step == n:
                        raise Killed
        except Killed:
            pass
        return state


def require_alike(folder: Path, other: Path) -> None:
    runs.require_alike(folder, other)
    for path in other.rglob("*.safetensors"):
        if path.parent.name != "checkpoints":
            assert (folder / path.relative_to(other)).read_bytes() == path.read_bytes()
