"""Programs of random models: losses, gradients and a step of AdamW, judged in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from block_configs import block_config

pytest.importorskip("numba", reason="needs extra numba")

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from programs import THREADS, TINY

from xformer import ops, optim, reference_only, tree
from xformer.backends.numba.program import compiled as programs
from xformer.backends.numba.program import program
from xformer.backends.numba.program.compiled import Compiled
from xformer.layers import BlockConfig, EmbedConfig, ExpertsConfig, RelativeConfig, RopeConfig
from xformer.layers.block import NORMS
from xformer.models import (
    Classifier,
    Discriminator,
    LanguageModel,
    LMHead,
    MaskedLMHead,
    TokenClassifier,
)
from xformer.ops.activation import ACTIVATIONS

MANY = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # each example records a program: to make it smaller takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
VOCAB, IGNORED = 19, -100
POSITIONS = ("learned", "sinusoidal", "rotary", "alibi", "relative")
HEADS = (
    *(LMHead(), LMHead(tied=False, bias=True), LMHead(softcap=3.0), MaskedLMHead()),
    *(Classifier(5, token="last", dropout=0.3), TokenClassifier(5, dropout=0.3)),
    Discriminator(),
)
EPS = 1e-2  # AdamW's: a gradient that is rounding alone takes no step of full size
ROUNDING = {"float32": 4 * TINY, "float64": 1e-13}
flags = st.booleans()
rates = st.sampled_from([0.0, 0.3])


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


class Sample(NamedTuple):
    model: LanguageModel
    dtype: str
    batch: int
    length: int
    padding: str | None  # the side it is on; None: no mask
    seed: int

    def params(self) -> Any:
        """Disturbed: a bias of zero or a weight of one would hide a gradient that forgets it."""
        rng = np.random.default_rng(self.seed)
        drawn = self.model.init(self.seed, dtype="float64")
        return tree.map(lambda p: (p + rng.normal(0, 0.1, p.shape)).astype(self.dtype), drawn)

    def inputs(self, number: int) -> dict[str, Any]:
        """A batch; each text has a token at least."""
        rng = np.random.default_rng((self.seed, number))
        shape = self.batch, self.length
        tokens, targets = (rng.integers(0, high, shape) for high in self.model.id_sizes)
        masks = {}
        if self.padding is not None:
            n = rng.integers(1, self.length + 1, (self.batch, 1))
            mask = np.arange(self.length) < n
            mask = mask if self.padding == "right" else mask[:, ::-1].copy()
            targets, masks = np.where(mask, targets, IGNORED), {"mask": mask}
        if isinstance(self.model.head, Classifier):
            targets = rng.integers(0, self.model.head.n_labels, self.batch)
        return {"tokens": tokens, "targets": targets, "masks": masks, "number": number}


@st.composite
def blocks(draw: Callable[..., Any], shared: dict[str, Any], biased: bool) -> BlockConfig:
    """A block of the sizes and the place of norms that all blocks of a model share."""
    options: dict[str, Any] = {
        name: draw(values)
        for name, values in {
            "d_ff": st.integers(1, 21),
            "activation": st.sampled_from(sorted(ACTIVATIONS)),
            "gated": flags,
            "bias": flags,
            "qkv_bias": maybe(flags),
            "o_bias": maybe(flags),
            "ffn_bias": maybe(flags),
            "qk_norm": st.sampled_from([None, None, "head", "all"]),
            "scale": maybe(st.just(0.4)),
            "dropout": rates,
            "attn_dropout": maybe(rates),
            "d_value": maybe(st.integers(1, 7)),
        }.items()
    }
    if shared["norm"] == "rms":
        options["norm_offset"] = draw(st.sampled_from([0.0, 1.0]))
    if draw(st.integers(0, 5)) == 0 and not biased:
        options["shaw_max_distance"] = draw(st.integers(0, 3))
    else:
        near = maybe(st.integers(0, 5))
        options |= {"window": draw(maybe(st.tuples(near, near))), "sinks": draw(flags)}
        options["softcap"] = draw(maybe(st.just(2.5)))
    if draw(st.integers(0, 5)) == 0:
        options["experts"] = ExpertsConfig(4, draw(st.integers(1, 4)), 5)
    else:
        options["hidden_dropout"] = draw(rates)
    if shared["norm_placement"] in ("pre", "none") and draw(flags):
        shared_norm = shared["norm_placement"] == "pre" and draw(flags)
        options |= {"parallel": True, "shared_norm": shared_norm}
    options["residual_scale"] = draw(maybe(st.just(0.5)))
    options["residual_multiplier"] = draw(st.sampled_from([1.0, 0.3]))
    return block_config(**shared, **options)


@st.composite
def samples(draw: Callable[..., Any]) -> Sample:
    kind = draw(st.sampled_from(POSITIONS))
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    length, width = draw(st.integers(1, 9)), draw(st.integers(1, 6)) * (1 + (kind == "rotary"))
    shared = {
        "d_model": draw(st.integers(6, 24)),
        "n_heads": groups * per_group,
        "n_kv_heads": groups,
        "d_head": width,
        "norm_placement": draw(st.sampled_from(NORMS)),
        "norm": draw(st.sampled_from(["layer", "rms"])),
        "eps": 0.1,  # of few channels a norm may have next to no variance to divide by
    }
    own = blocks(shared, kind in ("alibi", "relative"))
    causal = kind == "alibi" or draw(flags)
    embed = EmbedConfig(
        VOCAB,
        shared["d_model"],
        shared["d_model"],
        max_len=length,
        positions=kind if kind in ("learned", "sinusoidal") else "none",
        dropout=draw(rates),
    )
    head = draw(st.sampled_from(HEADS))
    turned = RopeConfig(draw(st.sampled_from(range(2, width + 1, 2)))) if kind == "rotary" else None
    buckets = RelativeConfig(shared["n_heads"], 6, 9, bidirectional=not causal)
    model = LanguageModel(
        embed,
        tuple(draw(st.lists(own, min_size=1, max_size=2))),
        causal=causal,
        rotary=turned,
        alibi=kind == "alibi",
        relative_bias=buckets if kind == "relative" else None,
        out_dropout=draw(rates),
        head=head,
    )
    padding = draw(st.sampled_from([None, "right", "left"]))
    dtype = draw(st.sampled_from(["float32", "float32", "float64"]))
    return Sample(model, dtype, draw(st.integers(1, 5)), length, padding, draw(st.integers(0, 99)))


def training(sample: Sample) -> Callable[..., Any]:
    """A step, and what it follows from."""
    unseen = {} if isinstance(sample.model.head, Classifier) else {"ignore_index": IGNORED}

    def step(params: Any, state: Any, tokens: Any, targets: Any, masks: Any, number: Any) -> Any:
        key = ops.RandomKey(5, step=number)
        loss, cache = sample.model.loss(params, tokens, targets, dropout_key=key, **masks, **unseen)
        grads = cache.backward()
        new, state = optim.adamw(params, grads, state, lr=0.05, eps=EPS)
        return new, state, loss, grads

    return step


def as_float64(x: Any) -> Any:
    return x.astype(np.float64) if getattr(x, "dtype", None) == np.float32 else x


def leaves(x: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in tree.flatten({"": x}).items()}


def require_close(found: Any, own: Any, exact: Any, rounding: float) -> None:
    """No further from float64 than the references are, but for some roundings of the largest."""
    names, plain, wanted = leaves(found), leaves(own), leaves(exact)
    largest = max(float(np.abs(x).max(initial=0)) for x in wanted.values())
    error = max(float(np.abs(plain[name] - x).max(initial=0)) for name, x in wanted.items())
    tolerance = 2 * error + rounding * max(largest, 1)
    for name, x in wanted.items():
        assert names[name].dtype == plain[name].dtype
        np.testing.assert_allclose(names[name], x, rtol=0, atol=tolerance, err_msg=name)


def judged(sample: Sample, threads: int, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """Two steps on so many threads, the second one of what the first has left."""
    monkeypatch.setattr(programs, "n_threads", lambda: threads)
    monkeypatch.setattr(program, "WORTH", 0)  # pieces of small arrays too
    step = training(sample)
    compiled = Compiled(step, donated=(0, 1))
    params = sample.params()
    state = optim.adamw_init(params)
    for number in range(1, 3):
        given = tuple(sample.inputs(number).values())
        with reference_only():
            plain = step(params, state, *given)
            exact = step(*tree.map(as_float64, (params, state)), *given)
        found = compiled(
            *tree.map(lambda a: np.array(a) if hasattr(a, "dtype") else a, (params, state)), *given
        )
        for part in range(4):
            require_close(found[part], plain[part], exact[part], ROUNDING[sample.dtype])
        params, state = plain[:2]
    assert len(compiled.programs) == 1 and not compiled.refused
    return compiled


@settings(MANY, max_examples=12)
@given(sample=samples(), threads=st.sampled_from([2, *THREADS]))
def test_random_models(sample: Sample, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    judged(sample, threads, monkeypatch)


@pytest.mark.slow
@MANY
@given(sample=samples(), threads=st.sampled_from([2, *THREADS]))
def test_more_random_models(sample: Sample, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    judged(sample, threads, monkeypatch)
