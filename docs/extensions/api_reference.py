"""The API reference: the public names of a module, their signatures and their docstrings.

    ```{public} xformer.ops
    ```

Public names are those of `__all__`; without it, what the module defines without an underscore.
Docstrings of this project are plain text, which is turned into reStructuredText here, and their
formulas into TeX (`formulas`).
"""

from __future__ import annotations

import ast
import inspect
import itertools
import pathlib
import re
from collections.abc import Set
from importlib import import_module
from types import ModuleType
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from formulas import START, parts
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.inspect import stringify_signature

from xformer.dispatch import Overridable

# ---------------------------------------------------------------- names

PAGES = pathlib.Path(__file__).parent.parent / "api"
TEXT = "".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md")))
MODULES = re.findall(r"{public} (\S+)", TEXT)


def public_names(module: ModuleType) -> list[str]:
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
    return [name for name in names if not isinstance(getattr(module, name), ModuleType)]


PUBLIC = [f"{name}.{public}" for name in MODULES for public in public_names(import_module(name))]


class Public(SphinxDirective):
    """`{public} module`: all public names of a module."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        module = import_module(name)
        lines = [f".. py:module:: {name}", "", *plain(module.__doc__ or "", _links(name)), ""]
        for public in public_names(module):
            lines += [*self.described(name, public, getattr(module, public)), ""]
        lines = ["````{eval-rst}", *lines, "````"]
        node = nodes.container()
        self.state.nested_parse(StringList(lines, name), self.content_offset, node)
        return node.children

    def described(self, module: str, name: str, value: Any) -> list[str]:
        path = f"{module}.{name}"
        owner = ".".join((getattr(value, "__module__", None) or module).split(".")[:2])
        if owner != module and f"{owner}.{name}" in PUBLIC:
            return [f"- ``{name}`` is :py:obj:`{owner}.{name}`."]
        if inspect.isclass(value):
            return [f".. autoclass:: {path}", "   :members:"]
        if inspect.isroutine(value) or isinstance(value, Overridable):
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
        signed = inspect.signature(obj)
    except (TypeError, ValueError):
        return None
    parameters = list(signed.parameters.values())
    if what == "method" and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    signed = signed.replace(parameters=[p.replace(default=_short(p.default)) for p in parameters])
    if what == "class":
        signed = signed.replace(return_annotation=inspect.Signature.empty)
    text = stringify_signature(signed, unqualified_typehints=True, short_literals=True)
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

# A line that could have held the next word was broken on purpose: in prose only if it is short.
PROSE, LIST = 80, 90
ARGUMENTS = re.compile(r"(\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*)(: )")
STARTS = re.compile(rf"{ARGUMENTS.pattern}|- |[A-Z]\w+: docs/")


def plain(text: str, names: dict[str, str], words: Set[str] = frozenset()) -> list[str]:
    """Plain text as reStructuredText: paragraphs, lines, code; nothing is markup but backticks.

    names: what in backticks becomes a link, and to which public name
    words: the arguments, which formulas may have
    """
    words = words | {match[1].split("(")[0].split("_")[0] for match in START.finditer(text)}
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines += [*_block(block.split("\n"), names, words), ""]
    return lines


def _block(lines: list[str], names: dict[str, str], words: Set[str]) -> list[str]:
    if not any(lines):
        return []
    code = inspect.cleandoc("\n".join(lines))
    if all(line.startswith("    ") for line in lines) or _is_code(code):
        return [".. code-block:: python", "", *(f"   {line}" for line in code.split("\n"))]
    full = LIST if any(ARGUMENTS.match(line) for line in lines) else PROSE
    joined = [lines[0].strip()]
    for before, line in itertools.pairwise(lines):
        word = line.strip().partition(" ")[0]
        if not STARTS.match(line) and len(before) + 1 + len(word) > full:
            joined[-1] += " " + line.strip()
        else:
            joined.append(line.strip())
    if all(line.startswith("- ") for line in joined):
        return [f"- {_inline(line[2:], names, words)}" for line in joined]
    if len(joined) == 1:
        return ["\\ " + _inline(joined[0], names, words)]
    return [f"| {_inline(line, names, words)}" for line in joined]


def _is_code(text: str) -> bool:
    try:
        statements = ast.parse(text).body
    except SyntaxError:
        return False
    kinds = {type(node) for statement in statements for node in ast.walk(statement)}
    return ast.AnnAssign not in kinds and bool(kinds & {ast.Call, ast.Assign})


def _inline(line: str, names: dict[str, str], words: Set[str]) -> str:
    """One line, of one or several parts such as "x: (..., I)   w: (I, O)"."""
    return "\u2003\u2003".join(_part(part, names, words) for part in re.split(r" {2,}", line))


def _part(text: str, names: dict[str, str], words: Set[str]) -> str:
    out = ""
    if match := ARGUMENTS.match(text):
        out = ", ".join(f"``{name}``" for name in match[1].split(", ")) + ": "
        text = text[match.end() :]
    for i, part in enumerate(re.split(r"`(\S|\S[^`]*\S)`", text)):
        if i % 2:
            code = f":py:obj:`{part} <{names[part]}>`" if part in names else f"``{part}``"
            out += f"\\ {code}\\ "
        else:
            for is_formula, piece in parts(part, words):
                out += f"\\ :math:`{piece}`\\ " if is_formula else _escaped(piece)
    return out


def _escaped(text: str) -> str:
    text = re.sub(r"([\\*_|`\[\]<>:])", r"\\\1", text)
    return re.sub(r"docs/([\w/\\-]+)\.md", _page, text)


def _page(match: re.Match[str]) -> str:
    name = match[1].replace("\\", "")
    return f"\\ :doc:`docs/{name}.md </docs/{name}>`\\ "


def _links(module: str, obj: Any = None) -> dict[str, str]:
    """Names as a docstring of `module` may write them, without those of `obj`'s parameters."""
    names = {path: path for path in PUBLIC}
    names |= {path.removeprefix("xformer."): path for path in PUBLIC}
    names |= {path.removeprefix(f"{module}."): path for path in PUBLIC}
    return {name: path for name, path in names.items() if name not in _parameters(obj)}


def _parameters(obj: Any) -> set[str]:
    try:
        return set(inspect.signature(obj).parameters)
    except (TypeError, ValueError):
        return set()


def docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    text = "\n".join(lines)
    if inspect.isclass(obj) and text.startswith(f"{obj.__name__}("):
        text = ""  # Python's own, of a dataclass or NamedTuple without a docstring
    module = max((m for m in MODULES if name.startswith(f"{m}.")), key=len)
    lines[:] = plain(text, _links(module, obj), _parameters(obj))


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out the fields of NamedTuples: the signature has them."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("public", Public)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", docstring)
    app.connect("autodoc-skip-member", skip)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
