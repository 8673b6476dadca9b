"""CUDA source compiled for the CPU, kept beside this file as bytecode is."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xformer.backends.cupy.module import Source

HERE = Path(__file__).parent
COMPILER = "g++"
# Instead of the shim's own checks, the address and undefined-behaviour sanitizers of the compiler;
# their library must be loaded before Python: see tests/test_cuda_sanitizers.py.
SANITIZE = os.environ.get("XFORMER_CUDA_SHIM") == "sanitize"

COMMON = ("-std=c++17", "-g1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off")
CHECKED = ("-O1", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0")
SANITIZED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SANITIZED += ("-fsanitize-address-use-after-scope", "-fno-omit-frame-pointer")
KERNEL = ("-fno-strict-aliasing", "-w")  # NVRTC is who warns: tests/test_cuda_compile.py

ENTRIES = """
}}  // namespace
static const shim::Entry entries[] = {{{entries}}};
extern "C" const shim::Entry* shim_entries(int* count) {{ *count = {count}; return entries; }}
"""


@dataclass(frozen=True)
class Library:
    """A compiled source: its launching function, and its variables in shared memory."""

    path: Path
    launch: Any
    shared: Any  # offset and size of each variable
    n_shared: int


@functools.cache
def missing_compiler() -> str | None:
    """Why kernels cannot be compiled here, or None where they can."""
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    return None if shutil.which(COMPILER) else f"there is no {COMPILER}"


def load(source: Source, dtype: str, macros: dict[str, Any]) -> Library:
    """The library of a source, compiled unless it is there already."""
    flags = (
        *source.options(dtype, macros),
        *COMMON,
        *KERNEL,
        *(SANITIZED if SANITIZE else CHECKED),
    )
    text = _unit(source)
    path = _kept(f"{source.name}.so", text, flags)
    if not path.exists():
        _compile(source.path.name, text, flags, path)
    library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    variables = shared_variables(path)
    flat = (ctypes.c_uint64 * max(1, 2 * len(variables)))(*(n for pair in variables for n in pair))
    return Library(path, library.shim_launch, flat, len(variables))


def _unit(source: Source) -> str:
    """The source in a namespace without a name, and the table of its kernels."""
    bounds = r"(?:__launch_bounds__\([^)]*\)\s*)?"
    names = re.findall(rf"__global__\s+{bounds}void\s+{bounds}(\w+)\s*\(", source.text)
    entries = ", ".join(f'shim::entry("{name}", &{name})' for name in names)
    return (
        f'#include "shim.h"\nnamespace {{\n{source.text}\n'
        f'#line 1 "entries"\n{ENTRIES.format(entries=entries, count=len(names))}'
    )


def _compile(name: str, text: str, flags: tuple[str, ...], path: Path) -> None:
    linked = ("-fsanitize=address,undefined",) if SANITIZE else ()
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        folder = Path(place)
        (folder / name).write_text(text, encoding="utf-8")
        _run(*flags, f"-I{HERE}", "-x", "c++", "-c", folder / name, "-o", folder / "kernel.o")
        parts = (folder / "kernel.o", _runtime(folder))
        _run("-shared", "-Wl,-Bsymbolic", *linked, *parts, "-o", folder / "new.so")
        (folder / "new.so").replace(path)


def _runtime(folder: Path) -> Path:
    """The object file of runtime.cpp, which every library holds."""
    flags = (*COMMON, *(SANITIZED if SANITIZE else ("-O2",)))  # what answers checks has none
    path = _kept("runtime.o", "", flags)
    if not path.exists():
        _run(*flags, "-c", HERE / "runtime.cpp", "-o", folder / "runtime.o")
        (folder / "runtime.o").replace(path)
    return path


def _kept(name: str, text: str, flags: tuple[str, ...]) -> Path:
    """Where what is compiled from this is kept, under a name that changes with any of it."""
    folder = HERE / "__pycache__"
    folder.mkdir(exist_ok=True)
    own = [(HERE / name).read_text(encoding="utf-8") for name in ("shim.h", "runtime.cpp")]
    digest = hashlib.sha256("\0".join([text, *own, *flags, _version()]).encode()).hexdigest()
    stem, _, ending = name.rpartition(".")
    return folder / f"{stem}-{digest[:16]}.{ending}"


def _run(*command: Any) -> None:
    # Not under the sanitizer that is loaded before Python: the compiler would take twice as long.
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = (COMPILER, *map(str, command))
    done = subprocess.run(command, capture_output=True, text=True, env=plain)
    if done.returncode:
        raise SyntaxError(f"{COMPILER} refuses the source:\n{done.stderr}")


@functools.cache
def _version() -> str:
    return subprocess.run([COMPILER, "--version"], capture_output=True, text=True).stdout


def shared_variables(path: Path) -> list[tuple[int, int]]:
    """Place in the library, and size, of each variable in shared memory.

    Those are the variables of functions that outlive them. (GCC 12 puts none of a template into a
    section of one's own, where they could be told by their place.)
    """
    listed = subprocess.run(["nm", "-S", path], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    found = [row for row in rows if len(row) == 4 and row[2] in "bBdD" and row[3].startswith("_ZZ")]
    return [(int(row[0], 16), int(row[1], 16)) for row in found]


def line_of(path: Path, offset: int) -> str:
    """File and line of the instruction at `offset` in a library."""
    command = ["addr2line", "-e", str(path), hex(offset)]
    try:
        said = subprocess.run(command, capture_output=True, text=True).stdout
    except FileNotFoundError:
        return hex(offset)
    return Path(said.split(" ")[0].strip()).name.replace(":", " line ")
