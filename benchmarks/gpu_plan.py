"""The models and sizes of `benchmarks.gpu`, on a device and in a dry run."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks import contestants, shapes
from benchmarks.contestants import (
    COMPILED,
    CUDNN,
    DETERMINISTIC,
    GRAPH,
    JITTED,
    OURS_ON_GPU,
    PEER,
    backend_of,
)
from benchmarks.gpu_attention import Lengths
from benchmarks.gpu_curves import Curves
from benchmarks.gpu_kernels import LARGE, SMALL, Sizes
from benchmarks.shapes import BY_NAME, STAND_IN, Shape
from xformer import GPT, pretrained
from xformer.backends import Backend

# The tests most likely to fail are first: time may be over before the last ones.
CORE = ("first_run", "cuda_cudnn", "cuda_flash", "cuda_lt", "cuda_linear", "cuda_feed_forward")
CORE += ("cuda_graphs", "cuda_decoding", "cuda_storage", "cuda_precision", "precision")
CORE += ("deterministic", "waiting", "cuda_kernels", "cuda_sdpa", "cuda_models", "devices")
CORE += ("kernels", "ops", "gradients", "models", "optim", "optim_flat", "cached", "generation")
CORE += ("training", "compile")
TF32 = 2e-2  # tolerance of a step with matmuls that round to 11 bits
ROUNDED = 5e-2  # tolerance of a step with weights and activations of 8 bits (bfloat16)
DEEP = 1.5e-1  # as ROUNDED, for 24 layers; torch's error is 9e-2 on an H100
LLAMA = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "vocab_size": 13}
LLAMA |= {"num_attention_heads": 4}


class Plan(NamedTuple):
    """What `benchmarks.gpu` runs: the backend, and each section's models, sizes and contestants."""

    backend: Backend
    steps: tuple[tuple[Shape, tuple[str, ...]], ...]  # training steps, and their contestants
    texts: tuple[Shape, ...]  # the shapes of decoding; `length` counts the generated tokens
    writers: tuple[str, ...]  # the contestants of decoding
    sizes: Sizes  # sizes of the arrays of single kernels
    lengths: Lengths  # sizes of the batches of attention alone
    curves: Curves  # the models and numbers of steps of the loss curves
    tests: tuple[str, ...]  # the arguments of pytest
    rounds: int  # the rounds of every timing
    calls: int  # the calls in a round of `gpu_kernels.costs`


def planned(dry: bool) -> Plan:
    """Return the plan for a device, or for a dry run. Raises Unusable if there is no device."""
    backend = backend_of("cupy", STAND_IN if dry else None)
    return _dry(backend) if dry else _whole(backend)


def _dry(backend: Backend) -> Plan:
    rows: dict[str, Any] = {"batch": 2, "length": 9, "rounds": 1, "repeats": 1}
    rows["device"] = STAND_IN
    gpt = Shape("gpt2", GPT(11, n_layers=1, d_model=8, n_heads=2, max_len=12), **rows)
    llama = Shape("llama", pretrained.model(shapes.LLAMA | LLAMA), **rows)
    rounded = replace(gpt, precision="bfloat16", tolerance=ROUNDED, judged=1)
    wide = PEER, OURS_ON_GPU
    half = PEER, OURS_ON_GPU, GRAPH, DETERMINISTIC
    steps = (
        (replace(rounded, name="gpt2-bfloat16"), half),
        (replace(rounded, name="llama-bfloat16", model=llama.model), half),
        (gpt, wide),
        (llama, wide),
    )
    texts = replace(gpt, batch=1, name="decoding"), replace(gpt, name="decoding-64")
    files = ("tests/test_rms_norm.py",)
    tests = ("--backend", "cuda_shim", "-k", "cuda_shim", *files)
    lengths = Lengths(tokens=16, heads=2, width=8, lengths=(8, 16))
    toy = GPT(256, 1, 8, 2, max_len=8)
    curves = Curves(toy, short=2, model=toy, long=2, batch=1, held_out=1)
    writers = PEER, OURS_ON_GPU, GRAPH
    return Plan(backend, steps, texts, writers, SMALL, lengths, curves, tests, 1, 2)


def _whole(backend: Backend) -> Plan:
    rows: dict[str, Any] = {"rounds": 5, "repeats": 3, "device": "cuda"}
    gpt, llama = replace(BY_NAME["gpt2"], **rows), replace(BY_NAME["llama"], batch=16, **rows)
    single = replace(gpt, batch=4)
    rounded: dict[str, Any] = {"precision": "bfloat16", "tolerance": ROUNDED}
    model, deep = pretrained.model(shapes.LLAMA_350M), rounded | {"tolerance": DEEP}
    large = replace(llama, name="llama-bfloat16", model=model, length=1024, judged=2, **deep)
    wide = PEER, COMPILED, OURS_ON_GPU, GRAPH, JITTED
    half = PEER, CUDNN, COMPILED, OURS_ON_GPU, GRAPH, DETERMINISTIC
    steps = (
        (replace(gpt, name="gpt2-bfloat16", batch=32, judged=4, **rounded), half),
        (large, half),
        (single, wide),
        (llama, wide),
        (replace(single, name="gpt2-tf32", tf32=True, tolerance=TF32), wide),
    )
    text = replace(gpt, length=256, repeats=1)
    texts = tuple(
        replace(text, batch=batch, name=name)
        for batch, name in ((1, "decoding"), (64, "decoding-64"))
    )
    tests = ("--backend", "cupy", "-k", "cupy", *(f"tests/test_{name}.py" for name in CORE))
    lengths = Lengths(tokens=1 << 15, heads=12, width=64, lengths=(1024, 4096, 16384))
    tiny, char = GPT(256, 4, 128, 4, max_len=64), GPT(256, 6, 384, 6, max_len=256)
    curves = Curves(tiny, short=100, model=char, long=1000, batch=12, held_out=20)
    writers = PEER, COMPILED, OURS_ON_GPU, GRAPH
    return Plan(backend, steps, texts, writers, LARGE, lengths, curves, tests, 5, 1000)


def able(names: Sequence[str], *, dry: bool) -> tuple[list[str], list[str]]:
    """Return those of `names` that can run here, and why the others cannot.

    dry: CuPy's stand-in replaces CuPy, and can always run. Called when a section begins, so
    that torch and JAX are imported only by sections that need them.
    """
    reasons = {name: None if dry and name.startswith("cupy") else why_not(name) for name in names}
    return [n for n in names if reasons[n] is None], [
        reason for reason in reasons.values() if reason
    ]


def why_not(name: str) -> str | None:
    """Return why a contestant cannot run on this GPU; None if it can."""
    if name != JITTED:
        return contestants.why_not(name)
    return None if jax_sees_gpu() else f"{name}: JAX is not installed, or sees no GPU"


@functools.cache
def jax_sees_gpu() -> bool:
    """Whether JAX finds a GPU. Another process asks it: JAX would keep memory of the device."""
    if importlib.util.find_spec("jax") is None:
        return False
    code = "import jax; print(jax.default_backend())"
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return False
    return done.stdout.strip() == "gpu"
