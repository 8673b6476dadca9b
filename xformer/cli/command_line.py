"""Run one command of `xformer`.

Each command is one module with two functions: `add_arguments(parser)` adds its options, and
`run(args)` returns the exit status. Only the module of the command that is asked for is imported.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import xformer
from xformer.cli.errors import by_option, in_words, sizes_given
from xformer.cli.output import end, notes, one_line, printing
from xformer.cli.parser import Parser
from xformer.distributed.launcher import launched

COMMANDS = {  # name -> what it does
    "prepare": "tokenise text into a folder, to train on",
    "train": "train a GPT on text",
    "plot": "draw the curves of training runs",
    "generate": "continue a prompt",
    "embed": "compare texts by their embeddings",
    "classify": "classify texts",
    "tag": "label parts of texts, such as names",
    "rank": "rank texts by a query",
    "search": "find passages in the texts of a folder by their meaning",
    "finetune": "fine-tune a pretrained model, all parameters or LoRA adapters",
    "export": "write a model as an ONNX file",
    "attention": "draw the attention weights of each head of a layer",
    "signal-flow": "draw the sizes of activations and gradients, layer by layer",
    "trace": "show each op of a training step, forward and backward",
    "exercise": "write and grade the exercises of the lectures",
    "gradcheck": "check every gradient",
    "summary": "show a model's layers, parameters, memory and FLOPs",
    "memory": "show the memory of a training step, computed and measured",
    "warm-up": "compile the kernels of backend numba ahead",
    "info": "show the backends that work here",
    "completion": "print a script for completion by the Tab key",
}
TOGETHER = ("train", "finetune")  # commands that several processes run together
DESCRIPTION = "The transformer, forward and backward, on any array library."


def run(argv: Sequence[str] | None) -> int:
    """As `xformer.cli.main`, which catches Ctrl-C during the imports too."""
    with printing() as out:
        status = _run(argv)
        out.flush()
        if out.lost is not None and not isinstance(out.lost, BrokenPipeError):
            why = out.lost.strerror
            print(f"xformer: error: standard output cannot be written: {why}", file=sys.stderr)
            status = status or 1
    return status


def command_parser(asked: Collection[str] = tuple(COMMANDS)) -> tuple[Parser, Mapping[str, Parser]]:
    """The parser of the command line, and the parsers of the commands by name.

    asked: the commands that get their options, for which their modules are imported
    """
    parser = Parser(prog="xformer", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"xformer {xformer.__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, what in COMMANDS.items():
        command = subparsers.add_parser(name, help=what)
        if name in asked:
            module = importlib.import_module(f"xformer.cli.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser, subparsers.choices


def _run(argv: Sequence[str] | None) -> int:
    usual, warnings.formatwarning = warnings.formatwarning, _warning
    file: Any = None  # of --config
    args = argparse.Namespace()
    try:
        words = sys.argv[1:] if argv is None else list(argv)
        _meet(words)
        asked = [word for word in words if word in COMMANDS][:1]
        parser, commands = command_parser(asked)
        args = parser.parse_args(words)
        if getattr(args, "config", None) is not None:
            from xformer.cli import config_file  # after parsing: this import takes long

            file = config_file.use(args)
        with ExitStack() as stack:
            if (backend := getattr(args, "backend", None)) is not None:
                # After parsing: this import takes long.
                from xformer.cli.open_model import kernels_of

                stack.enter_context(notes())
                stack.enter_context(kernels_of(backend))
            status: int = args.run(args)
    except (ValueError, OSError, ImportError, ArithmeticError, MemoryError, RuntimeError) as error:
        message = by_option(in_words(error), args)
        if file is not None and isinstance(error, ValueError):
            error.add_note(file.note(message, args))
        if isinstance(error, MemoryError):
            sizes = sizes_given(args, commands[asked[0]])
            if sizes not in message:
                error.add_note(f"asked for {sizes}")
        added = getattr(error, "__notes__", [])  # for example, the last good checkpoint
        end(f"xformer: error: {one_line('; '.join([message, *added]))}")
        return 1
    except KeyboardInterrupt:
        end("xformer: interrupted")
        return 130
    except Exception:  # a mistake of ours: with other processes, end them too
        if launched() > 1:
            end(traceback.format_exc())
        raise
    finally:
        warnings.formatwarning = usual
    return status


def _meet(words: Sequence[str]) -> None:
    """Find the processes that were started together, so that an error in one of them ends all.

    ValueError for a command that runs in one process: several would write the same files.
    """
    n, command = launched(), words[0] if words else ""
    if n > 1 and command in TOGETHER:
        from xformer.distributed.world import world

        world()
    elif n > 1 and command in COMMANDS and command != "info":
        raise ValueError(f"xformer {command} runs in one process, and {n} were started together")


def _warning(message: Warning | str, *_: Any, **__: Any) -> str:
    return f"xformer: warning: {one_line(str(message))}\n"
