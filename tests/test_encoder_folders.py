"""Folders of encoders: names of old, what is refused, what is left out, numbers of parameters."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoders import CLASSES, KINDS, MASKED, POOLED, REPLACED, TOKENS, T, configured, sizes_of
from huggingface import (
    FLOAT64,
    build,
    double_precision,
    on_meta,
    require_close,
    require_equal,
    rewritten,
    shapes_of,
    torch,
    transformers,
)
from safetensors.numpy import load_file

from xformer import pretrained
from xformer.layers import NormConfig
from xformer.models import Classifier
from xformer.pretrained import PretrainedError
from xformer.pretrained.families import FAMILIES
from xformer.pretrained.family import ACTIVATIONS

SLIDING = "sliding_attention"


def described(family: str, head: str, **changes: Any) -> dict[str, Any]:
    """A config.json without what the family has by default."""
    return kind(family, head) | sizes_of(family) | changes


def kind(family: str, head: str) -> dict[str, Any]:
    return {"model_type": KINDS[family], "architectures": [family + head]}


def saved(family: str, head: str, folder: Path, **changes: Any) -> tuple[Path, Any]:
    """A folder of transformers, and what we read there."""
    kind = getattr(transformers, family + head, None)
    if kind is None:
        pytest.skip(f"this transformers has no {family}")
    build(kind, configured(family, changes)).save_pretrained(folder)
    return folder, pretrained.load(folder, dtype="float64")[1]


def test_names_of_old(tmp_path: Path) -> None:
    folder, params = saved("Bert", MASKED, tmp_path)

    def old(name: str) -> str:
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        return name.replace("LayerNorm.bias", "LayerNorm.beta")

    rewritten(folder, old)
    assert any("gamma" in name for name in load_file(folder / "model.safetensors"))
    require_equal(pretrained.load(folder, dtype="float64")[1], params)


UNUSED = [
    ("Bert", "bert.pooler.dense.weight", "cls.seq_relationship.weight"),
    ("Roberta", "roberta.pooler.dense.weight", "roberta.pooler.dense.bias"),
    ("Albert", "albert.pooler.weight", "sop_classifier.classifier.weight"),
    ("MPNet", "mpnet.pooler.dense.weight", "mpnet.pooler.dense.bias"),
]


@pytest.mark.parametrize(("family", "first", "second"), UNUSED)
def test_parts_that_a_masked_model_does_not_use(
    family: str, first: str, second: str, tmp_path: Path
) -> None:
    folder, params = saved(family, MASKED, tmp_path)
    rewritten(folder, None, dict.fromkeys((first, second), np.zeros((2, 3), np.float32)))
    listed = ", ".join(f"'{name}'" for name in sorted([first, second]))
    with pytest.warns(UserWarning, match=f"that the model does not use are left out: {listed}"):
        _, again = pretrained.load(folder, dtype="float64")
    require_equal(again, params)
    rewritten(folder, None, {"mine": np.zeros(1, np.float32)})
    with pytest.raises(PretrainedError, match="3 unexpected"):  # all, where some are a mistake
        pretrained.load(folder)


@pytest.mark.parametrize("family", KINDS)
def test_buffers_and_repeated_tensors(family: str, tmp_path: Path) -> None:
    folder, params = saved(family, MASKED, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    own = FAMILIES[KINDS[family]]
    repeated = {name: tensors[of].copy() for name, of in own.tied.items()}
    name = f"{own.prefix}embeddings.position_ids"
    ids = {} if family == "ModernBert" else {name: np.arange(16)[None]}  # which has only RoPE
    rewritten(folder, None, repeated | ids)
    require_equal(pretrained.load(folder, dtype="float64")[1], params)
    name = next(iter(repeated))
    repeated[name][0] += 1
    rewritten(folder, None, repeated)
    with pytest.raises(PretrainedError, match=f"1 unexpected: '{name}'"):
        pretrained.load(folder)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("head", [MASKED, "Model"])
def test_names_with_and_without_prefix(family: str, head: str, tmp_path: Path) -> None:
    folder, params = saved(family, head, tmp_path)
    prefix = FAMILIES[KINDS[family]].prefix
    rewritten(folder, lambda name: prefix + name if head == "Model" else name.removeprefix(prefix))
    require_equal(pretrained.load(folder, dtype="float64")[1], params)


@pytest.mark.parametrize("family", POOLED)
def test_bare_models_without_a_pooler(family: str, tmp_path: Path) -> None:
    folder, params = saved(family, "Model", tmp_path)
    rewritten(folder, lambda name: None if "pooler" in name else name)
    model, without = pretrained.load(folder, dtype="float64")
    assert model.head is None
    require_equal(without, params._replace(head=None))
    with pytest.raises(ValueError, match='"pooler" needs a model with a Pooler'):
        model.pooled(without, np.full((1, 2), 5), pooling="pooler")


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("head", [MASKED, CLASSES, TOKENS])
def test_models_without_the_tensors_of_their_head_are_bare(
    head: str, family: str, tmp_path: Path
) -> None:
    folder, params = saved(family, "Model", tmp_path)
    rewritten(folder, architectures=[family + head])
    with pytest.warns(UserWarning, match=f"of the head of {family}{head}; the model is {family}M"):
        model, again = pretrained.load(folder, dtype="float64")
    require_equal(again, params)
    assert model.hf_config["architectures"] == [f"{family}Model"]
    pretrained.save(model, again, tmp_path / "copy")
    require_equal(pretrained.load(tmp_path / "copy", dtype="float64")[1], params)


OTHER_HEADS = [(MASKED, TOKENS), (TOKENS, MASKED), (CLASSES, MASKED), ("Model", CLASSES)]


@pytest.mark.parametrize("family", [name for name in KINDS if name != "Camembert"])  # as RoBERTa
@pytest.mark.parametrize(("head", "other"), OTHER_HEADS)
def test_heads_of_another_kind_are_left_out(
    head: str, other: str, family: str, tmp_path: Path
) -> None:
    folder, params = saved(family, head, tmp_path / "own")
    theirs, _ = saved(family, other, tmp_path / "other")
    own = load_file(folder / "model.safetensors")
    prefix = FAMILIES[KINDS[family]].prefix
    more = {
        name: tensor
        for name, tensor in load_file(theirs / "model.safetensors").items()
        if name not in own and not name.startswith(prefix)
    }
    rewritten(folder, None, more)
    match = f"that the model does not use are left out: '{min(more)}'"
    with pytest.warns(UserWarning, match=match):
        model, again = pretrained.load(folder, dtype="float64")
    require_equal(again, params)
    pretrained.save(model, again, tmp_path / "copy")
    require_equal(pretrained.load(tmp_path / "copy", dtype="float64")[1], params)
    rewritten(folder, None, {"mine": np.zeros(1, np.float32)})
    with pytest.raises(PretrainedError, match=r"tensors are not those .*: [0-9]+ unexpected"):
        pretrained.load(folder)


UNSUPPORTED = [
    *((family, "ForPreTraining", MASKED) for family in ("Bert", "Albert")),
    ("Bert", "ForNextSentencePrediction", "Model"),
    *((name, "ForQuestionAnswering", "Model") for name in KINDS if name != "NomicBert"),
    *((family, "ForMultipleChoice", "Model") for family in ("Bert", "DistilBert", "Electra")),
]


@pytest.mark.filterwarnings("ignore:.*parameters that the model does not use are left out")
@pytest.mark.parametrize(("family", "head", "read_as"), UNSUPPORTED)
def test_heads_that_are_not_supported(family: str, head: str, read_as: str, tmp_path: Path) -> None:
    hf = build(getattr(transformers, family + head), configured(family, {}))
    hf.save_pretrained(tmp_path)
    named = f"the head of {family}{head} is not supported; the model is {family}{read_as}"
    with pytest.warns(UserWarning, match=named):
        model, params = pretrained.load(tmp_path, dtype="float64")
    tokens = np.random.default_rng(0).integers(5, 37, (2, T))
    with double_precision(), torch.no_grad():
        inputs = torch.tensor(tokens)
        if read_as == MASKED:
            wanted = hf(inputs).prediction_logits
        else:
            wanted = getattr(hf, hf.base_model_prefix)(inputs).last_hidden_state
    got = (model.forward if read_as == MASKED else model.hidden)(params, tokens)[0]
    require_close("output", got, wanted.numpy(), FLOAT64)
    pretrained.save(model, params, tmp_path / "copy")
    require_equal(pretrained.load(tmp_path / "copy", dtype="float64")[1], params)


def test_a_part_of_a_head_is_refused(tmp_path: Path) -> None:
    folder, _ = saved("Bert", MASKED, tmp_path)
    rewritten(folder, lambda name: None if "transform" in name else name)
    with pytest.raises(
        PretrainedError, match=r"4 missing: 'cls\.predictions\.transform\.LayerNorm"
    ):
        pretrained.load(folder)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    folder, _ = saved("Bert", CLASSES, tmp_path)
    names = {"classifier.bias": "classifier.b", "bert.pooler.dense.bias": None}
    wrong = {"bert.embeddings.LayerNorm.bias": np.zeros((1, 12))}
    rewritten(folder, lambda name: names.get(name, name), wrong)
    with pytest.raises(PretrainedError) as raised:
        pretrained.load(folder)
    for part in (
        "2 missing: 'bert.pooler.dense.bias', 'classifier.bias'",
        "1 misshapen: 'bert.embeddings.LayerNorm.bias (wanted (12,), got (1, 12))'",
        "1 unexpected: 'classifier.b'",
    ):
        assert part in str(raised.value)


def test_too_many_tokens() -> None:
    model = pretrained.model(described("Roberta", MASKED, max_position_embeddings=T + 1))
    params = model.init()
    keep = np.ones((1, T), np.bool_)
    with pytest.raises(ValueError, match="at most max_len = 6 tokens fit, got 7"):
        model.forward(params, np.full((1, T), 5))
    with pytest.raises(ValueError, match=r"ids must lie in \[0, 8\)"):
        model.forward(params, np.full((1, T), 5), mask=keep)
    model.forward(params, np.full((1, T), 5), mask=keep & (np.arange(T) < T - 1))


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "Bert",
        MASKED,
        {"position_embedding_type": "relative_key"},
        "position_embedding_type must be",
    ),
    ("Roberta", MASKED, {"position_embedding_type": "relative_key_query"}, "position_embedding_ty"),
    ("Bert", MASKED, {"is_decoder": True}, "is_decoder must be False"),
    ("Roberta", MASKED, {"add_cross_attention": True}, "add_cross_attention must be False"),
    ("Bert", MASKED, {"is_encoder_decoder": True}, "is_encoder_decoder must be False"),
    ("Bert", "Model", {"pruned_heads": {"0": [1]}}, "pruned_heads must be {}"),
    ("Bert", MASKED, {"hidden_act": "mish"}, "hidden_act must be one of"),
    ("Bert", MASKED, {"tie_word_embeddings": False}, "tie_word_embeddings must be True"),
    ("DistilBert", MASKED, {"tie_word_embeddings": False}, "tie_word_embeddings must be True"),
    ("Bert", "Model", {"per_layer_config": {"0": {}}}, "not supported: 'per_layer_config'"),
    ("Bert", "Model", {"num_attention_heads": 5}, "n_heads = 5 must divide d_model = 12"),
    ("Bert", "Model", {"hidden_dropout_prob": 1.5}, "hidden_dropout_prob must be a number"),
    ("Bert", "ForPreTraining", {}, "architectures must be one of BertForMaskedLM, "),
    ("Roberta", "Model", {"pad_token_id": 15}, "offset needs learned positions and must be below"),
    ("DistilBert", "Model", {"hidden_size": 9}, "hidden_size must be 12, got 9"),
    ("MPNet", "Model", {"relative_attention_num_buckets": 64}, "num_buckets must be 32, got 64"),
    ("MPNet", MASKED, {"tie_word_embeddings": False}, "tie_word_embeddings must be True"),
    ("ModernBert", "Model", {"attention_dropout": 0.1}, "attention_dropout must be 0.0, got 0.1"),
    ("ModernBert", "Model", {"sliding_window": 8}, "not supported: 'sliding_window'"),
    ("ModernBert", "Model", {"head_dim": 4}, "head_dim must be 6, got 4"),
    ("ModernBert", CLASSES, {"classifier_pooling": "max"}, "classifier_pooling must be one of cls"),
    (
        "ModernBert",
        "Model",
        {"rope_parameters": {SLIDING: 3}},
        "rope_parameters must be an object for each of full_attention, sliding_attention",
    ),
    (
        "ModernBert",
        "Model",
        {"rope_parameters": {SLIDING: {"rope_theta": 5.0}}, "local_rope_theta": 6.0},
        "rope_theta must be 6, as local_rope_theta of config.json, got 5.0",
    ),
    (
        "ModernBert",
        "Model",
        {"rope_parameters": {SLIDING: {"rope_theta": 5.0}}, "rope_scaling": {"rope_type": "yarn"}},
        "rope_scaling must be absent beside rope_parameters",
    ),
    ("NomicBert", "Model", {"n_head": 12}, "n_head must be 3, got 12"),
    ("NomicBert", "Model", {"rotary_emb_base": 10_000}, "rotary_emb_base must be 1000.0, got"),
    ("NomicBert", "Model", {"prenorm": True}, "prenorm must be False, got True"),
    ("NomicBert", MASKED, {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1 in"),
    ("Albert", MASKED, {"inner_group_num": 2}, "inner_group_num must be 1"),
    ("Albert", MASKED, {"num_hidden_groups": 3}, "num_hidden_groups must be a divisor of 4"),
]


@pytest.mark.parametrize(("family", "head", "changes", "message"), REFUSED)
def test_configurations_that_are_refused(
    family: str, head: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PretrainedError, match=message):
        pretrained.model(described(family, head, **changes))


NOMIC = {  # as the folders of its own code have it, without the sizes
    **{"activation_function": "swiglu", "causal": False, "layer_norm_epsilon": 1e-12, "n_head": 3},
    **{"prenorm": False, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0},
    **{"rotary_emb_interleaved": False, "scale_attn_weights": True, "use_rms_norm": False},
}
READ: list[tuple[str, dict[str, Any]]] = [
    # As the Chinese and multilingual BERTs have them, and transformers 2 wrote them.
    ("Bert", {"directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12}),
    ("Bert", {"pooler_num_fc_layers": 3, "pooler_size_per_head": 128, "pruned_heads": {}}),
    ("Bert", {"pooler_type": "first_token_transform", "eos_token_ids": 0, "output_past": True}),
    ("Bert", {"position_embedding_type": None, "classifier_dropout": None, "hidden_act": None}),
    ("ModernBert", {"layer_norm_eps": 1e-5, "position_embedding_type": "absolute"}),
    ("ModernBert", {"reference_compile": True, "repad_logits_with_grad": False}),
    ("ModernBert", {"sparse_prediction": True, "initializer_cutoff_factor": 2.0}),
    ("DistilBert", {"tie_weights_": True, "sinusoidal_pos_embds": False, "qa_dropout": 0.1}),
    ("Electra", {"summary_type": "first", "summary_use_proj": True, "summary_last_dropout": 0.1}),
    ("NomicBert", NOMIC),
    ("Albert", {"down_scale_factor": 1, "gap_size": 0, "net_structure_type": 0}),
    ("Albert", {"num_memory_blocks": 0, "classifier_dropout_prob": 0.1, "hidden_dropout_prob": 0}),
]


@pytest.mark.parametrize(("family", "changes"), READ)
def test_keys_that_change_nothing(family: str, changes: dict[str, Any]) -> None:
    config = described(family, MASKED, **changes)
    plain = pretrained.model(described(family, MASKED))
    assert replace(pretrained.model(config), hf_config=None) == replace(plain, hf_config=None)


@pytest.mark.parametrize("head", [MASKED, CLASSES, TOKENS, "Model"])
@pytest.mark.parametrize("family", KINDS)
def test_what_a_configuration_leaves_out_is_as_in_transformers(family: str, head: str) -> None:
    config = getattr(transformers, f"{family}Config")()
    model = pretrained.model(kind(family, head))
    assert shapes_of(model) == on_meta(getattr(transformers, family + head), config)
    block, hf = model.blocks[0], config.to_dict()
    if family == "ModernBert":
        require_defaults_of_modernbert(model, config)
        return
    act = hf["activation" if family == "DistilBert" else "hidden_act"]
    assert block.attn.n_heads == config.num_attention_heads
    assert block.ffn.activation == ACTIVATIONS[act]
    assert block.norm.eps == model.embed.norm.eps == hf.get("layer_norm_eps", 1e-12)
    hidden, probs = ("dropout", "attention_dropout")
    if family != "DistilBert":
        hidden, probs = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    assert (block.dropout, block.attn.dropout, model.embed.dropout) == (
        hf[hidden],
        hf[probs],
        hf[hidden],
    )
    if head in (CLASSES, TOKENS):
        key = {"Albert": "classifier_dropout_prob"}
        if head == CLASSES:
            key["DistilBert"] = "seq_classif_dropout"
        assert model.head.dropout == hf.get(key.get(family, hidden))


def require_defaults_of_modernbert(model: Any, config: Any) -> None:
    """Its keys have other names, and its layers differ."""
    block = model.blocks[1]
    assert (block.attn.n_heads, block.attn.bias, block.ffn.bias) == (12, False, False)
    assert (block.ffn.activation, block.norm, model.embed.norm) == ("gelu", *[NORM] * 2)
    assert [b.attn.window for b in model.blocks] == [None, *[(64, 64), (64, 64), None] * 7]
    kinds = [config.rope_parameters[kind]["rope_theta"] for kind in config.layer_types]
    assert [rotary.theta for rotary in model.rotary] == kinds
    assert [b.attn_norm for b in model.blocks] == [False] + [True] * 21
    if isinstance(model.head, Classifier):
        assert model.head == Classifier(2, "first", "gelu", dense_bias=False, norm=NORM)


NORM = NormConfig(eps=1e-5, bias=False)
PUBLISHED: list[tuple[str, str, dict[str, Any], int]] = [
    ("Bert", MASKED, {"vocab_size": 30522}, 109_514_298),  # bert-base-uncased
    ("Bert", "Model", {"vocab_size": 30522}, 109_482_240),
    (
        "Roberta",
        MASKED,
        {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
        124_697_433,
    ),
    ("DistilBert", MASKED, {"vocab_size": 30522}, 66_985_530),
    (
        "Albert",
        "Model",
        {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
        11_683_584,
    ),
    # xlm-roberta-base, without the pooler of 590,592 that its file of a masked LM lacks
    (
        "XLMRoberta",
        MASKED,
        {"vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1},
        278_295_186,
    ),
    # camembert-base
    (
        "Camembert",
        MASKED,
        {"vocab_size": 32005, "max_position_embeddings": 514, "type_vocab_size": 1},
        110_655_493,
    ),
    ("ModernBert", MASKED, {}, 149_655_232),  # ModernBERT-base
    # electra-base-discriminator, without and with its head
    (
        "Electra",
        "Model",
        {
            **{"embedding_size": 768, "hidden_size": 768, "num_attention_heads": 12},
            "intermediate_size": 3072,
        },
        108_891_648,
    ),
    (
        "Electra",
        REPLACED,
        {
            **{"embedding_size": 768, "hidden_size": 768, "num_attention_heads": 12},
            "intermediate_size": 3072,
        },
        109_483_009,
    ),
    ("NomicBert", "Model", {}, 136_731_648),  # nomic-embed-text-v1.5
    # all-mpnet-base-v2
    ("MPNet", "Model", {"max_position_embeddings": 514}, 109_486_464),
]


@pytest.mark.parametrize(("family", "head", "sizes", "count"), PUBLISHED)
def test_number_of_parameters(family: str, head: str, sizes: dict[str, Any], count: int) -> None:
    shapes = shapes_of(pretrained.model(kind(family, head) | sizes))
    assert sum(math.prod(shape) for shape in shapes.values()) == count
    config = getattr(transformers, f"{family}Config")(**sizes)
    assert shapes == on_meta(getattr(transformers, family + head), config)
