"""Keys of configurations: what transformers reads is followed or refused, the rest is named."""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path

import pytest
from huggingface import require_equal, rewritten, torch, transformers
from test_pretrained_matching import require_same_as
from tiny import ENCODERS, KINDS, architecture, config, tiny

from xformer import finetune, pretrained
from xformer.pretrained import PretrainedError
from xformer.pretrained.config import READ, Config
from xformer.pretrained.families import FAMILIES
from xformer.pretrained.reading import read_json

# Attributes of configuration classes that no folder has: transformers' own bookkeeping.
BOOKKEEPING = {
    *("allow_global_per_layer_attribute_access", "base_config_key", "extra_config_files"),
    *("extra_files", "ignore_keys_at_rope_validation", "is_heterogeneous", "per_layer_attributes"),
    *("serialize_explicit_per_layer_config", "sub_configs_defaults"),
    *(f"base_model_{kind}_plan" for kind in ("ep", "fsdp", "pp", "tp")),
}
# Keys of models of images, which are in the same modeling file.
OF_IMAGES = {
    "gemma3_text": {"get_text_config", "image_token_id", "mm_tokens_per_image", "vision_config"},
    "qwen3_5_text": {
        *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id"),
        *("depth", "num_heads", "in_channels", "out_hidden_size", "num_position_embeddings"),
        *("patch_size", "spatial_merge_size", "temporal_patch_size"),
    },
}
READING = re.compile(r"\bconfig\.([a-z_]+)|getattr\((?:self\.)?config, \"(\w+)\"")


def read_by_transformers(kind: str) -> set[str]:
    """Keys of the family's configuration class, and of its modeling file."""
    found = config(kind)
    cls = type(found)
    keys = set(json.loads(found.to_json_string(use_diff=False))) | {*cls.attribute_map}
    keys |= set(inspect.signature(cls.__init__).parameters) - {"self", "kwargs"}
    keys |= {
        name
        for name in dir(found)
        if not name.startswith("_") and not callable(getattr(cls, name, None))
    }
    code = inspect.getsource(sys.modules[getattr(transformers, architecture(kind)).__module__])
    return keys | {name for pair in READING.findall(code) for name in pair if name}


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_that_transformers_reads_is_followed_or_refused(kind: str) -> None:
    family = FAMILIES[kind]
    for head in sorted(set(family.heads.values())):
        c = Config(json.loads(config(kind).to_json_string(use_diff=False)))
        c.rename(family.aliases)
        c.common(**{key: c.data.get(key) for key in family.free})
        family.build(c, head)
        known = c._asked | set(family.aliases) | {*READ} | BOOKKEEPING | OF_IMAGES.get(kind, set())
        unknown = read_by_transformers(kind) - known
        # rope_parameters are told of where a family has a rotary embedding, and read by no other.
        assert unknown <= ({"rope_scaling"} - known)


@pytest.mark.parametrize("kind", KINDS)
def test_aliases_are_those_of_transformers(kind: str) -> None:
    cls = type(config(kind))
    assert FAMILIES[kind].aliases == cls.attribute_map


@pytest.mark.parametrize("kind", [kind for kind in KINDS if FAMILIES[kind].aliases])
def test_an_alias_alone_is_read_as_transformers_reads_it(kind: str, tmp_path: Path) -> None:
    hf = tiny(kind)
    hf.save_pretrained(tmp_path)
    path, data = tmp_path / "config.json", read_json(tmp_path / "config.json")
    for alias, key in FAMILIES[kind].aliases.items():
        data[alias] = data.pop(key)
    path.write_text(json.dumps(data))
    judge = type(hf).from_pretrained(tmp_path)
    assert all(map(torch.equal, hf.state_dict().values(), judge.state_dict().values()))
    require_same_as(hf, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_nothing_reads_change_no_number(kind: str, tmp_path: Path) -> None:
    hf = tiny(kind)
    hf.save_pretrained(tmp_path)
    _, params = pretrained.load(tmp_path)
    keys = {"unsloth_fixed": True, "condition_on_chain": [1], "auto_map": {"A": "b.C"}}
    rewritten(tmp_path, **keys)
    listed = ", ".join(f"'{key}'" for key in sorted(keys))
    with pytest.warns(UserWarning, match=f"config.json: keys .* are left out: {listed}$"):
        require_equal(require_same_as(hf, tmp_path), params)


HEADS = [
    (kind, name)
    for kind in KINDS
    for name in FAMILIES[kind].heads
    if hasattr(transformers, name)  # T5WithLMHeadModel is of old
]


@pytest.mark.parametrize(("kind", "name"), HEADS)
def test_an_architecture_that_is_missing_is_told_from_the_tensors(
    kind: str, name: str, tmp_path: Path
) -> None:
    hf = tiny(kind, FAMILIES[kind].heads[name])
    hf.save_pretrained(tmp_path)
    _, params = pretrained.load(tmp_path)
    data = read_json(tmp_path / "config.json")
    assert data.pop("architectures") == [name]
    (tmp_path / "config.json").write_text(json.dumps(data))
    if kind == "modernbert" and "Classification" in name:  # both have the same tensors
        classifiers = "ModernBertForSequenceClassification and ModernBertForTokenClassification"
        with pytest.raises(PretrainedError, match=f"missing, and {classifiers} have these tens"):
            pretrained.load(tmp_path)
        return
    again, same = pretrained.load(tmp_path)
    # A bare model and a tied head have the same tensors: then it is the model with the head.
    is_same = hf.config.tie_word_embeddings and FAMILIES[kind].heads[name] == "hidden"
    wanted = architecture(kind) if is_same and kind not in ENCODERS else name
    assert again.hf_config == {**data, "architectures": [wanted]}
    require_equal(same, params)
    lines = tmp_path / "lines.txt"
    lines.write_text("plain text\n")
    if name.endswith("Classification"):
        with pytest.raises(ValueError, match=f"for a {name}, reads .*; the first record has text"):
            finetune.suited(lines, tmp_path)
        return
    task = "masked" if FAMILIES[kind].heads[name] == "masked-lm" else "causal"
    assert finetune.suited(lines, tmp_path) == task


def test_an_architecture_that_is_missing_and_tensors_of_none(tmp_path: Path) -> None:
    tiny("gpt2").save_pretrained(tmp_path)
    rewritten(tmp_path, lambda name: name.replace("h.1", "h.7"), architectures=[])
    with pytest.raises(
        PretrainedError, match=r"architectures is missing, and none of GPT2LMHead.*h\.7"
    ):
        pretrained.load(tmp_path)
    with pytest.raises(PretrainedError, match=r"architectures must be one of .* got None"):
        pretrained.model({"model_type": "gpt2"})  # without tensors
