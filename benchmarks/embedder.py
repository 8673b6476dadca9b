"""One contestant of `benchmarks.embeddings`, in a separate process and environment.

    python embedder.py xformer|sentence-transformers FOLDER

It loads the model from FOLDER, embeds one sentence, then answers JSON lines:

- {"run": [texts], "batch": n}: embed the texts (batch null: one call per text)
- {"show": [texts]}: return the vectors
- {"about": true}: return versions, threads and peak memory

The script imports nothing from this checkout, so that it measures the installed library.
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
    """Return `embed` of this library, called as docs/sentence-embeddings.md does."""
    from xformer import pretrained
    from xformer.pretrained.tokenizer import tokenizer
    from xformer.sentences import embed, settings

    opened = (*pretrained.load(folder), tokenizer(folder))
    options = settings(folder)._asdict()
    return lambda texts, batch=32: embed(*opened, texts, batch_size=batch, **options)


def sentence_transformers(folder: str) -> Callable[..., Any]:
    """Return `encode` of sentence-transformers on the CPU, called as its documentation does."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu")
    return lambda texts, batch=32: model.encode(texts, batch_size=batch)


def about() -> dict[str, Any]:
    """Return versions, threads, and the peak memory so far (Linux; None elsewhere)."""
    versions = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    peak = None
    if os.path.exists("/proc/self/status"):
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            fields = dict(line.split(":", 1) for line in status)
        peak = 1024 * int(fields["VmHWM"].split()[0])
    threads = {"torch": sys.modules["torch"].get_num_threads()} if "torch" in sys.modules else {}
    return {
        "versions": {name: versions[name] for name in PACKAGES if name in versions},
        "threads": threads,
        "peak_bytes": peak,
    }


def main(name: str, folder: str) -> None:
    """Answer requests for the contestant `name` until standard input ends."""
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
