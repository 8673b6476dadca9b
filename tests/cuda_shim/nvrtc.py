"""NVIDIA's run-time compiler, which needs no GPU: the package nvidia-cuda-nvrtc of `test-cuda`."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import re
from typing import Any, NamedTuple

PACKAGE = "nvidia-cuda-nvrtc"


class Use(NamedTuple):
    """What a kernel takes of a multiprocessor."""

    registers: int  # of a thread
    spilled: int  # bytes of a thread
    shared: int  # bytes of a block, not counting what a launch adds


@functools.cache
def library() -> Any:
    """The compiler's library. Raises ImportError where it is not installed."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{PACKAGE} is not installed: pip install '.[test-cuda]'") from None
    path = next(f.locate() for f in files if re.fullmatch(r"libnvrtc\.so\.\d+", f.name))
    return ctypes.CDLL(str(path))


def compiled(text: str, name: str, options: tuple[str, ...]) -> dict[str, Use]:
    """What each kernel of a source uses. Raises SyntaxError for errors and for warnings."""
    return _uses(_compile(text, name, options)[0])


def ptx(text: str, name: str, options: tuple[str, ...]) -> dict[str, str]:
    """The PTX of each kernel of a source. Raises SyntaxError for errors and for warnings."""
    kernels = _compile(text, name, options)[1].split(".visible .entry ")[1:]
    return {kernel.partition("(")[0]: kernel for kernel in kernels}


def _compile(text: str, name: str, options: tuple[str, ...]) -> tuple[str, str]:
    """The compiler's log, and PTX."""
    nvrtc, program = library(), ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    try:
        every = [option.encode() for option in (*options, "--ptxas-options=-v")]
        failed = nvrtc.nvrtcCompileProgram(
            program, len(every), (ctypes.c_char_p * len(every))(*every)
        )
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        text_of_log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, text_of_log)
        log = text_of_log.value.decode()
        if failed or "warning" in log:
            raise SyntaxError(f"NVRTC on {name} with {' '.join(options)}:\n{log}")
        nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
        text_of_ptx = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetPTX(program, text_of_ptx)
        return log, text_of_ptx.value.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _uses(log: str) -> dict[str, Use]:
    uses = {}
    for part in log.split("Compiling entry function '")[1:]:
        registers, spilled, shared = (
            int(found[1]) if (found := re.search(pattern, part)) else 0
            for pattern in (
                r"Used (\d+) registers",
                r"(\d+) bytes spill stores",
                r"(\d+) bytes smem",
            )
        )
        uses[part.partition("'")[0]] = Use(registers, spilled, shared)
    return uses
