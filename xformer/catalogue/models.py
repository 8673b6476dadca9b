"""Cases of the models: their loss, and the gradients of all parameters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from xformer.backends import Backend, Generator
from xformer.catalogue.case import KEY, Case, Function, Options, random
from xformer.models import GPT, Transformer
from xformer.typing import Array


def cases() -> Iterator[Case]:
    """Every model, with every option."""
    for subject in (_gpt, _transformer):
        yield from subject()


def _gpt() -> Iterator[Case]:
    def case(note: str, loss: Options | None = None, **config: Any) -> Case:
        sizes: Options = {"vocab_size": 13, "n_layers": 1, "d_model": 6, "n_heads": 2, "max_len": 7}
        model = GPT(**sizes | {"d_ff": 11} | config)

        def make(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
            tokens, targets = rng.integers((5, 4), high=13), rng.integers((5, 4), high=13)
            fn = partial(model.loss, tokens=tokens, targets=targets, **loss or {})
            return fn, (random(rng, model.init()),)

        return Case("models", f"GPT: {note}", make)

    yield case("as it is")
    yield case("two layers, untied, post-norm", n_layers=2, tied=False, norm="post")
    yield case("one key head, no biases", n_kv_heads=1, bias=False)
    yield case("silu, eps", activation="silu", eps=0.1)
    yield case("positions: none", positions="none")
    yield case("positions: sinusoidal", positions="sinusoidal")
    yield case("positions: learned, for q, k, v", position_mode="qkv", n_layers=2)
    options: Options = {"label_smoothing": 0.1, "z_loss": 0.3, "ignore_index": 2}
    yield case("dropout and loss options", {"dropout_key": KEY, **options}, dropout=0.3)


def _transformer() -> Iterator[Case]:
    def case(note: str, loss: Options | None = None, **config: Any) -> Case:
        sizes: Options = {"src_vocab_size": 17, "tgt_vocab_size": 13, "d_model": 6, "n_heads": 2}
        depth: Options = {"n_encoder_layers": 1, "n_decoder_layers": 1}
        model = Transformer(**sizes | depth | {"max_len": 7, "d_ff": 11} | config)

        def make(rng: Generator, backend: Backend) -> tuple[Function, tuple[Any, ...]]:
            src = _padded(rng, backend, 7, 17, model.pad_id)
            tgt = _padded(rng, backend, 5, 13, model.pad_id)
            fn = partial(model.loss, src=src, tgt=tgt, **loss or {})
            return fn, (random(rng, model.init()),)

        return Case("models", f"Transformer: {note}", make)

    yield case("as it is")
    yield case("pre-norm, tied", norm="pre", tied=True)
    yield case("two layers each", n_encoder_layers=2, n_decoder_layers=2)
    yield case("two layers each, shared memory", shared_memory=True, n_decoder_layers=2)
    yield case("free widths, no biases", d_head=5, d_value=2, src_width=5, tgt_width=9, bias=False)
    yield case("one key head, silu, eps", n_kv_heads=1, activation="silu", eps=0.1)
    yield case("pad_id 4", pad_id=4)
    concat: Options = {"position_mode": "concat", "src_width": 5, "tgt_width": 3, "d_positions": 3}
    yield case("positions: concatenated", **concat)
    yield case("positions: learned", positions="learned")
    qkv: Options = {"positions": "learned", "position_mode": "qkv"}
    yield case("positions: learned, for q, k, v", **qkv)
    yield case("positions: learned, for q, k, v, shared memory", shared_memory=True, **qkv)
    yield case("positions: sinusoidal, for q, k, v", position_mode="qkv")
    options: Options = {"label_smoothing": 0.1, "z_loss": 0.3}
    yield case("dropout and loss options", {"dropout_key": KEY, **options}, dropout=0.3)


def _padded(rng: Generator, backend: Backend, length: int, size: int, pad_id: int) -> Array:
    """(5, length) ids: some rows full, one that ends in padding, one with a single token."""
    host = backend.to_numpy(rng.integers((5, length), low=1, high=size)).copy()
    host[host == pad_id] = size - 1
    host[1, length - 2 :] = pad_id
    host[2, 1:] = pad_id
    return backend.asarray(host)
