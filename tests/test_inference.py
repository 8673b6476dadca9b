"""`inference()`: the same outputs, and nothing kept for a backward."""

from __future__ import annotations

import inspect
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_configs import block_config
from judges import outputs
from libraries import LIBRARIES, only
from test_kernels import WITHOUT_GRADIENT

import xformer as xf
from xformer import (
    GPT,
    Transformer,
    backends,
    dispatch,
    generation,
    inference,
    ops,
    pretrained,
    training,
    tree,
)
from xformer.backends import Backend
from xformer.backends.numpy.threads import forget_scratch, scratch_nbytes
from xformer.dispatch import NoCache, is_inference
from xformer.dispatch.checks import in_range
from xformer.layers import EmbedConfig, NormConfig
from xformer.models import EncoderDecoder, LanguageModel
from xformer.ops.barrier import barrier
from xformer.pretrained.tokenizer import tokenizer
from xformer.proofs.catalogue import Case, cases
from xformer.sentences import classify, embed, tag
from xformer.training import Batch

NUMPY = backends.get("numpy")
SAYS = r"made within inference\(\), which saves nothing$"
# What composites hold themselves: for generation, for the next segment (Transformer-XL), for the
# routers' losses; weights of a mean.
LITTLE = (
    "kv_cache.k",
    "kv_cache.v",
    "kv_cache.conv",
    "kv_cache.state",
    "extended",
    "router_logits",
    "ids",
    "weights",
    "value",
)
TOKENS = np.random.default_rng(0).integers(1, 13, (3, 7))


def of_each_subject() -> list[Case]:
    """A case of each op, layer and model."""
    return list({case.subject: case for case in cases()}.values())


def require_nothing(case: Case, library: Backend) -> None:
    """The case gives the same within `inference`, and keeps arrays of its arguments at most."""
    fn, args = case.build(library, "float32")
    wanted, _ = fn(*args)
    with inference():
        y, cache = fn(*args)
    for got, want in zip(outputs(y), outputs(wanted), strict=True):
        assert np.array_equal(library.to_numpy(got), library.to_numpy(want))
    if case.group == "ops":
        cache = getattr(cache, "cache", cache)  # less the gradients that there are not
        assert isinstance(cache, NoCache), cache
    own = {id(a) for a in tree.flatten((args, fn.keywords)).values()}
    for name, leaf in tree.flatten(cache).items():
        if hasattr(leaf, "dtype"):
            assert re.sub(r"\.\d+$", "", name).endswith(LITTLE) or id(leaf) in own, name
        elif "kv_cache.storage" not in name:  # to append in place, which JAX has not
            is_number = isinstance(leaf, int | float)  # as a compiled function may return
            assert is_number and case.group != "models", name
    with pytest.raises(RuntimeError, match=f"^backward: the cache was {SAYS}"):
        deepest(cache).backward(y)


def deepest(cache: Any) -> Any:
    """The first op's cache inside a composite's; one that has none stands for itself."""
    found: list[Any] = []
    tree.map_nodes(lambda _, node: found.append(node), cache, NoCache)
    return found[0] if found else NoCache()


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_nothing_is_kept(case: Case) -> None:
    require_nothing(case, NUMPY)


@pytest.mark.parametrize("case", of_each_subject(), ids=lambda case: case.name)
@only(*(name for name in LIBRARIES if name not in ("numpy", "jax")))
def test_on_other_libraries(case: Case, library: Backend) -> None:
    require_nothing(case, library)


@only("jax")
def test_within_a_compiled_function(library: Backend) -> None:
    import jax

    gpt, tokens = GPT(13, 2, 8, 2, 7), library.asarray(TOKENS)
    params = tree.map(library.asarray, gpt.init())

    @jax.jit
    def forward(params: Any, tokens: Any) -> Any:
        with inference():
            return gpt.loss(params, tokens, tokens)

    loss, cache = forward(params, tokens)
    assert np.isclose(float(loss), float(gpt.loss(params, tokens, tokens)[0]))
    assert len(jax.tree.leaves(cache)) == 1  # the loss
    assert all(np.size(leaf) == 1 for leaf in jax.tree.leaves(cache))


COMPOSITES = [case for case in cases() if case.group != "ops"]


@pytest.mark.parametrize("case", COMPOSITES, ids=lambda case: case.name)
@only("jax")
def test_a_compiled_function_may_return_its_cache(case: Case, library: Backend) -> None:
    import jax

    fn, args = case.build(library, "float32")
    jax.eval_shape(lambda args: within(lambda: fn(*args)), args)  # TypeError for what it may not


def test_each_part_of_a_model_drops_its_cache() -> None:
    """Encoder and decoder, which other tests do not call by themselves."""
    model = Transformer(13, 13, 8, 2, 1, 1, 16)
    params = model.init()
    (memory, pos), encoded = within(lambda: model.encode(params, TOKENS))
    _, decoded = within(
        lambda: model.decode_target(params, memory, pos, TOKENS, src_mask=TOKENS != 0)
    )
    assert isinstance(encoded, NoCache) and isinstance(decoded, NoCache)


def test_a_backward_says_why_there_is_none() -> None:
    gpt = GPT(13, 2, 8, 2, 7)
    params = gpt.init()
    with inference():
        loss, cache = gpt.loss(params, TOKENS, TOKENS)
    assert tree.nbytes(cache) == loss.nbytes
    with pytest.raises(RuntimeError, match=f"^backward: the cache was {SAYS}"):
        cache.backward()
    y, dropped = within(lambda: ops.tanh(np.ones(3)))
    with pytest.raises(AttributeError, match=f"^y: the cache was {SAYS}"):
        dropped.y  # noqa: B018
    with pytest.raises(RuntimeError, match=SAYS):
        dropped.backward(y)


def within(run: Any) -> Any:
    with inference():
        return run()


def test_it_ends() -> None:
    """Within itself, and where something is raised."""

    def kept() -> bool:
        return not isinstance(ops.tanh(np.ones(3))[1], NoCache)

    with inference():
        with inference():
            assert is_inference()
        assert is_inference() and not kept()
    assert not is_inference() and kept()
    with pytest.raises(ZeroDivisionError), inference():
        raise ZeroDivisionError
    assert not is_inference() and kept()


def test_it_goes_with_reference_only() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    with inference(), xf.reference_only():
        y, cache = ops.gelu(x)
        assert isinstance(cache, NoCache)
    with xf.reference_only():
        assert np.array_equal(y, ops.gelu(x)[0])


def test_what_returns_no_cache_is_left_alone() -> None:
    key = xf.RandomKey(1)
    x = np.zeros(1)
    bits = ops.random_bits(x, key=key, size=2)  # two, as if they were y and a cache
    kv_cache = xf.layers.kv_cache.append(
        *np.ones((2, 1, 1, 2, 3)), kv_cache=xf.layers.kv_cache.KVCache()
    )
    with inference():
        assert np.array_equal(ops.random_bits(x, key=key, size=2), bits)
        assert in_range(np.arange(3), size=3) is True
        again = xf.layers.kv_cache.append(
            *np.ones((2, 1, 1, 2, 3)), kv_cache=xf.layers.kv_cache.KVCache()
        )
        assert np.array_equal(again.k, kv_cache.k) and again.length == 2
        assert barrier(x, memory=x, key=key, dy=x) == (x, x, key)


def test_an_op_says_whether_it_returns_one() -> None:
    """Its flag and its annotation agree."""
    for op in dispatch.ops():
        if op.__module__.startswith("xformer."):
            returns = str(inspect.signature(op.reference).return_annotation)
            y = r"(Array|tuple\[Array, (\.\.\.|Array)\])"  # linears and add_norm have several
            has_cache = re.fullmatch(rf"tuple\[{y}, \w+Cache( \| \w+Cache)?\]", returns) is not None
            assert op.has_backward == has_cache, op
            assert op.has_backward != (op in WITHOUT_GRADIENT), op


# ---- Memory ----


def encoder(activation_checkpointing: bool = False) -> tuple[LanguageModel, Any]:
    """Of the kind of MiniLM."""
    block = block_config(64, 4, 256, norm_placement="post", activation="gelu")
    embed = EmbedConfig(300, 64, 64, 64, positions="learned", norm=NormConfig())
    model = LanguageModel(
        embed,
        (block,) * 6,
        causal=False,
        head=None,
        activation_checkpointing=activation_checkpointing,
    )
    return model, model.init()


def most(run: Any) -> int:
    """The bytes that `run` held at most, beside the scratch memory of kernels."""
    forget_scratch()
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1] - scratch_nbytes()
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_a_forward_takes_the_memory_of_a_layer(activation_checkpointing: bool) -> None:
    model, params = encoder(activation_checkpointing)
    tokens = np.random.default_rng(0).integers(0, 300, (16, 64))

    def forward() -> Any:
        return model.pooled(params, tokens)

    plain, spare = most(forward), most(lambda: within(forward))
    x = 16 * 64 * 64 * 4
    # x, what the layer adds to it, and the hidden layer of its feed-forward network, twice.
    assert spare < 13 * x
    if not activation_checkpointing:
        assert plain > 6 * 12 * x > 5 * spare
    _, cache = within(forward)
    assert tree.nbytes(cache) < x / 30


# ---- Where the library runs forward only ----


class Watched:
    """Notes whether `inference` is active whenever a method is called."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: Any, *names: str) -> None:
        self.seen: list[bool] = []
        for name in names:
            patch.setattr(kind, name, self._noting(getattr(kind, name)))

    def _noting(self, method: Any) -> Any:
        def noting(*args: Any, **options: Any) -> Any:
            self.seen.append(is_inference())
            return method(*args, **options)

        return noting


@pytest.mark.parametrize("how", ["stream", "beam_search", "speculative"])
def test_generation(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    gpt = GPT(13, 2, 8, 2, 32)
    params, watched = gpt.init(), Watched(monkeypatch, LanguageModel, "_embedded")
    prompt = [1, 2, 3]
    if how == "speculative":
        rounds: Any = generation.speculative(
            gpt, params, gpt, params, prompt, k=2, max_new_tokens=5
        )
    elif how == "beam_search":
        rounds = generation.beam_search(gpt, params, [prompt], n_beams=2, max_new_tokens=5)
    else:
        rounds = generation.stream(gpt, params, [prompt], max_new_tokens=5)
    for _ in rounds:
        assert not is_inference()  # here, while a generator waits
    assert len(watched.seen) > 4 and all(watched.seen)


def test_generation_of_an_encoder_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Transformer(13, 13, 8, 2, 1, 1, 16)
    params = model.init()
    watched = Watched(monkeypatch, EncoderDecoder, "encode", "_decode_target")
    text = generation.prefill(model, params, TOKENS.tolist(), start_id=1)
    generation.generate(model, params, text, max_new_tokens=4)
    state = model.init_state(params, TOKENS)
    assert len(watched.seen) > 1 and all(watched.seen) and not is_inference()
    logits, state = model.decode(params, TOKENS[:, :1] * 0 + 1, state)
    assert state.kv_cache[0].k.shape[2] == 1 and logits.shape == (3, 13)


def test_validation() -> None:
    gpt = GPT(13, 2, 8, 2, 7)
    seen: list[bool] = []

    def loss(*args: Any) -> tuple[Any, Any]:
        seen.append(is_inference())
        return training.loss_of(gpt)(*args)

    def batches() -> Iterator[Batch]:
        for _ in range(2):
            assert not is_inference()
            yield Batch((TOKENS, TOKENS), {}, TOKENS.size, TOKENS.size)

    params = gpt.init()
    found = training.evaluate(loss, params, batches(), NUMPY)
    assert found == pytest.approx(float(gpt.loss(params, TOKENS, TOKENS)[0]))
    assert seen == [True, True] and not is_inference()


def test_sentences(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sentences = pytest.importorskip("sentences", reason="tokenizers is not installed")
    classes = sentences.BERT | {"architectures": ["BertForSequenceClassification"]}
    watched = Watched(monkeypatch, LanguageModel, "hidden")
    tokens = sentences.BERT | {"architectures": ["BertForTokenClassification"]}
    runs: Any = (("embed", sentences.BERT, embed), ("classify", classes, classify))
    for name, config, run in (*runs, ("tag", tokens, tag)):
        (tmp_path / name).mkdir()
        folder = sentences.write_model(tmp_path / name, config)
        run(*pretrained.load(folder), tokenizer(folder), sentences.TEXTS)
    assert len(watched.seen) > 1 and all(watched.seen) and not is_inference()
