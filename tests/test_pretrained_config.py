"""Configurations: every key is read with its type, or refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import edited, refused_at_most, some
from hypothesis import given
from hypothesis import strategies as st

from xformer.layers import RopeConfig
from xformer.layers.rope_tables import frequencies
from xformer.pretrained.config import HARMLESS, NEUTRAL, Config
from xformer.pretrained.reading import PretrainedError, read_json
from xformer.pretrained.rope import rope

DATA: dict[str, Any] = {
    "size": 768,
    "eps": 1e-5,
    "theta": 10000,
    "tied": True,
    "act": "gelu",
    "layers": ["full", "sliding"],
    "sizes": [1, 2],
    "factors": [1, 2.5],
    "empty": None,
    "rope": {"kind": "yarn", "deep": {"x": 1}},
}


def config(**changes: Any) -> Config:
    return Config(copy.deepcopy(DATA) | changes, "folder/config.json")


def refuses(message: str) -> Any:
    return pytest.raises(PretrainedError, match=rf"^folder/config\.json: {message}")


def test_values_are_read() -> None:
    c = config()
    assert c.integer("size") == 768
    assert c.number("eps") == 1e-5
    assert isinstance(c.number("theta"), float)
    assert c.flag("tied") is True
    assert c.text("act", choices=("relu", "gelu")) == "gelu"
    assert c.texts("layers", choices=("full", "sliding"), length=2) == ("full", "sliding")
    assert c.integers("sizes", low=1) == (1, 2)
    assert c.numbers("factors", length=2) == (1.0, 2.5)
    part = c.sub("rope")
    assert part is not None and part.text("kind") == "yarn"
    deep = part.sub("deep")
    assert deep is not None and deep.integer("x") == 1
    c.finish()


def test_what_is_absent() -> None:
    c = config()
    with refuses("width is missing"):
        c.integer("width")
    with refuses("empty is missing"):
        c.integer("empty")
    assert c.integer("width", default=3) == c.integer("empty", default=3) == 3
    assert c.integer("empty", default=3, null=None) is None
    assert c.integer("width", default=3, null=None) == 3
    assert c.numbers("width", default=None) is None
    assert c.numbers("empty", default=(1.0,), null=None) is None
    assert c.sub("empty") is None and c.sub("width") is None
    assert "empty" not in c and "width" not in c and "size" in c


@pytest.mark.parametrize("value", ["768", 768.0, 1e3, True, [768], {}, -1, 2**31, 10**90])
def test_an_integer_is_nothing_else(value: Any) -> None:
    with refuses("size must be an integer from 0 to 2147483647, got "):
        config(size=value).integer("size")


@pytest.mark.parametrize(
    "value", ["1", True, [1.0], {}, -1, 3, float("nan"), float("inf"), 10**400]
)
def test_a_number_is_nothing_else(value: Any) -> None:
    with refuses("eps must be a number"):
        config(eps=value).number("eps", low=0, high=2)


def test_a_number_beyond_floating_point_is_refused() -> None:
    for value in (10**400, -(10**400), float("inf")):
        with refuses("eps must be a number"):
            config(eps=value).number("eps")


@pytest.mark.parametrize("value", [0, 1, "true", [], 1.0])
def test_a_flag_is_nothing_else(value: Any) -> None:
    with refuses("tied must be true or false, got "):
        config(tied=value).flag("tied")


def test_a_flag_that_is_null_is_false() -> None:
    assert config(tied=None).flag("tied", default=True) is False
    assert config().flag("tied", default=True) is True
    assert config(tied=None).flag("tied", default=None) is None
    config(tied=None).only("tied", False)
    with pytest.raises(PretrainedError, match="tied must be True, got None"):
        config(tied=None).only("tied", True)


@pytest.mark.parametrize("value", ["tanh", 3, ["gelu"], True])
def test_a_text_is_one_of_its_choices(value: Any) -> None:
    with refuses("act must be one of relu, gelu, got "):
        config(act=value).text("act", choices=("relu", "gelu"))


@pytest.mark.parametrize("value", [[1], [1, 2, 3], "12", {"0": 1}, [1] * 20_000])
def test_a_list_has_its_length(value: Any) -> None:
    with refuses("sizes must be a list of 2 numbers, got "):
        config(sizes=value).numbers("sizes", length=2)


@pytest.mark.parametrize("value", [[1, "2"], [1, True], [1, [2]], [1, 2.0], [1, None]])
def test_every_item_of_a_list_is_checked(value: Any) -> None:
    with refuses("sizes must be an integer from 0 to"):
        config(sizes=value).integers("sizes")


@pytest.mark.parametrize("value", [[], "yarn", 3, True])
def test_a_part_is_an_object(value: Any) -> None:
    with refuses("rope must be an object, got "):
        config(rope=value).sub("rope")


def test_errors_name_the_place_in_a_part() -> None:
    part = config().sub("rope")
    assert part is not None
    with refuses("rope: kind must be one of linear, got 'yarn'"):
        part.text("kind", choices=("linear",))


def test_only() -> None:
    c = config()
    c.only("tied", True)
    c.only("size", 768, 1024)
    c.only("empty", 3)
    c.only("absent", 3)
    c.only("theta", 10000.0)
    for name, value in (("tied", False), ("tied", 1), ("size", 767), ("act", None)):
        with refuses(f"{name} must be "):
            c.only(name, value)


def test_what_nobody_asked_for_is_refused() -> None:
    c = config()
    c.ignore(*(set(DATA) - {"tied", "rope", "empty"}))
    with refuses("not supported: 'rope', 'tied'$"):
        c.finish()
    c.flag("tied")
    part = c.sub("rope")
    assert part is not None and part.text("kind")
    with refuses("rope: not supported: 'deep'$"):
        c.finish()


def test_a_long_list_of_keys_is_cut() -> None:
    with pytest.raises(PretrainedError, match=r"not supported: 'k0', .* and 95 more$"):
        Config({f"k{i}": 1 for i in range(100)}).finish()


def test_keys_that_do_not_touch_the_mathematics() -> None:
    c = Config({"architectures": ["A"], "top_p": 0.9, "is_decoder": False, "pruned_heads": {}})
    c.common()
    c.finish()
    for name, value in (("is_decoder", True), ("pruned_heads", {"0": [1]})):
        with pytest.raises(PretrainedError, match=f"{name} must be "):
            Config({name: value}).common()
    both = Config({"is_encoder_decoder": True})
    both.common(is_encoder_decoder=True)
    both.finish()


@pytest.mark.parametrize(
    ("data", "count"),
    [({}, 2), ({"num_labels": 5}, 5), ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3)],
)
def test_labels(data: dict[str, Any], count: int) -> None:
    assert Config(data).labels() == count


@pytest.mark.parametrize("data", [{"id2label": {}}, {"id2label": {"0": "a"}, "num_labels": 2}])
def test_labels_that_contradict_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises(PretrainedError, match="id2label must be an object of"):
        Config(data).labels()


@some
@given(data=st.data())
def test_edited_configurations_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    whole = DATA | {"rope_scaling": SCALINGS["yarn"][0], "rope_theta": 1e6}
    (tmp_path / "config.json").write_bytes(data.draw(edited(whole)))
    with refused_at_most():
        c = Config(read_json(tmp_path / "config.json"))
        c.integer("size", default=1)
        c.number("eps", default=0.0)
        c.text("act", default="")
        c.integers("sizes", default=())
        c.labels()
        rope(c, width=16, max_len=4096)
        c.finish()


# Rotary embedding


SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "linear": ({"factor": 2.5}, {"factor": 2.5}),
    "dynamic": ({"factor": 2.0}, {"factor": 2.0, "max_len": 4096}),
    "llama3": (
        {
            "factor": 8,
            "low_freq_factor": 1,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_len": 1024,
        },
    ),
    "yarn": (
        {
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 16,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "truncate": False,
        },
        {
            "factor": 4.0,
            "original_max_len": 1024,
            "max_len": 4096,
            "beta_fast": 16.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "truncate": False,
        },
    ),
    "longrope": (
        {
            "short_factor": [1.0 + i for i in range(8)],
            "long_factor": [2 + i for i in range(8)],
            "original_max_position_embeddings": 1024,
        },
        {
            "short_factor": tuple(1.0 + i for i in range(8)),
            "long_factor": tuple(2.0 + i for i in range(8)),
            "original_max_len": 1024,
            "max_len": 4096,
        },
    ),
}


def read(data: dict[str, Any], **options: Any) -> RopeConfig:
    c = Config(data, "folder/config.json")
    found = rope(c, **{"width": 16, "max_len": 4096} | options)
    c.finish()
    return found


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("word", ["rope_type", "type"])
def test_scalings_as_transformers_4_and_5_write_them(kind: str, word: str) -> None:
    given_, wanted = SCALINGS[kind]
    scaling = "none" if kind == "default" else kind
    config = RopeConfig(16, 5e5, scaling=scaling, **wanted)
    part = {word: kind, **given_}
    assert read({"rope_theta": 500000, "rope_scaling": part}) == config
    assert read({"rope_parameters": {"rope_theta": 5e5, **part}}) == config
    assert read({"rope_parameters": part}, theta=5e5) == config


def test_what_is_absent_in_a_rotary_embedding() -> None:
    assert read({}) == RopeConfig(16, 10000.0)
    assert read({"rope_scaling": None, "rope_parameters": {}}, theta=1e6) == RopeConfig(16, 1e6)
    part = {"rope_type": "yarn", "factor": 2.0}
    assert read({"rope_scaling": {}}, default=part) == read({}, default=part) != read({})
    assert read({"rope_parameters": {}}, default=part) == read({})
    outside = {"original_max_position_embeddings": 512}
    assert read({"rope_scaling": part}).original_max_len == 4096
    assert read({"rope_scaling": part, **outside}).original_max_len == 512
    assert read({"rope_scaling": part | {"factor": None}, **outside}).stretch == 8.0
    assert read(outside).scaling == "none"


def test_a_part_of_the_channels() -> None:
    assert read({"partial_rotary_factor": 0.5}, share=0.25).width == 8
    assert read({"rope_parameters": {"partial_rotary_factor": 0.5}}, share=0.25).width == 8
    assert read({}, share=0.25).width == 4
    assert read({"partial_rotary_factor": 1.0}).width == 16


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"rope_scaling": {"type": "su"}}, "rope_scaling: type must be one of default, linear"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_scaling: rope_type must be one of"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "rope_scaling: type must be"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling: factor must be a num"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling: rotary: factor must be"),
        ({"rope_scaling": {"type": "default", "factor": 2}}, "rope_scaling: not supported: 'fact"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 3}}, "rope_scaling: not su"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        (
            {"rope_scaling": {"type": "linear"}, "rope_parameters": {"rope_theta": 3}},
            "rope_scaling",
        ),
        (
            {"rope_theta": 2.0, "rope_parameters": {"rope_theta": 3.0}},
            "rope_parameters: rope_theta",
        ),
        ({"rope_theta": 0}, "rope_parameters: rotary: theta must be larger than 1"),
        ({"rope_theta": True}, "rope_theta must be a number"),
        ({"partial_rotary_factor": 0.5}, "rope_parameters: partial_rotary_factor must be 1 in"),
        (
            {"rope_parameters": {"full": {"rope_theta": 2.0}, "sliding": {"rope_theta": 2.0}}},
            "rope_parameters must be the parameters of all layers, not of each type",
        ),
        (
            {"rope_scaling": {"full": {"rope_theta": 2.0}}},
            "rope_scaling must be the parameters of all layers, not of each type",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "rope_scaling: short_factor must be a list of 8",
        ),
    ],
)
def test_a_rotary_embedding_that_is_refused(data: dict[str, Any], message: str) -> None:
    with refuses(message):
        read(data)


@pytest.mark.parametrize("share", [0.0, 1.5, 1e308, -1.0])
def test_a_share_of_the_channels_that_is_refused(share: float) -> None:
    with refuses("rope_parameters: partial_rotary_factor must be more than 0 and at most 1"):
        read({"partial_rotary_factor": share}, share=0.5)


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("length", [512, 2048, 9000])
def test_frequencies_are_those_of_transformers(kind: str, length: int) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    part = {"rope_type": kind, "rope_theta": 5e5, **SCALINGS[kind][0]}
    theirs = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=4096,
        rope_parameters=copy.deepcopy(part),
    )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    if kind == "default":
        wanted, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(theirs)
    else:
        wanted, factor = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=length)
    data = json.loads(theirs.to_json_string(use_diff=False))
    found, attention = frequencies(rope(Config(data), width=16, max_len=4096), length)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=2e-6)  # theirs are float32
    assert attention == pytest.approx(factor, rel=1e-12)


# What transformers writes


def test_keys_of_transformers_base_configuration_are_known() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    base = transformers.PreTrainedConfig().to_dict()
    assert set(base) <= {*HARMLESS, *NEUTRAL}
    c = Config(json.loads(json.dumps(base)))
    c.common()
    c.finish()


# Keys by family that its own reader must ask for: all others are common.
FAMILIES = {
    "gpt2": {
        *("activation_function", "attn_pdrop", "embd_pdrop", "layer_norm_epsilon", "n_embd"),
        *("n_head", "n_inner", "n_layer", "n_positions", "reorder_and_upcast_attn", "resid_pdrop"),
        *("scale_attn_by_inverse_layer_idx", "scale_attn_weights", "summary_activation"),
        *("summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    },
    "llama": {"attention_bias", "mlp_bias", "pretraining_tp"},
    "bert": {"attention_probs_dropout_prob", "hidden_dropout_prob", "type_vocab_size"},
    "t5": {"d_ff", "d_kv", "d_model", "feed_forward_proj", "relative_attention_num_buckets"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_a_family_are_left_to_it(family: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    data = json.loads(transformers.AutoConfig.for_model(family).to_json_string(use_diff=False))
    c = Config(data)
    c.common(is_encoder_decoder=data["is_encoder_decoder"])
    c.ignore(*FAMILIES[family])
    if family == "gpt2":
        c.ignore("vocab_size", "tie_word_embeddings")
        c.finish()
    else:
        with pytest.raises(PretrainedError, match="not supported"):
            c.finish()
