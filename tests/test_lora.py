"""Low-rank adapters: what is drawn, what is trained, what is kept, and what merging changes."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
from causal_models import CONFIGS as CAUSAL
from encoders import KINDS, sizes_of
from judges import AUTOGRAD
from libraries import only

from xformer import backends, optim, pretrained, tree
from xformer.backends import Backend
from xformer.backends.numpy.linear import NumpyLinearCache
from xformer.base.tree import Frozen, value
from xformer.finetune import lora
from xformer.layers import LinearParams, LoRAParams

NUMPY = backends.get("numpy")
B, T, V = 2, 5, 37
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    **{"vocab_size": V, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 16},
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": V,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 20,
}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 3,
}
T5: dict[str, Any] = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    **{"vocab_size": V, "d_model": 12, "d_kv": 5, "d_ff": 20, "num_layers": 2, "num_heads": 3},
    "is_encoder_decoder": True,
}
ALBERT: dict[str, Any] = {
    "model_type": "albert",
    "architectures": ["AlbertForMaskedLM"],
    "vocab_size": V,
    "embedding_size": 5,
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 20,
}
CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "mixtral": MIXTRAL, "t5": T5, "albert": ALBERT}


def made(name: str, place: Backend = NUMPY, **options: Any) -> tuple[Any, Any]:
    """A model with adapters, none of them 0, in float64."""
    model = pretrained.model(CONFIGS[name])
    options = {"rank": 2, "alpha": 3, "targets": ("*",)} | options
    params = lora.attach(model.init(0, place.name, "float64"), **options)
    rng = place.generator(1, "float64")

    def drawn(_: str, node: LoRAParams) -> LoRAParams:
        return node._replace(b=rng.normal(node.b.shape, std=0.3))

    return model, tree.map_nodes(drawn, params, LoRAParams)


def loss_of(name: str, model: Any, params: Any, place: Backend = NUMPY) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    ids = [place.asarray(rng.integers(0, V, (B, T))) for _ in range(3 if name == "t5" else 2)]
    return model.loss(params, *ids)


def test_at_first_nothing_changes(library: Backend) -> None:
    """b is 0; a is PEFT's draw, the same everywhere; all else is frozen and the very same array."""
    model = pretrained.model(LLAMA)
    base = model.init(0, backends.backend_of(library.asarray(0.0)).name)
    base = tree.map(lambda a: library.asarray(library.to_numpy(a)), base)
    params = lora.attach(base, rank=4, alpha=6)
    found = lora.adapters(params)
    names = [f"stack.blocks.{i}.attn.{part}" for i in range(2) for part in ("q", "kv.v")]
    assert list(found) == names
    host = lora.attach(model.init(0), rank=4, alpha=6)
    for name, node in found.items():
        a = library.to_numpy(node.a)
        assert np.array_equal(a, lora.adapters(host)[name].a)
        assert a.shape == (12, 4) and 0.2 < np.abs(a).max() <= 12**-0.5
        assert node.b.shape[0] == 4 and not library.to_numpy(node.b).any()
        assert node.scale.value == 1.5
    before, after = tree.flatten(base), tree.flatten(params)
    frozen = {n.replace(".base.", "."): a for n, a in after.items() if isinstance(a, Frozen)}
    assert frozen.keys() == before.keys()
    assert all(leaf.value is before[name] for name, leaf in frozen.items())
    if library.name == "jax":
        return  # it would compile the model for seconds
    ids = library.asarray([[1, 2, 3]])
    logits = [library.to_numpy(model.forward(p, ids)[0]) for p in (base, params)]
    assert np.array_equal(*logits)


QUERIES = {  # of the families whose attention has other maps
    "deepseek_v2": {"attn.q", "attn.kv.up"},
    "deepseek_v3": {"attn.q.up", "attn.kv.up"},
    "qwen3_5_text": {"attn.q", "attn.kv.v", "attn.qkv"},
}


@pytest.mark.parametrize("name", [*CAUSAL, *KINDS.values(), "t5"])
def test_each_family_has_targets_by_default(name: str) -> None:
    """Each attention has an adapter at its queries and at its values."""
    if name in CAUSAL:
        settings = dict(CAUSAL[name])
        config = {"model_type": name, "architectures": [settings.pop("architecture")], **settings}
    elif name == "t5":
        config = T5
    else:
        family = next(family for family, kind in KINDS.items() if kind == name)
        config = {"model_type": name, "architectures": [f"{family}Model"], **sizes_of(family)}
    base = pretrained.model(config).init(0)
    adapted = lora.adapters(lora.attach(base, rank=2, alpha=3))
    parts = {n.rpartition(".blocks.")[2].partition(".")[2] for n in adapted}
    cross = {"cross.q", "cross.kv.v"} if name == "t5" else set()
    assert parts == QUERIES.get(name, {"attn.q", "attn.kv.v"}) | cross
    outputs = [n for n in lora.linear_maps(base) if n.endswith((".attn.o", ".cross.o"))]
    for output in outputs:
        assert any(n.startswith(output.removesuffix("o")) for n in adapted)


def test_a_seed_is_a_draw() -> None:
    base = pretrained.model(LLAMA).init(0)
    attach = partial(lora.attach, base, 2, 2)
    a, again, other = (lora.adapters(attach(seed=s)) for s in (0, 0, 1))
    name = next(iter(a))
    assert np.array_equal(a[name].a, again[name].a)
    assert not np.array_equal(a[name].a, other[name].a)
    first, second = list(a.values())[:2]
    assert not np.array_equal(first.a, second.a)


@pytest.mark.parametrize("name", CONFIGS)
@only("torch")
def test_gradients_are_those_of_autograd(library: Backend, name: str) -> None:
    """Through the same forward code, as tests/judges.py does it."""
    import torch

    model, params = made(name, library)
    leaves = tree.flatten(tree.trained(params))
    for leaf in leaves.values():
        leaf.requires_grad_()
    loss, cache = loss_of(name, model, params, library)
    grads = tree.flatten(cache.backward())
    wanted = torch.autograd.grad(loss, list(leaves.values()))
    assert grads.keys() == leaves.keys()
    for leaf_name, grad in zip(leaves, wanted, strict=True):
        got, want = grads[leaf_name].detach().numpy(), grad.numpy()
        assert np.abs(got - want).max() <= AUTOGRAD * np.abs(want).max(), leaf_name


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_the_base_are_never_computed(name: str) -> None:
    """No linear map but an adapter's own keeps what a gradient of its weights would need."""
    model, params = made(name, targets=("*.attn.q", "*.attn.kv.v"))
    _, cache = loss_of(name, model, params)
    maps: dict[str, NumpyLinearCache] = {}
    tree.map_nodes(maps.setdefault, cache, NumpyLinearCache)
    for where, node in maps.items():
        of_adapter = re.search(r"\.maps\.\d\.(up|down)\.op$", where) is not None
        assert (node.x is not None) == of_adapter, where
    assert any(where.endswith(".up.op") and node.x is not None for where, node in maps.items())
    grads = tree.flatten(cache.backward())
    assert {n.rpartition(".")[2] for n in grads} == {"a", "b"}


def test_less_is_kept_than_for_the_whole_model() -> None:
    model, params = made("llama", targets=("*.attn.q",))
    _, cache = loss_of("llama", model, params)
    _, whole = loss_of("llama", model, lora.merge(params))
    assert tree.nbytes(cache) < tree.nbytes(whole)


@pytest.mark.parametrize("name", CONFIGS)
def test_merged_is_unmerged(name: str) -> None:
    model, params = made(name)
    merged = lora.merge(params)
    assert not lora.adapters(merged)
    assert not any(isinstance(leaf, Frozen) for leaf in tree.flatten(merged).values())
    (y, _), (z, _), (base, _) = (
        loss_of(name, model, p) for p in (params, merged, model.init(0, dtype="float64"))
    )
    assert abs(y - z) < 1e-13 < abs(y - base)


def test_training_changes_adapters_alone() -> None:
    """And what was frozen stays, bit for bit: it is the very same array."""
    model, params = made("llama")
    trained, new = tree.trained(params), params
    state = optim.adamw_init(trained)
    losses = []
    for _ in range(20):
        loss, cache = loss_of("llama", model, new)
        trained, state = optim.adamw(trained, cache.backward(), state, lr=1e-2)
        new = tree.join(new, trained)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    before, after = tree.flatten(params), tree.flatten(new)
    for name, leaf in before.items():
        same = value(leaf) is value(after[name])
        assert same == isinstance(leaf, Frozen), name


def test_all_linear_maps_have_names() -> None:
    params = pretrained.model(MIXTRAL).init(0)
    parts = ("q", "kv.k", "kv.v", "o")
    blocks = [f"stack.blocks.{i}.attn.{part}" for i in range(2) for part in parts]
    assert lora.linear_maps(params) == (*blocks, "head")
    assert lora.linear_maps(lora.attach(params, 1, 1)) == (*blocks, "head")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "attach: rank must be an int of at least 1, got 0"),
        ({"rank": 2.0}, "attach: rank must be an int of at least 1, got 2.0"),
        ({"alpha": -1}, r"attach: alpha must lie in \[0, inf\], got -1"),
        ({"targets": ()}, "attach: targets must hold at least one pattern"),
        ({"targets": ("*.q", "*.qkv")}, r"'\*.qkv' matches no linear map; there are \*.attn.q, "),
        ({"targets": ("*.ffn.up",)}, r"stack.blocks.0.ffn.up is an array of another kind, such as"),
        ({"targets": ("embed.table",)}, "embed.table is an array of another kind"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    params = pretrained.model(MIXTRAL).init(0)
    with pytest.raises(ValueError, match=message):
        lora.attach(params, **{"rank": 2, "alpha": 2} | options)


def test_more_bad_input() -> None:
    params = lora.attach(pretrained.model(LLAMA).init(0), 2, 2)
    with pytest.raises(ValueError, match=r"attach: stack.blocks.0.attn.q has an adapter already"):
        lora.attach(params, 2, 2)
    with pytest.raises(TypeError, match="targets must be a list of patterns, got 'head'"):
        lora.attach(params, 2, 2, "head")
    with pytest.raises(TypeError, match="alpha must be a number"):
        lora.attach(params, 2, "2")


def test_one_map_is_a_tree_too() -> None:
    params = lora.attach(LinearParams(np.ones((3, 2)), None), 1, 1, ("",))
    assert isinstance(params, LoRAParams)
    assert lora.linear_maps(params) == ("",)
