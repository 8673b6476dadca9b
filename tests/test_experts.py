"""Mixtures of experts: the op, its NumPy kernel, and the layer with its router."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from judges import FLOAT64, require_close
from libraries import only

from xformer import backends, gradcheck, layers, ops, reference_only, tree
from xformer.backends import Backend

NUMPY = backends.get("numpy")


def draw(rng: Any, shape: Any) -> Any:
    return rng.normal(shape, std=shape[0] ** -0.5)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def inputs(library: Backend, rows: int = 7, k: int = 2) -> tuple[Any, ...]:
    """x, w_gate, w_up, w_down, weights; N = 7, D = 3, E = 5, F = 11."""
    rng = library.generator(3, "float64")
    shapes = (rows, 3), (5, 3, 11), (5, 3, 11), (5, 11, 3), (rows, k)
    return tuple(rng.normal(shape) for shape in shapes)


IDS = np.array([[0, 1], [3, 0], [3, 1], [1, 3], [0, 3], [1, 0], [3, 0]])  # 2 and 4 have no rows


def ran(library: Backend, args: tuple[Any, ...], ids: Any, dy: Any = None) -> list[np.ndarray]:
    """The output and all gradients, on the host."""
    y, cache = ops.experts(*args, ids=library.asarray(ids))
    dy = library.generator(5, "float64").normal(y.shape) if dy is None else library.asarray(dy)
    return [library.to_numpy(a) for a in (y, *cache.backward(dy)) if a is not None]


# ---- The op and its kernel ----


def test_experts_one_row_after_the_other(library: Backend) -> None:
    x, w_gate, w_up, w_down, weights = map(library.to_numpy, inputs(library))
    y = ran(library, inputs(library), IDS)[0]
    for n in range(7):
        wanted = 0
        for weight, e in zip(weights[n], IDS[n], strict=True):
            hidden = silu(x[n] @ w_gate[e]) * (x[n] @ w_up[e])
            wanted = wanted + weight * (hidden @ w_down[e])
        assert np.allclose(y[n], wanted, rtol=1e-12, atol=1e-14)


def test_an_expert_without_rows_has_gradient_zero(library: Backend) -> None:
    _, _, *dws, dweights = ran(library, inputs(library), IDS)
    for dw in dws:
        assert [bool(dw[e].any()) for e in range(5)] == [True, True, False, True, False]
    assert dweights.all()


@pytest.mark.parametrize("spoilt", ["x", "dy"])
def test_what_was_not_chosen_does_not_matter(library: Backend, spoilt: str) -> None:
    """An infinity in row 0 stays in that row and in its experts, 0 and 1."""
    x, *rest = inputs(library)
    host = {"x": np.array(library.to_numpy(x)), "dy": np.ones((7, 3))}
    good = ran(library, (x, *rest), IDS, host["dy"])
    host[spoilt][0] = np.inf
    with np.errstate(all="ignore"):
        got = ran(library, (library.asarray(host["x"]), *rest), IDS, host["dy"])
    assert not all(np.isfinite(a).all() for a in got)
    for i, (a, wanted) in enumerate(zip(got, good, strict=True)):  # y, dx, dw_gate, dw_up, ...
        first = 2 if 2 <= i <= 4 else 1
        assert np.array_equal(a[first:], wanted[first:])


def test_an_expert_chosen_twice_has_both_weights(library: Backend) -> None:
    args = inputs(library)
    y, *_, dweights = ran(library, args, np.repeat(IDS[:, :1], 2, axis=1))
    both = library.to_numpy(args[4]).sum(axis=1, keepdims=True)
    once = ran(library, (*args[:4], library.asarray(both)), IDS[:, :1])
    assert np.allclose(y, once[0], rtol=1e-13, atol=1e-15)
    assert np.allclose(dweights, once[5], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(("rows", "k"), [(0, 2), (7, 0), (0, 0)])
def test_no_rows_or_no_choices(library: Backend, rows: int, k: int) -> None:
    args = inputs(library, rows, k)
    y, *grads = ran(library, args, np.zeros((rows, k), dtype=int))
    assert y.shape == (rows, 3)
    for a, grad in zip(args, grads, strict=True):
        assert grad.shape == tuple(a.shape) and not grad.any()
    assert not y.any()


def test_the_kernel_keeps_only_the_chosen_rows() -> None:
    args = inputs(NUMPY)
    _, cache = ops.experts(*args, ids=IDS)
    with reference_only():
        _, every = ops.experts(*args, ids=IDS)
    assert sum(part.gate.shape[0] for part in cache.parts) == IDS.size
    assert sum(part.gate.shape[0] for part in every.parts) == 7 * 5
    assert tree.nbytes(cache.parts) * 5 == tree.nbytes(every.parts) * 2


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint64"])
def test_every_integer_type_will_do(library: Backend, dtype: str) -> None:
    wanted = ran(library, inputs(library), IDS)
    for a, b in zip(ran(library, inputs(library), IDS.astype(dtype)), wanted, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (np.array([[0, 5]]), ValueError, "ids must lie in [0, 5), got ids from 0 to 5"),
        (np.array([[-1, 2]]), ValueError, "ids must lie in [0, 5), got ids from -1 to 2"),
        (np.array([[0.0, 1.0]]), TypeError, "ids must be an integer array, got dtype "),
        ([[0, 1]], TypeError, "ids must be an integer array, got list"),
        (np.array([0, 1]), ValueError, "ids must be (N, C) with N = 1 (from x), C = 2 (from "),
    ],
)
def test_bad_ids(library: Backend, ids: Any, error: type[Exception], message: str) -> None:
    args = inputs(library, rows=1)
    with pytest.raises(error, match=f"^experts: {re.escape(message)}"):
        ops.experts(*args, ids=library.asarray(ids) if hasattr(ids, "shape") else ids)


def test_bad_options(library: Backend) -> None:
    x, *ws, weights = inputs(library)
    ids = library.asarray(IDS)
    with pytest.raises(ValueError, match=r"^experts: activation must be one of relu, "):
        ops.experts(x, *ws, weights, ids=ids, activation="sillu")
    none = (w[:0, ...] for w in ws)
    with pytest.raises(ValueError, match=r"^experts: axis 0 of w_gate must not be empty"):
        ops.experts(x, *none, weights, ids=ids)
    _, cache = ops.experts(x, *ws, weights, ids=ids)
    with pytest.raises(ValueError, match=r"^experts: dy must have shape "):
        cache.backward(x[:2, :])


# ---- The layer ----

CONFIG = layers.ExpertsConfig(n_experts=5, top_k=2, d_ff=11)


def layer_inputs(library: Backend, config: layers.ExpertsConfig = CONFIG) -> tuple[Any, Any]:
    """x and params; B = 2, T = 7, D = 3."""
    rng = library.generator(4, "float64")
    return rng.normal((2, 7, 3)), config.init(rng, 3, draw=draw)


@pytest.mark.parametrize("normalise", [True, False])
def test_mixture_is_the_formula(library: Backend, normalise: bool) -> None:
    """Qwen's order, softmax over all experts first; by shares of every expert, one by one."""
    config = layers.ExpertsConfig(n_experts=5, top_k=2, d_ff=11, normalise=normalise)
    x, params = layer_inputs(library, config)
    y, _ = layers.mixture(x, params, config=config)
    x, y, params = tree.map(library.to_numpy, (x, y, params))
    probs = softmax(x @ params.router)
    shares = np.where(probs >= np.sort(probs, axis=-1)[..., -2:-1], probs, 0.0)  # 2 of 5
    if normalise:
        shares = shares / shares.sum(axis=-1, keepdims=True)
    wanted = np.zeros_like(x)
    for e in range(5):
        hidden = silu(x @ params.gate[e]) * (x @ params.up[e])
        wanted += shares[..., e : e + 1] * (hidden @ params.down[e])
    assert np.allclose(y, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["V2", "V3"])
def test_deepseeks_choice_token_by_token(library: Backend, kind: str) -> None:
    """arXiv:2405.04434, eq. 20 to 22, and 2412.19437, eq. 12 to 16, with groups."""
    groups: dict[str, Any] = {"n_groups": 4, "top_groups": 2, "weight_scale": 2.5}
    if kind == "V3":
        groups |= {"score": "sigmoid", "correction": True, "group_top": 2}
    config = layers.ExpertsConfig(12, 3, 11, normalise=kind == "V3", **groups)
    x, params = layer_inputs(library, config)
    correction = np.zeros(12)
    if kind == "V3":
        params = params._replace(correction=library.generator(6, "float64").normal((12,)))
        correction = library.to_numpy(params.correction)
    y, cache = layers.mixture(x, params, config=config)
    host: Any = tree.map(library.to_numpy, params)
    moved = 0
    for row, got, ids in zip(
        library.to_numpy(x).reshape(14, 3),
        library.to_numpy(y).reshape(14, 3),
        library.to_numpy(cache.ids),
        strict=True,
    ):
        logits = row @ host.router
        scores = softmax(logits) if kind == "V2" else 1 / (1 + np.exp(-logits))
        keys = scores + correction
        best = [sorted(keys[3 * g : 3 * g + 3])[::-1][: 1 if kind == "V2" else 2] for g in range(4)]
        allowed = np.argsort([-sum(each) for each in best])[:2]
        chosen = sorted(
            (e for g in allowed for e in range(3 * g, 3 * g + 3)), key=lambda e: -keys[e]
        )
        assert ids.tolist() == chosen[:3]
        moved += set(ids) != set(np.argsort(-scores)[:3])
        total = sum(scores[e] for e in ids) if kind == "V3" else 1.0
        wanted = 0
        for e in ids:
            hidden = silu(row @ host.gate[e]) * (row @ host.up[e])
            wanted = wanted + 2.5 * scores[e] / total * (hidden @ host.down[e])
        assert np.allclose(got, wanted, rtol=1e-12, atol=1e-14)
    assert moved  # groups or the correction have changed a choice
    dparams = cache.backward(y)[1]
    assert (
        dparams.correction is None
        if kind == "V2"
        else not library.to_numpy(dparams.correction).any()
    )


def test_groups_without_tokens(library: Backend) -> None:
    config = layers.ExpertsConfig(12, 3, 11, n_groups=4, top_groups=2)
    x, params = layer_inputs(library, config)
    y, cache = layers.mixture(x[:0, ...], params, config=config)
    dx, dparams = cache.backward(y)
    assert y.shape == dx.shape == (0, *x.shape[1:])
    assert not library.to_numpy(dparams.router).any()


def test_mixtrals_and_qwens_order_are_one_function() -> None:
    """softmax(top k of l) = top k of softmax(l) / their sum: the denominator of all cancels."""
    logits, order = NUMPY.generator(0, "float64").normal((7, 5), std=3.0), slice(-2, None)
    ids = logits.argsort(axis=1)[:, order]
    assert np.array_equal(ids, softmax(logits).argsort(axis=1)[:, order])
    mixtral = softmax(np.take_along_axis(logits, ids, axis=1))
    qwen = np.take_along_axis(softmax(logits), ids, axis=1)
    assert np.allclose(mixtral, qwen / qwen.sum(axis=1, keepdims=True), rtol=1e-14)


def test_of_equal_logits_the_lower_expert_comes_first(library: Backend) -> None:
    """Of so many experts that a sort which is not stable would mix them."""
    config = layers.ExpertsConfig(n_experts=37, top_k=3, d_ff=2)
    x, params = layer_inputs(library, config)
    pair = np.array(library.to_numpy(params.router))[:, :2]
    router = library.asarray(pair[:, np.arange(37) % 2])  # experts 0, 2, ... are equal, 1, 3, ...
    _, cache = layers.mixture(x, params._replace(router=router), config=config)
    ids, logits = library.to_numpy(cache.ids), library.to_numpy(cache.router_logits)
    assert logits.shape == (14, 37) and ids.shape == (14, 3)
    assert ids.tolist() == [[0, 2, 4] if row[0] > row[1] else [1, 3, 5] for row in logits]


def test_one_expert_with_normalised_weight_leaves_the_router_untaught(library: Backend) -> None:
    """Its weight is 1 whatever the logits: with top_k = 1, normalise = False is what learns."""
    for normalise in (True, False):
        config = layers.ExpertsConfig(n_experts=5, top_k=1, d_ff=11, normalise=normalise)
        x, params = layer_inputs(library, config)
        y, cache = layers.mixture(x, params, config=config)
        drouter = library.to_numpy(cache.backward(y)[1].router)
        assert drouter.any() == (not normalise)


@only("numpy", "array-api-strict", "torch")
def test_auxiliary_losses_add_to_the_gradient(library: Backend) -> None:
    x, params = layer_inputs(library)

    def total(x: Any, params: Any) -> tuple[Any, Any]:
        y, cache = layers.mixture(x, params, config=CONFIG)
        balance, balance_cache = ops.load_balancing(cache.router_logits, ids=cache.ids)
        small, small_cache = ops.router_z_loss(cache.router_logits)

        class Cache:
            def backward(self, dy: Any, dloss: Any) -> Any:
                return cache.backward(
                    dy, balance_cache.backward(dloss) + small_cache.backward(dloss)
                )

        return (y, balance + small), Cache()

    gradcheck(total, x, params, alone=False, elementwise=0).require()


def test_initial_weights(library: Backend) -> None:
    params = CONFIG.init(library.generator(0), 3)
    shapes = {name: tuple(a.shape) for name, a in tree.flatten(params).items()}
    assert shapes == {"router": (3, 5), "gate": (5, 3, 11), "up": (5, 3, 11), "down": (5, 11, 3)}
    host = tree.flatten(CONFIG.init(NUMPY.generator(0), 3))
    for name, a in tree.flatten(params).items():
        assert np.array_equal(library.to_numpy(a), host[name])
    assert np.unique(np.concatenate([a.ravel() for a in host.values()])).size == 5 * (3 + 3 * 33)


@pytest.mark.parametrize("gate", [True, False])
def test_the_shared_expert_is_added(library: Backend, gate: bool) -> None:
    """Every token runs through it; the choice of the others does not change."""
    config = layers.ExpertsConfig(5, 2, 11, d_shared=7, shared_gate=gate)
    x, params = layer_inputs(library, config)
    y, cache = layers.mixture(x, params, config=config)
    chosen, without = layers.mixture(
        x, params._replace(shared=None, shared_gate=None), config=CONFIG
    )
    assert np.array_equal(library.to_numpy(cache.ids), library.to_numpy(without.ids))
    x, y, chosen, params = tree.map(library.to_numpy, (x, y, chosen, params))
    shared = params.shared
    wanted = (silu(x @ shared.gate.w) * (x @ shared.up.w)) @ shared.down.w
    assert (params.shared_gate is not None) == gate
    if gate:
        assert params.shared_gate.shape == (3, 1)
        wanted = wanted / (1 + np.exp(-x @ params.shared_gate))
    assert np.allclose(y, chosen + wanted, rtol=1e-12, atol=1e-14)


@only("jax")
def test_mixture_under_jit(library: Backend) -> None:
    import jax

    def run(x: Any, params: Any) -> Any:
        y, cache = layers.mixture(x, params, config=CONFIG)
        return y, cache.backward(y, cache.router_logits)

    args = layer_inputs(library)
    plain, jitted = (tree.flatten(f(*args)) for f in (run, jax.jit(run)))
    host = [{k: np.asarray(v) for k, v in values.items()} for values in (jitted, plain)]
    require_close(*host, FLOAT64)


GROUPS = {"n_experts": 6, "n_groups": 2}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"top_k": 6}, ValueError, "top_k must be at most n_experts = 5, got 6"),
        ({"top_k": 0}, ValueError, "top_k must be an int of at least 1, got 0"),
        ({"n_experts": 2.0}, ValueError, "n_experts must be an int of at least 1, got 2.0"),
        ({"d_ff": -1}, ValueError, "d_ff must be an int of at least 1, got -1"),
        ({"normalise": "yes"}, TypeError, "normalise must be True or False, got 'yes'"),
        ({"activation": "sin"}, ValueError, "activation must be one of relu, "),
        ({"d_shared": 0}, ValueError, "d_shared must be an int of at least 1, got 0"),
        ({"bias": None}, TypeError, "bias must be True or False, got None"),
        (
            {"d_shared": 3, "activation": "clamped_swiglu"},
            ValueError,
            "a shared expert: activation must be one of relu, ",
        ),
        ({"shared_gate": 1}, TypeError, "shared_gate must be True or False, got 1"),
        ({"shared_gate": True}, ValueError, "shared_gate needs d_shared"),
        ({"score": "relu"}, ValueError, "score must be one of softmax, sigmoid, got 'relu'"),
        ({"correction": True}, ValueError, "correction needs score \"sigmoid\", got 'softmax'"),
        ({"n_groups": 2}, ValueError, "n_groups must divide n_experts = 5, got 2"),
        ({"top_groups": 2}, ValueError, "top_groups must be at most 1 with n_groups = 1, got 2"),
        (GROUPS | {"group_top": 4}, ValueError, "group_top must be at most 3 with n_groups = 2"),
        (GROUPS | {"group_top": 2}, ValueError, 'group_top above 1 needs score "sigmoid"'),
        (
            GROUPS | {"top_k": 4},
            ValueError,
            "top_k must be at most the 3 experts of 1 groups, got 4",
        ),
    ],
)
def test_bad_configurations(change: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^mixture: {re.escape(message)}"):
        layers.ExpertsConfig(**{"n_experts": 5, "top_k": 2, "d_ff": 11} | change)


def test_mixture_says_what_does_not_fit(library: Backend) -> None:
    x, params = layer_inputs(library)

    def fails(message: str, x: Any = x, **change: Any) -> None:
        with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}"):
            layers.mixture(x, params._replace(**change), config=CONFIG)

    fails("mixture: x must be (B, T, D) or (T, D), got shape (3,)", x=x[0, 0, ...])
    fails("mixture: x must be an array, got float", x=1.5)
    fails("mixture: router must be (D, E) = (3, 5), got shape (3, 4)", router=params.router[:, :4])
    fails("mixture: router must be an array, got None", router=None)
    for name, wanted in (("gate", "(E, D, F) = (5, 3, 11)"), ("down", "(E, F, D) = (5, 11, 3)")):
        bad = getattr(params, name)[:4, ...]
        fails(f"mixture: {name} must be {wanted}, got shape {tuple(bad.shape)}", **{name: bad})
    message = "mixture: shared_gate must be (D, 1) = (3, 1), got shape (3, 5)"
    fails(message, shared_gate=params.router)
    message = "mixture: up_bias must be (E, F) = (5, 11), got shape (5, 3)"
    fails(message, up_bias=library.asarray(np.ones((5, 3))))
    y, cache = layers.mixture(x, params, config=CONFIG)
    with pytest.raises(ValueError, match=r"^mixture: dy must have shape "):
        cache.backward(y[:1, ...])
    with pytest.raises(ValueError, match=r"^mixture: drouter_logits must have shape "):
        cache.backward(y, cache.router_logits[:3, :])


# ---- Against transformers ----


@pytest.fixture
def float64_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes its routers' softmax in float32 by name: let the name be float64."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def block_of(family: str, normalise: bool) -> Any:
    """A sparse block of transformers: E = 5, C = 2, D = 3, F = 11, random float64 weights."""
    import torch
    from transformers import MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = {"hidden_size": 3, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    qwen = {"moe_intermediate_size": 11, "num_experts": 5, "norm_topk_prob": normalise}
    if family == "mixtral":
        config = MixtralConfig(intermediate_size=11, num_local_experts=5, **sizes)
        block = MixtralSparseMoeBlock(config)
    elif family == "qwen2":
        config = Qwen2MoeConfig(shared_expert_intermediate_size=7, **qwen, **sizes)
        block = Qwen2MoeSparseMoeBlock(config)
    else:
        block = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**qwen, **sizes))
    block = block.double()
    generator = torch.Generator().manual_seed(0)
    for p in block.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5, generator=generator)
    return block


@pytest.mark.usefixtures("float64_routers")
def test_mixture_is_that_of_gpt_oss() -> None:
    """Biases everywhere, gate and up in alternate columns; large inputs, some clamped."""
    torch = pytest.importorskip("torch")
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    sizes = {"hidden_size": 3, "num_experts_per_tok": 2, "intermediate_size": 11}
    theirs = GptOssMLP(
        GptOssConfig(num_local_experts=5, experts_implementation="eager", **sizes)
    ).double()
    generator = torch.Generator().manual_seed(0)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, generator=generator)
    x, dy = NUMPY.generator(0, "float64").normal((2, 2, 7, 3), std=4.0)
    x_torch = torch.tensor(x, requires_grad=True)
    y = theirs(x_torch)[0]
    leaves = dict(theirs.named_parameters())
    grads = torch.autograd.grad(y, (x_torch, *leaves.values()), torch.tensor(dy))

    def ours(values: dict[str, np.ndarray]) -> layers.ExpertsParams:
        w, b = values["experts.gate_up_proj"], values["experts.gate_up_proj_bias"]
        return layers.ExpertsParams(
            router=values["router.weight"].T,
            gate=w[..., ::2],
            up=w[..., 1::2],
            down=values["experts.down_proj"],
            router_bias=values["router.bias"],
            gate_bias=b[:, ::2],
            up_bias=b[:, 1::2],
            down_bias=values["experts.down_proj_bias"],
        )

    params = ours({name: p.detach().numpy() for name, p in leaves.items()})
    gates = np.einsum("btd,edf->btef", x, params.gate) + params.gate_bias
    assert 0.05 < (gates > 7).mean() < 0.5
    config = layers.ExpertsConfig(5, 2, 11, activation="clamped_swiglu", bias=True)
    found, cache = layers.mixture(x, params, config=config)
    dx, dparams = cache.backward(dy)
    wanted = {"y": y.detach().numpy(), "dx": grads[0].numpy()}
    wanted |= tree.flatten(
        ours({name: g.numpy() for name, g in zip(leaves, grads[1:], strict=True)})
    )
    require_close({"y": found, "dx": dx, **tree.flatten(dparams)}, wanted, FLOAT64)


def as_params(router: Any, gate_up: Any, down: Any, *shared: Any) -> layers.ExpertsParams:
    """(E, D), (E, 2F, D), (E, D, F) of transformers as ours.

    shared: gate, up and down of the shared expert, each (O, I), and its own gate (1, D)
    """
    gate, up = gate_up[:, :11], gate_up[:, 11:]
    params = layers.ExpertsParams(router.T, *(np.swapaxes(w, 1, 2) for w in (gate, up, down)))
    if not shared:
        return params
    gate, up, down = (layers.LinearParams(w.T, None) for w in shared[:3])
    return params._replace(shared=layers.FeedForwardParams(up, down, gate), shared_gate=shared[3].T)


@pytest.mark.parametrize(
    ("family", "normalise"),
    [("mixtral", True), ("qwen3", True), ("qwen3", False), ("qwen2", True), ("qwen2", False)],
)
@pytest.mark.usefixtures("float64_routers")
def test_mixture_is_transformers(family: str, normalise: bool) -> None:
    import torch

    block = block_of(family, normalise)
    weights = [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]
    options: dict[str, Any] = {}
    if family == "qwen2":
        shared = block.shared_expert
        weights += [shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight]
        weights += [block.shared_expert_gate.weight]
        options = {"d_shared": 7, "shared_gate": True}
    x, dy = NUMPY.generator(0, "float64").normal((2, 2, 7, 3))
    x_torch = torch.tensor(x, requires_grad=True)
    y = block(x_torch)
    grads = torch.autograd.grad(y, (x_torch, *weights), torch.tensor(dy))
    wanted = {"y": y.detach().numpy(), "dx": grads[0].numpy()}
    wanted |= tree.flatten(as_params(*(g.numpy() for g in grads[1:])))

    config = layers.ExpertsConfig(5, 2, 11, normalise, **options)
    params = as_params(*(w.detach().numpy() for w in weights))
    y, cache = layers.mixture(x, params, config=config)
    dx, dparams = cache.backward(dy)
    require_close({"y": y, "dx": dx, **tree.flatten(dparams)}, wanted, FLOAT64)
