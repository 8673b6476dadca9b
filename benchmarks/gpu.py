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
    gpt2-bfloat16, llama-bfloat16       training steps beside torch eager, with cuDNN's attention,
              and torch.compile; as a CUDA graph; deterministic
    decoding, decoding-64     time a token of 1 and of 64 texts, beside torch eager and compile
    attention      by itself, up to 16,384 tokens, beside torch's
    curve-float32, curve-bfloat16       losses of whole trainings, beside NumPy's and float32's
    gpt2, llama, gpt2-tf32    training steps in float32, with jax.jit too

All of them take longer than ten minutes: benchmarks/README.md has them in three parts. Nothing is
reported of what is wrong; it is named at the end, and the exit status is 1. --dry-run does the same
in seconds without a GPU: toy sizes, CuPy's stand-in of the tests, torch on the CPU.
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
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from xformer.backends import Backend

from benchmarks import (
    contestants,
    gpu_curves,
    gpu_decoding,
    gpu_kernels,
    gpu_page,
    harness,
    machine,
    report,
    step,
)
from benchmarks.__main__ import RESULTS, default_name
from benchmarks.gpu_attention import attention
from benchmarks.gpu_plan import Plan, planned
from benchmarks.harness import ROOT

MINUTES = 9.5  # then all is stopped
TESTING = 150  # seconds
STOPPING = 20  # seconds that pytest has to say what it has found


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
    found |= {"sections": {}, "wrong": []}
    sections = sections_of(plan, found, end)
    for name in args.section or []:
        if name not in sections:
            parser.error(f"--section must be one of {', '.join(sections)}, got {name!r}")
    for name in args.section or sections:
        if time.monotonic() >= end:
            found["wrong"].append(f"{name}: not begun, {args.minutes:g} minutes were over")
            continue
        run_section(name, sections[name], found, end)
    question = ["gpu", *(["dry-run"] if args.dry_run else []), *(args.section or [])[:1]]
    out = args.out / default_name(found, "-".join(question))  # a part does not replace another
    report.write(found, out)
    print(gpu_page.text(found))
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

    def tick() -> None:
        if time.monotonic() >= end:
            raise TimeoutError("it was not done")

    device = contestants.torch_device(plan.texts[0].device)
    steps = {
        shape.name: partial(
            step.measure, shape, names, shape.rounds, ["step"], failed=found["wrong"]
        )
        for shape, names in plan.steps
    }
    return {
        "costs": lambda: gpu_kernels.costs(plan.place, plan.rounds, plan.calls),
        "rates": lambda: gpu_kernels.rates(plan.place, plan.sizes, plan.rounds),
        "kernels": kernels,
        "tests": lambda: tested(plan, found, min(TESTING, end - time.monotonic())),
        **{name: run for name, run in steps.items() if name.endswith("bfloat16")},
        **{
            text.name: partial(
                gpu_decoding.decoded, text, plan.writers, plan.rounds, found["wrong"]
            )
            for text in plan.texts
        },
        "attention": lambda: attention(plan.place, plan.lengths, plan.rounds, device, tick),
        "curve-float32": lambda: gpu_curves.in_float32(plan.place, plan.curves, tick),
        "curve-bfloat16": lambda: gpu_curves.in_bfloat16(plan.place, plan.curves, tick),
        **steps,  # those that are not there yet
    }


def run_section(name: str, run: Callable[[], Any], found: dict[str, Any], end: float) -> None:
    """Keep what it finds, or why it failed, which leaves the others.

    Its processes are stopped at the end.
    """
    start = time.monotonic()
    print(f"{name} ...", file=sys.stderr, flush=True)
    done = threading.Event()
    threading.Thread(target=stopping, args=(done, end - start), daemon=True).start()
    try:
        found["sections"][name] = run()
    except Exception as error:
        over = "stopped, time was over: " if time.monotonic() >= end else ""
        found["wrong"].append(f"{name}: {over}{type(error).__name__}: {error}")
        traceback.print_exc()
    finally:
        done.set()
    machine.give_back()  # the contestants have processes, and memory, of their own
    print(f"{name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


def stopping(done: threading.Event, seconds: float) -> None:
    """Stop all processes then, and those that begin later, until it is done."""
    while not done.wait(seconds):
        harness.Process.stop()
        seconds = 1


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


if __name__ == "__main__":
    sys.exit(main())
