"""llama2.c's models are Llama with interleaved rotary pairs: transformers' output and gradients."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import pytest
from hostile import refused_at_most
from huggingface import (
    FLOAT64,
    Values,
    build,
    double_precision,
    judged,
    require_close,
    transformers,
)

from xformer import pretrained
from xformer.pretrained import PretrainedError
from xformer.pretrained.families import llama2c
from xformer.pretrained.llama2c import Header, shapes

B, T = 3, 7
PLACES = {
    "self_attn.q_proj": "wq",
    "self_attn.k_proj": "wk",
    "self_attn.v_proj": "wv",
    "self_attn.o_proj": "wo",
    "mlp.gate_proj": "w1",
    "mlp.down_proj": "w2",
    "mlp.up_proj": "w3",
    "input_layernorm": "rms_att",
    "post_attention_layernorm": "rms_ffn",
}
TOP = {
    "model.embed_tokens.weight": "token_embedding",
    "model.norm.weight": "rms_final",
    "lm_head.weight": "wcls",
}


def renamed(values: Values, width: int) -> Values:
    """A Llama's tensors, or gradients, as llama2.c has them; width: of a head."""
    found = {}
    for name, value in values.items():
        if name in TOP:
            found[TOP[name]] = value
            continue
        _, _, layer, part = name.removesuffix(".weight").split(".", 3)
        if PLACES[part] in ("wq", "wk"):  # from half-split to interleaved pairs
            halves = value.reshape(-1, 2, width // 2, value.shape[1])
            value = halves.swapaxes(1, 2).reshape(value.shape)
        found[f"{PLACES[part]}.{layer}"] = value
    return found


def test_a_file_of_many_layers_is_refused_soon(tmp_path: Path) -> None:
    header = Header(2, 1, 50_000, 1, 1, 1, 1, tied=True)
    size = 28 + 4 * sum(map(math.prod, shapes(header).values()))
    (tmp_path / "a.bin").write_bytes(struct.pack("<7i", *header[:7]).ljust(size, b"\0"))
    with (
        refused_at_most(),
        pytest.raises(PretrainedError, match="n_layers must be at most 1000, got 50000"),
    ):
        pretrained.load(tmp_path / "a.bin")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (2, 1)])
def test_output_and_gradients(heads: int, kv_heads: int, tied: bool, tmp_path: Path) -> None:
    header = Header(16, 20, 2, heads, kv_heads, 37, 32, tied=tied)
    config = transformers.LlamaConfig(
        hidden_size=header.d_model,
        intermediate_size=header.d_ff,
        num_hidden_layers=header.n_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=header.vocab_size,
        max_position_embeddings=header.max_len,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    hf = build(transformers.LlamaForCausalLM, config)
    for p in hf.parameters():
        p.data = p.data.float().double()  # the file has float32
    width = header.d_model // heads
    weights = {name: p.detach().numpy() for name, p in hf.named_parameters()}
    written = {name: a.astype(np.float32) for name, a in renamed(weights, width).items()}
    llama2c.write_file(tmp_path / "a.bin", header._asdict(), written)
    tokens = np.random.default_rng(0).integers(0, header.vocab_size, (B, T))
    with double_precision():
        want = judged(hf, {"input_ids": tokens}, "logits")
    model, params = pretrained.load(tmp_path / "a.bin", dtype="float64")
    logits, cache = model.forward(params, tokens)
    require_close("logits", logits, want.y, FLOAT64)
    grads = pretrained.tensors_of(model, cache.backward(want.dy))
    wanted = renamed(want.grads, width)
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        require_close(name, grad, wanted[name], FLOAT64)
