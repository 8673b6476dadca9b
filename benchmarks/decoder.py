"""One contestant of `benchmarks.decoding`: `decoder.py NAME FOLDER`, a model in a folder.

{"write": {"prompt": ids, "n": n}} is answered with the n likeliest next ids and the seconds that
they took. "xformer <backend>" is this library as it is, "xformer <backend> ops" without compiled
tokens; "transformers" its own `generate`, with a cache; "transformers loop" calls its model with a
cache, without what `generate` does around it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import harness, machine

Write = Callable[[Sequence[int], int], list[int]]


def xformer(folder: str, how: str) -> Write:
    """As this library's page has it; how: a backend, or "<backend> ops"."""
    from xformer import backends, pretrained
    from xformer.generation import generate

    backend, _, kind = how.partition(" ")
    model, params = pretrained.load(folder, backend)

    def write(prompt: Sequence[int], n: int) -> list[int]:
        compiled = False if kind == "ops" else None
        with backends.get(backend).active():
            return generate(model, params, [prompt], max_new_tokens=n, compiled=compiled)[0]

    return write


def transformers(folder: str, loop: bool) -> Write:
    """In float32 on the CPU, with its cache, which ends no text."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def write(prompt: Sequence[int], n: int) -> list[int]:
        ids = torch.tensor([prompt])
        options: dict[str, Any] = {"max_new_tokens": n, "do_sample": False, "use_cache": True}
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return found[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def step_by_step(prompt: Sequence[int], n: int) -> list[int]:
        ids, cache, new = torch.tensor([prompt]), None, []
        for _ in range(n):
            found = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = found.past_key_values, found.logits[:, -1].argmax(dim=-1, keepdim=True)
            new.append(int(ids))
        return new

    return step_by_step if loop else write


def main(name: str, folder: str) -> None:
    """Answer until standard input ends."""
    library, _, how = name.partition(" ")
    write = transformers(folder, how == "loop") if library != "xformer" else xformer(folder, how)

    def answer(prompt: list[int], n: int) -> dict[str, Any]:
        start = time.perf_counter()
        ids = write(prompt, n)
        return {"ids": ids, "seconds": time.perf_counter() - start}

    def about() -> dict[str, Any]:
        from xformer.backends.base import process_memory

        return {"peak_bytes": process_memory().peak, "threads": machine.threads()}

    harness.serve({"write": answer, "about": about})


if __name__ == "__main__":
    main(*sys.argv[1:])
