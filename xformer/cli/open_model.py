"""Open the model of --model with its tokenizer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from xformer import backends, kernels, pretrained
from xformer.base import tree
from xformer.cli.progress import progress
from xformer.generation import Bytes
from xformer.generation.settings import start_of
from xformer.generation.text import Codec, prompt_ids
from xformer.models import EncoderDecoder
from xformer.pretrained import files
from xformer.pretrained.foreign import require_model
from xformer.pretrained.reading import PretrainedError, read_json
from xformer.pretrained.tokenizer import tokenizer
from xformer.training import Vocabulary, checkpoint, load_vocabulary

TOKENIZERS = "tokenizer.json, vocab.json with merges.txt, vocab.txt"
ELSEWHERE = "if the tokenizer is elsewhere, give --tokenizer PATH"


class LoadedModel(NamedTuple):
    """A model, its parameters and its tokenizer."""

    model: Any
    params: Any
    tokenizer: Codec
    slides: bool = False  # a text may be longer than the context of a model of xformer train
    ends: bool = False  # `prompt` appends the EOS token, as `training.Pairs` does to a source

    def prompt(self, text: str, what: str = "prompt") -> list[int]:
        """The token ids of `text`. ValueError, which calls the text `what`, if there are none."""
        ids = prompt_ids(self.tokenizer, self.model, text, what)
        end = self.tokenizer.eos_id
        return [*ids, end] if self.ends and end is not None else ids


def opened(args: Any) -> LoadedModel:
    """Load the model by the options `model`, `tokenizer`, `backend`, `device` and `dtype`.

    OSError or ValueError if a file is missing or damaged.
    """
    path = Path(args.model)
    require_model(path)  # first: a folder without a model has often no tokenizer either
    enable_float64(args.backend, args.dtype)
    if is_own(path):
        if args.tokenizer:
            raise ValueError(
                f"--tokenizer: {path} was written by xformer train and has a tokenizer"
            )
        return _trained(path, *loaded(path, args.backend, args.dtype, args.device))
    # A tokenizer is missing more often than a model, so it is opened first. Beside a .bin file
    # there may be several; then the size of the model's vocabulary decides.
    words: Codec | None = tokenizer(args.tokenizer) if args.tokenizer else None
    if words is None and path.is_dir():
        try:
            words = tokenizer(path)
        except FileNotFoundError as error:
            why = f"{error}; looked for {TOKENIZERS}; {ELSEWHERE}"
            raise FileNotFoundError(why) from error
    model, params = loaded(path, args.backend, args.dtype, args.device)
    return LoadedModel(model, params, words or _tokenizer_beside(path, model))


def loaded(path: Path, backend: str, dtype: str, device: str | None = None) -> tuple[Any, Any]:
    """The model in `path`, and its parameters on a backend. No tokenizer is needed."""
    if not is_own(path):
        with progress() as report:
            return pretrained.load(path, backend, dtype, device, progress=report)
    on = backends.get(backend, device)
    model, params = checkpoint.load(path, on)
    return model, tree.map(lambda a: on.asarray(on.to_numpy(a), dtype), params)


def is_own(path: Path) -> bool:
    """Whether `path` is a folder written by xformer train or `training.save`."""
    config = path / files.CONFIG
    if not config.is_file():
        return False
    return str(read_json(config).get("format")).startswith(checkpoint.FORMAT_PREFIX)


def _trained(path: Path, model: Any, params: Any) -> LoadedModel:
    """A model of xformer train with its vocabulary. ValueError if their sizes differ."""
    words = vocabulary_of(path)
    is_pair = isinstance(model, EncoderDecoder)
    tables = (model.src_embed, model.target_embed) if is_pair else (model.embed,)
    sizes = sorted({table.vocab_size for table in tables if table is not None})
    if sizes != [words.size]:
        what = " bytes, because the folder has no vocabulary" if isinstance(words, Bytes) else ""
        raise ValueError(
            f"{path}: the vocabulary must have {' and '.join(map(str, sizes))} tokens, like the "
            f"{type(model).__name__}, got {words.size}{what}"
        )
    return LoadedModel(model, params, words, slides=not is_pair, ends=is_pair)


def start_id(loaded: LoadedModel) -> int:
    """The id of the start token of an encoder-decoder's targets. ValueError if it is unknown."""
    start = start_of(loaded.model)
    start = loaded.tokenizer.bos_id if start is None else start
    if start is None:
        raise ValueError("neither the model nor its tokenizer names the start token of a target")
    return start


def vocabulary_of(folder: Path) -> Vocabulary:
    """The vocabulary in the folder of a run; bytes if there is none (old checkpoints)."""
    try:
        return load_vocabulary(folder)
    except FileNotFoundError:
        return Bytes()


def kernels_of(backend: Any) -> AbstractContextManager[None]:
    """A context with the kernels of `backend` if it computes on NumPy arrays; else an empty one."""
    return kernels(backend) if backend in backends.ON_NUMPY else nullcontext()


def enable_float64(backend: str, dtype: str) -> None:
    """Enable float64 in JAX if `backend` and `dtype` need it. Call it before JAX makes an array."""
    if (backend, dtype) == ("jax", "float64"):
        backends.get("jax")  # raises if JAX is missing
        from xformer.backends.jax import enable_float64

        enable_float64()


def _tokenizer_beside(path: Path, model: Any) -> Codec:
    """The llama2.c tokenizer beside `path` that has the model's vocabulary size."""
    size = model.embed.vocab_size
    others = ""
    for name in sorted(path.parent.glob("tok*.bin")):
        try:
            candidate = tokenizer(name)
        except PretrainedError as error:  # a damaged file, or one of another kind
            others += f"; {error}"
            continue
        if candidate.vocab_size == size:
            return candidate
    raise FileNotFoundError(
        f"there is no tokenizer of {size} tokens beside {path}: looked for tok*.bin{others}; "
        f"{ELSEWHERE}"
    )
