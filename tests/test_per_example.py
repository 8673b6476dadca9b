"""`xf.per_example`: one example at a time is the judge, for every model, layer and op."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from block_configs import block_config
from libraries import only

import xformer as xf
from xformer import backends, ops, tree
from xformer.backends import Backend
from xformer.hooks import PerExample, per_example_rules
from xformer.hooks.per_example_array import Summands
from xformer.layers import EmbedConfig, ExpertsConfig, NormConfig
from xformer.models import LanguageModel
from xformer.proofs.catalogue import Case, cases

NUMPY = backends.get("numpy")
GPT = xf.GPT(vocab_size=17, n_layers=2, d_model=16, n_heads=2, max_len=8)
TOKENS, TARGETS = np.random.default_rng(0).integers(0, 17, (2, 3, 8))
MODELS = [case for case in cases() if case.group == "models"]
MIXED = [case for case in MODELS if "LanguageModel: experts" in case.name]
SEPARATE = [case for case in MODELS if case not in MIXED]
EPS = 1e-12


def plain(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) and not hasattr(x, "_fields") else (x,)


def flat(grads: Any) -> dict[str, Any]:
    return tree.flatten({"": grads})


def of_parameters(found: PerExample) -> set[str]:
    return {name for name, leaf in flat(found.summands).items() if isinstance(leaf, Summands)}


def agree(found: PerExample, i: int, judge: Any) -> None:
    """The gradient of example i, and its norm, are those of the judge."""
    wanted, names = flat(judge), of_parameters(found)
    largest = max(np.abs(wanted[name]).max(initial=0) for name in names)
    ours = flat(found.weighted(np.eye(len(found.squared_norms))[i]))
    for name in names:
        assert np.abs(ours[name] - wanted[name]).max(initial=0) <= EPS * largest, name
    norm = sum(np.sum(wanted[name] ** 2) for name in names)
    assert found.squared_norms[i] == pytest.approx(norm, rel=EPS, abs=1e-300)


def reduced(fn: Any, args: tuple[Any, ...], reduction: str) -> Any:
    """A loss with another reduction; another function unchanged."""
    return partial(fn, reduction=reduction) if np.ndim(fn(*args)[0]) == 0 else fn


@pytest.mark.parametrize("case", SEPARATE, ids=lambda case: case.name)
def test_models_with_the_gradient_of_one_example_alone(case: Case) -> None:
    """The whole batch, with a dy of 0 for the other examples. The gradient has the same bits."""
    fn, args = case.build(NUMPY)
    with xf.reference_only():
        y, cache = reduced(fn, args, "none")(*args)
        dy = np.random.default_rng(1).normal(size=y.shape)
        found = xf.per_example(cache, dy)
        same = flat(cache.backward(dy))
        for name, leaf in flat(found.grads).items():
            assert np.array_equal(leaf, same[name]), name
        assert len(found.squared_norms) == 5
        for i in range(5):
            one = np.zeros_like(dy)
            one[i] = dy[i]
            agree(found, i, cache.backward(one))


def sliced(x: Any, i: int) -> Any:
    """Example i alone, of arrays and trees of arrays whose first axis is the batch."""
    if isinstance(x, np.ndarray):
        return x[i : i + 1] if x.shape[:1] == (5,) else x
    if isinstance(x, tuple):
        parts = [sliced(part, i) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


@pytest.mark.parametrize("case", SEPARATE, ids=lambda case: case.name)
def test_models_one_example_at_a_time(case: Case) -> None:
    """Batches of one example, without dropout, whose mask depends on the whole batch."""
    fn, args = case.build(NUMPY)
    options = {name: x for name, x in fn.keywords.items() if name != "dropout_key"}
    fn = reduced(partial(fn.func, *fn.args, **options), args, "sum")
    probe, _ = fn(*args)
    dy = () if np.ndim(probe) == 0 else (np.random.default_rng(1).normal(size=probe.shape),)
    with xf.reference_only():
        found = xf.per_example(fn(*args)[1], *dy)
        for i in range(5):
            keywords = {name: sliced(x, i) for name, x in fn.keywords.items()}
            params, *inputs = args
            ones = (sliced(x, i) for x in inputs)
            _, cache = partial(fn.func, *fn.args, **keywords)(params, *ones)
            agree(found, i, cache.backward(*(d[i : i + 1] for d in dy)))


LAYERS = ["linear", "attention", "feed_forward", "mixture", "norm", "block", "parallel", "residual"]
OPS = ["embedding", "linear", "layer_norm", "rms_norm", "scale", "sdpa", "shaw", "xl_attention"]
OPS += ["additive_attention", "causal_conv", "experts", "log_decay"]
# Without parameters, without a batch, or with a dy of several parts.
OTHERS = ("frozen", "no w", "one sequence", "ready keys", "auxiliary", "one query", "no keys")
OTHERS += ("x (5,)", "x (7,)", "x ()", "ids ()", "no rows")


def has_parameters(case: Case) -> bool:
    if any(what in case.name for what in OTHERS) or case.group == "models":
        return False
    if case.subject == "sdpa":
        return "sinks" in case.name
    return case.subject in (OPS if case.group == "ops" else LAYERS)


@pytest.mark.parametrize(
    "case",
    [case for case in cases() if has_parameters(case)],
    ids=lambda case: f"{case.group}-{case.name}",
)
def test_layers_and_ops(case: Case) -> None:
    fn, args = case.build(NUMPY)
    with xf.reference_only():
        y, cache = fn(*args)
        if np.ndim(y) == 0 and "targets" in fn.keywords:
            y, cache = reduced(fn, args, "none")(*args)
        dy = np.random.default_rng(1).normal(size=y.shape)
        found = xf.per_example(cache, dy)
        same = flat(cache.backward(dy))
        assert all(np.array_equal(a, same[name]) for name, a in flat(found.grads).items())
        for i in range(len(y)):
            one = np.zeros_like(dy)
            one[i] = dy[i]
            agree(found, i, cache.backward(one))


@pytest.mark.parametrize("length", [2, 40])
def test_gram_and_explicit_products(length: int) -> None:
    """Few rows: products of rows. Many rows: the gradients of each example."""
    x, w = np.random.default_rng(0).normal(size=(3, length, 4)), np.ones((4, 5))
    _, cache = ops.linear(x, w)
    dy = np.random.default_rng(1).normal(size=(3, length, 5))
    wanted = np.sum(np.einsum("bti,bto->bio", x, dy) ** 2, axis=(1, 2))
    assert np.allclose(xf.per_example(cache, dy).squared_norms, wanted, rtol=1e-13)


def cancelling(dtype: str, seed: int) -> tuple[Any, Any]:
    """Rows of x that are nearly equal, and of dy whose sum is 0, so that x^T dy is short."""
    rng = np.random.default_rng(seed)
    x = 10 * rng.normal(size=(1, 1, 256)) + 1e-3 * rng.normal(size=(2, 64, 256))
    dy = 10 * rng.normal(size=(2, 64, 256))
    dy -= dy.mean(axis=1, keepdims=True)
    return x.astype(dtype), dy.astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_norms_of_products_that_cancel(dtype: str) -> None:
    x, dy = cancelling(dtype, 0)
    w = np.zeros((256, 256), dtype)
    found = xf.per_example(ops.linear(x, w)[1], dy)
    wanted = np.sum((x.mT.astype("float64") @ dy.astype("float64")) ** 2, axis=(1, 2))
    assert found.squared_norms == pytest.approx(wanted, rel=2e-3)
    assert np.all(found.squared_norms >= wanted)
    clipped = found.weighted((1 / np.sqrt(wanted)).astype(dtype))[1]
    assert np.linalg.norm(found.clipped(1.0)[1] - clipped) <= 3e-3 * np.linalg.norm(clipped)
    # Of a difference below the rounding of float64, the norm is too large and never too small.
    x = 10 * np.ones((1, 64, 256)) + 1e-13 * np.random.default_rng(1).normal(size=(1, 64, 256))
    found = xf.per_example(ops.linear(x, np.zeros((256, 256)))[1], dy[:1].astype("float64"))
    assert found.squared_norms[0] >= np.sum((x[0].T @ dy[0].astype("float64")) ** 2) > 0


@only("jax")
def test_norms_without_float64(library: Backend) -> None:
    """JAX as it begins: from the gradient of one example at a time, also of ids."""
    import jax

    x, dy = cancelling("float32", 0)
    ids = np.random.default_rng(1).integers(0, 300, (2, 64))
    with jax.enable_x64(False):
        for cache, wanted in (
            (ops.linear(library.asarray(x), library.asarray(np.zeros((256, 256), "f")))[1], x.mT),
            (
                ops.embedding(
                    library.asarray(np.zeros((300, 256), "f")), ids=jax.numpy.asarray(ids)
                )[1],
                np.eye(300)[ids].mT,
            ),
        ):
            norms = np.sum((wanted.astype("float64") @ dy.astype("float64")) ** 2, axis=(1, 2))
            found = xf.per_example(cache, library.asarray(dy))
            assert library.to_numpy(found.squared_norms) == pytest.approx(norms, rel=1e-2)


def test_a_gradient_that_is_not_finite_is_never_whole() -> None:
    _, cache = ops.linear(np.ones((3, 4, 5)), np.ones((5, 6)))
    for wrong in (np.nan, np.inf):
        dy = np.ones((3, 4, 6))
        dy[1, 2, 3] = wrong
        with np.errstate(invalid="ignore"):
            found = xf.per_example(cache, dy)
        with pytest.raises(
            ValueError, match="per_example: the gradient of example 1 is not finite"
        ):
            found.clipped(1.0)


@pytest.mark.parametrize(
    "options", [{"d_shared": 4, "shared_gate": True}, {"bias": True}], ids=["shared", "biases"]
)
def test_sinks_and_experts_in_a_model(options: dict[str, Any]) -> None:
    """The router z-loss treats tokens one by one, so it is allowed; its mean is over all."""
    mixture = ExpertsConfig(n_experts=3, top_k=2, d_ff=5, **options)
    block = block_config(d_model=16, n_heads=2, d_ff=8, sinks=True, experts=mixture)
    model = LanguageModel(EmbedConfig(17, 16, 16, 8), (block,) * 2, router_z_weight=0.1)
    params = model.init(seed=0, dtype="float64")
    with xf.reference_only():
        _, cache = model.loss(params, TOKENS, TARGETS)
        found = xf.per_example(cache)
        for i in range(3):
            _, one = model.loss(params, TOKENS[i : i + 1], TARGETS[i : i + 1])
            agree(found, i, tree.map(lambda g: g / 3, one.backward()))


@pytest.mark.parametrize("how", ["activation_checkpointing", "reversible", "neither"])
def test_layers_that_run_again_in_backward(how: str) -> None:
    """Rules of layers, such as those of positions and of a bias alone, also hold for them."""
    options: Any = {} if how == "neither" else {how: True}
    qkv = xf.GPT(17, 2, 16, 2, 8, positions="learned", position_mode="qkv", **options)
    block = block_config(16, 2, 8, reversible=how == "reversible")
    block = replace(block, attn=replace(block.attn, output="bias"))
    options.pop("reversible", None)
    for model in (qkv, LanguageModel(EmbedConfig(17, 16, 16, 8), (block,) * 2, **options)):
        params = model.init(seed=0, dtype="float64")
        with xf.reference_only():
            found = xf.per_example(model.loss(params, TOKENS, TARGETS)[1])
            for i in range(3):
                _, one = model.loss(params, TOKENS[i : i + 1], TARGETS[i : i + 1])
                agree(found, i, tree.map(lambda g: g / 3, one.backward()))


def test_frozen_parameters_do_not_count() -> None:
    params = GPT.init(seed=0, dtype="float64")
    frozen = tree.freeze(params, "embed.*", "*.attn.*", "*_norm.w")
    with xf.reference_only():
        found = xf.per_example(GPT.loss(frozen, TOKENS, TARGETS)[1])
        whole = xf.per_example(GPT.loss(params, TOKENS, TARGETS)[1])
        for i in range(3):
            _, one = GPT.loss(frozen, TOKENS[i : i + 1], TARGETS[i : i + 1])
            agree(found, i, tree.map(lambda g: g / 3, one.backward()))
    assert found.grads.embed.table is None
    assert np.all(found.squared_norms < whole.squared_norms)


# ---- Clipping ----


def test_clipped() -> None:
    """The sum of the clipped gradients, one after the other."""
    params = GPT.init(seed=0, dtype="float64")
    with xf.reference_only():
        found = xf.per_example(GPT.loss(params, TOKENS, TARGETS)[1], np.asarray(3.0))
        max_norm = float(np.median(np.sqrt(found.squared_norms)))
        total: Any = None
        for i in range(3):
            grads = GPT.loss(params, TOKENS[i : i + 1], TARGETS[i : i + 1])[1].backward()
            clipped, _ = xf.optim.clip_by_global_norm(grads, max_norm=max_norm)
            total = clipped if total is None else tree.map(np.add, total, clipped)
    ours, total = flat(found.clipped(max_norm)), flat(total)
    largest = max(np.abs(a).max() for a in total.values())
    # clip_by_global_norm divides by the norm plus 1e-6.
    assert all(np.abs(ours[name] - total[name]).max() <= 1e-6 * largest for name in total)
    exact = found.weighted(np.minimum(1, max_norm / np.sqrt(found.squared_norms)))
    assert all(np.array_equal(a, ours[name]) for name, a in flat(exact).items())
    assert all(np.array_equal(a, 0 * a) for a in flat(found.clipped(0.0)).values())


@only("numpy-readonly", "array-api-strict", "torch", "jax")
def test_on_every_library(library: Backend) -> None:
    """Of tied tables, with ids and products, and positions that are summands themselves."""
    model = xf.GPT(17, 2, 16, 2, 8, positions="learned", position_mode="qkv")
    params = model.init(seed=0)
    with xf.reference_only():
        wanted = xf.per_example(model.loss(params, TOKENS, TARGETS)[1])
        there = tree.map(library.asarray, params)
        _, cache = model.loss(there, library.asarray(TOKENS), library.asarray(TARGETS))
        found = xf.per_example(cache)
    norms = library.to_numpy(found.squared_norms)
    assert norms == pytest.approx(wanted.squared_norms, rel=1e-4)
    clipped = flat(found.clipped(0.1))
    for name, ours in flat(wanted.clipped(0.1)).items():
        assert np.abs(library.to_numpy(clipped[name]) - ours).max() <= 1e-5, name


@only("cuda_shim")
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_norms_whose_kernel_adds_a_gradient(library: Backend, norm: str) -> None:
    """The gradient of the residual sum, which a norm's backward can add in the same kernel."""
    model = xf.GPT(17, 2, 16, 2, 8)
    model = replace(model, blocks=tuple(replace(b, norm=NormConfig(norm)) for b in model.blocks))
    params = model.init(seed=0, dtype="float32")
    there = tree.map(library.asarray, params)
    with xf.unfused():
        wanted = xf.per_example(model.loss(params, TOKENS, TARGETS)[1])
        _, cache = model.loss(there, library.asarray(TOKENS), library.asarray(TARGETS))
        norms = library.to_numpy(xf.per_example(cache).squared_norms)
    assert norms == pytest.approx(wanted.squared_norms, rel=1e-4)


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
def test_with_kernels(kernels: str) -> None:
    """Within `unfused` ops run kernels, whose caches have the same names of fields."""
    if kernels == "numba":
        pytest.importorskip("numba", reason="extra numba is not installed")
    for options in ({}, {"norm_placement": "post"}):
        model = xf.GPT(17, 2, 16, 2, 8, **options)
        params = model.init(seed=0)
        with xf.reference_only():
            wanted = xf.per_example(model.loss(params, TOKENS, TARGETS)[1])
        with xf.kernels(kernels), xf.unfused():
            _, cache = model.loss(params, TOKENS, TARGETS)
            found, grads = xf.per_example(cache), cache.backward()
        assert all(np.array_equal(a, flat(grads)[name]) for name, a in flat(found.grads).items())
        assert found.squared_norms == pytest.approx(wanted.squared_norms, rel=1e-5)


# ---- What is refused ----


class Mine(NamedTuple):
    x: Any

    def backward(self, dy: Any) -> Any:
        return dy


def test_refused_by_name() -> None:
    params = GPT.init(seed=0)
    _, fused = GPT.loss(params, TOKENS, TARGETS)
    with pytest.raises(ValueError, match=r"a kernel of \w+ ran; run the forward within xf.unfused"):
        xf.per_example(fused)
    _, cache = ops.info_nce(np.ones((3, 4)), np.ones((3, 4)))
    with pytest.raises(ValueError, match=r"by info_nce, the loss of an example depends on the oth"):
        xf.per_example(cache)
    with pytest.raises(ValueError, match=r"there is no rule for the gradients of test_per_example"):
        xf.per_example(Mine(1.0), np.ones((3, 4)))
    with xf.inference():
        _, none = GPT.loss(params, TOKENS, TARGETS)
    with pytest.raises(ValueError, match=r"per_example: the cache was made within inference\(\)"):
        xf.per_example(none)
    with xf.unfused():
        _, cache = GPT.loss(params, TOKENS, TARGETS)
        _, forward = GPT.forward(params, TOKENS)
        sinks = block_config(d_model=16, n_heads=2, d_ff=8, sinks=True)
        model = LanguageModel(EmbedConfig(17, 16, 16, 8), (sinks,))
        _, with_sinks = model.loss(model.init(seed=0), TOKENS, TARGETS)
    with pytest.raises(ValueError, match=r"a forward needs the gradient of its output"):
        xf.per_example(forward)
    with pytest.raises(ValueError, match=r"a kernel of sdpa ran, .* within xf.reference_only\(\)"):
        xf.per_example(with_sinks)
    edited = xf.edit(cache, {"embed.table": lambda dy: dy})
    with pytest.raises(ValueError, match=r"node of embedding was edited; edit the layer around it"):
        xf.per_example(edited)
    found = xf.per_example(xf.edit(cache, {"stack.blocks.1.attn": lambda dy: 0 * dy}))
    assert not found.grads.stack.blocks[1].attn.o.w.any()
    _, single = ops.layer_norm(np.ones(7), np.ones(7))
    with pytest.raises(ValueError, match=r"the first axis of arrays must be the 7 examples"):
        xf.per_example(single, np.ones(7))
    with pytest.raises(ValueError, match=r"weights must have shape \(3,\), got \(2,\)"):
        found.weighted(np.ones(2, np.float32))
    with pytest.raises(ValueError, match=r"per_example: max_norm must lie in \[0, inf\], got -1.0"):
        found.clipped(-1.0)


@pytest.mark.parametrize("case", MIXED, ids=lambda case: case.name)
def test_losses_that_mix_the_examples(case: Case) -> None:
    fn, args = case.build(NUMPY)
    with xf.reference_only():
        _, cache = fn(*args)
        with pytest.raises(ValueError, match=r"by load_balancing, the loss of an example depends"):
            xf.per_example(cache)


# ---- Ops of one's own ----


class Scaled(NamedTuple):
    """y = x * w, with w (D,)."""

    x: Any
    w: Any

    def backward(self, dy: Any) -> Any:
        return dy * self.w, (dy * self.x).sum(axis=(0, 1))


class Params(NamedTuple):
    w: Any
    b: Any


class Moved(NamedTuple):
    """y = x * w + b, whose backward returns the gradients of its parameters as a tree."""

    x: Any
    params: Params

    def backward(self, dy: Any) -> Any:
        grads = Params((dy * self.x).sum(axis=(0, 1)), dy.sum(axis=(0, 1)))
        return dy * self.params.w, grads


class Model(NamedTuple):
    """The cache of a linear layer, and of an op of ours after it."""

    linear: Any
    own: Any

    def backward(self, dy: Any) -> Any:
        dx, down = self.own.backward(dy)
        return {"linear": self.linear.backward(dx)[1], "own": down}


X, DY = np.random.default_rng(1).normal(size=(2, 3, 5, 4))
W = np.random.default_rng(2).normal(size=(3, 4, 4))


def model_of(kind: Any, x: Any = X) -> Any:
    h, linear = ops.linear(x, W[0], None)
    params = W[1, 0] if kind is Scaled else Params(W[1, 0], W[2, 0])
    return Model(linear, kind(h, params))


@pytest.fixture
def rules_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_example_rules, "OWN", {})
    xf.per_example_rule(Scaled, lambda cache, dy: (None, (dy * cache.x).sum(axis=1)))
    xf.per_example_rule(
        Moved, lambda cache, dy: (None, Params((dy * cache.x).sum(axis=1), dy.sum(axis=1)))
    )


@pytest.mark.usefixtures("rules_of_ones_own")
@pytest.mark.parametrize("kind", [Scaled, Moved])
def test_an_op_of_ones_own(kind: Any) -> None:
    cache = model_of(kind)
    found = xf.per_example(cache, DY)
    whole = tree.flatten(cache.backward(DY))
    alone = [model_of(kind, X[i : i + 1]).backward(DY[i : i + 1]) for i in range(3)]
    norms = [sum((g**2).sum() for g in tree.flatten(grads).values()) for grads in alone]
    np.testing.assert_allclose(found.squared_norms, norms, rtol=1e-12)
    assert all(np.array_equal(whole[n], g) for n, g in tree.flatten(found.grads).items())
    weights = np.asarray([0.5, 2.0, 0.0])
    parts = [tree.map(lambda g, w=w: g * w, g) for g, w in zip(alone, weights, strict=True)]
    wanted = tree.flatten(tree.map(lambda *g: sum(g), *parts))
    for name, got in tree.flatten(found.weighted(weights)).items():
        np.testing.assert_allclose(got, wanted[name], rtol=1e-12)


@pytest.mark.usefixtures("rules_of_ones_own")
def test_wrong_rules_of_ones_own() -> None:
    for rule, message in (
        (lambda cache, dy: (dy * cache.x).sum(axis=1), "must return 2 gradients in a tuple"),
        (lambda cache, dy: (None, dy.sum(axis=(0, 1))), r"must have shape \(3, 4\), got \(4,\)"),
    ):
        xf.per_example_rule(Scaled, rule)
        with pytest.raises(ValueError, match=message):
            xf.per_example(model_of(Scaled), DY)
    with pytest.raises(TypeError, match="cache must be the class of a cache"):
        xf.per_example_rule(Scaled(X, W[0]), lambda cache, dy: None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rule must be a function, got int"):
        xf.per_example_rule(Scaled, 3)  # type: ignore[arg-type]


def test_an_op_without_a_rule_names_the_way() -> None:
    with pytest.raises(ValueError, match=r"gradients of .*Scaled: give it one by xf\.per_example_"):
        xf.per_example(model_of(Scaled), DY)


def test_dy_has_a_name() -> None:
    params = GPT.init(seed=0, dtype="float64")
    with xf.unfused():
        logits, cache = GPT.forward(params, TOKENS)
    dy = np.random.default_rng(0).normal(size=logits.shape)
    one, other = xf.per_example(cache, dy), xf.per_example(cache, dy=dy)
    assert np.array_equal(one.squared_norms, other.squared_norms)
