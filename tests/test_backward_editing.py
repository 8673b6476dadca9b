"""`xf.watch`, `xf.edit`, `xf.unfused`: names of nodes, what flows through them, and edits of it."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from block_configs import block_config
from libraries import only

import xformer as xf
from xformer import backends, ops, tree
from xformer.backends import Backend
from xformer.hooks import node_names
from xformer.layers import EmbedConfig, ExpertsConfig
from xformer.models import LanguageModel
from xformer.proofs.catalogue import Case, cases

NUMPY = backends.get("numpy")
GPT = xf.GPT(vocab_size=17, n_layers=3, d_model=16, n_heads=2, max_len=8)
TOKENS, TARGETS = np.random.default_rng(0).integers(0, 17, (2, 3, 8))
ATTN = "stack.blocks.1.attn"
FFN = "stack.blocks.1.ffn"


def loss_of(model: Any = GPT, dtype: str = "float64", **options: Any) -> Any:
    """The cache of a loss, with a node for each layer."""
    with xf.unfused():
        return model.loss(model.init(seed=0, dtype=dtype), TOKENS, TARGETS, **options)[1]


def same(a: Any, b: Any) -> bool:
    a, b = tree.flatten({"": a}), tree.flatten({"": b})
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def zero(gradient: Any) -> Any:
    return 0 * gradient


# ---- Names ----


@pytest.mark.parametrize(
    "case", [c for c in cases() if c.group == "models"], ids=lambda case: case.name
)
def test_nodes_have_the_names_of_their_parameters(case: Case) -> None:
    """The arrays that a node's backward returns are at its name in the gradient of the model."""
    fn, args = case.build(NUMPY)
    with xf.unfused():
        y, cache = fn(*args)
    dys = [np.ones_like(y)] if np.ndim(y) else []
    plain = cache.backward(*dys)
    grads, watched = xf.watch(cache, "*", *dys)
    assert same(plain, grads)
    is_alone = not isinstance(grads, tuple) or hasattr(grads, "_fields")
    finals = tree.flatten(grads if is_alone else grads[0])
    name_of = {id(leaf): name for name, leaf in finals.items()}
    found = set()
    for name, node in watched.items():
        name = name.removeprefix("cache.")  # of the case's own wrapper
        if name in ("cache", "encode", "decode"):  # each has parameters of several names
            continue
        for part in node.grads if type(node.grads) is tuple else (node.grads,):
            if hasattr(part, "_fields") and type(part).__name__.endswith("Params"):
                for path, leaf in tree.flatten(part).items():
                    if (final := name_of.get(id(leaf))) is not None:
                        names = name if name.endswith(".router") else f"{name}.{path}"
                        assert final == names or "groups" in case.name, (final, names)
                        found.add(final)
    # The others are sums, of several uses, and zeros for an unused head.
    sums = ("embed.table", "memory.k.w", "memory.v.w", "memory.k.b", "memory.v.b")
    rest = {name for name in set(finals) - found if not name.endswith(sums)}
    assert not rest or "groups" in case.name or "mean" in case.name, rest


def test_other_nodes_have_the_names_of_their_fields() -> None:
    names = node_names.named(loss_of())
    assert {f"{ATTN}.core", f"{FFN}.act", f"{ATTN}.q_heads", f"{ATTN}_drop", "head.loss"} <= set(
        names
    )
    assert type(names[ATTN]).__name__ == "AttentionCache"
    assert names["stack"].layers.blocks[1] is names["stack.blocks.1"]
    parallel = block_config(d_model=16, n_heads=2, d_ff=8, parallel=True, bias=False)
    model = LanguageModel(EmbedConfig(17, 16, 16, 8), (parallel,) * 2)
    assert {ATTN, FFN, f"{ATTN}_norm", f"{FFN}_norm"} <= set(node_names.named(loss_of(model)))


def test_unfused_keeps_kernels_of_single_ops() -> None:
    """And their values: kernels of several ops would have fewer nodes."""
    op = node_names.named(loss_of())[f"{ATTN}.q"].op
    assert type(op).__module__ == "xformer.backends.numpy.linear"
    params, (tokens, targets) = GPT.init(), (np.tile(a, (40, 1)) for a in (TOKENS, TARGETS))
    with xf.unfused():
        said = xf.explain(ops.linear_cross_entropy, np.ones((4, 3)), np.ones((3, 5)), targets=[0])
        loss, _ = GPT.loss(params, tokens, targets)
    assert "not run, unfused() is active" in said
    fused, _ = GPT.loss(params, tokens, targets)
    assert loss == pytest.approx(float(fused), rel=1e-6)


# ---- Watching ----


def test_watch_returns_activations_and_their_gradients() -> None:
    cache = loss_of()
    grads, watched = xf.watch(cache, "stack.blocks.*.attn.o")
    assert same(grads, cache.backward())
    assert list(watched) == [f"stack.blocks.{i}.attn.o" for i in range(3)]
    at = watched[f"{ATTN}.o"]
    o = GPT.init(seed=0, dtype="float64").stack.blocks[1].attn.o
    assert np.allclose(at.dx, at.dy @ o.w.T, rtol=1e-13, atol=0)
    dw = np.einsum("btd,bte->de", at.x, at.dy)
    assert np.allclose(grads.stack.blocks[1].attn.o.w, dw, rtol=1e-12, atol=1e-15)
    assert pickle.loads(pickle.dumps(at)).x.shape == (3, 8, 16)
    assert type(at.node) is type(node_names.named(cache)[f"{ATTN}.o"])


def test_the_input_of_a_block_is_that_of_its_first_op() -> None:
    """Of pre-LN and post-LN blocks: the same array as the sum before."""
    for placement in ("pre", "post"):
        model = xf.GPT(17, 2, 16, 2, 8, norm_placement=placement)
        _, watched = xf.watch(loss_of(model), "stack.blocks.1*")
        assert (
            watched["stack.blocks.1"].x
            is watched[ATTN if placement == "post" else f"{ATTN}_norm"].x
        )
    experts = block_config(d_model=16, n_heads=2, d_ff=8, experts=ExpertsConfig(3, 2, 5))
    model = LanguageModel(EmbedConfig(17, 16, 16, 8), (experts,) * 2)
    _, watched = xf.watch(loss_of(model), FFN)
    assert watched[FFN].x.shape == (24, 16)
    _, watched = xf.watch(loss_of(), f"{ATTN}_drop")
    with pytest.raises(AttributeError, match="x: DropoutCache saves no input"):
        _ = watched[f"{ATTN}_drop"].x


def test_watch_a_forward() -> None:
    with xf.unfused():
        y, cache = GPT.forward(GPT.init(), TOKENS)
    dy = np.ones_like(y)
    grads, watched = xf.watch(cache, "head", dy)
    assert same(grads, cache.backward(dy))
    assert watched["head"].dy is dy


# ---- Editing, with torch's autograd as the judge ----


@pytest.mark.parametrize("at", ["output", "input"])
@pytest.mark.parametrize("branch", ["attn", "ffn"])
def test_zero_is_the_gradient_with_a_branch_held_constant(
    branch: str, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch: `detach` of the branch's output, or of its input, in layer 1 of 3."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    params = GPT.init(seed=0, dtype="float64")
    edited = xf.edit(loss_of(), {f"stack.blocks.1.{branch}": zero}, at=at).backward()
    name = "attention" if branch == "attn" else "feed_forward"
    home = "attention_config" if branch == "attn" else name
    module = sys.modules[f"xformer.layers.{home}"]
    original: Callable[..., Any] = getattr(module, name)
    calls = []

    def detached(x: Any, *args: Any, **options: Any) -> Any:
        calls.append(x)
        if len(calls) != 2:
            return original(x, *args, **options)
        y, cache = original(x.detach() if at == "input" else x, *args, **options)
        return (y.detach() if at == "output" else y), cache

    monkeypatch.setattr(module, name, detached)
    leaves = tree.map(lambda a: torch.tensor(a, requires_grad=True), params)
    with xf.reference_only():
        loss, _ = GPT.loss(leaves, torch.tensor(TOKENS), torch.tensor(TARGETS))
    loss.backward()
    judge = {name: leaf.grad for name, leaf in tree.flatten(leaves).items()}
    held = 0
    for name, grad in tree.flatten(edited).items():
        wanted = 0 if judge[name] is None else judge[name].numpy()
        held += judge[name] is None
        assert np.abs(grad - wanted).max() <= 1e-14, name
    assert held >= 2  # the norm before the branch


def test_edits_compose_and_never_change_the_cache() -> None:
    cache = loss_of()
    before = cache.backward()
    once = xf.edit(cache, {FFN: lambda dy: 2 * dy})
    twice = xf.edit(once, {"stack.blocks.1.ff?": lambda dy: 3 * dy, ATTN: zero})
    both = xf.edit(cache, {FFN: lambda dy: 6 * dy, ATTN: zero})
    assert same(cache.backward(), before)
    assert not same(once.backward(), before)
    ours, wanted = (tree.flatten(c.backward()) for c in (twice, both))
    assert all(np.allclose(ours[n], wanted[n], rtol=1e-13, atol=1e-17) for n in ours)
    # What comes after the nodes in forward does not change.
    for name in ("stack.norm.w", "stack.blocks.2.attn.q.w", f"{FFN}_norm.b"):
        assert (name == f"{FFN}_norm.b") != np.array_equal(
            tree.flatten(once.backward())[name], tree.flatten(before)[name]
        )


@pytest.mark.parametrize("name", [ATTN, f"{ATTN}.q", "head"])
def test_an_edit_is_not_lost_in_a_copy(name: str) -> None:
    edited = xf.edit(loss_of(), {name: zero})
    for cache in (edited, edited._replace(**edited._asdict())):
        with pytest.raises(TypeError, match="edit: an edited cache is neither copied nor pickled"):
            copy.deepcopy(cache)
        with pytest.raises(TypeError, match="edit: an edited cache is neither copied nor pickled"):
            pickle.dumps(cache)
    node: Any = node_names.named(edited)[name]
    assert node._replace().edited
    assert same(edited.backward(), edited._replace().backward())


def test_nothing_outlives_the_backward() -> None:
    """Without the garbage collector: activations and gradients are not in a cycle."""

    def held(use: Callable[[Any], Any]) -> bool:
        cache = loss_of()
        x = weakref.ref(xf.watch(cache, ATTN)[1][ATTN].x)
        dead = [weakref.ref(a) for a in tree.flatten(use(cache)).values()]
        del cache
        return x() is not None or any(a() is not None for a in dead)

    gc.collect()
    gc.disable()
    try:
        assert not held(lambda cache: cache.backward())
        assert not held(lambda cache: xf.watch(cache, "*")[0])
        assert not held(lambda cache: xf.edit(cache, {"*.attn": zero}).backward())
        assert not held(lambda cache: xf.watch(xf.edit(cache, {"*.q": zero}, at="input"), "*")[0])
    finally:
        gc.enable()


def test_replace() -> None:
    """The parameters of the node and all before it get the gradient of the new dy."""
    wanted = np.random.default_rng(1).normal(size=(3, 8, 16))
    edited = xf.edit(loss_of(), {FFN: lambda dy: wanted})
    _, watched = xf.watch(edited, f"{FFN}.down")
    assert watched[f"{FFN}.down"].dy is wanted
    db = edited.backward().stack.blocks[1].ffn.down.b
    assert np.allclose(db, wanted.sum(axis=(0, 1)), rtol=1e-12)


@only("numpy-readonly", "array-api-strict", "torch", "jax")
def test_on_every_library(library: Backend) -> None:
    params = tree.map(library.asarray, GPT.init(seed=0))
    with xf.unfused():
        _, cache = GPT.loss(params, library.asarray(TOKENS), library.asarray(TARGETS))
    grads, watched = xf.watch(xf.edit(cache, {ATTN: zero}), f"{ATTN}*")
    assert library.to_numpy(watched[f"{ATTN}.o"].dy).shape == (3, 8, 16)
    assert not library.to_numpy(grads.stack.blocks[1].attn.o.w).any()
    assert library.to_numpy(grads.stack.blocks[0].attn.o.w).any()


# ---- Bad input ----


def test_names_that_are_not_there() -> None:
    cache = loss_of()
    with pytest.raises(ValueError, match=r"watch: 'stack.blocks.3.attn' matches none of 67 nodes"):
        xf.watch(cache, "stack.blocks.3.attn")
    with pytest.raises(ValueError, match=rf"'{ATTN}m' matches none .*did you mean {ATTN}\?"):
        xf.edit(cache, {f"{ATTN}m": zero})
    with pytest.raises(ValueError, match=r"edit: at must be one of output, input, got 'begin'"):
        xf.edit(cache, {ATTN: zero}, at="begin")
    with xf.inference():
        _, none = GPT.loss(GPT.init(), TOKENS, TARGETS)
    with pytest.raises(ValueError, match=r"edit: the cache was made within inference\(\)"):
        xf.edit(none, {ATTN: zero})


@pytest.mark.parametrize("how", ["activation_checkpointing", "reversible"])
def test_layers_that_run_again_have_no_names(how: str) -> None:
    options: Any = {how: True}
    kind = "CheckpointCache" if how == "activation_checkpointing" else "ReversibleCache"
    cache = loss_of(xf.GPT(17, 2, 16, 2, 8, **options))
    with pytest.raises(ValueError, match=f"none of .*: layers within {kind} have no names, since"):
        xf.watch(cache, f"{ATTN}.q")


def test_an_input_that_gets_no_gradient() -> None:
    edited = xf.edit(loss_of(), {"embed": zero}, at="input")
    with pytest.raises(TypeError, match=r'edit: embed: at "input" needs .*, got EmbedParams'):
        edited.backward()


def test_a_fused_forward_is_named() -> None:
    _, cache = GPT.loss(GPT.init(), TOKENS, TARGETS)
    with pytest.raises(ValueError, match=r"a kernel of linear_many ran; run the .* xf.unfused\(\)"):
        xf.watch(cache, f"{ATTN}.q")
    assert xf.watch(cache, ATTN)[1]  # a kernel within it is no obstacle


def test_wrong_results_of_the_function() -> None:
    cache = loss_of()
    edited = xf.edit(cache, {ATTN: lambda dy: dy[0, ...]})
    with pytest.raises(
        ValueError, match=rf"edit: {ATTN}: the function's result must have shape \(3, 8, 16\), got"
    ):
        edited.backward()
    with pytest.raises(TypeError, match=rf"edit: {ATTN}: the function's result must .*float64"):
        xf.edit(cache, {ATTN: lambda dy: dy.astype("float32")}).backward()
    with pytest.raises(TypeError, match=rf"edit: {ATTN}: the function's result must .*got"):
        xf.edit(cache, {ATTN: lambda dy: None}).backward()  # type: ignore[arg-type,return-value]


def test_watch_takes_dy_by_name() -> None:
    with xf.unfused():
        logits, cache = GPT.forward(GPT.init(seed=0, dtype="float64"), TOKENS)
    dy = np.random.default_rng(0).normal(size=logits.shape)
    (grads, one), (others, other) = xf.watch(cache, ATTN, dy), xf.watch(cache, ATTN, dy=dy)
    assert same(grads, others) and np.array_equal(one[ATTN].dx, other[ATTN].dx)
