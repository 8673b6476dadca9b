"""Old public names. They work in 0.1 and go in 0.2; each use warns with the new name.

CHANGELOG.md has the table. A name is listed here once: names of modules in `NAMES`; methods and
arguments where they are declared, by `method` and `arguments`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

COMMANDS = {"check": "gradcheck", "flow": "signal-flow", "ledger": "memory"}
OPTIONS: dict[str, dict[str, str]] = {  # of each command
    "finetune": {"--validate": "--validation-fraction"},
    "generate": {"--checkpoint": "--model", "--max-new": "--max-new-tokens"},
    "memory": {"--checkpoint-activations": "--activation-checkpointing"},
    "prepare": {"--share": "--validation-fraction", "--vocabulary": "--tokenizer"},
    "signal-flow": {"--width": "--d-model"},
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
    "BlockConfig": {"norm": "norm_placement", "norm_kind": "norm", "shaw": "shaw_max_distance"},
    "LanguageModel": {  # before EncoderDecoder, whose old names it has too
        "n_groups": "n_shared_layer_groups",
        "balance": "load_balancing_weight",
        "router_z": "router_z_weight",
        "checkpoint": "activation_checkpointing",
        "source": "hf_config",
    },
    "EncoderDecoder": {"checkpoint": "activation_checkpointing", "source": "hf_config"},
    "GPT": {"norm": "norm_placement", "checkpoint": "activation_checkpointing"},
    "Transformer": {"norm": "norm_placement", "checkpoint": "activation_checkpointing"},
    "notes": {  # of a run of `xformer train`
        name.removeprefix("--").replace("-", "_"): new.removeprefix("--").replace("-", "_")
        for name, new in OPTIONS["train"].items()
    }
    | {"graph": "compile"},
}

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


def method(old: str, new: str, **names: str) -> Any:
    """For a class body: a method `old` that calls the method `new`. names: as in `arguments`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        kind = type(self).__name__
        _warn(f"{kind}.{old}", f"{kind}.{new}", 3)
        kwargs = {names.get(name, name): value for name, value in kwargs.items()}
        return getattr(self, new)(*args, **kwargs)

    call.__name__, call.__doc__ = old, f"The old name of `{new}`."
    return call


def attribute(new: str) -> Any:
    """For a class body: a property that is called otherwise now."""

    class Old:
        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type) -> Any:
            if instance is None:
                raise AttributeError(f"type object {owner.__name__!r} has no {self.name!r}")
            _warn(f"{owner.__name__}.{self.name}", f"{owner.__name__}.{new}", 3)
            return getattr(instance, new)

    return Old()


def arguments(**names: str | tuple[str, Sequence[str]]) -> Callable[[T], T]:
    """A decorator of a function or a class: old keyword arguments, each with its new name.

    With the values that the old name had, if the name has another meaning now.
    """

    def decorate(target: T) -> T:
        owner: Any = target
        if isinstance(owner, type):
            made: Any = owner
            made.__init__ = _accepting(made.__init__, made.__name__, names)
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
    found = [command]
    for word in rest:
        name, equals, value = word.partition("=")
        new = OPTIONS.get(command, {}).get(name)
        if new is not None:
            _warn(name, new, 3, FutureWarning)  # which a terminal shows
        found.append(word if new is None else new + equals + value)
    return found


def fields(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    """A file's fields by their new names. kind: of `FIELDS`, if it has any."""
    names = FIELDS.get(kind, {})
    if not (names.keys() - set(names.values())) & found.keys():
        return found
    return {names.get(name, name): value for name, value in found.items()}


def configuration(found: Any) -> Any:
    """What `dataclasses.asdict` wrote of a model, with the new names of its fields."""
    if isinstance(found, list):
        return [configuration(part) for part in found]
    if not isinstance(found, dict):
        return found
    for kind, names in FIELDS.items():
        old = names.keys() - set(names.values())
        if kind != "notes" and old <= found.keys():
            found = fields(kind, found)
    return {name: configuration(part) for name, part in found.items()}


def about(found: Any) -> Any:
    """The description of a run, with the new names of its model's fields."""
    if not isinstance(found, dict) or "model" not in found:
        return found
    return found | {"model": configuration(found["model"])}


def _accepting(function: Any, title: str, names: dict[str, str | tuple[str, Sequence[str]]]) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for old, new in names.items() if kwargs else ():
            new, values = new if isinstance(new, tuple) else (new, None)
            if old in kwargs and (values is None or kwargs[old] in values):
                _warn(f"{title}({old}=)", f"{title}({new}=)", 3)
                kwargs[new] = kwargs.pop(old)  # `dataclasses.replace` gives the new one too
        return function(*args, **kwargs)

    return call


def _warn(
    old: str, new: str, stacklevel: int, category: type[Warning] = DeprecationWarning
) -> None:
    why = f"{old} is called {new}; the old name goes in 0.2"
    warnings.warn(why, category, stacklevel=stacklevel)
