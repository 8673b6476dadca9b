"""The model of --model, with what turns text to its ids and back."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from xformer import backends, kernels, pretrained, tree
from xformer.cli.progress import progress
from xformer.generation import Bytes
from xformer.generation.text import Codec, prompt_ids
from xformer.generation.token_ids import start_of
from xformer.models import EncoderDecoder
from xformer.pretrained import files
from xformer.pretrained.foreign import require_model
from xformer.pretrained.reading import read_json
from xformer.pretrained.tokenizer import tokenizer
from xformer.training import Vocabulary, checkpoint, load_vocabulary

TOKENIZERS = "tokenizer.json, vocab.json with merges.txt, vocab.txt"


class Found(NamedTuple):
    """A model that writes texts."""

    model: Any
    params: Any
    tokenizer: Codec
    slides: bool = False  # a text may outgrow the context: of a GPT by xformer train
    ends: bool = False  # a source has its end, as in `training.Pairs`; other tokenizers set it

    def prompt(self, text: str, what: str = "prompt") -> list[int]:
        """The ids that it reads of a text. ValueError, with what the text is, for none."""
        ids = prompt_ids(self.tokenizer, self.model, text, what)
        end = self.tokenizer.eos_id
        return [*ids, end] if self.ends and end is not None else ids


def opened(args: argparse.Namespace) -> Found:
    """What --model, --tokenizer, --backend, --device and --dtype name. OSError, ValueError."""
    path = Path(args.model)
    require_model(path)  # before the tokenizer, which another kind of folder may lack
    enable_float64(args.backend, args.dtype)
    if is_own(path):
        if args.tokenizer:
            raise ValueError(f"{path}, by xformer train, has its own: it goes without --tokenizer")
        return _trained(path, backends.get(args.backend, args.device), args.dtype)
    # The tokenizer first, since it is missing more often than the model; but among several beside
    # a file the model knows which.
    own: Codec | None = tokenizer(args.tokenizer) if args.tokenizer else None
    if own is None and path.is_dir():
        own = _tokenizer_in(path)
    with progress() as report:
        model, params = pretrained.load(
            path, args.backend, args.dtype, args.device, progress=report
        )
    return Found(model, params, own or _tokenizer_beside(path, model))


def is_own(path: Path) -> bool:
    """Whether a folder holds a model by xformer train, or `training.save`."""
    config = path / files.CONFIG
    return config.is_file() and read_json(config).get("format") == checkpoint.FORMAT


def _trained(path: Path, backend: backends.Backend, dtype: str) -> Found:
    model, params = checkpoint.load(path, backend)
    words = vocabulary_of(path)
    network = getattr(model, "network", model)
    is_pair = isinstance(network, EncoderDecoder)
    tables = (network.src_embed, network.target_embed) if is_pair else (network.embed,)
    sizes = sorted({table.vocab_size for table in tables if table is not None})
    if sizes != [words.size]:
        what = " of bytes, as it has none of its own" if isinstance(words, Bytes) else ""
        raise ValueError(
            f"{path}: its vocabulary must have the {' and '.join(map(str, sizes))} tokens of its "
            f"{type(model).__name__}, got {words.size}{what}"
        )
    params = tree.map(lambda a: backend.asarray(backend.to_numpy(a), dtype), params)
    return Found(model, params, words, slides=not is_pair, ends=is_pair)


def start_id(found: Found) -> int:
    """The id that targets of an encoder-decoder begin with. ValueError where nothing says it."""
    start = start_of(found.model)
    start = found.tokenizer.bos_id if start is None else start
    if start is None:
        raise ValueError("neither the model nor its tokenizer says which token begins a target")
    return start


def vocabulary_of(folder: Path) -> Vocabulary:
    """That of a run; bytes where there is none, as in checkpoints of long ago."""
    try:
        return load_vocabulary(folder)
    except FileNotFoundError:
        return Bytes()


def kernels_of(backend: Any) -> AbstractContextManager[None]:
    """The context in which kernels of a backend whose arrays are NumPy's run; else none."""
    return kernels(backend) if backend in backends.ON_NUMPY else nullcontext()


def enable_float64(backend: str, dtype: str) -> None:
    """JAX computes in float64 only where it is told to, before anything else."""
    if (backend, dtype) == ("jax", "float64"):
        backends.get("jax")  # says what is missing
        from xformer.backends.jax import enable_float64

        enable_float64()


def _tokenizer_in(folder: Path) -> Codec:
    try:
        return tokenizer(folder)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}; looked for {TOKENIZERS}; --tokenizer PATH names one that lies elsewhere"
        ) from error


def _tokenizer_beside(path: Path, model: Any) -> Codec:
    """Of llama2.c: that of as many tokens as the model has."""
    size = model.embed.vocab_size
    for name in sorted(path.parent.glob("tok*.bin")):
        if (found := tokenizer(name)).vocab_size == size:
            return found
    raise FileNotFoundError(
        f"there is no tokenizer of {size} tokens beside {path}: looked for tok*.bin; "
        "--tokenizer PATH names one that lies elsewhere"
    )
