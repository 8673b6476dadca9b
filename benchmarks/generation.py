"""`python -m benchmarks.generation`: tokens per second of stories260K, by each way to generate.

These are greedy with and without a KV cache, one sequence and a batch, sampling, beam search and
speculative decoding; on NumPy, and on torch on the CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command, harness, machine, report, stored
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
Work = tuple[Callable[[], list[list[int]]], int]  # returns ids of texts; number of tokens counted


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON. Returns 1 if a text is not the published one."""
    parser = command.parser("benchmarks.generation", __doc__)
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", required=True, help=f"of {MODEL}, {WORDS}, {STORY}"
    )
    command.add_rounds(parser, 5)
    command.add_out_file(parser)
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="put the table there too")
    args = parser.parse_args(argv)
    if args.page is not None:
        report.around(args.page, BEGIN, END)
    libraries = [name for name in LIBRARIES if name in backends.available()]
    result = machine.describe(libraries) | {"threads": machine.share_threads()}
    try:
        result |= measure(args.data, libraries, args.rounds)
    except Disagreement as error:
        print(f"benchmarks: nothing is reported.\n{error}", file=sys.stderr)
        return 1
    print(text(result))
    out = args.out or stored.path_of(result, "generation")
    stored.write(result, out)
    print(f"\nWritten: {out}")
    if args.page is not None:
        update(args.page, result, out)
    return 0


def measure(data: Path, libraries: Sequence[str], rounds: int) -> dict[str, Any]:
    """Compare the greedy texts with the published one, then time all works in interleaved rounds.

    data: the folder of MODEL, WORDS and STORY
    Returns the result for the JSON. Raises Disagreement if a text differs.
    """
    story = (data / STORY).read_bytes().decode()
    words = tokenizer(data / WORDS)
    works: dict[tuple[str, str], Work] = {}
    for library in libraries:
        model, params = pretrained.load(data / MODEL, library)
        by_name = ways(model, params, backends.get(library), words.encode(story)[:-1])
        for name in ("without a cache", "one text", "guesses"):
            (ids,) = by_name[name][0]()
            if words.decode(ids) != story:
                raise Disagreement(f"{library}, {name}: the text is not the published one")
        works |= {(name, library): work for name, work in by_name.items()}
    turns = {key: partial(harness.timed, run) for key, (run, _) in works.items()}
    with command.ticking("generation", len(turns) * (rounds + 1)) as tick:
        seconds = harness.interleave(turns, rounds, tick)
    rows: dict[str, dict[str, Any]] = {}
    for (name, library), times in seconds.items():
        n = works[name, library][1]
        rows.setdefault(name, {})[library] = harness.summary(times, None) | {
            "tokens": n,
            "per_s": n / min(times),
        }
    return {"model": MODEL, "rounds": rounds, "length": LENGTH, "rows": rows}


def ways(model: Any, params: Any, backend: backends.Backend, story: list[int]) -> dict[str, Work]:
    """Return the works that are timed, by name, on `backend`; story: ids of the published text."""
    write = partial(generate, model, params, max_new_tokens=LENGTH)
    stack = params.stack._replace(blocks=params.stack.blocks[:GUESSES])
    draft = model.with_layers(range(GUESSES)), params._replace(stack=stack)

    @inference()
    def uncached() -> list[list[int]]:
        ids = [BOS]
        for _ in range(LENGTH):
            logits, _ = model.forward(params, backend.asarray(np.asarray([ids])))
            ids.append(int(backend.to_numpy(logits)[0, -1].argmax()))
        return [ids[1:]]

    def searched() -> list[list[int]]:
        (beams,) = beam_search(model, params, [[BOS]], n_beams=BEAMS, max_new_tokens=LENGTH)
        return [beam.ids for beam in beams]

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
    "without a cache": "one text, without a KV cache",
    "one text": "one text",
    "drawn": "one text, sampling: temperature, top-k, top-p",
    "texts at once": f"{BATCH} texts at once",
    "beams": f"beam search, {BEAMS} beams",
    "guesses": f"one text, speculative decoding with the first {GUESSES} of 5 layers",
}


def text(result: Mapping[str, Any]) -> str:
    """Return the table, and lines on machine, versions and commit."""
    libraries = list(result["backends"])
    lines = [
        f"| tokens a second | {' | '.join(libraries)} |",
        "|---|" + "---:|" * len(libraries),
    ]
    for name, shown in SHOWN.items():
        cells = [f"{result['rows'][name][library]['per_s']:,.0f}" for library in libraries]
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    commit = (result["commit"] or "none")[:9] + (" with local changes" if result["dirty"] else "")
    lines += [
        "",
        f"{result['date']}, {result['machine']['cpu']}, {result['machine']['system']}, "
        f"{result['threads']['cpus']} threads.",
        f"Python {result['python']}; {'; '.join(result['backends'].values())}. Commit {commit}.",
        f"{result['length']} tokens in float32, the fastest of {result['rounds']} runs.",
    ]
    return "\n".join(lines)


def update(page: Path, result: Mapping[str, Any], path: Path) -> None:
    """Replace the result on `page` by `result`; path: of its JSON, for the link."""
    link = Path(os.path.relpath(path, page.parent)).as_posix()
    shown = f"{text(result)}\n[All figures]({link}).\n"
    report.put(page, BEGIN, END, shown)


if __name__ == "__main__":
    sys.exit(command.run(main))
