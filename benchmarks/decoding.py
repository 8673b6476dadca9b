"""`python -m benchmarks.decoding`: time per token at batch 1, beside Hugging Face transformers."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import command, harness, machine, report, stored
from benchmarks.harness import Disagreement
from xformer import backends, pretrained
from xformer.base import tree

PEER = "transformers"
NAMES = (PEER, "transformers loop", "xformer numpy", "xformer numba", "xformer torch")
# The contestants of `benchmarks.gate`.
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
    """A model and the lengths of the prompt and of the text that it generates."""

    name: str
    config: dict[str, Any]  # of Hugging Face
    prompt: int  # tokens
    new: int  # tokens
    rounds: int


TEXTS = (
    Text("stories260K", STORIES, prompt=1, new=200, rounds=10),
    Text("char-gpt", GPT2 | SMALL, prompt=16, new=200, rounds=10),
    Text("gpt2", GPT2 | LARGE, prompt=16, new=64, rounds=8),
)
BY_NAME = {text.name: text for text in TEXTS}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each model, print its table and write its JSON. Returns 1 if texts differ."""
    parser = command.parser("benchmarks.decoding", __doc__)
    parser.add_argument("--shape", action="append", choices=BY_NAME, help="default: all")
    command.add_rounds(parser)
    command.add_out(parser)
    args = parser.parse_args(argv)
    command.require("torch", "transformers")
    ours = {name: name.split()[1] for name in NAMES if name.startswith("xformer")}
    absent = {n: why for n, b in ours.items() if (why := backends.unavailable_reason(b))}
    names = [name for name in NAMES if name not in absent]
    libraries = [library for name, library in ours.items() if name in names]
    for name in args.shape or BY_NAME:
        result = machine.describe(libraries, (*machine.PACKAGES, "transformers"))
        result |= {"threads": machine.threads(), "load": machine.load()}
        result["absent"] = [f"{name}: {why}" for name, why in absent.items()]
        rounds = args.rounds or BY_NAME[name].rounds
        try:
            with command.ticking(name, len(names) * (rounds + 1)) as tick:
                result |= measure(BY_NAME[name], rounds, tick, names)
        except Disagreement as error:
            print(f"benchmarks: nothing is reported.\n{error}", file=sys.stderr)
            return 1
        print(table(result))
        out = stored.path_of(result, f"decoding-{name}", args.out)
        stored.write(result, out)
        print(f"\nWritten: {out}\n")
    return 0


def start(name: str, folder: str | Path) -> harness.Process:
    """Start the process of the contestant `name` on the model in `folder`."""
    command = [sys.executable, "-m", "benchmarks.decoder", name, folder]
    return harness.Process(name, command, machine.environment() | {"HF_HUB_OFFLINE": "1"})


def measure(
    text: Text,
    rounds: int,
    tick: Callable[[], Any] = lambda: None,
    names: Sequence[str] = NAMES,
) -> dict[str, Any]:
    """Compare the texts that all contestants generate, then return times per token, for the JSON.

    Each contestant is a process. The prompt is random, and decoding is greedy.

    text: the model's config, the lengths of prompt and generated text
    rounds: timed rounds, after one that warms up; each round runs each contestant once
    tick: is called after each run
    names: the contestants; PEER must be one of them, because ratios are to its time

    Raises Disagreement if a contestant's tokens differ from PEER's.
    """
    model = pretrained.model(text.config)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, model.embed.vocab_size, text.prompt).tolist()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        pretrained.save(model, varied(model), folder)
        running = {name: stack.enter_context(start(name, folder)) for name in names}
        request = {"prompt": prompt, "n": text.new}
        ids = check({name: one.ask(write=request)["ids"] for name, one in running.items()})

        def seconds_per_token(one: harness.Process) -> list[float]:
            return [one.ask(write=request)["seconds"] / text.new]

        runs = {name: partial(seconds_per_token, one) for name, one in running.items()}
        seconds = harness.interleave(runs, rounds, tick)
        rows = [
            {"name": name, "token": harness.summary(seconds[name], seconds[PEER])}
            | one.ask(about={})
            for name, one in running.items()
        ]
    settings = {"shape": text.name, "prompt": text.prompt, "new": text.new, "rounds": rounds}
    return settings | {"different": len(set(ids)), "peer": PEER, "rows": rows}


def varied(model: Any) -> Any:
    """Return initial weights plus noise: without it, every generated token would be the same."""
    rng = np.random.default_rng(1)

    def move(p: np.ndarray) -> np.ndarray:
        return (p + rng.normal(0.0, 0.1, p.shape)).astype(np.float32)

    return tree.map(move, model.init(0))


def check(texts: Mapping[str, list[int]]) -> list[int]:
    """Return the token ids that all contestants wrote. Raises Disagreement if one differs."""
    want = texts[PEER]
    for name, ids in texts.items():
        if ids != want:
            raise Disagreement(f"{name} and {PEER} write different texts:\n{ids}\n{want}")
    return want


def table(result: Mapping[str, Any]) -> str:
    """Return a Markdown table of a result, one row per contestant."""
    rows = [[f"{result['shape']}, {result['new']} tokens", "ms a token", "x", "peak MB"]]
    for row in result["rows"]:
        token = row["token"]
        times = f"{token['min_ms']:.3f} ({token['median_ms']:.3f})"
        rows.append([row["name"], times, f"{token['ratio']:.3f}", f"{row['peak_bytes'] / 1e6:.0f}"])
    return report.align(rows)


if __name__ == "__main__":
    sys.exit(command.run(main))
