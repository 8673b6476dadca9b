"""One contestant of `benchmarks.decoding`: `decoder.py NAME FOLDER` (FOLDER holds the model).

{"write": {"prompt": ids, "n": n}} is answered with n greedy token ids and the seconds taken.

- "xformer <backend>": this library with its defaults
- "xformer <backend> ops": this library without compiled decoding
- "transformers": `generate` of transformers, with a KV cache
- "transformers loop": a greedy loop over the model of transformers, with a KV cache
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import harness, machine

Write = Callable[[Sequence[int], int], list[int]]


def xformer(folder: str, variant: str) -> Write:
    """Return greedy decoding by this library; variant: "<backend>" or "<backend> ops"."""
    from xformer import backends, pretrained
    from xformer.generation import generate

    backend, _, suffix = variant.partition(" ")
    model, params = pretrained.load(folder, backend)

    def write(prompt: Sequence[int], n: int) -> list[int]:
        compiled = False if suffix == "ops" else None
        with backends.get(backend).active():
            return generate(model, params, [prompt], max_new_tokens=n, compiled=compiled)[0]

    return write


def transformers(folder: str, loop: bool) -> Write:
    """Return greedy decoding by transformers, in float32 on the CPU, without an end-of-text token.

    loop: call the model token by token, instead of `generate`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def write(prompt: Sequence[int], n: int) -> list[int]:
        ids = torch.tensor([prompt])
        options: dict[str, Any] = {"max_new_tokens": n, "do_sample": False, "use_cache": True}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return output[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def step_by_step(prompt: Sequence[int], n: int) -> list[int]:
        ids, cache, new = torch.tensor([prompt]), None, []
        for _ in range(n):
            output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = output.past_key_values, output.logits[:, -1].argmax(dim=-1, keepdim=True)
            new.append(int(ids))
        return new

    return step_by_step if loop else write


def main(name: str, folder: str) -> None:
    """Answer requests for the contestant `name` until standard input ends."""
    library, _, variant = name.partition(" ")
    write = (
        transformers(folder, variant == "loop")
        if library != "xformer"
        else xformer(folder, variant)
    )

    def answer(prompt: list[int], n: int) -> dict[str, Any]:
        start = time.perf_counter()
        ids = write(prompt, n)
        return {"ids": ids, "seconds": time.perf_counter() - start}

    def about() -> dict[str, Any]:
        from xformer.dispatch.backend import process_memory

        return {"peak_bytes": process_memory().peak, "threads": machine.threads()}

    harness.serve({"write": answer, "about": about})


if __name__ == "__main__":
    main(*sys.argv[1:])
