"""`python -m benchmarks.gpu`: is this library right on a GPU, and how fast? In ten minutes.

From the root of a checkout, on a machine with a CUDA device:

    pip install -e '.[cuda13,nvmath,cudnn,test]' torch && python -m benchmarks.gpu

(`cuda12` and `cudnn-cu12` for CUDA 12). Without a network, `--pack FOLDER` on another machine
fetches the wheels, and says what to run. JAX takes part in float32, where it sees the GPU.

Without --section these run, in this order, the worthiest first:

    libraries what runs linear maps and attention, and what is missing
    costs     of the host: a RawKernel, an op, an array call, a product
    rates     of the device: a copy, a product
    gpt2-bfloat16       training steps beside torch eager, with cuDNN's attention, and
              torch.compile; as a CUDA graph; deterministic
    tests     the kernels' tests and the core of the suite on CuPy (`pytest --backend cupy`), for at
              most 150 seconds: those behind are not run
    attention by itself, up to 16,384 tokens, beside torch's
    kernels   every kernel beside its floor, by these rates

These run where they are named (--section NAME, repeatable):

    llama-bfloat16      as gpt2-bfloat16
    decoding, decoding-64     time a token of 1 and of 64 texts, beside torch eager and compile
    curve-float32, curve-bfloat16       losses of whole trainings, beside NumPy's and float32's
    gpt2, llama, gpt2-tf32    training steps in float32, with jax.jit too

After --minutes, counted from the start of the command, no section begins, and contestants that run
are stopped: each is a process of its own. So are the tests. Sections in this process (libraries,
costs, rates, attention, kernels, curves) end behind what they are measuring, so that the command
may take longer. A warning of a contestant, that another kernel runs, is a line below its table.
JSON and table are written anew whenever a contestant has had a turn, so that a run that is killed
has lost no more than what was running. What is wrong is not reported but named at the end, and the
exit status is 1. --dry-run does the same in about two minutes without a GPU: toy sizes, CuPy's
stand-in of the tests, torch on the CPU.
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

MINUTES = 9.5  # then no section begins
FIRST = ("libraries", "costs", "rates", "gpt2-bfloat16", "tests", "attention", "kernels")
# Seconds that a section has where others follow it.
LIMITS = {"gpt2-bfloat16": 330, "llama-bfloat16": 420, "attention": 90}
TESTING = 150  # seconds, whether or not others follow

Section = Callable[["Run", float], Any]  # a run, and when the section must be over


def main(argv: Sequence[str] | None = None, began: float | None = None) -> int:
    """Run; print tables, write JSON. Returns 1 where something was wrong, or did not run.

    began: when the command did, by `time.monotonic`; now unless given.
    """
    began = time.monotonic() if began is None else began
    parser = parser_of()
    args = parser.parse_args(argv)
    if args.pack is not None:
        return packed(args, parser)
    # JAX would take most of the device's memory at once, and leave none to the others.
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
            run.found["wrong"].append(why)
            continue
        limit = LIMITS.get(name) if names[i + 1 :] else None
        own_end = end if limit is None else min(end, time.monotonic() + limit)
        run_section(name, sections[name], run, own_end)
    run.write()
    print(gpu_page.text(run.found))
    print(f"\nWritten: {run.out}, and the table beside it")
    return 1 if run.found["wrong"] else 0


def parser_of() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--dry-run", action="store_true", help="toy sizes without a GPU")
    parser.add_argument(
        "--section", action="append", metavar="NAME", help=f"default: {', '.join(FIRST)}"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help="then no section begins, and processes are stopped (default %(default)s)",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=stored.DEFAULT)
    parser.add_argument(
        "--pack", type=Path, metavar="FOLDER", help="fetch wheels for a machine without a network"
    )
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument(
        "--python-version", default=this, metavar="3.N", help="its Python (default %(default)s)"
    )
    parser.add_argument(
        "--cuda", choices=sorted(gpu_pack.EXTRAS), default="13", help="its CUDA (default 13)"
    )
    parser.add_argument(
        "--has",
        type=Path,
        metavar="FILE",
        help="what `pip freeze` prints there (default: CuPy, torch with CUDA, pytest)",
    )
    return parser


def packed(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Fetch wheels, and say what to run where they are brought."""
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
    """What was found so far, and where it is written."""

    def __init__(self, plan: Plan, args: argparse.Namespace) -> None:
        self.plan, self.dry = plan, args.dry_run
        place = plan.place
        self.found: dict[str, Any] = machine.describe([])
        self.found |= {"device": place.describe(), "dry_run": self.dry}
        if (gpu := None if self.dry else machine.nvidia_smi("name")) is not None:
            self.found["machine"]["gpu"] = gpu
        self.found["versions"] |= gpu_libraries.versions(place)
        self.found |= {"running": None, "sections": {}, "left_out": {}, "wrong": []}
        question = ["gpu", *(["dry-run"] if self.dry else []), *(args.section or [])[:1]]
        # A part does not replace another.
        self.out = stored.path_of(self.found, "-".join(question), args.out)

    def write(self) -> None:
        """JSON, and the table beside it; each whole or not at all."""
        stored.write(self.found, self.out)
        report.replace(self.out.with_suffix(".md"), gpu_page.text(self.found) + "\n")

    def keep(self, name: str, found: Any) -> None:
        """What a section has found so far."""
        self.found["sections"][name] = found
        self.write()

    def able(self, section: str, names: Sequence[str]) -> list[str]:
        """Those that can take part in a section; the others are named, with their reasons."""
        there, why = able(names, dry=self.dry)
        if why:
            self.found["left_out"][section] = why
        return there


def sections_of(plan: Plan) -> dict[str, Section]:
    """By name; each returns what it has found."""
    place, rounds = plan.place, plan.rounds

    def kernels(run: Run, end: float) -> list[dict[str, Any]]:
        rates = run.found["sections"].get("rates")
        rates = rates or gpu_kernels.rates(place, plan.sizes, rounds)
        options: Any = (rounds, lambda: time.monotonic() >= end)
        rows, wrong = gpu_kernels.kernels(
            place, plan.sizes, rates, *options, lambda rows: run.keep("kernels", rows)
        )
        run.found["wrong"] += [f"kernels: {what}" for what in wrong]
        return rows

    def tested(run: Run, end: float) -> dict[str, int]:
        seconds = min(TESTING, end - time.monotonic())
        return gpu_tests.tested(plan.tests, run.found["wrong"], seconds)

    device = contestants.torch_device(plan.texts[0].device)
    steps = {shape.name: stepped(shape, names) for shape, names in plan.steps}
    return {
        "libraries": lambda run, end: gpu_libraries.libraries(place),
        "costs": lambda run, end: gpu_kernels.costs(place, rounds, plan.calls),
        "rates": lambda run, end: gpu_kernels.rates(place, plan.sizes, rounds),
        "kernels": kernels,
        "tests": tested,
        **{name: section for name, section in steps.items() if name.endswith("bfloat16")},
        **{text.name: written(text, plan.writers, rounds) for text in plan.texts},
        "attention": lambda run, end: attention(
            *(place, plan.lengths, rounds, device, until(end)),
            lambda rows: run.keep("attention", rows),
        ),
        "curve-float32": lambda run, end: gpu_curves.in_float32(
            place, plan.curves, until(end), lambda found: run.keep("curve-float32", found)
        ),
        "curve-bfloat16": lambda run, end: gpu_curves.in_bfloat16(
            place, plan.curves, until(end), lambda found: run.keep("curve-bfloat16", found)
        ),
        **steps,  # those that are not there yet
    }


def until(end: float) -> Callable[[], None]:
    """To be called now and then: TimeoutError when time is over."""

    def tick() -> None:
        if time.monotonic() >= end:
            raise TimeoutError("it was not done")

    return tick


def stepped(shape: Shape, names: Sequence[str]) -> Section:
    """The section of a training step."""

    def section(run: Run, end: float) -> dict[str, Any]:
        there = run.able(shape.name, names)
        options: Any = {"failed": run.found["wrong"]}
        options["keep"] = lambda found: run.keep(shape.name, found)
        return step.measure(shape, there, shape.rounds, ["step"], **options)

    return section


def written(shape: Shape, names: Sequence[str], rounds: int) -> Section:
    """The section of texts."""

    def section(run: Run, end: float) -> dict[str, Any]:
        there = run.able(shape.name, names)
        keep = lambda found: run.keep(shape.name, found)  # noqa: E731
        return gpu_decoding.decoded(shape, there, rounds, run.found["wrong"], keep)

    return section


def run_section(name: str, section: Section, run: Run, end: float) -> None:
    """Keep what it finds, or why it failed, which leaves the others.

    Its processes are stopped at the end; what it has found by then is kept, but where a contestant
    is wrong.
    """
    start, found = time.monotonic(), run.found
    print(f"{name} ...", file=sys.stderr, flush=True)
    found["running"] = name
    run.write()
    done = threading.Event()
    threading.Thread(target=stopping, args=(done, end - start), daemon=True).start()
    try:
        found["sections"][name] = section(run, end)
    except Exception as error:
        over = "stopped, time was over: " if time.monotonic() >= end else ""
        found["wrong"].append(f"{name}: {over}{type(error).__name__}: {error}")
        if isinstance(error, Disagreement):
            found["sections"].pop(name, None)
        traceback.print_exc()
    finally:
        done.set()
    found["running"] = None
    run.write()
    machine.give_back()  # the contestants have processes, and memory, of their own
    print(f"{name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


def stopping(done: threading.Event, seconds: float) -> None:
    """Stop all processes then, and those that begin later, until it is done."""
    while not done.wait(seconds):
        harness.Process.stop()
        seconds = 1


if __name__ == "__main__":
    sys.exit(main(began=time.monotonic() - machine.age()))
