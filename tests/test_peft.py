"""Adapters and PEFT: each reads what the other wrote, with the same outputs and gradients."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface import FLOAT64, build, double_precision, require_close, torch, transformers
from safetensors.numpy import load_file

from xformer import pretrained, tree
from xformer.finetune import lora, modules, peft
from xformer.finetune.peft_config import HARMLESS, METHODS, Scales
from xformer.layers import LoRAParams

theirs = pytest.importorskip("peft")
# PEFT still asks transformers for something by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

B, T, V = 2, 5, 37
LLAMA: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {
    **{"vocab_size": V, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 32},
    "pad_token_id": 0,
}
BERT = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
DEEPSEEK = BERT | {"num_key_value_heads": 4, "kv_lora_rank": 6, "q_lora_rank": 8}
DEEPSEEK |= {"qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5, "n_routed_experts": 4}
DEEPSEEK |= {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 2, "topk_group": 1}
NEOX = BERT | {"hidden_size": 24, "num_attention_heads": 3}
DISTILBERT: dict[str, Any] = {
    **{"vocab_size": V, "dim": 12, "n_layers": 2, "n_heads": 3, "hidden_dim": 20},
    "max_position_embeddings": 32,
}
T5: dict[str, Any] = {
    **{"vocab_size": V, "d_model": 12, "d_kv": 5, "d_ff": 20, "num_layers": 2, "num_heads": 3},
    "feed_forward_proj": "gated-gelu",
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2", GPT2),
    "GPT2Model": ("GPT2", GPT2),
    "GPT2ForSequenceClassification": ("GPT2", GPT2),
    "GPTNeoXForCausalLM": ("GPTNeoX", NEOX),
    "LlamaForCausalLM": ("Llama", LLAMA),
    "LlamaModel": ("Llama", LLAMA),
    "MistralForCausalLM": ("Mistral", LLAMA),
    "MixtralForCausalLM": ("Mixtral", LLAMA | {"num_local_experts": 3}),
    "Qwen2ForSequenceClassification": ("Qwen2", LLAMA),
    "Qwen3ForCausalLM": ("Qwen3", LLAMA | {"head_dim": 6}),
    "Gemma2ForCausalLM": ("Gemma2", LLAMA | {"head_dim": 6}),
    "Phi3ForCausalLM": ("Phi3", LLAMA),
    "Gemma3TextModel": ("Gemma3Text", LLAMA | {"head_dim": 6}),
    "BertForMaskedLM": ("Bert", BERT),
    "BertForSequenceClassification": ("Bert", BERT),
    "BertForTokenClassification": ("Bert", BERT),
    "BertModel": ("Bert", BERT),
    "ModernBertForTokenClassification": ("ModernBert", BERT),
    "DeepseekV3ForCausalLM": ("DeepseekV3", DEEPSEEK),
    "RobertaForSequenceClassification": ("Roberta", BERT),
    "DistilBertForMaskedLM": ("DistilBert", DISTILBERT),
    "AlbertForMaskedLM": ("Albert", BERT | {"embedding_size": 5}),
    "T5ForConditionalGeneration": ("T5", T5),
}


def built(name: str, folder: Path, **changes: Any) -> Any:
    """A model of transformers, random, in a folder."""
    family, config = MODELS[name]
    settings = getattr(transformers, f"{family}Config")(**(config | changes))
    hf = build(getattr(transformers, name), settings)
    hf.save_pretrained(folder)
    return hf


def adapted(params: Any, seed: int = 0, **options: Any) -> Any:
    """Adapters at all linear maps, or at targets, and none of them 0."""
    options = {"rank": 2, "alpha": 3, "targets": ("*",)} | options
    params = lora.attach(params, **options)
    rng = np.random.default_rng(seed)

    def drawn(_: str, node: LoRAParams) -> LoRAParams:
        return node._replace(b=rng.normal(size=node.b.shape, scale=0.3).astype(node.b.dtype))

    return tree.map_nodes(drawn, params, LoRAParams)


def tokens(n: int = 2) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(1, V, (n, B, T)))


def ours(model: Any, params: Any) -> tuple[np.ndarray, Any]:
    inputs = tokens(2 if hasattr(model, "decoder") else 1)
    return model.forward(params, *inputs)


def judged(hf: Any) -> Any:
    """The output of a model of transformers, or PEFT's; with gradients to come."""
    inputs = [torch.tensor(ids) for ids in tokens(2)]
    named = {"input_ids": inputs[0]}
    if hf.config.is_encoder_decoder:
        named["decoder_input_ids"] = inputs[1]
    out = hf(**named)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def with_peft(hf: Any, folder: Path, **options: Any) -> Any:
    """Our adapter around their model, in float64."""
    with double_precision():
        return theirs.PeftModel.from_pretrained(hf, folder, **options).double().eval()


@pytest.mark.parametrize("name", MODELS)
def test_peft_reads_what_is_written(name: str, tmp_path: Path) -> None:
    """All linear maps adapted, or those by default: logits, and the gradients of every a and b."""
    hf = built(name, tmp_path / "base")
    model, params = pretrained.load(tmp_path / "base", dtype="float64")
    # Of GPT-2's classifier only the body: PEFT warns of models that mix Conv1D and Linear.
    targets = ("stack.*",) if name == "GPT2ForSequenceClassification" else ("*",)
    # Of DeepSeek the maps that have adapters by default: PEFT would adapt experts too.
    params = adapted(params, targets=None if name == "DeepseekV3ForCausalLM" else targets)
    peft.save(model, params, tmp_path / "adapter")
    wrapped = with_peft(hf, tmp_path / "adapter", is_trainable=True)
    y, cache = ours(model, params)
    dy = np.random.default_rng(1).normal(size=y.shape)
    with double_precision():
        wanted = judged(wrapped)
        wanted.backward(torch.tensor(dy))
    require_close("output", y, wanted.detach().numpy(), FLOAT64)
    merged, _ = ours(model, lora.merge(params))
    require_close("merged", merged, y, 1e-12)
    grads = by_module(model, params, cache.backward(dy))
    parameters = {n: p for n, p in wrapped.named_parameters() if p.requires_grad}
    assert grads.keys() == parameters.keys()
    for n, p in parameters.items():
        grad = np.zeros(p.shape) if p.grad is None else p.grad.numpy()  # BERT's unused pooler
        # Of blocks that are 0 there are no gradients here.
        require_close(n, grads[n], grad * (grads[n] != 0), FLOAT64, 1e-12)


def by_module(model: Any, params: Any, grads: Any) -> dict[str, np.ndarray]:
    """Our gradients of a and b by PEFT's names."""
    found, nodes = {}, lora.adapters(grads)
    for name, link in modules.modules(model, params).items():
        parts = [nodes.get(leaf) for leaf in modules.maps(link)]
        if any(parts):
            # Ones in the place of the scale, so that nothing is scaled.
            own = [modules.Adapter(part.a, part.b, 1.0) for part in parts]
            joined = modules.joined(link, own, [part.b.shape[1] for part in own])
            for kind, grad in (("A", joined.a), ("B", joined.b)):
                found[f"base_model.model.{name}.lora_{kind}.default.weight"] = grad.T
    return found


WRITTEN: list[tuple[str, dict[str, Any]]] = [
    ("GPT2LMHeadModel", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    ("GPT2Model", {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}),
    ("GPTNeoXForCausalLM", {"target_modules": ["query_key_value", "dense"]}),
    ("LlamaForCausalLM", {"target_modules": "all-linear", "use_rslora": True}),
    (
        "LlamaForCausalLM",
        {
            "target_modules": ["q_proj", "o_proj", "up_proj"],
            "rank_pattern": {"layers.0.self_attn.q_proj": 4, "^model.layers.1.mlp.up_proj": 1},
            "alpha_pattern": {"o_proj": 7},
            "lora_dropout": 0.1,
            "task_type": "CAUSAL_LM",
        },
    ),
    ("MixtralForCausalLM", {"target_modules": ["q_proj", "v_proj"]}),
    ("BertModel", {"target_modules": ["query", "value"], "layers_to_transform": [1]}),
    ("AlbertForMaskedLM", {"target_modules": "all-linear"}),
    ("BertForTokenClassification", {"target_modules": ["query", "classifier"]}),
    ("ModernBertForTokenClassification", {"target_modules": ["Wqkv", "classifier"]}),
    ("DeepseekV3ForCausalLM", {"target_modules": ["q_b_proj", "kv_b_proj"]}),
    ("T5ForConditionalGeneration", {"target_modules": ["q", "v"], "task_type": "SEQ_2_SEQ_LM"}),
]


@pytest.mark.parametrize(("name", "options"), WRITTEN)
def test_what_peft_writes_is_read(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The same outputs; written by us its tensors are those that they were, bit for bit."""
    hf = built(name, tmp_path / "base")
    config = theirs.LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, **options)
    with double_precision():
        wrapped = theirs.get_peft_model(hf, config).double().eval()
        wanted = judged(wrapped).detach().numpy()
    wrapped.save_pretrained(tmp_path / "theirs")
    model, params = pretrained.load(tmp_path / "base", dtype="float64")
    plain, _ = ours(model, params)
    params = peft.load(model, params, tmp_path / "theirs")
    y, _ = ours(model, params)
    require_close("output", y, wanted, FLOAT64)
    assert np.abs(y - plain).max() > 1e-3
    peft.save(model, params, tmp_path / "ours")
    files = [load_file(tmp_path / who / peft.WEIGHTS) for who in ("theirs", "ours")]
    assert files[0].keys() == files[1].keys()
    assert all(np.array_equal(files[0][n], files[1][n]) for n in files[0])


# What PEFT stores as a whole: the head below an adapter, and modules that it trained.
WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {"target_modules": ["lm_head", "q_proj"], "task_type": "CAUSAL_LM"}),
    ("LlamaForCausalLM", {"target_modules": "all-linear", "modules_to_save": ["lm_head"]}),
    ("LlamaForCausalLM", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    ("GPTNeoXForCausalLM", {"target_modules": ["lm_head", "query_key_value"]}),
    ("MixtralForCausalLM", {"target_modules": ["q_proj"], "modules_to_save": ["gate", "norm"]}),
    ("Qwen2ForSequenceClassification", {"target_modules": ["q_proj"], "task_type": "SEQ_CLS"}),
    ("BertForSequenceClassification", {"target_modules": ["query"], "task_type": "SEQ_CLS"}),
    ("RobertaForSequenceClassification", {"target_modules": ["query"], "task_type": "SEQ_CLS"}),
    ("BertForTokenClassification", {"target_modules": ["query"], "task_type": "TOKEN_CLS"}),
    (
        "Gemma2ForCausalLM",  # whose head is tied: both are saved, and equal
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
]


def trained(hf: Any, folder: Path, **options: Any) -> Any:
    """PEFT's model with an adapter, all that learns at random, and saved."""
    config = theirs.LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, **options)
    with double_precision():
        wrapped = theirs.get_peft_model(hf, config).double().eval()
        with torch.no_grad():
            for parameter in wrapped.parameters():
                if parameter.requires_grad:
                    parameter += 0.1 * torch.randn_like(parameter)
    wrapped.save_pretrained(folder)
    return wrapped


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@pytest.mark.parametrize(("name", "options"), WHOLE)
def test_whole_parameters_are_read(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    hf = built(name, tmp_path / "base")
    wrapped = trained(hf, tmp_path / "theirs", **options)
    with double_precision():
        wanted = judged(wrapped).detach().numpy()
    files = load_file(tmp_path / "theirs" / peft.WEIGHTS)
    assert any(".lora_" not in n for n in files)
    model, params = pretrained.load(tmp_path / "base", dtype="float64")
    params = peft.load(model, params, tmp_path / "theirs")
    require_close("output", ours(model, params)[0], wanted, FLOAT64)
    merged = lora.merge(params)
    pretrained.save(model, merged, tmp_path / "merged")
    again = pretrained.load(tmp_path / "merged", dtype="float64")
    require_close("merged", ours(*again)[0], wanted, FLOAT64)


BODY = {"target_modules": ["c_attn"], "fan_in_fan_out": True}


@pytest.mark.filterwarnings("ignore:.*(tie|tied|Setting `save_embedding_layers`).*:UserWarning")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["lm_head"]}, "no linear maps 'lm_head'; a head that is tied"),
        (BODY | {"modules_to_save": ["wte"]}, "would make head and embedding differ"),
        (BODY | {"modules_to_save": ["lm_head"]}, "would make head and embedding differ"),
    ],
)
def test_a_tied_head_that_learned_alone_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    hf = built("GPT2LMHeadModel", tmp_path / "base")
    trained(hf, tmp_path / "theirs", **options)
    model, params = pretrained.load(tmp_path / "base", dtype="float64")
    with pytest.raises(pretrained.PretrainedError, match=message):
        peft.load(model, params, tmp_path / "theirs")


FOLLOWED = {
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias"),
    "init_lora_weights",
}


def test_every_option_of_peft_is_followed_or_refused() -> None:
    names = {field.name for field in dataclasses.fields(theirs.LoraConfig)}
    assert names <= {*HARMLESS, *METHODS, *FOLLOWED}
    for key in METHODS:
        with pytest.raises(pretrained.PretrainedError, match=f"{key} must be"):
            Scales({"r": 1, "lora_alpha": 1, key: {"some": 1}}, "adapter_config.json")


def test_peft_trains_on_from_there(tmp_path: Path) -> None:
    """And we go on from where it stopped: GPT-2's one adapter, then three."""
    hf = built("GPT2LMHeadModel", tmp_path / "base")
    model, params = pretrained.load(tmp_path / "base", dtype="float64")
    params = adapted(params, targets=("*.attn.q", "*.attn.kv.v"))
    peft.save(model, params, tmp_path / "first")
    wrapped = with_peft(hf, tmp_path / "first", is_trainable=True)
    with double_precision(), torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)  # blocks are blocks no longer
        wanted = judged(wrapped).numpy()
    wrapped.save_pretrained(tmp_path / "second")
    _, base = pretrained.load(tmp_path / "base", dtype="float64")
    again = peft.load(model, base, tmp_path / "second")
    assert len(lora.adapters(again)) == 6
    require_close("output", ours(model, again)[0], wanted, FLOAT64)
