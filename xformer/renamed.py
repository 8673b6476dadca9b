"""Old public names. They work in 0.1 and are removed in 0.2; each use warns with the new name.

CHANGELOG.md has the table. Names of modules are in `NAMES`. Old methods and arguments are declared
beside the new ones, by `method` and `arguments`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

COMMANDS = {"check": "gradcheck", "flow": "signal-flow", "ledger": "memory"}
OPTIONS: dict[str, dict[str, str]] = {  # of each command
    "finetune": {"--validate": "--validation-fraction"},
    "generate": {"--checkpoint": "--model", "--max-new": "--max-new-tokens"},
    "memory": {
        "--checkpoint-activations": "--activation-checkpointing",
        "--length": "--seq-len",
    },
    "prepare": {"--share": "--validation-fraction", "--vocabulary": "--tokenizer"},
    "signal-flow": {"--width": "--d-model"},
    "summary": {"--length": "--seq-len"},
    "train": {
        "--at": "--resume-step",
        "--checkpoint-activations": "--activation-checkpointing",
        "--context": "--max-len",
        "--every": "--checkpoint-every",
        "--keep": "--keep-checkpoints",
        "--vocabulary": "--tokenizer",
        "--width": "--d-model",
    },
}
FIELDS = {  # of configurations, in files that earlier versions wrote
    "LanguageModel": {
        "n_groups": "n_shared_layer_groups",
        "balance": "load_balancing_weight",
        "router_z": "router_z_weight",
        "checkpoint": "activation_checkpointing",
        "relative": "relative_bias",
        "source": "hf_config",
    },
    "EncoderDecoder": {
        "checkpoint": "activation_checkpointing",
        "encoder_relative": "encoder_relative_bias",
        "decoder_relative": "decoder_relative_bias",
        "source": "hf_config",
    },
    "GPT": {"norm": "norm_placement", "checkpoint": "activation_checkpointing"},
    "Transformer": {"norm": "norm_placement", "checkpoint": "activation_checkpointing"},
    "notes": {  # of a run of `xformer train`
        name.removeprefix("--").replace("-", "_"): new.removeprefix("--").replace("-", "_")
        for name, new in OPTIONS["train"].items()
    }
    | {"graph": "compile"},
}
NEWER = {"position_mode": "add"}  # of a GPT: fields that earlier versions had not, as they behaved

# New and old parts of the names of parameters, in files that earlier versions wrote.
PARAMETERS = {"relative_bias": "relative"}

# The fields of a BlockConfig before it had parts, in order; where each is now. Then older names.
BLOCK = {
    "d_model": "attn.d_model",
    "n_heads": "attn.n_heads",
    "d_ff": "ffn.d_ff",
    "n_kv_heads": "attn.n_kv_heads",
    "d_head": "attn.d_head",
    "d_value": "attn.d_value",
    "activation": "ffn.activation",
    "gated": "ffn.gated",
    "experts": "experts",
    "norm_placement": "norm_placement",
    "norm": "norm.kind",
    "norm_offset": "norm.offset",
    "eps": "norm.eps",
    "parallel": "parallel",
    "shared_norm": "shared_norm",
    "bias": "attn.bias ffn.bias norm.bias",
    "qkv_bias": "attn.qkv_bias",
    "o_bias": "attn.o_bias",
    "ffn_bias": "ffn.bias",  # None: bias
    "qk_norm": "attn.qk_norm",
    "scale": "attn.scale",
    "window": "attn.window",
    "softcap": "attn.softcap",
    "sinks": "attn.sinks",
    "shaw_max_distance": "attn.shaw_max_distance",
    "dropout": "dropout attn.dropout",
    "attn_dropout": "attn.dropout",  # None: dropout
    "hidden_dropout": "ffn.dropout",
    "kv_heads": "attn.kv_heads",  # to read
    "head_width": "attn.head_width",
    "value_width": "attn.value_width",
    "probs_dropout": "attn.dropout",
    "norm_config": "norm",
    "norm_kind": "norm.kind",
    "shaw": "attn.shaw_max_distance",
}
PLACEMENTS = ("pre", "post", "sandwich", "output")  # values of `norm`, when it was the placement

NAMES: dict[str, dict[str, str]] = {
    "xformer": {"Key": "RandomKey", "initial": "initializers"},
    "xformer.backends": {"of": "backend_of", "why_not": "unavailable_reason"},
    "xformer.generation": {"Prefix": "PrefilledPrompt"},
    "xformer.generation.samplers": {"likeliest": "greedy"},
    "xformer.layers": {
        "Past": "KVCache",
        "Rotary": "RopeTables",
        "linears": "linear_many",
        "rotary": "rope_tables",
    },
    "xformer.ops": {"Key": "RandomKey"},
}


def new_name(module: str, name: str) -> str:
    """The new name of `module.name`, with a warning. AttributeError if there is none."""
    new = NAMES.get(module, {}).get(name)
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    _warn(f"{module}.{name}", f"{module}.{new}", 4)
    return new


def value_of(instance: Any, old: str, new: str) -> Any:
    """The value of the attribute `new`, with a warning. For a property `old` of a NamedTuple."""
    kind = type(instance).__name__
    _warn(f"{kind}.{old}", f"{kind}.{new}", 4)
    return getattr(instance, new)


def method(old: str, new: str, **names: str) -> Any:
    """A method `old`, for a class body, that calls the method `new`. names: of `arguments`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        kind = type(self).__name__
        _warn(f"{kind}.{old}", f"{kind}.{new}", 3)
        kwargs = {names.get(name, name): value for name, value in kwargs.items()}
        return getattr(self, new)(*args, **kwargs)

    call.__name__, call.__doc__ = old, f"The old name of `{new}`."
    return call


def attribute(new: str) -> Any:
    """A property, for a class body, that returns the attribute `new` (a dotted name)."""

    class Old:
        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type) -> Any:
            if instance is None:
                raise AttributeError(f"type object {owner.__name__!r} has no {self.name!r}")
            _warn(f"{owner.__name__}.{self.name}", f"{owner.__name__}.{new}", 3)
            return operator.attrgetter(new)(instance)

    return Old()


def flat_block(kind: type[T]) -> type[T]:
    """A decorator of `BlockConfig`: the old fields of `BLOCK` can be passed and read."""
    cls: Any = kind
    init, names = cls.__init__, tuple(field.name for field in dataclasses.fields(cls))

    @functools.wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        was_flat = bool(args) and isinstance(args[0], int)
        kwargs |= dict(zip(BLOCK if was_flat else names, args, strict=False))
        old = kwargs.keys() - set(names) | {n for n in ("norm",) if isinstance(kwargs.get(n), str)}
        if old and old <= BLOCK.keys():
            _warn(f"BlockConfig({', '.join(sorted(old))})", "BlockConfig(attn, ffn, norm)", 3)
            kwargs = block_parts(kwargs)
        init(self, **kwargs)

    cls.__init__ = call
    for name, path in BLOCK.items():
        if not hasattr(cls, name) and name not in names:
            old = attribute(path.split()[0])
            old.__set_name__(cls, name)
            setattr(cls, name, old)
    return kind


def block_parts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `BlockConfig` from old fields. If a part is among them, they change it.

    fields: fields of `BLOCK`, and parts: "attn", "ffn" and "norm"
    """
    from xformer.layers import AttentionConfig, ExpertsConfig, FeedForwardConfig, NormConfig

    kinds: Any = {"attn": AttentionConfig, "ffn": FeedForwardConfig, "norm": NormConfig}
    fields = dict(fields)
    if isinstance(fields.get("window"), list):  # of a file
        fields["window"] = tuple(fields["window"])
    if fields.get("norm") in PLACEMENTS:
        fields["norm_placement"] = fields.pop("norm")
    parts = {
        name: fields[name] for name, kind in kinds.items() if isinstance(fields.get(name), kind)
    }
    changes: dict[str, dict[str, Any]] = {name: {} for name in ("", *kinds)}
    for name in [name for name in BLOCK if name in fields and name not in parts]:
        if fields[name] is not None or name not in ("attn_dropout", "ffn_bias"):
            for path in BLOCK[name].split():
                part, _, field = path.rpartition(".")
                changes[part][field] = fields[name]
    merged = changes.pop("")
    if (experts := merged.pop("experts", None)) is not None:
        parts["ffn"] = ExpertsConfig(**experts) if isinstance(experts, dict) else experts
        changes["ffn"] = {}
    for name, kind in kinds.items():
        changed = changes[name]
        merged[name] = (
            dataclasses.replace(parts[name], **changed) if name in parts else kind(**changed)
        )
    return merged


def arguments(**names: str | tuple[str, Sequence[str]]) -> Callable[[T], T]:
    """A decorator of a function or a class that accepts old keyword arguments.

    names: "new"; "not new" if the new argument has the opposite value; ("new", values) if the old
        name has another meaning now: `values` are those of the old meaning
    """

    def decorate(target: T) -> T:
        owner: Any = target
        if isinstance(owner, type):
            cls: Any = owner
            cls.__init__ = _accepting(cls.__init__, cls.__name__, names)
            return target
        return _accepting(owner, owner.__name__, names)

    return decorate


def command_line(argv: Sequence[str]) -> list[str]:
    """The command and its options by their new names, with a warning for each old one."""
    if not argv:
        return []
    command, *rest = argv
    if command in COMMANDS:
        _warn(f"xformer {command}", f"xformer {COMMANDS[command]}", 3, FutureWarning)
        command = COMMANDS[command]
    words = [command]
    for word in rest:
        name, equals, value = word.partition("=")
        new = OPTIONS.get(command, {}).get(name)
        if new is not None:
            _warn(name, new, 3, FutureWarning)  # which a terminal shows
        words.append(word if new is None else new + equals + value)
    return words


def fields(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """A file's fields by their new names. kind: of `FIELDS`, if it has any."""
    if kind == "BlockConfig" and "attn" not in values:
        return block_parts(values)
    names = FIELDS.get(kind, {})
    if not (names.keys() - set(names.values())) & values.keys():
        return values
    return {names.get(name, name): value for name, value in values.items()}


def configuration(node: Any) -> Any:
    """A model's configuration from `dataclasses.asdict`, with the new names of its fields."""
    if isinstance(node, list):
        return [configuration(part) for part in node]
    if not isinstance(node, dict):
        return node
    for kind, names in FIELDS.items():
        if kind != "notes" and all(n in node or names[n] in node for n in names):
            node = fields(kind, node)
    if node.get("name") == "GPT":  # as a run describes it
        node = NEWER | node
    return {name: configuration(part) for name, part in node.items()}


def parameters(arrays_of_file: Mapping[str, T], wanted: Iterable[str]) -> dict[str, T]:
    """A file's arrays by the new names of `PARAMETERS`, where these are in `wanted`."""
    arrays = dict(arrays_of_file)
    for new in wanted:
        old = ".".join(PARAMETERS.get(part, part) for part in new.split("."))
        if new not in arrays and old in arrays:
            arrays[new] = arrays.pop(old)
    return arrays


def about(description: Any) -> Any:
    """The description of a run, with the new names of its model's fields."""
    if not isinstance(description, dict) or "model" not in description:
        return description
    return description | {"model": configuration(description["model"])}


def _accepting(function: Any, title: str, names: dict[str, str | tuple[str, Sequence[str]]]) -> Any:
    def rename(kwargs: dict[str, Any]) -> None:
        for old, new in names.items():
            new, values = new if isinstance(new, tuple) else (new, None)
            if old not in kwargs or (values is not None and kwargs[old] not in values):
                continue
            value, warned = kwargs.pop(old), (f"{title}({old}=)", f"{title}({new}=)")
            if new.startswith("not "):
                new, value = new.removeprefix("not "), not value
                warned = f"{title}({old}={not value})", f"{title}({new}={value})"
            _warn(*warned, 4)
            kwargs[new] = value  # `dataclasses.replace` gives the new one too

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            rename(kwargs)
        return function(*args, **kwargs)

    call.rename = rename  # type: ignore[attr-defined]  # kernels of an op need the new names
    return call


def _warn(
    old: str, new: str, stacklevel: int, category: type[Warning] = DeprecationWarning
) -> None:
    why = f"{old} is called {new}; the old name will be removed in 0.2"
    warnings.warn(why, category, stacklevel=stacklevel)
