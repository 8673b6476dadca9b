"""Texts: every family's tokens, call by call and captured."""

from __future__ import annotations

from causal_models import NAMES, T5_NAMES, UNPADDED, causal, seq2seq

from null_device import stand_ins, work
from null_device.cases import Numbers, case
from xformer.generation import samplers

PROMPTS = {"one": [[5, 6, 7]], "two, padded": [[5, 6, 7], [8]]}
UNCOMPILED = {"shaw": "Shaw", "qwen3_5_text": "gated DeltaNet"}  # one token a call
OF_CUPY = ("mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3")
UNCAPTURED = dict.fromkeys(OF_CUPY, "cuBLAS") | UNCOMPILED


def add(name: str, length: str) -> None:
    model, prompts, refused = causal(name)[0], PROMPTS[length], UNCAPTURED.get(name)

    @case("texts", f"{name}, {length}")
    def run() -> Numbers:
        """Ids are looked at once a token."""
        with stand_ins.using("cublaslt"), work.warned() as said:
            seen = work.steady(work.Texts(model, prompts), before=4)
        assert not said, said
        return work.of_loop(seen)

    @case("texts captured", f"{name}, {length}")
    def captured() -> Numbers:
        """Ids are looked at once a call of several tokens."""
        with stand_ins.using("cublaslt"), work.warned() as said:
            if name in UNCOMPILED:
                seen = work.steady(work.Texts(model, prompts, compiled=True), before=4)
            else:
                seen = work.second_call(model, prompts, work.SHORT)
        return work.of_graph(seen, said, refused, work.SHORT)


for _name in NAMES:
    for _length in PROMPTS:
        if _name not in UNPADDED or _length != "two, padded":
            add(_name, _length)


def add_seq2seq(name: str) -> None:
    @case("texts", name)
    def run() -> Numbers:
        """Targets of an encoder-decoder."""
        with stand_ins.using("cublaslt"):
            texts = work.Texts(seq2seq(name)[0], [[5, 6, 7], [8]], start_id=1)
            return work.of_loop(work.steady(texts, before=4))


for _name in T5_NAMES:
    add_seq2seq(_name)


@case("texts", "sampled")
def sampled() -> Numbers:
    """All filters, on the device: the logits are looked at once a token."""
    model = causal("llama")[0]
    filters = (samplers.repetition_penalty(1.1), samplers.temperature(0.8), samplers.top_k(9))
    sampler = samplers.compose(*filters, samplers.top_p(0.9), samplers.min_p(0.05))
    with stand_ins.using("cublaslt"):
        seen = work.steady(work.Texts(model, [[5, 6, 7], [8]], sampler=sampler), before=4)
    return work.of_loop(seen)
