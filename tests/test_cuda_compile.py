"""Every CUDA source under NVIDIA's own compiler, for every architecture, within its budget."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda_shim import nvrtc
from cuda_shim.nvrtc import Use
from libraries import slow_but

import xformer.backends.cupy
from xformer.backends.cupy.module import Source
from xformer.dispatch.shapes import STORED

FOLDER = Path(xformer.backends.cupy.__file__).parent
ARCHITECTURES = ("sm_80", "sm_90", "sm_90a", "sm_100", "sm_120")
# Where every activation is compiled; elsewhere the first.
EVERY_CHOICE = ("sm_80", "sm_90")
# Of attention's choices those that take most registers are compiled, and in float64 and float16 the
# first. A release does the rest (-m slow): NVRTC needs 1 to 4 s for each, 40 s for all of an
# architecture.
LARGEST = {"float32": {"WIDTH": 64, "FEW": 0}, "bfloat16": {"WIDTH": 128, "FEW": 0}}


def source(path: Path) -> Source:
    module = importlib.import_module(f"xformer.backends.cupy.{path.stem}")
    found: Source = module.SOURCE
    return found


SOURCES = [source(path) for path in sorted(FOLDER.glob("*.cu"))]
QUICK = [source for source in SOURCES if source.name != "sdpa_backward"]
every_source = pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.name)


def budgets(source: Source, dtype: str) -> dict[str, Use]:
    """The lines `// Budget: kernel: 40 registers, 0 spilled, 256 shared` of a source.

    A line `// Budget in two bytes: ...` is another one of what is stored so.
    """
    found = {}
    for which in ("", " in two bytes")[: 1 + (dtype in STORED)]:
        line = rf"^// Budget{which}: (\w+): (\d+) registers, (\d+) spilled, (\d+) shared$"
        for name, *numbers in re.findall(line, source.path.read_text(encoding="utf-8"), re.M):
            found[name] = Use(*map(int, numbers))
    return found


def is_always(source: Source, architecture: str, dtype: str, macros: dict[str, Any]) -> bool:
    """Whether a choice of macros is compiled always, not for a release alone."""
    if "WIDTH" in macros and dtype in LARGEST:
        return all(value == LARGEST[dtype][name] for name, value in macros.items())
    if "WIDTH" not in macros and architecture in EVERY_CHOICE:
        return True
    return all(value == source.macros[name][0] for name, value in macros.items() if name != "WIDE")


@pytest.mark.parametrize("source", slow_but(QUICK, SOURCES), ids=lambda s: s.name)
@pytest.mark.parametrize("architecture", slow_but(["sm_90"], ARCHITECTURES))
def test_compiles_within_its_budget(source: Source, architecture: str) -> None:
    """No error, no warning; registers, spills, shared memory (in float64; less in float32)."""
    require_budget(source, architecture, lambda *c: is_always(source, architecture, *c))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "architecture"),
    [
        pytest.param(source, architecture, id=f"{architecture}-{source.name}")
        for source in SOURCES
        for architecture in ARCHITECTURES
        if not all(is_always(source, architecture, *choice) for choice in source.variants())
    ],
)
def test_every_choice_compiles_within_its_budget(source: Source, architecture: str) -> None:
    require_budget(source, architecture, lambda *c: not is_always(source, architecture, *c))


def require_budget(
    source: Source, architecture: str, chosen: Callable[[str, dict[str, Any]], bool]
) -> None:
    try:
        nvrtc.library()
    except ImportError as error:
        pytest.skip(f"CUDA is not compiled: {error}")
    variants = [variant for variant in source.variants() if chosen(*variant)]
    assert variants, "nothing is compiled"
    for dtype, macros in variants:
        allowed = budgets(source, dtype)
        options = (*source.options(dtype, macros), f"--gpu-architecture={architecture}")
        used = nvrtc.compiled(source.text, source.path.name, options)
        assert used.keys() == allowed.keys(), "each kernel has a line // Budget"
        for name, use in used.items():
            over = [f for f in Use._fields if getattr(use, f) > getattr(allowed[name], f)]
            assert not over, f"{name} {dtype} {macros} uses {use}, may use {allowed[name]}"
            assert dtype == "float64" or not use.spilled, f"{name} {macros} spills in {dtype}"


# Of each norm's kernels, what they write but rows: statistics, one number a row.
SINGLE_NUMBERS = {
    "layer_norm": {"layer_norm_forward": 2, "layer_norm_backward": 0},
    "rms_norm": {"rms_norm_forward": 1, "rms_norm_backward": 0},
}


@pytest.mark.parametrize("architecture", EVERY_CHOICE)
@pytest.mark.parametrize("dtype", ["float32", "float64", *STORED])
@pytest.mark.parametrize("name", SINGLE_NUMBERS)
def test_norms_store_rows_by_16_bytes(name: str, dtype: str, architecture: str) -> None:
    """The compiler may split the store of a pack into as many stores as it has elements."""
    try:
        nvrtc.library()
    except ImportError as error:
        pytest.skip(f"CUDA is not compiled: {error}")
    of_name = next(source for source in SOURCES if source.name == name)
    options = (*of_name.options(dtype, {"WIDE": 1}), f"--gpu-architecture={architecture}")
    kernels = nvrtc.ptx(of_name.text, of_name.path.name, options)
    assert kernels.keys() == SINGLE_NUMBERS[name].keys()
    for kernel, text in kernels.items():
        stores = re.findall(r"st\.global[.\w]*", text)
        wide = [s for s in stores if re.search(r"\.v4\.[bfu]32$|\.v2\.[bfu]64$", s)]
        assert wide, kernel
        assert len(stores) - len(wide) == SINGLE_NUMBERS[name][kernel], stores


def test_compiler_reports_what_is_wrong() -> None:
    """Errors and warnings are not passed over, nor spills."""
    try:
        nvrtc.library()
    except ImportError as error:
        pytest.skip(f"CUDA is not compiled: {error}")
    options = ("--gpu-architecture=sm_80",)
    with pytest.raises(SyntaxError, match='identifier "y" is undefined'):
        nvrtc.compiled("__global__ void k(float* x) { *x = y; }", "k.cu", options)
    with pytest.raises(SyntaxError, match="never referenced"):
        nvrtc.compiled("__global__ void k(float* x) { int unused; }", "k.cu", options)
    text = """extern "C" __global__ void __launch_bounds__(1024, 2) k(float* x, int n) {
    __shared__ float row[8];
    float v[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = x[i * n];
    __syncthreads();
    row[threadIdx.x % 8] = v[0];
#pragma unroll
    for (int i = 0; i < 64; ++i) x[i * n] = v[63 - i] + row[i % 8];
}"""
    use = nvrtc.compiled(text, "k.cu", options)["k"]
    assert use.registers == 32
    assert use.spilled > 0
    assert use.shared == 32


@every_source
def test_source_says_what_it_computes(source: Source) -> None:
    """Formula, layout, geometry at the top; budgets behind them."""
    top = source.path.read_text(encoding="utf-8").split("\n#include")[0].splitlines()
    assert all(line.startswith("//") for line in top)
    assert len(top) > 3
    assert any("rid" in line or "block a" in line for line in top), "say the launch geometry"
    assert budgets(source, "float32")
