"""`python -m benchmarks.gpu`: correctness and speed of this library on a GPU, in ten minutes.

From the root of a checkout, on a machine with a CUDA device:

    pip install -e '.[cuda13,nvmath,cudnn,test]' torch && python -m benchmarks.gpu

(`cuda12` and `cudnn-cu12` for CUDA 12). For a machine without a network, `--pack FOLDER` on another
machine fetches the wheels, and prints what to run. JAX takes part in float32, if it finds the GPU.

Without --section these sections run, in this order, the most important first:

    libraries       the kernels of linear maps and attention, and missing libraries
    costs           host time of a RawKernel, an op, an array call, a matmul
    rates           device rates of a copy and a matmul
    gpt2-bfloat16   training steps: eager, as a CUDA graph, and deterministic; beside torch eager,
                    torch with cuDNN's attention, and torch.compile
    tests           the kernels' tests and the core of the suite on CuPy (`pytest --backend cupy`),
                    stopped after 150 seconds
    attention       attention alone, up to 16,384 tokens, beside torch's
    kernels         every kernel beside its floor, computed from the rates

These sections run only if they are named (--section NAME, repeatable):

    llama-bfloat16                  as gpt2-bfloat16
    decoding, decoding-64           time per token of 1 and of 64 sequences, beside torch eager and
                                    torch.compile
    curve-float32, curve-bfloat16   losses of whole trainings, beside NumPy's and float32's
    gpt2, llama, gpt2-tf32          training steps in float32, with jax.jit too

Time limit: --minutes after the start of the command no section begins. Running contestants and
tests are stopped; they are separate processes. The sections in this process (libraries, costs,
rates, attention, kernels, curves) first finish their current measurement, so the command may take
longer.

Output: the JSON and the table are written after each time that a contestant runs, so a killed run
loses only its current measurement. If a contestant warns that another kernel runs, the warning is
below its table. Wrong results have no times; they are named at the end, and the exit status is 1.

--dry-run runs the same in about two minutes without a GPU: with toy sizes, the tests' stand-in for
CuPy, and torch on the CPU.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    command,
    contestants,
    gpu_curves,
    gpu_decoding,
    gpu_kernels,
    gpu_libraries,
    gpu_pack,
    gpu_page,
    gpu_tests,
    harness,
    machine,
    report,
    step,
    stored,
)
from benchmarks.gpu_attention import attention
from benchmarks.gpu_plan import Plan, able, planned
from benchmarks.harness import Disagreement
from benchmarks.shapes import Shape

MINUTES = 9.5  # the default of --minutes
FIRST = ("libraries", "costs", "rates", "gpt2-bfloat16", "tests", "attention", "kernels")
# Seconds for a section, if others follow it.
LIMITS = {"gpt2-bfloat16": 330, "llama-bfloat16": 420, "attention": 90}
TESTING = 150  # seconds for the tests, whether or not others follow

# Arguments: the run, and the time of `time.monotonic` at which the section must end.
Section = Callable[["Run", float], Any]


def main(argv: Sequence[str] | None = None, began: float | None = None) -> int:
    """Run the sections, print tables, write JSON. Returns 1 if anything was wrong or did not run.

    began: the time of `time.monotonic` at the command's start; None for now.
    """
    began = time.monotonic() if began is None else began
    parser = parser_of()
    args = parser.parse_args(argv)
    if args.pack is not None:
        return packed(args, parser)
    # By default JAX allocates most of the device's memory, and other contestants get none.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault(machine.COMPILING, str(machine.n_cpus()))
    plan = planned(args.dry_run)
    sections = sections_of(plan)
    for name in args.section or []:
        if name not in sections:
            parser.error(f"--section must be one of {', '.join(sections)}, got {name!r}")
    run = Run(plan, args)
    names, end = args.section or FIRST, began + 60 * args.minutes
    for i, name in enumerate(names):
        if time.monotonic() >= end:
            why = f"{name}: not begun, {args.minutes:g} minutes were over"
            run.result["wrong"].append(why)
            continue
        limit = LIMITS.get(name) if names[i + 1 :] else None
        section_end = end if limit is None else min(end, time.monotonic() + limit)
        run_section(name, sections[name], run, section_end)
    run.write()
    print(gpu_page.text(run.result))
    print(f"\nWritten: {run.out}, and the table beside it")
    return 1 if run.result["wrong"] else 0


def parser_of() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command.parser("benchmarks.gpu", __doc__)
    parser.add_argument("--dry-run", action="store_true", help="toy sizes without a GPU")
    parser.add_argument(
        "--section", action="append", metavar="NAME", help=f"default: {', '.join(FIRST)}"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help="after this time no section begins, and processes are stopped (default %(default)s)",
    )
    command.add_out(parser)
    parser.add_argument(
        "--pack", type=Path, metavar="FOLDER", help="fetch wheels for a machine without a network"
    )
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument(
        "--python-version",
        default=this,
        metavar="3.N",
        help="for --pack: the machine's Python (default %(default)s)",
    )
    parser.add_argument(
        "--cuda",
        choices=sorted(gpu_pack.EXTRAS),
        default="13",
        help="for --pack: the machine's CUDA (default 13)",
    )
    parser.add_argument(
        "--has",
        type=Path,
        metavar="FILE",
        help="for --pack: the machine's `pip freeze` (default: CuPy, torch with CUDA, pytest)",
    )
    return parser


def packed(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Fetch the wheels of --pack and print what to run on the machine. Returns the exit status."""
    if not re.fullmatch(r"3\.\d+", args.python_version):
        parser.error(f"--python-version must be like 3.12, got {args.python_version!r}")
    has = dict.fromkeys(gpu_pack.ASSUMED) if args.has is None else gpu_pack.frozen(args.has)
    try:
        wheels = gpu_pack.pack(args.pack, args.python_version, args.cuda, has)
    except RuntimeError as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 1
    print(gpu_pack.say(args.pack, wheels))
    return 0


class Run:
    """The result so far (`result`, for the JSON), and the path it is written to (`out`)."""

    def __init__(self, plan: Plan, args: argparse.Namespace) -> None:
        self.plan, self.dry = plan, args.dry_run
        backend = plan.backend
        self.result: dict[str, Any] = machine.describe([])
        self.result |= {"device": backend.describe(), "dry_run": self.dry}
        if (gpu := None if self.dry else machine.nvidia_smi("name")) is not None:
            self.result["machine"]["gpu"] = gpu
        self.result["versions"] |= gpu_libraries.versions(backend)
        self.result |= {"running": None, "sections": {}, "left_out": {}, "wrong": []}
        # The first section is part of the name: runs of other sections have other files.
        question = ["gpu", *(["dry-run"] if self.dry else []), *(args.section or [])[:1]]
        self.out = stored.path_of(self.result, "-".join(question), args.out)

    def write(self) -> None:
        """Write the JSON and the table; each file is written as a whole or not at all."""
        stored.write(self.result, self.out)
        report.replace(self.out.with_suffix(".md"), gpu_page.text(self.result) + "\n")

    def keep(self, name: str, result: Any) -> None:
        """Store the result so far of the section `name`, and write the files."""
        self.result["sections"][name] = result
        self.write()

    def able(self, section: str, names: Sequence[str]) -> list[str]:
        """Return those of `names` that can run; write into the result why the others cannot."""
        usable, reasons = able(names, dry=self.dry)
        if reasons:
            self.result["left_out"][section] = reasons
        return usable


def sections_of(plan: Plan) -> dict[str, Section]:
    """Return all sections by name; each section returns its result for the JSON."""
    backend, rounds = plan.backend, plan.rounds

    def kernels(run: Run, end: float) -> list[dict[str, Any]]:
        rates = run.result["sections"].get("rates")
        rates = rates or gpu_kernels.rates(backend, plan.sizes, rounds)
        options: Any = (rounds, lambda: time.monotonic() >= end)
        rows, wrong = gpu_kernels.kernels(
            backend, plan.sizes, rates, *options, lambda rows: run.keep("kernels", rows)
        )
        run.result["wrong"] += [f"kernels: {what}" for what in wrong]
        return rows

    def tested(run: Run, end: float) -> dict[str, int]:
        seconds = min(TESTING, end - time.monotonic())
        return gpu_tests.tested(plan.tests, run.result["wrong"], seconds)

    device = contestants.torch_device(plan.texts[0].device)
    steps = {shape.name: stepped(shape, names) for shape, names in plan.steps}
    return {
        "libraries": lambda run, end: gpu_libraries.libraries(backend),
        "costs": lambda run, end: gpu_kernels.costs(backend, rounds, plan.calls),
        "rates": lambda run, end: gpu_kernels.rates(backend, plan.sizes, rounds),
        "kernels": kernels,
        "tests": tested,
        **{name: section for name, section in steps.items() if name.endswith("bfloat16")},
        **{text.name: written(text, plan.writers, rounds) for text in plan.texts},
        "attention": lambda run, end: attention(
            *(backend, plan.lengths, rounds, device, until(end)),
            lambda rows: run.keep("attention", rows),
        ),
        "curve-float32": lambda run, end: gpu_curves.in_float32(
            backend, plan.curves, until(end), lambda result: run.keep("curve-float32", result)
        ),
        "curve-bfloat16": lambda run, end: gpu_curves.in_bfloat16(
            backend, plan.curves, until(end), lambda result: run.keep("curve-bfloat16", result)
        ),
        **steps,  # adds the steps in float32; the keys above stay where they are
    }


def until(end: float) -> Callable[[], None]:
    """Return a function that raises TimeoutError from the time `end` on (`time.monotonic`)."""

    def tick() -> None:
        if time.monotonic() >= end:
            raise TimeoutError("it was not done")

    return tick


def stepped(shape: Shape, names: Sequence[str]) -> Section:
    """Return the section that times training steps of `shape` by the contestants `names`."""

    def section(run: Run, end: float) -> dict[str, Any]:
        usable = run.able(shape.name, names)
        options: Any = {"failed": run.result["wrong"]}
        options["keep"] = lambda result: run.keep(shape.name, result)
        return step.measure(shape, usable, shape.rounds, ["step"], **options)

    return section


def written(shape: Shape, names: Sequence[str], rounds: int) -> Section:
    """Return the section that times decoding of `shape` by the contestants `names`."""

    def section(run: Run, end: float) -> dict[str, Any]:
        usable = run.able(shape.name, names)
        keep = lambda result: run.keep(shape.name, result)  # noqa: E731
        return gpu_decoding.decoded(shape, usable, rounds, run.result["wrong"], keep)

    return section


def run_section(name: str, section: Section, run: Run, end: float) -> None:
    """Run a section and store its result in `run`, or the error if it fails.

    At the time `end` its processes are stopped. Its result so far stays in `run`, except after a
    Disagreement.
    """
    start, result = time.monotonic(), run.result
    print(f"{name} ...", file=sys.stderr, flush=True)
    result["running"] = name
    run.write()
    done = threading.Event()
    threading.Thread(target=stopping, args=(done, end - start), daemon=True).start()
    try:
        result["sections"][name] = section(run, end)
    except Exception as error:
        over = "stopped, time was over: " if time.monotonic() >= end else ""
        result["wrong"].append(f"{name}: {over}{type(error).__name__}: {error}")
        if isinstance(error, Disagreement):
            result["sections"].pop(name, None)
        traceback.print_exc()
    finally:
        done.set()
    result["running"] = None
    run.write()
    machine.give_back()  # the contestants are other processes, and need this memory
    print(f"{name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


def stopping(done: threading.Event, seconds: float) -> None:
    """After `seconds`, stop all contestants, and each new one, until `done` is set."""
    while not done.wait(seconds):
        harness.Process.stop()
        seconds = 1


if __name__ == "__main__":
    began = time.monotonic() - machine.age()
    sys.exit(command.run(lambda: main(began=began)))
