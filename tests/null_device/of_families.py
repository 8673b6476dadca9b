"""Every family: training steps call by call and captured."""

from __future__ import annotations

from typing import Any

from causal_models import NAMES, T5_NAMES, V, causal, seq2seq

from null_device import stand_ins, work
from null_device.cases import Numbers, case
from null_device.device import refusing
from xformer import pretrained

ENCODER: dict[str, Any] = {
    **{"vocab_size": V, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3},
    **{"intermediate_size": 20, "max_position_embeddings": 16, "num_labels": 3},
}
DISTILBERT = {
    **{"vocab_size": V, "dim": 12, "n_layers": 2, "n_heads": 3, "hidden_dim": 20},
    "max_position_embeddings": 16,
}
ENCODERS = {
    "bert": ("BertForMaskedLM", ENCODER),
    "bert for classes": ("BertForSequenceClassification", ENCODER),
    "roberta": ("RobertaForMaskedLM", ENCODER),
    "distilbert": ("DistilBertForMaskedLM", DISTILBERT),
    "albert": ("AlbertForMaskedLM", ENCODER | {"embedding_size": 5}),
}
# What has no kernel for numbers of two bytes: part of what TypeError says.
REFUSED = {
    **dict.fromkeys(
        ("mixtral", "qwen2_moe", "gpt_oss"), "softmax: x must be float32 or float64, got bfloat16"
    ),
    "deepseek_v3": "experts: x must be float32 or float64, got bfloat16",
    "gemma2": "rms_norm: w must be float32",
    "gemma3_text": "rms_norm: w must be float32",
    "granite": "rms_norm: w must be float32",
    **dict.fromkeys(("cohere", "cohere2"), "linear_cross_entropy: w must be float32"),
    "alibi": "sdpa: no kernel runs in bfloat16: a bias is not added in bfloat16",
    "relative bias": "sdpa: no kernel runs in bfloat16: a bias is not added in bfloat16",
    "qwen3_5_text": "causal_conv: x must be float32 or float64, got bfloat16",
    "shaw": "shaw: q must be float32 or float64, got bfloat16",
    "t5": "sdpa: no kernel runs in bfloat16: a bias is not added in bfloat16",
    "t5 1.1": "sdpa: no kernel runs in bfloat16: a bias is not added in bfloat16",
    "bert for classes": "pool: x must be float32 or float64, got bfloat16",
}
# Products that are CuPy's cannot be captured.
OF_CUPY = (
    *("mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "qwen3_5_text"),
    *("shaw", "bert for classes"),
)
UNCAPTURED = dict.fromkeys(OF_CUPY, "cuBLAS")


def made(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A model, and what its loss takes after the parameters."""
    tokens, targets = work.ids(V, 2, 9)
    if name in T5_NAMES:
        network = seq2seq(name)[0]
        three = (tokens, tokens, targets)
        return network, three
    if name in ENCODERS:
        architecture, config = ENCODERS[name]
        kind = {"model_type": name.split()[0], "architectures": [architecture]}
        model = pretrained.model(kind | config)
        return model, (tokens, targets[:, 0] % 3 if "classes" in name else targets)
    return causal(name)[0], (tokens, targets)


def refused(steps: work.Steps, why: str) -> None:
    """TypeError says why, in these words."""
    try:
        steps()
    except TypeError as error:
        assert why in str(error), error
    else:
        raise AssertionError(f"it runs, in place of: {why}")


def add(name: str) -> None:
    @case("families", name)
    def run() -> Numbers:
        """In float32, by cuBLAS."""
        with stand_ins.using(), refusing(*work.LOOKS):
            return work.numbers(work.steady(work.Steps(*made(name))))

    @case("families in bfloat16", name)
    def stored() -> Numbers | None:
        with stand_ins.using("cublaslt"), refusing(*work.LOOKS):
            steps = work.Steps(*made(name), precision="bfloat16")
            if name in REFUSED:
                return refused(steps, REFUSED[name])
            return work.numbers(work.steady(steps))

    @case("families captured", name)
    def captured() -> Numbers:
        """By cuBLASLt, whose products can be."""
        with stand_ins.using("cublaslt"), work.warned() as said:
            seen = work.steady(work.Looped(*made(name), compiled=True))
        return work.of_graph(seen, said, UNCAPTURED.get(name))


for _name in (*NAMES, *T5_NAMES, *ENCODERS):
    add(_name)
