"""`xformer summary`: a model's layers, parameters, memory and FLOPs."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from xformer import pretrained
from xformer.base.printing import scaled, size
from xformer.cli.open_model import is_own
from xformer.cli.parser import Parser
from xformer.cli.paths import MODEL, nonempty
from xformer.cli.table import Row, table
from xformer.dispatch.shapes import FLOATING
from xformer.inspection.summary import LENGTH, Part, Summary, context, summary
from xformer.layers import BlockConfig, ExpertsConfig
from xformer.models import EncoderDecoder
from xformer.pretrained import files
from xformer.training import checkpoint

WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes a number


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer summary`."""
    add_sizes(parser)
    parser.add_argument("--verbose", action="store_true", help="show the name of every parameter")


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add --model, the sizes of its input, --dtype and --json."""
    add = parser.add_argument
    add("--model", metavar="PATH", type=nonempty, required=True, help=MODEL)
    add("--batch", type=int, default=1, help="sequences in a batch (default: 1)")
    length = f"tokens of a sequence (default: {LENGTH}, or the context length if that is less)"
    add("--seq-len", type=int, help=length)
    add("--dtype", default="float32", choices=FLOATING, help="default: float32")
    add("--json", action="store_true", help="print one JSON object, for programs")


def run(args: argparse.Namespace) -> int:
    """Print the tables, or the JSON. The weights are not read."""
    model, tensors = inspected(Path(args.model))
    stored: dict[str, int] = {}
    for name in tensors:
        dtype = tensors[name].dtype
        nbytes = WIDTHS.get(dtype, 0) * math.prod(tensors[name].shape)
        stored[dtype] = stored.get(dtype, 0) + nbytes
    result = summary(model, batch=args.batch, length=args.seq_len, dtype=args.dtype)
    if args.json:
        print(json.dumps(_data(model, stored, result), indent=2))
        return 0
    print(table(_about(model, stored), right=()))
    print("\n" + table(_every(result) if args.verbose else _parts(model, result), right=(2, 3)))
    print("\n" + table(_memory(result), right=(1,)))
    print("\n" + table(_flops(model, result), right=(1,)))
    return 0


def inspected(path: Path) -> tuple[Any, Any]:
    """The model in `path`, and its tensors, which are not read."""
    if is_own(path):
        return checkpoint.inspect(path), files.open_tensors(path)
    return pretrained.inspect(path)


def _data(model: Any, stored: dict[str, int], result: Summary) -> dict[str, Any]:
    memory, flops = result.memory, result.flops
    of_memory = {"inference": memory.inference, "training": memory.training}
    of_flops = {"forward": flops.forward, "training": flops.training}
    return {
        "model": title(model),
        "context": context(model),
        "stored": stored,
        "parameters": result.n_params,
        "active_parameters": result.n_active,
        "parts": [
            {**part._asdict(), "parameters": part.n_params, "active": part.n_active}
            for part in result.parts
        ],
        "batch": result.batch,
        "length": result.length,
        "dtype": result.dtype,
        "bytes": memory._asdict() | of_memory,
        "flops_per_token": flops._asdict() | of_flops,
    }


def title(model: Any) -> str:
    """The name of a model's architecture, for people."""
    config = getattr(model, "hf_config", None) or {}
    names = config.get("architectures")
    return str(names[0] if names else config.get("model_type") or type(model).__name__)


def _about(model: Any, stored: dict[str, int]) -> Iterator[Row]:
    """The configuration in a few rows."""
    blocks = model.blocks
    yield "model", title(model)
    dtypes = ", ".join(dtype for dtype in stored if stored[dtype])
    yield "stored", f"{size(sum(stored.values()))} of {dtypes}"
    depth = f"{len(blocks)}"
    if isinstance(model, EncoderDecoder):
        depth = f"{len(model.encoder)} encoder, {len(model.decoder)} decoder"
    yield "layers", f"{depth}, width {_each(b.d_model for b in blocks)}"
    attns = [b.attn for b in blocks]
    heads = f"{_each(a.n_heads for a in attns)} heads of {_each(a.head_width for a in attns)}"
    if any(a.kv_heads != a.n_heads for a in attns):
        heads += f", {_each(a.kv_heads for a in attns)} key/value heads"
    yield "attention", heads + _windows(blocks)
    yield "feed-forward", _feed_forward(blocks)
    tables = {name: getattr(model, name, None) for name in ("embed", "src_embed", "tgt_embed")}
    sizes = sorted({e.vocab_size for e in tables.values() if e is not None})
    if sizes:
        yield "vocabulary", " and ".join(f"{n:,}" for n in sizes)
    limit = context(model)
    yield "context", "any" if limit is None else f"{limit:,}"


def _each(numbers: Iterable[int]) -> str:
    return " or ".join(f"{n:,}" for n in sorted(set(numbers)))


def _windows(blocks: Sequence[BlockConfig]) -> str:
    lefts = [w[0] + 1 for b in blocks if (w := b.attn.window) is not None and w[0] is not None]
    if not lefts:
        return ""
    where = "" if len(lefts) == len(blocks) else f" in {len(lefts)} of {len(blocks)} layers"
    return f", window {_each(lefts)}{where}"


def _feed_forward(blocks: Sequence[BlockConfig]) -> str:
    kinds = []
    for block in blocks:
        kind = f"width {block.ffn.d_ff:,}, {block.ffn.activation}"
        if isinstance(e := block.ffn, ExpertsConfig):
            kind = f"{e.n_experts} experts of {kind}, gated, {e.top_k} a token"
            if e.d_shared is not None:
                kind += f", and a shared one of width {e.d_shared:,}"
        elif e.gated:
            kind += ", gated"
        kinds.append(kind)
    return "; or ".join(dict.fromkeys(kinds))


def _parts(model: Any, result: Summary) -> Iterator[Row]:
    """One row for each part, and one for each linear layer or norm in it."""
    yield "part", "shape", "parameters", "share"
    for part in result.parts:
        groups = _grouped(part)
        whole = groups.pop("", None)
        times = f"{len(part.paths)} x {part.each:,}" if len(part.paths) > 1 else ""
        share = f"{part.n_params / result.n_params:.1%}"
        yield part.name, times if whole is None else whole[0], f"{part.n_params:,}", share
        for name, (shapes, count) in groups.items():
            yield f"  {name}", shapes, f"{count:,}", ""
    head = model.head
    if getattr(head, "tied", False):
        yield "head, tied", "the embedding's table", "0", ""
    yield "total", "", f"{result.n_params:,}", ""
    if result.n_active != result.n_params:
        share = f"{result.n_active / result.n_params:.1%}"
        yield "active for a token", "", f"{result.n_active:,}", share


def _grouped(part: Part) -> dict[str, tuple[str, int]]:
    """Shapes and size of each group of parameters: a weight with its bias, or a single one.

    The key is "" if the whole part is one group.
    """
    groups: dict[str, list[tuple[int, ...]]] = {}
    for leaf, shape in part.leaves.items():
        owner, _, last = leaf.rpartition(".")
        groups.setdefault(owner if owner and last in ("w", "b") else leaf, []).append(shape)
    if len(part.leaves) == 1 or set(part.leaves) == {"w", "b"}:
        groups = {"": list(part.leaves.values())}
    return {
        name: (" + ".join(map(_shape, shapes)), sum(map(math.prod, shapes)))
        for name, shapes in groups.items()
    }


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _every(result: Summary) -> Iterator[Row]:
    """One row for each parameter array."""
    yield "parameter", "shape", "parameters", "share"
    for part in result.parts:
        for path in part.paths:
            for leaf, shape in part.leaves.items():
                count = math.prod(shape)
                name = f"{path}.{leaf}".removesuffix(".")
                yield name, _shape(shape), f"{count:,}", f"{count / result.n_params:.1%}"
    yield "total", "", f"{result.n_params:,}", ""


def _memory(result: Summary) -> Iterator[Row]:
    memory = result.memory
    params = size(memory.params)
    yield "memory", "", f"{result.dtype}, batch {result.batch:,}, length {result.length:,}"
    yield "  parameters", params, ""
    yield "  forward", size(memory.forward), "output and saved set of inference"
    yield "  inference", size(memory.inference), "parameters + forward, without temporaries"
    yield "  saved set", size(memory.saved), "saved for backward, with the loss"
    yield "  gradients", params, ""
    yield "  moments", size(2 * memory.params), "AdamW, two for each parameter"
    what = "parameters + gradients + moments + saved set"
    yield "  training", size(memory.training), what
    if memory.kv_token is not None and memory.kv_cache is not None:
        whole = size(memory.kv_cache)
        what = f"a token, during generation; {whole} for the batch"
        yield "  KV cache", size(memory.kv_token), what


def _flops(model: Any, result: Summary) -> Iterator[Row]:
    flops, both = result.flops, isinstance(model, EncoderDecoder)
    of = "one token of the source and one of the target, " if both else ""
    yield "FLOPs a token", "", of + "in matmuls, at that length"
    yield "  parameters", scaled(flops.weights, "FLOP"), ""
    yield "  attention", scaled(flops.attention, "FLOP"), "scores and weighted sums of values"
    yield "  forward", scaled(flops.forward, "FLOP"), "parameters + attention"
    yield "  training", scaled(flops.training, "FLOP"), "3 x forward"
