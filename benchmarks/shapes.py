"""The shapes that every benchmark measures, named once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from xformer import GPT, Transformer, backends, tree
from xformer.typing import Array


@dataclass(frozen=True)
class Shape:
    """A model with the batch it is trained on."""

    name: str
    model: GPT | Transformer
    batch: int  # B
    length: int  # T, of the source too
    rounds: int  # by default; so many that the minimum settles
    repeats: int  # runs on end in a round, about 0.1 s of them
    tolerance: float = 1e-5  # of losses and gradients in float32, as a relative error

    def params(self, backend: backends.Backend, dtype: str = "float32") -> Any:
        """The same float32 values on every backend: initial weights, all of them disturbed.

        A bias of zero or a norm's weight of one would hide a gradient that forgets it.
        """
        rng = np.random.default_rng(1)

        def move(p: np.ndarray) -> Array:
            noise = rng.normal(0.0, 0.02, p.shape).astype(p.dtype)
            return backend.asarray(p + noise, dtype)

        return tree.map(move, self.model.init(0))

    def data(self, backend: backends.Backend) -> tuple[Array, ...]:
        """What `model.loss` takes after the parameters: random token ids."""
        rng, model = np.random.default_rng(2), self.model
        if isinstance(model, GPT):
            ids = rng.integers(0, model.vocab_size, (self.batch, self.length + 1))
            host = (ids[:, :-1], ids[:, 1:])
        else:
            host = (
                self._padded(rng, model.src_vocab_size, self.length),
                self._padded(rng, model.tgt_vocab_size, self.length + 1),
            )
        return tuple(backend.asarray(np.ascontiguousarray(ids)) for ids in host)

    def _padded(self, rng: np.random.Generator, vocab_size: int, length: int) -> np.ndarray:
        """Rows of half to full length; the padding's id is 0."""
        ids = rng.integers(1, vocab_size, (self.batch, length))
        lengths = rng.integers(length // 2, length + 1, (self.batch, 1))
        return np.where(np.arange(length) < lengths, ids, 0)

    def describe(self) -> str:
        """One line: the model's sizes and the batch's."""
        m = self.model
        if isinstance(m, GPT):
            what, layers, vocab = "GPT", f"{m.n_layers}", f"{m.vocab_size}"
        else:
            what, layers = "encoder-decoder", f"{m.n_encoder_layers}+{m.n_decoder_layers}"
            vocab = f"{m.src_vocab_size}/{m.tgt_vocab_size}"
        return (
            f"{what}, {layers} layers, width {m.d_model}, {m.n_heads} heads, vocabulary {vocab}, "
            f"batch {self.batch} of {self.length} tokens"
        )


SHAPES = (
    Shape(
        "tiny",
        GPT(vocab_size=256, n_layers=2, d_model=64, n_heads=4, max_len=32),
        batch=4,
        length=32,
        rounds=10,
        repeats=10,
    ),
    Shape(
        "encdec",
        Transformer(
            src_vocab_size=1000,
            tgt_vocab_size=1000,
            d_model=128,
            n_heads=4,
            n_encoder_layers=2,
            n_decoder_layers=2,
            max_len=32,
        ),
        batch=16,
        length=32,
        rounds=10,
        repeats=2,
        tolerance=1e-3,  # a ReLU's input that rounds to the other side of 0 alone makes 3e-4
    ),
    Shape(
        "char-gpt",
        GPT(vocab_size=65, n_layers=6, d_model=384, n_heads=6, max_len=256),
        batch=12,
        length=256,
        rounds=5,
        repeats=1,
    ),
)
BY_NAME = {shape.name: shape for shape in SHAPES}
DEFAULT = ("tiny", "encdec")  # two to three minutes on two cores; char-gpt takes longer
