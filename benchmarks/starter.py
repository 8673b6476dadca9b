"""One process of `benchmarks.starts`: `starter.py NAME FOLDER` (FOLDER: a GPT-2 in HF's format).

It imports the library, loads the model, computes the logits of PROMPT, and prints "ready". It
answers each request with the logits of the last token. The script imports nothing from this
checkout, so that only the measured library is loaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def xformer(folder: str) -> Any:
    """Return the last token's logits by this library, on NumPy."""
    import numpy as np

    from xformer import pretrained

    model, params = pretrained.load(folder)
    logits, _ = model.decode(params, np.asarray([PROMPT]), model.init_state())
    return logits[0]


def torch_eager(folder: str) -> Any:
    """Return the last token's logits by the shortest program in plain torch."""
    import torch
    import torch.nn.functional as F
    from safetensors.torch import load_file

    config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    w, heads, layers = load_file(Path(folder, "model.safetensors")), config["n_head"], "transformer"

    def norm(x: Any, name: str) -> Any:
        name = f"{layers}.{name}"
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    def linear(x: Any, name: str) -> Any:
        return F.linear(x, w[f"{layers}.{name}.weight"].T, w[f"{layers}.{name}.bias"])

    with torch.inference_mode():
        table = w[f"{layers}.wte.weight"]
        x = table[PROMPT][None] + w[f"{layers}.wpe.weight"][: len(PROMPT)]
        for i in range(config["n_layer"]):
            qkv = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, dim=-1)
            q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv)
            ctx = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + linear(ctx.transpose(1, 2).flatten(2), f"h.{i}.attn.c_proj")
            hidden = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
            x = x + linear(F.gelu(hidden, approximate="tanh"), f"h.{i}.mlp.c_proj")
        return F.linear(norm(x, "ln_f")[:, -1], table)[0]


def transformers(folder: str) -> Any:
    """Return the last token's logits by Hugging Face transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0, -1]


START = {"xformer numpy": xformer, "torch eager": torch_eager, "transformers": transformers}

if __name__ == "__main__":
    logits = START[sys.argv[1]](sys.argv[2])
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(logits.tolist()), flush=True)
