"""T5: what transformers computes, its gradients, its files, of version 1.0 and 1.1."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface import (
    Values,
    build,
    on_meta,
    proof,
    require_equal,
    rewritten,
    shapes_of,
    torch,
    transformers,
)
from safetensors.numpy import load_file

from xformer import pretrained
from xformer.models import LMHead
from xformer.pretrained import PretrainedError
from xformer.pretrained.reading import read_json

B, V = 3, 37
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "d_model": 12,
    "d_kv": 5,
    "d_ff": 20,
    "num_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}
V11: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def built(head: str, untied: bool = False, **changes: Any) -> Any:
    """A model of transformers; untied: its head has weights of its own, as version 1.1 has."""
    hf = build(getattr(transformers, f"T5{head}"), transformers.T5Config(**(SIZES | changes)))
    for name, parameter in hf.named_parameters():
        if name.endswith(".q.weight"):  # T5 scales them, not the scores, which would be too sharp
            parameter.data *= hf.config.d_kv**-0.5
    if untied:  # transformers 5 ties every new T5, and leaves alone one that it loads like this
        hf.lm_head.weight = torch.nn.Parameter(torch.randn_like(hf.lm_head.weight))
    return hf


def batch(s: int = 9, t: int = 7, src: str = "none", tgt: str = "none") -> tuple[Values, Values]:
    """Inputs of transformers and ours, padded on a side, with any tokens: no row is special."""
    rng = np.random.default_rng(0)
    ids = {"src": rng.integers(0, V, (B, s)), "tgt": rng.integers(0, V, (B, t))}
    keep = {name: np.ones(array.shape, np.bool_) for name, array in ids.items()}
    for name, side in (("src", src), ("tgt", tgt)):
        for row, n in ((1, 2), (2, 5)):
            pads = {"none": slice(0), "left": slice(n), "right": slice(-n, None)}[side]
            keep[name][row, pads] = False
    theirs = {
        "input_ids": ids["src"],
        "attention_mask": keep["src"].astype(int),
        "decoder_input_ids": ids["tgt"],
        "decoder_attention_mask": keep["tgt"].astype(int),
    }
    return theirs, {**ids, "src_mask": keep["src"], "tgt_mask": keep["tgt"]}


def prove(hf: Any, folder: Path, theirs: Values, ours: Values, output: str = "logits") -> None:
    """`proof`; the buckets of distances stay those of float32, which rounds at their edges."""
    given = dict(ours)
    src, tgt = given.pop("src"), given.pop("tgt")

    def run(model: Any, params: Any) -> tuple[np.ndarray, Any]:
        return model.forward(params, src, tgt, **given)

    proof(hf, folder, theirs, run, output=output, keep=given["tgt_mask"], integers=False)


@pytest.mark.parametrize("src", ["none", "left", "right"])
@pytest.mark.parametrize("tgt", ["none", "left", "right"])
@pytest.mark.parametrize("version", ["1.0", "1.1", "1.1 tied"])
def test_padding(version: str, src: str, tgt: str, tmp_path: Path) -> None:
    changes = {} if version == "1.0" else V11
    hf = built("ForConditionalGeneration", version == "1.1", **changes)
    prove(hf, tmp_path, *batch(src=src, tgt=tgt))


@pytest.mark.parametrize("gate", ["", "gated-"])
@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_new", "silu", "quick_gelu", "tanh"])
def test_feed_forward(gate: str, name: str, tmp_path: Path) -> None:
    hf = built("ForConditionalGeneration", feed_forward_proj=gate + name)
    prove(hf, tmp_path, *batch(src="right"))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 1, "num_decoder_layers": 3},
        {"num_layers": 3, "num_decoder_layers": 1, "num_heads": 1},
        {"d_kv": 4, "num_heads": 3, "layer_norm_epsilon": 0.1},
        {"relative_attention_num_buckets": 5, "relative_attention_max_distance": 3},
    ],
)
def test_sizes(changes: dict[str, Any], tmp_path: Path) -> None:
    prove(built("ForConditionalGeneration", **changes), tmp_path, *batch())


@pytest.mark.parametrize(("buckets", "distance", "s", "t"), [(8, 16, 41, 23), (32, 128, 150, 140)])
def test_longer_than_the_largest_distance(
    buckets: int, distance: int, s: int, t: int, tmp_path: Path
) -> None:
    far = {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": distance}
    hf = built("ForConditionalGeneration", **(far | {"num_layers": 1, "num_heads": 1}))
    prove(hf, tmp_path, *batch(s, t, "right", "left"))


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_without_a_head(version: str, tmp_path: Path) -> None:
    hf = built("Model", **({} if version == "1.0" else V11))
    prove(hf, tmp_path, *batch(src="left", tgt="right"), output="last_hidden_state")


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_encoder_alone(side: str, tmp_path: Path) -> None:
    theirs, ours = batch(src=side)
    proof(
        built("EncoderModel", **V11),
        tmp_path,
        {name: theirs[name] for name in ("input_ids", "attention_mask")},
        lambda model, params: model.forward(params, ours["src"], mask=ours["src_mask"]),
        output="last_hidden_state",
        keep=ours["src_mask"],
        integers=False,
    )


def saved(head: str, folder: Path, untied: bool = False, **changes: Any) -> tuple[Path, Any]:
    """A folder of transformers, and what we read there."""
    built(head, untied, **changes).save_pretrained(folder)
    return folder, pretrained.load(folder, dtype="float64")[1]


ENCODER, DECODER = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"


@pytest.mark.parametrize("head", ["ForConditionalGeneration", "Model", "EncoderModel"])
def test_names_of_the_embedding(head: str, tmp_path: Path) -> None:
    folder, params = saved(head, tmp_path)
    shared = load_file(folder / "model.safetensors")["shared.weight"]
    own = [ENCODER] if head == "EncoderModel" else [ENCODER, DECODER]
    copies = {name: shared.copy() for name in own}
    old = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    unread = {} if head == "EncoderModel" else {old: np.zeros((8, 3), np.float32)}
    rewritten(folder, None, copies | unread)
    require_equal(pretrained.load(folder, dtype="float64")[1], params)
    for name in own:  # any one of them will do
        rewritten(folder, lambda n: None if n in own or n == "shared.weight" else n)
        rewritten(folder, None, {name: shared})
        require_equal(pretrained.load(folder, dtype="float64")[1], params)
    rewritten(folder, None, {"shared.weight": shared + 1})
    with pytest.raises(PretrainedError, match=f"1 unexpected: '{own[-1]}'"):
        pretrained.load(folder)


def test_head_with_weights_of_its_own(tmp_path: Path) -> None:
    """A 1.1 is one by its configuration (of transformers 4, or as 5 writes it); 1.0 is scaled."""
    folder, params = saved("ForConditionalGeneration", tmp_path, True, **V11)
    assert params.head.w.shape == (12, V)
    config = read_json(folder / "config.json")
    assert config["tie_word_embeddings"] and not config["scale_decoder_outputs"]
    del config["scale_decoder_outputs"]
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    model, again = pretrained.load(folder, dtype="float64")
    assert model.head == LMHead(tied=False, scale=1.0)
    require_equal(again, params)
    hf, _ = transformers.T5ForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float64
    )
    assert not hf.config.scale_decoder_outputs
    assert np.array_equal(hf.lm_head.weight.detach().numpy().T, params.head.w)
    assert np.array_equal(hf.shared.weight.detach().numpy(), params.src_embed.table)
    # transformers 4 overwrites such a head, 5 keeps it: nobody can mean it.
    rewritten(folder, None, tie_word_embeddings=True)
    with pytest.raises(PretrainedError, match=r"1 unexpected: 'lm_head\.weight'"):
        pretrained.load(folder)


def test_an_encoder_alone_by_another_name(tmp_path: Path) -> None:
    folder, params = saved("EncoderModel", tmp_path)
    rewritten(folder, architectures=["T5ForConditionalGeneration"])
    with pytest.warns(UserWarning, match="no tensors of a decoder; the model is T5EncoderModel"):
        model, again = pretrained.load(folder, dtype="float64")
    assert model.hf_config["architectures"] == ["T5EncoderModel"]
    require_equal(again, params)


def test_the_decoder_beside_an_encoder_is_left_out(tmp_path: Path) -> None:
    folder, params = saved("ForConditionalGeneration", tmp_path, True, **V11)
    rewritten(folder, architectures=["T5EncoderModel"])
    with pytest.warns(
        UserWarning, match="does not use are left out: 'decoder.block.0.*and .* more"
    ):
        _, again = pretrained.load(folder, dtype="float64")
    require_equal(again.stack, params.encoder)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_head_that_repeats_the_embedding(version: str, tmp_path: Path) -> None:
    changes = {} if version == "1.0" else V11
    folder, params = saved("ForConditionalGeneration", tmp_path, **changes)
    shared = load_file(folder / "model.safetensors")["shared.weight"]
    model, _ = pretrained.load(folder)
    assert model.head == LMHead(tied=True, scale=12**-0.5 if version == "1.0" else 1.0)
    assert params.head is None
    if version == "1.0":
        rewritten(folder, None, {"lm_head.weight": shared.copy()})
        require_equal(pretrained.load(folder, dtype="float64")[1], params)


def kind(head: str) -> dict[str, Any]:
    return {"model_type": "t5", "architectures": [f"T5{head}"]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"feed_forward_proj": "gated-mish"}, "feed_forward_proj must be one of .*, or gated-..."),
    ({"feed_forward_proj": "relu-gated"}, "feed_forward_proj must be one of"),
    (
        {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"},
        "dense_act_fn must be 'gelu_new'",
    ),
    ({"is_gated_act": True}, "is_gated_act must be False"),
    ({"is_decoder": True}, "is_decoder must be False"),
    ({"tie_encoder_decoder": True}, "tie_encoder_decoder must be False"),
    ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets must be an integer"),
    ({"relative_attention_max_distance": 2}, "max_distance must be"),
    ({"num_layers": 0}, "num_layers must be an integer from 1"),
    ({"head_dim": 4}, "head_dim must be"),
    ({"architectures": ["T5ForTokenClassification"]}, "architectures must be one of"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_configurations_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PretrainedError, match=message):
        pretrained.model(kind("ForConditionalGeneration") | SIZES | changes)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    folder, _ = saved("Model", tmp_path)
    wrong = {"encoder.final_layer_norm.weight": np.zeros(11)}
    names = {"decoder.block.1.layer.1.EncDecAttention.q.weight": "mine"}
    rewritten(folder, lambda name: names.get(name, name), wrong)
    with pytest.raises(PretrainedError) as raised:
        pretrained.load(folder)
    for part in (
        "1 missing: 'decoder.block.1.layer.1.EncDecAttention.q.weight'",
        "1 misshapen: 'encoder.final_layer_norm.weight (wanted (12,), got (11,))'",
        "1 unexpected: 'mine'",
    ):
        assert part in str(raised.value)


SMALL_V11 = V11 | {"d_ff": 1024, "num_heads": 6, "num_layers": 8, "num_decoder_layers": 8}
PUBLISHED: list[tuple[str, dict[str, Any], int]] = [
    ("ForConditionalGeneration", {}, 60_506_624),  # t5-small, whose sizes are the defaults
    ("ForConditionalGeneration", SMALL_V11, 76_961_152),  # t5-v1_1-small
    ("EncoderModel", {}, 35_330_816),
]


@pytest.mark.parametrize(("head", "sizes", "count"), PUBLISHED)
def test_number_of_parameters(head: str, sizes: dict[str, Any], count: int) -> None:
    model = pretrained.model(kind(head) | sizes)
    shapes = shapes_of(model)
    assert sum(math.prod(shape) for shape in shapes.values()) == count
    hf = on_meta(getattr(transformers, f"T5{head}"), transformers.T5Config(**sizes))
    if sizes:  # which transformers 5 ties where no file says otherwise
        hf["lm_head.weight"] = hf["shared.weight"]
    assert shapes == hf


def test_what_a_configuration_leaves_out_is_as_in_transformers() -> None:
    config = transformers.T5Config()
    model = pretrained.model(kind("ForConditionalGeneration"))
    block = model.encoder[0]
    assert block == model.decoder[0] and len(model.encoder) == len(model.decoder)
    assert (block.ffn.activation, block.ffn.gated) == (config.dense_act_fn, config.is_gated_act)
    assert block.norm.eps == config.layer_norm_epsilon
    rates = (block.dropout, block.ffn.dropout, model.src_embed.dropout, model.out_dropout)
    assert rates == (config.dropout_rate,) * 4
    relative = (model.encoder_relative_bias.n_buckets, model.encoder_relative_bias.max_distance)
    assert relative == (
        config.relative_attention_num_buckets,
        config.relative_attention_max_distance,
    )
