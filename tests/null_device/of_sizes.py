"""Models of the sizes that benchmarks measure: steps and tokens."""

from __future__ import annotations

import itertools
from typing import Any

from null_device import stand_ins, work
from null_device.cases import Numbers, case
from null_device.device import refusing
from xformer import GPT, pretrained
from xformer.generation.compiled_decoding import MOST

GPT2 = GPT(50257, 12, 768, 12, max_len=1024)
LLAMA = pretrained.model(
    {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000},
        **{"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24},
        **{"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 1024},
    }
)
LIBRARIES = {"without": (), "cublaslt": ("cublaslt",), "both": ("cublaslt", "cudnn")}
DTYPES = {"float32": None, "bfloat16": "bfloat16", "float16": "float16"}


def add(name: str, model: Any, arrays: Any, dtype: str, libraries: str) -> None:
    group = "steps in float16" if dtype == "float16" else "steps"

    @case(group, f"{name}, {dtype}, {libraries}")
    def run() -> Numbers:
        with stand_ins.using(*LIBRARIES[libraries]), refusing(*work.LOOKS):
            return work.numbers(work.steady(work.Steps(model, arrays, DTYPES[dtype])))


def add_captured(name: str, model: Any, arrays: Any) -> None:
    @case("steps", f"{name}, bfloat16, both, captured")
    def run() -> Numbers:
        with stand_ins.using("cublaslt", "cudnn"), work.warned() as said:
            looped = work.Looped(model, arrays, compiled=True, precision="bfloat16")
            seen = work.steady(looped)
        return work.of_graph(seen, said)


def add_tokens(name: str, model: Any, prompts: list[list[int]], captured: bool) -> None:
    @case("tokens", f"{name}, {len(prompts)}" + ", captured" * captured)
    def run() -> Numbers:
        with stand_ins.using("cublaslt"), work.warned() as said:
            if captured:
                seen = work.second_call(model, prompts, MOST, "bfloat16")
            else:
                seen = work.steady(work.Texts(model, prompts, "bfloat16"), before=4)
        return work.of_graph(seen, said, launches=MOST) if captured else work.of_loop(seen)


for (_name, _model, _arrays), _dtype, _libraries in itertools.product(
    (
        ("gpt2 124M, 32 x 1024", GPT2, work.ids(50257, 32, 1024)),
        ("llama 350M, 8 x 1024", LLAMA, work.ids(32000, 8, 1024)),
    ),
    DTYPES,
    LIBRARIES,
):
    if (_dtype, _libraries) == ("float32", "both"):
        continue  # cuDNN's attention is of two bytes
    add(_name, _model, _arrays, _dtype, _libraries)
    if (_dtype, _libraries) == ("bfloat16", "both"):
        add_captured(_name, _model, _arrays)
for _name, _model in (("gpt2 124M", GPT2), ("llama 350M", LLAMA)):
    for _n, _captured in itertools.product((1, 64), (False, True)):
        add_tokens(_name, _model, [[5, 6, 7]] * _n, _captured)
