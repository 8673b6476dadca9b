"""The API reference: the public names of a module, their signatures and their docstrings.

    ```{public} xformer.ops
    ```

Public names are those of `__all__`; without it, what the module defines without an underscore.
Docstrings of this project are plain text, which is turned into reStructuredText here.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from types import ModuleType
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.inspect import stringify_signature

# ---------------------------------------------------------------- names


def public_names(module: ModuleType) -> list[str]:
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
    return [name for name in names if not isinstance(getattr(module, name), ModuleType)]


class Public(SphinxDirective):
    """`{public} module`: all public names of a module."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module = importlib.import_module(self.arguments[0])
        lines = [f".. py:module:: {module.__name__}", "", *plain(module.__doc__ or ""), ""]
        for name in public_names(module):
            lines += [*self.described(module.__name__, name, getattr(module, name)), ""]
        lines = ["````{eval-rst}", *lines, "````"]
        node = nodes.container()
        self.state.nested_parse(StringList(lines, module.__name__), self.content_offset, node)
        return node.children

    def described(self, module: str, name: str, value: Any) -> list[str]:
        path = f"{module}.{name}"
        owner = ".".join((getattr(value, "__module__", None) or module).split(".")[:2])
        if owner != module and name in public_names(importlib.import_module(owner)):
            return [f"- ``{name}`` is :py:obj:`{owner}.{name}`."]
        if inspect.isclass(value):
            return [f".. autoclass:: {path}", "   :members:"]
        if hasattr(value, "__call__") and hasattr(value, "__name__"):
            return [f".. autofunction:: {path}"]
        lines = [f".. py:data:: {name}"]
        if isinstance(value, dict):
            keys = ", ".join(f"``{key!r}``" for key in value)
            return [*lines, "", f"   A dictionary. Its keys: {keys}"]
        return [*lines, f"   :value: {value!r}"]


# ---------------------------------------------------------------- signatures


def signature(app: Sphinx, what: str, name: str, obj: Any, *rest: Any) -> Any:
    """The signature as it is written: annotations stay the strings that the source has."""
    try:
        found = inspect.signature(obj)
    except (TypeError, ValueError):
        return None
    parameters = list(found.parameters.values())
    if what == "method" and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    found = found.replace(parameters=[p.replace(default=_short(p.default)) for p in parameters])
    if what == "class":
        found = found.replace(return_annotation=inspect.Signature.empty)
    text = stringify_signature(found, unqualified_typehints=True, short_literals=True)
    arguments, _, result = text.partition(" -> ")
    return arguments, result or None


class _Source:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _short(default: Any) -> Any:
    """A default as source text: the name of a function or class, not its address."""
    if default is inspect.Parameter.empty:
        return default
    text = getattr(default, "__name__", None) or repr(default)
    return _Source("..." if "<" in text else text)


# ---------------------------------------------------------------- docstrings

FULL = 80  # a shorter line that could have held the next word was broken on purpose
ARGUMENTS = re.compile(r"(\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*)(: )")
PAGE = re.compile(r"docs/([\w/-]+)\.md")


def plain(text: str) -> list[str]:
    """Plain text as reStructuredText: paragraphs, lines, code; nothing is markup but backticks."""
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines += [*_block(block.split("\n")), ""]
    return lines


def _block(lines: list[str]) -> list[str]:
    if not any(lines):
        return []
    code = inspect.cleandoc("\n".join(lines))
    if all(line.startswith("    ") for line in lines) or _is_code(code):
        return [".. code-block:: python", "", *(f"   {line}" for line in code.split("\n"))]
    joined = [lines[0].strip()]
    for before, line in zip(lines, lines[1:], strict=False):
        word = line.strip().partition(" ")[0]
        starts = ARGUMENTS.match(line) or line.startswith("- ")
        if not starts and len(before) + 1 + len(word) > FULL:
            joined[-1] += " " + line.strip()
        else:
            joined.append(line.strip())
    if all(line.startswith("- ") for line in joined):
        return [f"- {_inline(line[2:])}" for line in joined]
    if len(joined) == 1 and not ARGUMENTS.match(joined[0]):
        return [_inline(joined[0])]
    return [f"| {_inline(line)}" for line in joined]


def _is_code(text: str) -> bool:
    try:
        statements = ast.parse(text).body
    except SyntaxError:
        return False
    kinds = {type(node) for statement in statements for node in ast.walk(statement)}
    return ast.AnnAssign not in kinds and bool(kinds & {ast.Call, ast.Assign})


def _inline(line: str) -> str:
    parts = line.split("`")
    if len(parts) % 2 == 0:  # a backtick without a partner
        return _escaped(line)
    out = ""
    if found := ARGUMENTS.match(parts[0]):
        names = ", ".join(f"``{name}``" for name in found[1].split(", "))
        out, parts[0] = f"{names}: ", parts[0][found.end() :]
    for i, part in enumerate(parts):
        out += f"\\ ``{part}``\\ " if i % 2 and part else _escaped(part)
    return out


def _escaped(text: str) -> str:
    text = re.sub(r"([\\*_|`\[\]<>:])", r"\\\1", text)
    text = re.sub(r" {2,}", lambda gap: "\u2003" * (len(gap[0]) // 2 + 1), text)
    return re.sub(r"docs/([\w/\\-]+)\.md", _page, text)


def _page(found: re.Match[str]) -> str:
    name = found[1].replace("\\", "")
    return f"\\ :doc:`docs/{name}.md </docs/{name}>`\\ "


def docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    text = "\n".join(lines)
    if inspect.isclass(obj) and text.startswith(f"{obj.__name__}("):
        text = ""  # Python's own, of a dataclass or NamedTuple without a docstring
    lines[:] = plain(text)


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out the fields of NamedTuples: the signature has them."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("public", Public)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", docstring)
    app.connect("autodoc-skip-member", skip)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
