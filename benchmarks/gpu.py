"""`python -m benchmarks.gpu`: is this library right on a GPU, and how fast, in under ten minutes?

From the root of a checkout, on a machine with a CUDA device, CuPy, torch and pytest, in a program
environment that holds them:

    pip install --no-deps -e . && python -m benchmarks.gpu

needs array-api-compat, safetensors, threadpoolctl and tqdm beside them (and where there is no
network, the option --no-build-isolation with setuptools). JAX takes part where it sees the GPU. In
this order, each section by itself (--section NAME, repeatable); after --minutes none begins, and
what runs is stopped:

    costs     of the host: a RawKernel, an op, an array call, a product
    rates     of the device: a copy, a product
    kernels   every kernel beside its floor, by these rates
    tests     the kernels' tests and the core of the suite on CuPy (`pytest --backend cupy`), for at
              most 150 seconds: those behind are not run
    gpt2      a training step beside torch eager, torch.compile and jax.jit
    decoding  time a token, beside torch eager and torch.compile
    llama, gpt2-tf32    more training steps

Nothing is reported of what is wrong; it is named at the end, and the exit status is 1. --dry-run
does the same in seconds without a GPU: toy sizes, CuPy's stand-in of the tests, torch on the CPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from xformer.backends import Backend

from benchmarks import contestants, gpu_kernels, gpu_page, harness, machine, report, shapes, step
from benchmarks.__main__ import RESULTS, default_name
from benchmarks.contestants import COMPILED, JITTED, PEER, backend_of
from benchmarks.gpu_kernels import LARGE, SMALL, Sizes
from benchmarks.harness import ROOT, Disagreement
from benchmarks.shapes import BY_NAME, STAND_IN, Shape
from xformer import GPT, pretrained

OURS = "cupy kernel"
# What a kernel's own tests see comes first: the later ones may not have their turn.
CORE = ("cuda_kernels", "cuda_sdpa", "cuda_models", "kernels", "ops", "gradients", "models")
CORE += ("optim", "cached", "generation", "training")
MINUTES = 9.5  # then all is stopped
TESTING = 150  # seconds
STOPPING = 20  # seconds that pytest has to say what it has found
NEAR = 1e-5  # two logits so close may change places
TF32 = 2e-2  # error of a step whose products round to 11 bits
FIRST = 5  # the id that texts begin with
LLAMA = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "vocab_size": 13}
LLAMA |= {"num_attention_heads": 4}


class Plan(NamedTuple):
    """What is measured, and where."""

    place: Backend
    shapes: tuple[Shape, ...]
    text: Shape  # of decoding: its length is that of the text
    sizes: Sizes
    names: tuple[str, ...]  # of contestants
    tests: tuple[str, ...]  # arguments of pytest
    rounds: int
    calls: int  # of a turn of the host's costs


def planned(dry: bool) -> Plan:
    """Of a device, or of the dry run. Unusable where there is no device."""
    place = backend_of("cupy", STAND_IN if dry else None)
    if dry:
        rows: dict[str, Any] = {"batch": 2, "length": 9, "rounds": 1, "repeats": 1}
        rows["device"] = STAND_IN
        gpt = Shape("gpt2", GPT(11, n_layers=1, d_model=8, n_heads=2, max_len=12), **rows)
        llama = Shape("llama", pretrained.model(shapes.LLAMA | LLAMA), **rows)
        files = ("tests/test_rms_norm.py",)
        tests = ("--backend", "cuda_shim", "-k", "cuda_shim", *files)
        names = (*peers(PEER), OURS)
        return Plan(place, (gpt, llama), gpt, SMALL, names, tests, 1, 2)
    rows = {"rounds": 5, "repeats": 3, "device": "cuda"}
    gpt = replace(BY_NAME["gpt2"], batch=4, **rows)
    llama = replace(BY_NAME["llama"], batch=16, **rows)
    rounded = replace(gpt, name="gpt2-tf32", tf32=True, tolerance=TF32)
    text = replace(gpt, batch=1, length=256, repeats=1)
    names = (*peers(PEER, COMPILED), OURS, *([JITTED] if jax_sees_gpu() else []))
    tests = ("--backend", "cupy", "-k", "cupy", *(f"tests/test_{name}.py" for name in CORE))
    return Plan(place, (gpt, llama, rounded), text, LARGE, names, tests, 5, 1000)


def peers(*names: str) -> list[str]:
    """Those of torch that can take part."""
    return [name for name in names if contestants.why_not(name) is None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run; print tables, write JSON. Returns 1 where something was wrong, or did not run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, in seconds")
    parser.add_argument("--section", action="append", metavar="NAME", help="default: all")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="then all is stopped")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=RESULTS)
    args = parser.parse_args(argv)
    end = time.monotonic() + 60 * args.minutes
    # JAX would take most of the device's memory at once, and leave none to the others.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault(machine.COMPILING, str(machine.n_cpus()))
    plan = planned(args.dry_run)
    found = machine.describe([]) | {"device": plan.place.describe(), "dry_run": args.dry_run}
    found["versions"] |= versions(plan.place)
    found |= {"contestants": plan.names, "sections": {}, "wrong": []}
    sections = sections_of(plan, found, end)
    for name in args.section or []:
        if name not in sections:
            parser.error(f"--section must be one of {', '.join(sections)}, got {name!r}")
    for name in args.section or sections:
        if time.monotonic() >= end:
            found["wrong"].append(f"{name}: not begun, {args.minutes:g} minutes were over")
            continue
        run_section(name, sections[name], found, end)
    print(gpu_page.text(found))
    out = args.out / default_name(found, "gpu-dry-run" if args.dry_run else "gpu")
    report.write(found, out)
    report.replace(out.with_suffix(".md"), gpu_page.text(found) + "\n")
    print(f"\nWritten: {out}, and the table beside it")
    return 1 if found["wrong"] else 0


def versions(place: Backend) -> dict[str, str]:
    """Of the libraries, of CUDA and of its driver."""
    found = {place.name: place.version}
    for name in ("torch", "jax", "jaxlib"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if place.name == "cupy":
        number = sys.modules["cupy"].cuda.runtime.runtimeGetVersion()
        found["CUDA"] = f"{number // 1000}.{number % 1000 // 10}"
    driver = machine.nvidia_smi("driver_version")
    return found if driver is None else found | {"driver": driver}


def sections_of(plan: Plan, found: dict[str, Any], end: float) -> dict[str, Callable[[], Any]]:
    """By name; each returns what it has found. end: when all must be over."""
    done = found["sections"]

    def kernels() -> list[dict[str, Any]]:
        rates = done.get("rates") or gpu_kernels.rates(plan.place, plan.sizes, plan.rounds)
        options = (plan.rounds, lambda: time.monotonic() >= end)
        rows, wrong = gpu_kernels.kernels(plan.place, plan.sizes, rates, *options)
        found["wrong"] += [f"kernels: {what}" for what in wrong]
        return rows

    return {
        "costs": lambda: gpu_kernels.costs(plan.place, plan.rounds, plan.calls),
        "rates": lambda: gpu_kernels.rates(plan.place, plan.sizes, plan.rounds),
        "kernels": kernels,
        "tests": lambda: tested(plan, found, min(TESTING, end - time.monotonic())),
        **{shape.name: partial(stepped, plan, shape) for shape in plan.shapes[:1]},
        "decoding": lambda: decoded(plan),
        **{shape.name: partial(stepped, plan, shape) for shape in plan.shapes[1:]},
    }


def run_section(name: str, run: Callable[[], Any], found: dict[str, Any], end: float) -> None:
    """Keep what it finds, or why it failed, which leaves the others.

    Its processes are stopped at the end.
    """
    start = time.monotonic()
    print(f"{name} ...", file=sys.stderr, flush=True)
    stop = threading.Timer(end - start, harness.Process.stop)
    stop.start()
    try:
        found["sections"][name] = run()
    except Exception as error:
        over = "stopped, time was over: " if time.monotonic() >= end else ""
        found["wrong"].append(f"{name}: {over}{type(error).__name__}: {error}")
        traceback.print_exc()
    finally:
        stop.cancel()
    if "cupy" in sys.modules:  # the contestants have processes, and memory, of their own
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
    print(f"{name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


def tested(plan: Plan, found: dict[str, Any], seconds: float) -> dict[str, int]:
    """How many tests passed, failed, were skipped, of those that the time was enough for."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tests.xml"
        options = ("-q", "-p", "no:cacheprovider", f"--junitxml={path}")
        command = [sys.executable, "-m", "pytest", *options, *plan.tests]
        said, over = outcome(command, seconds)
        if over:
            found["wrong"].append(f"tests: stopped after {seconds:.0f} s, the rest did not run")
        if not path.is_file():
            raise RuntimeError(f"pytest: {said[-2000:]}")
        cases = list(ElementTree.parse(path).iter("testcase"))
    bad = [c for c in cases if c.findall("failure") or c.findall("error")]
    skipped = [c for c in cases if c.findall("skipped")]
    found["wrong"] += [f"tests: {c.get('classname')}.{c.get('name')} failed" for c in bad]
    passed = len(cases) - len(bad) - len(skipped)
    if not passed:
        raise RuntimeError(f"pytest: no test passed\n{said[-2000:]}")
    return {"passed": passed, "failed": len(bad), "skipped": len(skipped)}


def outcome(command: Sequence[str], seconds: float) -> tuple[str, bool]:
    """What a program says, and whether it was stopped: it may still write what it has found."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        try:
            return process.communicate(timeout=seconds)[0], False
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=STOPPING)[0], True
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate()[0], True


def stepped(plan: Plan, shape: Shape) -> dict[str, Any]:
    """A training step of a shape, as `python -m benchmarks` measures it."""
    return step.measure(shape, plan.names, shape.rounds, ["step"])


def decoded(plan: Plan) -> dict[str, Any]:
    """Time a token of a text; Disagreement where one writes another."""
    names = [name for name in plan.names if name != JITTED]
    n, rounds = plan.text.length, plan.rounds
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shapes.store(plan.text, folder)
        running = {name: stack.enter_context(decoder(name, folder)) for name in names}
        texts = {
            name: one.ask(write={"first": FIRST, "n": n})["ids"] for name, one in running.items()
        }
        agreed = {name: agreement(name, texts, running[OURS]) for name in names}

        def turn(one: harness.Process) -> list[float]:
            return [one.ask(write={"first": FIRST, "n": n})["seconds"] / n]

        turns = {name: partial(turn, one) for name, one in running.items()}
        seconds = harness.interleave(turns, rounds, lambda: None)
        return {
            name: harness.summary(seconds[name], seconds[names[0]])
            | one.ask(about={})
            | {"same_ids": agreed[name]}
            for name, one in running.items()
        }


def agreement(name: str, texts: dict[str, list[int]], ours: Any) -> int:
    """How many ids are those of the first text. Disagreement unless all, or but for rounding.

    ours: who is asked how far apart two logits are.
    """
    peer, own = next(iter(texts)), texts[name]
    theirs = texts[peer]
    if own == theirs:
        return len(own)
    pairs = enumerate(zip(own, theirs, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    if at is None:
        raise Disagreement(
            f"{name} writes another text than {peer}: {len(own)} ids, not {len(theirs)}"
        )
    pair = [own[at], theirs[at]]
    gap = ours.ask(gap={"ids": [FIRST, *theirs[:at]], "pair": pair})["gap"]
    if not gap <= NEAR:
        raise Disagreement(
            f"{name} writes another text than {peer}: id {at + 1} is {pair[0]}, not {pair[1]}, and "
            f"their logits are {gap:.1e} apart, allowed {NEAR:.0e}"
        )
    return at


def decoder(name: str, folder: Path) -> harness.Process:
    """The process of a contestant."""
    command = [sys.executable, "-m", "benchmarks.gpu_decoding", folder, name]
    return harness.Process(name, command, machine.environment())


def jax_sees_gpu() -> bool:
    """Asked in another process, since it would keep memory of the device."""
    code = "import jax; print(jax.default_backend())"
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return False
    return done.stdout.strip() == "gpu"


if __name__ == "__main__":
    sys.exit(main())
