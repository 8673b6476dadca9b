"""A page of the documentation, run block by block as a reader does who installed what it names.

`run` starts a process that sees no package but those of the extras and packages that the page
names. It runs the page's Python blocks and shell blocks in order, in one namespace and one folder.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import traceback
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"^```(python|sh)\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE
)
INSTALLS = re.compile(r"(?:^|[\s/;&`(])pip install ([^&\n`]*)")
EXTRAS = re.compile(r"\.\[([\w,-]+)\]|\bextras? ((?:`[\w-]+`(?:, | and | or )?)+)")
NO_COMMANDS = re.compile(r"^(python3 -m venv|\. |\S*pip install|pip install)")


class Block(NamedTuple):
    """A block of code, and what the page says that it prints: None if it says nothing."""

    kind: str
    code: str
    shown: str | None


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """The code of a page, but for what it shows of a source."""
    found = [Block(kind, code, shown or None) for kind, code, shown in BLOCK.findall(text_of(page))]
    return [block for block in found if not is_of_a_source(block)]


def is_of_a_source(block: Block) -> bool:
    """Whether a block shows lines of a source; a line of three points stands for others."""
    parts = re.split(r"(?m)^ *\.\.\.\n", block.code)
    return block.kind == "python" and any(all(p in text for p in parts) for text in sources())


@cache
def sources() -> list[str]:
    paths = [path for folder in ("xformer", "backends") for path in (ROOT / folder).rglob("*.py")]
    return [path.read_text(encoding="utf-8") for path in paths]


def pages() -> list[str]:
    """All pages that have code to run."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md"]
    paths += sorted((ROOT / "docs").rglob("*.md"))
    return [name for path in paths if blocks(name := path.relative_to(ROOT).as_posix())]


# ---- What a page installs ----


def named(page: str) -> tuple[set[str], set[str]]:
    """The extras and the other packages that a page tells its reader to install."""
    text, extras, packages = text_of(page), set[str](), set[str]()
    for inside, listed in EXTRAS.findall(text):
        extras |= set(inside.split(",") if inside else re.findall(r"`([\w-]+)`", listed))
    for words in INSTALLS.findall(text):
        for word in shlex.split(words, comments=True):
            if re.fullmatch(r"[A-Za-z][\w-]*(\[[\w,]+\])?", word):
                packages.add(normal(word.partition("[")[0]))
    return extras, packages - {"xformer-array"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def closure(extras: set[str], packages: set[str]) -> tuple[set[str], set[str]]:
    """Distributions that pip would install, and those of them that are missing here."""
    from packaging.requirements import Requirement

    wanted = [Requirement(line) for line in project()["dependencies"]]
    for extra in extras:
        wanted += [Requirement(line) for line in project()["optional-dependencies"][extra]]
    wanted += [Requirement(name) for name in packages]
    seen: set[tuple[str, frozenset[str]]] = set()
    missing: set[str] = set()
    while wanted:
        each = wanted.pop()
        name, options = normal(each.name), frozenset(each.extras)
        if (name, options) in seen or (each.marker and not each.marker.evaluate({"extra": ""})):
            continue
        seen.add((name, options))
        if name == "xformer-array":
            inner = [line for o in options for line in project()["optional-dependencies"][o]]
        else:
            try:
                inner = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                missing.add(name)
                continue
        for line in inner:
            needed = Requirement(line)
            if needed.marker is None or any(
                needed.marker.evaluate({"extra": option}) for option in (*options, "")
            ):
                needed.marker = None
                wanted.append(needed)
    return {name for name, _ in seen}, missing


@cache
def modules() -> dict[str, set[str]]:
    """For each module that is installed, the distributions that have it."""
    found = importlib.metadata.packages_distributions()
    return {module: {normal(name) for name in names} for module, names in found.items()}


def hidden(page: str) -> list[str]:
    """The modules that are installed here, and not where a reader follows the page."""
    installed, _ = closure(*named(page))
    installed |= {"xformer-array", "pip", "setuptools"}
    return sorted(module for module, names in modules().items() if not names & installed)


# ---- What is shown ----

NUMBER = re.compile(r"-?\d+\.?\d*(?:e[-+]\d+)?")


def require_shown(block: Block, printed: str, exact: bool) -> None:
    """AssertionError unless a block printed what the page shows. A line `...` is any lines."""
    assert block.shown is not None
    parts = re.split(r"(?m)^\.\.\.$\n?", block.shown.rstrip())
    rest = printed.rstrip().splitlines()
    for i, part in enumerate(parts):
        lines = part.splitlines()
        starts = [0] if i == 0 else range(len(rest) - len(lines) + 1)
        found = [n for n in starts if _alike(lines, rest[n : n + len(lines)], exact)]
        assert found, f"{block.code}printed:\n{printed}\nand the page shows:\n{part}"
        rest = rest[found[0] + len(lines) :]
    assert len(parts) > 1 or not rest, f"{block.code}printed more:\n{rest}"


def _alike(shown: list[str], printed: list[str], exact: bool) -> bool:
    if exact or len(shown) != len(printed):
        return shown == printed
    pairs = list(zip(shown, printed, strict=True))
    if any(_words(a) != _words(b) for a, b in pairs):
        return False
    return all(
        abs(float(x) - float(y)) <= max(0.05 * abs(float(x)), 1e-6)
        for a, b in pairs
        for x, y in zip(NUMBER.findall(a), NUMBER.findall(b), strict=True)
    )


def _words(line: str) -> list[str]:
    return NUMBER.sub("0", line).split()


# ---- Running it ----


class Failed(AssertionError):
    """A block that ended with an error."""


def run(
    page: str, folder: Path, small: dict[str, str] | None = None, then: str = ""
) -> tuple[list[str], Any]:
    """What each block prints, and the value of the expression `then` after all of them.

    small: code that takes long, and what is run instead
    """
    codes = [[block.kind, block.code] for block in blocks(page)]
    for long, short in (small or {}).items():
        codes = [[kind, code.replace(long, short)] for kind, code in codes]
    order = {"blocks": codes, "hidden": hidden(page), "then": then}
    outcome = folder / ".outcome.json"
    environment = {**os.environ, "HOME": str(folder), "PYTHONPATH": str(ROOT)}
    environment["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    process = subprocess.run(
        [sys.executable, "-P", __file__, str(outcome)],
        input=json.dumps(order),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )
    if process.returncode:
        raise Failed(f"{page}:\n{process.stdout[-6000:]}")
    found = json.loads(outcome.read_text(encoding="utf-8"))
    return found["printed"], found["then"]


class Hiding:
    """A finder of modules that does not find the hidden ones."""

    def __init__(self, finder: Any, names: set[str]) -> None:
        self.finder, self.names = finder, names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self.names:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def shell(code: str) -> None:
    """Run the commands of a block; what installs something is left out."""
    from xformer.cli import main

    for line in code.replace("\\\n", " ").splitlines():
        for command in line.partition("  #")[0].split(" && "):
            if not command.strip() or command.startswith("#") or NO_COMMANDS.match(command):
                continue
            is_alone = not set("|<>;$") & set(command)
            if command.startswith("xformer ") and is_alone:  # in this process, which is quicker
                words = shlex.split(command, comments=True)[1:]
                try:
                    status = main(words)
                except SystemExit as end:
                    status = end.code
            else:
                done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True)
                print(done.stdout, end="")
                status = done.returncode
            if status:
                raise SystemExit(f"{command!r} ended with {status}")


def follow() -> None:
    """Read what is to be run from standard input; write what it printed to a file."""
    order = json.load(sys.stdin)
    names = set(order["hidden"])
    sys.meta_path[:] = [Hiding(finder, names) for finder in sys.meta_path]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed: list[str] = []
    for kind, code in order["blocks"]:
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                if kind == "python":
                    exec(compile(code, "<page>", "exec", dont_inherit=True), namespace)
                else:
                    shell(code)
        except BaseException:
            print(code, "printed:", out.getvalue(), sep="\n", file=sys.stderr)
            traceback.print_exc()
            raise SystemExit(1) from None
        printed.append(out.getvalue())
    value = eval(order["then"], namespace) if order["then"] else None
    Path(sys.argv[1]).write_text(json.dumps({"printed": printed, "then": value}), encoding="utf-8")


if __name__ == "__main__":
    follow()
