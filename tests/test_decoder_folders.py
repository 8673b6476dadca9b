"""Folders of decoders as they have been written over the years; and ones that do not fit."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import edited, refused_at_most, some
from huggingface import build, reloaded, require_equal, torch, transformers
from hypothesis import given
from hypothesis import strategies as st
from libraries import LIBRARIES, only
from safetensors.numpy import load_file, save_file
from test_decoder_families import BARE, LM, configured, kind

from xformer import backends, pretrained, tree
from xformer.backends import Backend
from xformer.pretrained import PretrainedError
from xformer.pretrained.reading import read_json

Tensors = dict[str, np.ndarray]
HEADS = ("lm_head.weight", "embed_out.weight")
UNTIED = ("GPT2", "Llama", "Qwen3", "Gemma2", "DeepseekV2")
EMBEDDINGS = {"GPT2": "transformer.wte.weight", "Llama": "model.embed_tokens.weight"}


def written(folder: Path, family: str, head: str = LM, **changes: Any) -> Any:
    """What transformers saves there, in float32."""
    hf = build(kind(family, head), configured(family, changes)).float()
    hf.save_pretrained(folder)
    return hf


def rewrite(folder: Path, change: Callable[[Tensors], Tensors], **config: Any) -> None:
    """Change the tensors in a folder, and keys of its configuration."""
    path = folder / "model.safetensors"
    save_file({name: np.array(t) for name, t in change(load_file(path)).items()}, path)
    path = folder / "config.json"
    path.write_text(json.dumps(read_json(path) | config))


def require_back(model: Any, params: Any, hf: Any, folder: Path) -> None:
    """transformers reads what we save."""
    pretrained.save(model, params, folder)
    reloaded(hf.double(), folder)


# As they have been written


def test_gpt2_of_the_hub(tmp_path: Path) -> None:
    """Without the prefix `transformer.`, and with the causal mask of each layer."""
    hf = written(tmp_path, "GPT2")
    _, want = pretrained.load(tmp_path)

    def hub(tensors: Tensors) -> Tensors:
        old = {name.removeprefix("transformer."): t for name, t in tensors.items()}
        for i in range(2):
            old[f"h.{i}.attn.bias"] = np.tril(np.ones((1, 1, 32, 32), np.float32))
            old[f"h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
        return old

    rewrite(tmp_path, hub)
    model, params = pretrained.load(tmp_path)
    require_equal(params, want)
    require_back(model, params, hf, tmp_path / "back")


@pytest.mark.parametrize("family", EMBEDDINGS)
def test_a_tied_head_may_be_there_if_it_is_equal(family: str, tmp_path: Path) -> None:
    written(tmp_path, family, tie_word_embeddings=True)
    _, want = pretrained.load(tmp_path)
    name = EMBEDDINGS[family]
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors[name]})
    require_equal(pretrained.load(tmp_path)[1], want)
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors[name] + 1e-6})
    with pytest.raises(PretrainedError, match=r"config\.json describes: 1 unexpected: 'lm_head\."):
        pretrained.load(tmp_path)


@pytest.mark.parametrize("family", EMBEDDINGS)
def test_a_tied_head_may_stand_for_the_embedding(family: str, tmp_path: Path) -> None:
    written(tmp_path, family, tie_word_embeddings=True)
    _, want = pretrained.load(tmp_path)
    name = EMBEDDINGS[family]
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors.pop(name)})
    require_equal(pretrained.load(tmp_path)[1], want)


# What null means. transformers 5.24 with huggingface_hub 2.4 refuses five of these settings; then a
# model with the meaning in place of null is the judge.
NULLS: list[tuple[str, str, Any]] = [
    ("GPT2", "scale_attn_weights", False),
    ("GptOss", "attention_bias", False),
    ("GptOss", "head_dim", 4),
    ("Starcoder2", "use_bias", False),
    ("DeepseekV3", "norm_topk_prob", False),
    ("DeepseekV3", "rope_interleave", False),
    ("Gemma2", "tie_word_embeddings", False),
]


@pytest.mark.parametrize(("family", "key", "meaning"), NULLS)
def test_null_is_false_or_computed(family: str, key: str, meaning: Any, tmp_path: Path) -> None:
    """A flag is false, even if it is true where its key is absent. A width is computed."""
    from huggingface_hub.errors import StrictDataclassFieldValidationError

    try:
        hf = written(tmp_path, family, **{key: None})
    except StrictDataclassFieldValidationError:
        hf = written(tmp_path, family, **{key: meaning})
    rewrite(tmp_path, lambda tensors: tensors, **{key: None})
    model, params = pretrained.load(tmp_path)
    tokens = np.random.default_rng(0).integers(4, 37, (2, 7))
    with torch.no_grad():
        wanted = hf(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(model.forward(params, tokens)[0], wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", UNTIED)
def test_a_model_without_its_head_is_bare(family: str, tmp_path: Path) -> None:
    """Embedding models are published so: the architecture of a causal LM, untied, and no head."""
    hf = written(tmp_path, family, tie_word_embeddings=False)
    _, params = pretrained.load(tmp_path)
    rewrite(tmp_path, lambda tensors: {n: t for n, t in tensors.items() if n not in HEADS})
    with pytest.warns(UserWarning, match=f"no tensors of the head of {hf.config.architectures[0]}"):
        model, again = pretrained.load(tmp_path)
    assert model.head is None and model.hf_config["architectures"] != hf.config.architectures
    require_equal(again, params._replace(head=None))
    tokens = np.random.default_rng(0).integers(4, 37, (2, 7))
    with torch.no_grad():
        wanted = hf.base_model(torch.tensor(tokens)).last_hidden_state.numpy()
    np.testing.assert_allclose(model.hidden(again, tokens)[0], wanted, rtol=1e-3, atol=1e-3)
    pretrained.save(model, again, tmp_path / "copy")
    reread = transformers.AutoModel.from_pretrained(tmp_path / "copy", output_loading_info=True)[1]
    assert not any(reread[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_a_classifier_beside_a_language_model_is_left_out(family: str, tmp_path: Path) -> None:
    written(tmp_path, family)
    _, params = pretrained.load(tmp_path)
    score = np.zeros((2, 16), np.float32)
    rewrite(tmp_path, lambda tensors: tensors | {"score.weight": score})
    with pytest.warns(UserWarning, match=r"does not use are left out: 'score\.weight'"):
        require_equal(pretrained.load(tmp_path)[1], params)


def test_loading_tells_how_far_it_is(tmp_path: Path) -> None:
    written(tmp_path, "Llama")
    said: list[tuple[str, int, int]] = []
    _, params = pretrained.load(
        tmp_path, dtype="float64", progress=lambda *place: said.append(place)
    )
    total = tree.nbytes(params)
    assert [said[0], said[-1]] == [("loading", 0, total), ("loading", total, total)]
    assert [done for _, done, _ in said] == sorted(done for _, done, _ in said)


def test_frequencies_are_no_parameters(tmp_path: Path) -> None:
    written(tmp_path, "Llama")
    _, want = pretrained.load(tmp_path)
    places = ("model", "model.layers.0.self_attn", "model.layers.1.self_attn")
    f = np.array([1.0, 0.01], np.float32)
    more = {f"{place}.rotary_emb.inv_freq": f for place in places}
    rewrite(tmp_path, lambda tensors: tensors | more)
    require_equal(pretrained.load(tmp_path)[1], want)


@pytest.mark.parametrize(
    ("family", "head"), [("GPT2", "GPT2LMHeadModel"), ("Llama", "LlamaForCausalLM")]
)
def test_a_bare_model_in_the_place_of_a_whole_one(family: str, head: str, tmp_path: Path) -> None:
    written(tmp_path, family, BARE, tie_word_embeddings=True)
    _, bare = pretrained.load(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors, architectures=[head])
    model, params = pretrained.load(tmp_path)
    assert model.head.tied
    require_equal(params, bare)


@pytest.mark.parametrize("family", ["GPT2", "Mixtral"])
def test_shards(family: str, tmp_path: Path) -> None:
    hf = written(tmp_path / "one", family)
    hf.save_pretrained(tmp_path / "many", max_shard_size="5KB")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 3
    model, params = pretrained.load(tmp_path / "many")
    require_equal(params, pretrained.load(tmp_path / "one")[1])
    params = tree.map(np.array, params)
    require_back(model, params, hf, tmp_path / "many")  # the index would come first


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_are_widened_as_torch_does(dtype: str, tmp_path: Path) -> None:
    hf = written(tmp_path / "float32", "Llama").to(getattr(torch, dtype))
    hf.save_pretrained(tmp_path / "half")
    assert read_json(tmp_path / "half" / "config.json")["dtype"] == dtype
    hf.float().save_pretrained(tmp_path / "widened")
    for wide in ("float32", "float64"):
        _, params = pretrained.load(tmp_path / "half", dtype=wide)
        require_equal(params, pretrained.load(tmp_path / "widened", dtype=wide)[1])


@only("array-api-strict", "torch", "jax", "cupy")
def test_parameters_of_every_library_are_saved(library: Backend, tmp_path: Path) -> None:
    hf = written(tmp_path / "theirs", "Mixtral")
    model, params = pretrained.load(tmp_path / "theirs", LIBRARIES[library.name])
    assert {backends.backend_of(leaf).name for leaf in tree.flatten(params).values()} == {
        LIBRARIES[library.name]
    }
    require_back(model, params, hf, tmp_path / "ours")
    saved = read_json(tmp_path / "ours" / "config.json")
    assert saved == read_json(tmp_path / "theirs" / "config.json")


# What does not fit


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def flat(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: tensors[name][:-1]}


QKV, NORM = "transformer.h.1.attn.c_attn", "model.layers.1.input_layernorm.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts.2.w3.weight"
NORM2 = "transformer.h.0.ln_1.weight"
UNFIT: list[tuple[str, Callable[[Tensors], Tensors], dict[str, Any], str]] = [
    ("GPT2", without(f"{QKV}.bias"), {}, f"1 missing: '{QKV}.bias'"),
    ("GPT2", flat(f"{QKV}.weight"), {}, rf"1 misshapen: .{QKV}.weight \(wanted .12, 36., got .11,"),
    ("GPT2", without(EMBEDDINGS["GPT2"]), {}, f"1 missing: '{EMBEDDINGS['GPT2']}'"),
    ("GPT2", lambda t: t | {"h.0.attn.c_attn.lora_A": t[NORM2]}, {}, "unexpected: .*lora_A"),
    ("GPT2", lambda t: t, {"n_layer": 1}, r"12 unexpected: 'transformer\.h\.1\..* and 7 more"),
    ("GPT2", lambda t: t, {"n_layer": 3}, r"12 missing: 'transformer\.h\.2\.attn\.c_attn\.bias',"),
    ("GPT2", lambda t: t, {"n_embd": 15}, r"28 misshapen: "),
    ("GPT2", lambda t: t, {"n_positions": 31}, r"1 misshapen: 'transformer\.wpe\.weight"),
    ("Llama", without(EMBEDDINGS["Llama"]), {}, f"1 missing: '{EMBEDDINGS['Llama']}'"),
    ("Llama", flat(NORM), {}, rf"1 misshapen: '{NORM} \(wanted .16,., got .15,.\)'"),
    ("Llama", lambda t: t, {"attention_bias": True}, r"8 missing: 'model\.layers\.0\.self_attn\.k"),
    ("Llama", lambda t: t, {"tie_word_embeddings": True}, "1 unexpected: 'lm_head.weight'"),
    ("Llama", lambda t: t, {"num_key_value_heads": 4}, "4 misshapen: .*k_proj.weight"),
    ("Mixtral", without(EXPERT), {}, f"1 missing: '{EXPERT}'"),
    ("Mixtral", lambda t: t, {"num_local_experts": 2}, "8 misshapen|6 unexpected"),
    ("Mixtral", lambda t: t, {"num_local_experts": 1024}, r"[0-9]{4} missing: "),
    # Absurd sizes
    ("Llama", lambda t: t, {"num_hidden_layers": 1000}, "describes 1000 layers, .* 21 tensors"),
    ("Llama", lambda t: t, {"vocab_size": 2**31 - 1}, "2 misshapen: .*2147483647, 16"),
    ("Llama", lambda t: t, {"hidden_size": 2**31 - 4, "head_dim": 4}, "21 misshapen"),
    ("GPT2", lambda t: t, {"n_positions": 2**31 - 1}, "1 misshapen: .*2147483647, 12"),
]


@pytest.mark.parametrize(("family", "change", "config", "message"), UNFIT)
def test_what_does_not_fit_is_listed(
    family: str,
    change: Callable[[Tensors], Tensors],
    config: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    written(tmp_path, family)
    rewrite(tmp_path, change, **config)
    with (
        refused_at_most(),
        pytest.raises(PretrainedError, match=f"^{re.escape(str(tmp_path))}: .*{message}"),
    ):
        pretrained.load(tmp_path)


@pytest.mark.parametrize("family", ["GPT2", "Llama", "Mixtral"])
@some
@given(data=st.data())
def test_edited_configurations_load_or_are_refused(
    family: str, tmp_path: Path, data: st.DataObject
) -> None:
    if not (tmp_path / family).exists():
        written(tmp_path / family, family)
        shutil.copy(tmp_path / family / "config.json", tmp_path)
    edit = data.draw(edited(read_json(tmp_path / "config.json")))
    (tmp_path / family / "config.json").write_bytes(edit)
    with refused_at_most(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "config.*keys that transformers does not read")
        pretrained.load(tmp_path / family)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    written(tmp_path, "GPT2")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(PretrainedError, match=r"pytorch_model\.bin is a pickle"):
        pretrained.load(tmp_path)


def test_frozen_parameters_are_saved_like_others(tmp_path: Path) -> None:
    written(tmp_path / "a", "Llama")
    model, params = pretrained.load(tmp_path / "a")
    pretrained.save(model, tree.freeze(params, "embed.*"), tmp_path / "b")
    require_equal(pretrained.load(tmp_path / "b")[1], params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", None])
def test_types_that_are_not_computed_in_are_refused(tmp_path: Path, dtype: Any) -> None:
    written(tmp_path, "Llama")
    message = f"^load: dtype must be float32 or float64 on backend numpy, got {dtype!r}$"
    with pytest.raises(ValueError, match=message):
        pretrained.load(tmp_path, dtype=dtype)


def test_what_is_no_folder_and_no_configuration(tmp_path: Path) -> None:
    written(tmp_path, "Llama")
    for name in ("config.json", "model.safetensors"):
        with pytest.raises(PretrainedError, match=f"{name}: is one file of a model; load its fold"):
            pretrained.load(tmp_path / name)
    with pytest.raises(TypeError, match=r"^model: config must be a mapping, got list$"):
        pretrained.model([])  # type: ignore[arg-type]


def test_parameters_of_another_model_are_not_saved(tmp_path: Path) -> None:
    written(tmp_path / "a", "Llama")
    written(tmp_path / "b", "Llama", intermediate_size=21)
    model, _ = pretrained.load(tmp_path / "a")
    _, params = pretrained.load(tmp_path / "b")
    with pytest.raises(ValueError, match=r"^save: params must be the model's, but 6 differ"):
        pretrained.save(model, params, tmp_path / "c")
    assert not (tmp_path / "c").exists()
