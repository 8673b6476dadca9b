"""One contestant of `benchmarks.embeddings`, in a process and an environment of its own.

    python embedder.py xformer|sentence-transformers FOLDER

Loads the model and embeds one sentence, then answers JSON lines: {"run": [texts], "batch": n}
embeds (batch null: a call for each text), {"show": [texts]} gives the vectors, {"about": true} what
took part. A script without imports from this checkout, so that it measures what is installed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from typing import Any

PACKAGES = ("numpy", "tokenizers", "torch", "transformers", "sentence-transformers")


def xformer(folder: str) -> Callable[..., Any]:
    """As this library's page has it."""
    from xformer import pretrained
    from xformer.pretrained.tokenizer import tokenizer
    from xformer.sentences import embed, settings

    opened = (*pretrained.load(folder), tokenizer(folder))
    options = settings(folder)._asdict()
    return lambda texts, batch=32: embed(*opened, texts, batch_size=batch, **options)


def sentence_transformers(folder: str) -> Callable[..., Any]:
    """As its own page has it, on the CPU."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu")
    return lambda texts, batch=32: model.encode(texts, batch_size=batch)


def about() -> dict[str, Any]:
    """Versions, threads, and the most memory so far (Linux)."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    peak = None
    if os.path.exists("/proc/self/status"):
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            fields = dict(line.split(":", 1) for line in status)
        peak = 1024 * int(fields["VmHWM"].split()[0])
    threads = {"torch": sys.modules["torch"].get_num_threads()} if "torch" in sys.modules else {}
    return {
        "versions": {name: found[name] for name in PACKAGES if name in found},
        "threads": threads,
        "peak_bytes": peak,
    }


def main(name: str, folder: str) -> None:
    """Answer until standard input ends."""
    encode = {"xformer": xformer, "sentence-transformers": sentence_transformers}[name](folder)
    encode(["A first sentence."])
    print("ready", flush=True)
    for line in sys.stdin:
        request, answer = json.loads(line), None
        if "about" in request:
            answer = about()
        elif "show" in request:
            answer = encode(request["show"]).tolist()
        elif request["batch"] is None:
            for text in request["run"]:
                encode([text])
        else:
            encode(request["run"], request["batch"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
