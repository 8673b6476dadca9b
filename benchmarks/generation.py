"""`python -m benchmarks.generation`: tokens a second of stories260K, by every way to them.

With a cache and without, one text and many, drawn, searched and guessed; on NumPy, and on torch
on the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks import harness, machine, stored
from benchmarks.embeddings_page import BEGIN, END
from benchmarks.harness import Disagreement
from xformer import backends, inference, pretrained
from xformer.generation import beam_search, generate, prefill, speculative
from xformer.generation.samplers import compose, temperature, top_k, top_p
from xformer.pretrained.tokenizer import tokenizer

MODEL, WORDS, STORY = "stories260K.bin", "tok512.bin", "stories260K_greedy_200_tokens.txt"
LIBRARIES = ("numpy", "torch")
BOS, LENGTH, BATCH, BEAMS, GUESSES = 1, 200, 16, 4, 3
SAMPLER = compose(temperature(0.8), top_k(40), top_p(0.95))
Work = tuple[Callable[[], list[list[int]]], int]  # texts, and how many tokens that is


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, write the JSON. Returns 1 where a text is not the published one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=__doc__)
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", required=True, help=f"of {MODEL}, {WORDS}, {STORY}"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help=stored.DEFAULT)
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="put the table there too")
    args = parser.parse_args(argv)
    libraries = [name for name in LIBRARIES if name in backends.available()]
    found = machine.describe(libraries) | {"threads": machine.share_threads()}
    try:
        with tqdm(disable=None, leave=False) as bar:
            found |= measure(args.data, libraries, args.rounds, bar.update)
    except Disagreement as wrong:
        print(f"benchmarks: nothing is reported.\n{wrong}", file=sys.stderr)
        return 1
    print(text(found))
    out = args.out or stored.path_of(found, "generation")
    stored.write(found, out)
    print(f"\nWritten: {out}")
    if args.page is not None:
        update(args.page, found, out)
    return 0


def measure(
    data: Path, libraries: Sequence[str], rounds: int, tick: Callable[[], Any]
) -> dict[str, Any]:
    """Check the greedy texts, then measure in turns."""
    story = (data / STORY).read_bytes().decode()
    words = tokenizer(data / WORDS)
    works: dict[tuple[str, str], Work] = {}
    for library in libraries:
        model, params = pretrained.load(data / MODEL, library)
        own = ways(model, params, backends.get(library), words.encode(story)[:-1])
        for name in ("without a cache", "one text", "guesses"):
            (ids,) = own[name][0]()
            if words.decode(ids) != story:
                raise Disagreement(f"{library}, {name}: the text is not the published one")
        works |= {(name, library): work for name, work in own.items()}
    turns = {key: partial(harness.timed, run) for key, (run, _) in works.items()}
    seconds = harness.interleave(turns, rounds, tick)
    rows: dict[str, dict[str, Any]] = {}
    for (name, library), times in seconds.items():
        n = works[name, library][1]
        rows.setdefault(name, {})[library] = harness.summary(times, None) | {
            "tokens": n,
            "per_s": n / min(times),
        }
    return {"model": MODEL, "rounds": rounds, "length": LENGTH, "rows": rows}


def ways(model: Any, params: Any, place: backends.Backend, story: list[int]) -> dict[str, Work]:
    """What is measured, by name."""
    write = partial(generate, model, params, max_new_tokens=LENGTH)
    stack = params.stack._replace(blocks=params.stack.blocks[:GUESSES])
    draft = replace(model, blocks=model.blocks[:GUESSES]), params._replace(stack=stack)

    @inference()
    def uncached() -> list[list[int]]:
        ids = [BOS]
        for _ in range(LENGTH):
            logits, _ = model.forward(params, place.asarray(np.asarray([ids])))
            ids.append(int(place.to_numpy(logits)[0, -1].argmax()))
        return [ids[1:]]

    def searched() -> list[list[int]]:
        found = beam_search(model, params, [[BOS]], n_beams=BEAMS, max_new_tokens=LENGTH)
        return [beam.ids for beam in found[0]]

    def guessed() -> list[list[int]]:
        rounds = speculative(model, params, *draft, [BOS], k=4, max_new_tokens=LENGTH)
        return [[i for new in rounds for i in new]]

    def read() -> list[list[int]]:
        return [list(ids) for ids in prefill(model, params, [story]).ids]

    return {
        "reading a prompt": (read, len(story)),
        "without a cache": (uncached, LENGTH),
        "one text": (lambda: write([[BOS]]), LENGTH),
        "drawn": (lambda: write([[BOS]], sampler=SAMPLER), LENGTH),
        "texts at once": (lambda: write([[BOS]] * BATCH), BATCH * LENGTH),
        "beams": (searched, LENGTH),
        "guesses": (guessed, LENGTH),
    }


SHOWN = {
    "reading a prompt": f"reading a prompt of {LENGTH} tokens",
    "without a cache": "one text, by a forward pass over all of it for each token",
    "one text": "one text",
    "drawn": "one text, drawn: temperature, top-k, top-p",
    "texts at once": f"{BATCH} texts at once",
    "beams": f"the best of {BEAMS} beams",
    "guesses": f"one text, by guesses of the first {GUESSES} of 5 layers",
}


def text(found: Mapping[str, Any]) -> str:
    """The table, and where it came about."""
    libraries = list(found["backends"])
    lines = [
        f"| tokens a second | {' | '.join(libraries)} |",
        "|---|" + "---:|" * len(libraries),
    ]
    for name, shown in SHOWN.items():
        cells = [f"{found['rows'][name][library]['per_s']:,.0f}" for library in libraries]
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    commit = (found["commit"] or "none")[:9] + (" with local changes" if found["dirty"] else "")
    lines += [
        "",
        f"{found['date']}, {found['machine']['cpu']}, {found['machine']['system']}, "
        f"{found['threads']['cpus']} threads.",
        f"Python {found['python']}; {'; '.join(found['backends'].values())}. Commit {commit}.",
        f"{found['length']} tokens in float32, the fastest of {found['rounds']} runs.",
    ]
    return "\n".join(lines)


def update(page: Path, found: Mapping[str, Any], result: Path) -> None:
    """Put a run in the place of the one on the page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    link = Path(os.path.relpath(result, page.parent)).as_posix()
    shown = f"{text(found)}\n[All figures]({link}).\n"
    page.write_text(f"{before}{BEGIN}{shown}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
