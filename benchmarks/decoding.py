"""`python -m benchmarks.decoding`: time a token at batch 1, beside Hugging Face's transformers."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from benchmarks import harness, machine, report, stored
from benchmarks.harness import Disagreement
from xformer import pretrained, tree

PEER = "transformers"
NAMES = (PEER, "transformers loop", "xformer numpy", "xformer numba", "xformer torch")
# Of the gate, `benchmarks.gate`.
GATE = (PEER, "transformers loop", "xformer numpy", "xformer numba ops", "xformer numba")
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
LARGE = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
SMALL = {"n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": 256, "vocab_size": 65}
STORIES = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


class Text(NamedTuple):
    """A model, by its configuration, and how much it writes."""

    name: str
    config: dict[str, Any]
    prompt: int
    new: int
    rounds: int


TEXTS = (
    Text("stories260K", STORIES, prompt=1, new=200, rounds=10),
    Text("char-gpt", GPT2 | SMALL, prompt=16, new=200, rounds=10),
    Text("gpt2", GPT2 | LARGE, prompt=16, new=64, rounds=8),
)
BY_NAME = {text.name: text for text in TEXTS}


def main(argv: Sequence[str] | None = None) -> int:
    """Run; of each model print a table and write JSON. Returns 1 where texts differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding", description=__doc__)
    parser.add_argument("--shape", action="append", choices=BY_NAME, help="default: all")
    parser.add_argument("--rounds", type=int, metavar="N", help="default: by shape")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=stored.DEFAULT)
    args = parser.parse_args(argv)
    if importlib.util.find_spec("transformers") is None:
        parser.error("transformers is not installed")
    libraries = [n.split()[1] for n in NAMES if n.startswith("xformer")]
    for name in args.shape or BY_NAME:
        found = machine.describe(libraries, (*machine.PACKAGES, "transformers"))
        found |= {"threads": machine.threads(), "load": machine.load()}
        rounds = args.rounds or BY_NAME[name].rounds
        try:
            with tqdm(total=len(NAMES) * (rounds + 1), desc=name, disable=None, leave=False) as bar:
                found |= measure(BY_NAME[name], rounds, bar.update)
        except Disagreement as wrong:
            print(f"benchmarks: nothing is reported.\n{wrong}", file=sys.stderr)
            return 1
        print(table(found))
        out = stored.path_of(found, f"decoding-{name}", args.out)
        stored.write(found, out)
        print(f"\nWritten: {out}\n")
    return 0


def start(name: str, folder: str | Path) -> harness.Process:
    """The process of a contestant."""
    command = [sys.executable, "-m", "benchmarks.decoder", name, folder]
    return harness.Process(name, command, machine.environment() | {"HF_HUB_OFFLINE": "1"})


def measure(
    text: Text,
    rounds: int,
    tick: Callable[[], Any] = lambda: None,
    names: Sequence[str] = NAMES,
) -> dict[str, Any]:
    """Compare the texts, then measure in turns; names: who takes part, the peer among them."""
    model = pretrained.model(text.config)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, model.embed.vocab_size, text.prompt).tolist()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        pretrained.save(model, varied(model), folder)
        running = {name: stack.enter_context(start(name, folder)) for name in names}
        asked = {"prompt": prompt, "n": text.new}
        ids = check({name: one.ask(write=asked)["ids"] for name, one in running.items()})

        def turn(one: harness.Process) -> list[float]:
            return [one.ask(write=asked)["seconds"] / text.new]

        turns = {name: partial(turn, one) for name, one in running.items()}
        seconds = harness.interleave(turns, rounds, tick)
        rows = [
            {"name": name, "token": harness.summary(seconds[name], seconds[PEER])}
            | one.ask(about={})
            for name, one in running.items()
        ]
    how = {"shape": text.name, "prompt": text.prompt, "new": text.new, "rounds": rounds}
    return how | {"different": len(set(ids)), "peer": PEER, "rows": rows}


def varied(model: Any) -> Any:
    """Weights that do not write the same token for ever."""
    rng = np.random.default_rng(1)

    def move(p: np.ndarray) -> np.ndarray:
        return (p + rng.normal(0.0, 0.1, p.shape)).astype(np.float32)

    return tree.map(move, model.init(0))


def check(texts: Mapping[str, list[int]]) -> list[int]:
    """The text that all have written; Disagreement where one has written another."""
    want = texts[PEER]
    for name, ids in texts.items():
        if ids != want:
            raise Disagreement(f"{name} writes another text than {PEER}:\n{ids}\n{want}")
    return want


def table(found: Mapping[str, Any]) -> str:
    """Of each contestant one row."""
    rows = [[f"{found['shape']}, {found['new']} tokens", "ms a token", "x", "peak MB"]]
    for row in found["rows"]:
        token = row["token"]
        times = f"{token['min_ms']:.3f} ({token['median_ms']:.3f})"
        rows.append([row["name"], times, f"{token['ratio']:.3f}", f"{row['peak_bytes'] / 1e6:.0f}"])
    return report.align(rows)


if __name__ == "__main__":
    sys.exit(main())
