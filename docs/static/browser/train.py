"""Trains a tiny GPT on names out of Python's standard library, one step at a time.

docs/static/browser/worker.js runs this file in the reader's browser; it also runs in any Python.
"""

import re
from importlib import import_module

import numpy as np

import xformer as xf

MODULES = "argparse ast asyncio collections csv datetime decimal email functools inspect io json"
MODULES += " logging math operator os pathlib random re shutil socket statistics tarfile typing"
LETTERS = "._abcdefghijklmnopqrstuvwxyz"  # "." begins and ends a name
T, BATCH = 15, 32  # tokens of a row, rows of a batch


def collected():
    """The public names of `MODULES` and their classes, sorted."""
    modules = [import_module(name) for name in MODULES.split()]
    owners = modules + [
        value for module in modules for value in vars(module).values() if isinstance(value, type)
    ]
    found = {name for owner in owners for name in dir(owner)}
    return sorted(name for name in found if re.fullmatch("[a-z][a-z_]{2,13}", name))


class Run:
    """A model and its training, from step 0."""

    def __init__(self, seed=0):
        self.names = collected()
        self.rng = np.random.default_rng(seed)
        self.gpt = xf.GPT(vocab_size=len(LETTERS), n_layers=2, d_model=32, n_heads=4, max_len=T)
        self.params = self.gpt.init(seed=seed, backend="numpy")
        self.state = xf.optim.adamw_init(self.params)
        self.n_params = sum(p.size for p in xf.tree.flatten(self.params).values())
        self.step = 0

    def train(self):
        """One step of AdamW; returns the loss before it, in nats a letter."""
        rows = np.full((BATCH, T + 1), -1)  # the loss ignores -1
        for row, i in zip(rows, self.rng.integers(0, len(self.names), BATCH), strict=True):
            ids = [LETTERS.index(letter) for letter in f".{self.names[i]}."]
            row[: len(ids)] = ids
        tokens, targets = np.maximum(rows[:, :-1], 0), rows[:, 1:]
        loss, cache = self.gpt.loss(self.params, tokens, targets, ignore_index=-1)
        self.params, self.state = xf.optim.adamw(self.params, cache.backward(), self.state, lr=3e-3)
        self.step += 1
        return float(loss)

    def invented(self, n=6):
        """`n` names that the model invents."""
        texts = xf.generation.generate(
            self.gpt,
            self.params,
            [[0]] * n,
            max_new_tokens=T - 1,
            sampler=xf.generation.samplers.temperature(0.8),
            stop=[0],
            seed=self.step,
        )
        return ["".join(LETTERS[i] for i in ids).strip(".") for ids in texts]
