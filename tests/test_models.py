"""What the models promise beyond their gradients, which test_gradients.py checks."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
import pytest
from block_configs import block_config
from judges import (
    FLOAT64,
    named,
    require_close,
)
from libraries import only

from xformer import (
    GPT,
    RandomKey,
    Transformer,
    distributed,
    generation,
    layers,
    models,
    ops,
    reference_only,
    tree,
)
from xformer.backends import Backend
from xformer.distributed.world import Alone
from xformer.layers import EmbedConfig, RopeConfig
from xformer.models import LanguageModel, LMHead


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_a_token_changes_no_logits_before_it(library: Backend, positions: str) -> None:
    model = GPT(13, n_layers=2, d_model=6, n_heads=2, max_len=7, positions=positions)
    params = on(library, model.init(dtype="float64"))
    tokens = np.array([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])
    before, _ = model.forward(params, library.asarray(tokens))
    tokens[:, 3] = 12
    after, _ = model.forward(params, library.asarray(tokens))
    before, after = library.to_numpy(before), library.to_numpy(after)
    assert np.array_equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] != after[:, 3:]).any(axis=(0, 2)).all()


def test_a_last_stage_of_a_pipeline(library: Backend) -> None:
    """Vectors in, the loss of an untied head out, as in the whole model."""
    whole = GPT(13, n_layers=2, d_model=6, n_heads=2, max_len=7, tied=False)
    last = dataclasses.replace(whole, embed=None)
    params = on(library, whole.init(dtype="float64"))
    tokens = library.asarray(np.array([[1, 2, 3, 4], [6, 5, 4, 12]]))
    loss, cache = whole.loss(params, tokens, tokens)
    wanted = cache.backward()
    (x, _), embed_cache = layers.embed(params.embed, ids=tokens, config=whole.embed)
    own = params._replace(embed=None)
    got, cache = last.loss(own, x, tokens)
    grads, dx = cache.model.backward_all(library.xp.ones_like(got))
    assert float(got) == float(loss) and grads.embed is None
    found = grads._replace(embed=embed_cache.backward(dx, None))
    for name, a in tree.flatten(found).items():
        assert np.array_equal(library.to_numpy(a), library.to_numpy(tree.flatten(wanted)[name]))
    with pytest.raises(ValueError, match="LMHead: the size of a vocabulary needs an embedding"):
        last.init()
    with pytest.raises(ValueError, match="decode: the model must be causal and have an embedding"):
        last.decode(own, tokens, last.init_state())
    with pytest.raises(ValueError, match="LanguageModel: a tied head needs embed, got None"):
        dataclasses.replace(last, head=LMHead())
    with pytest.raises(ValueError, match="prefill: the model must have an embedding, got None"):
        generation.generate(last, own, [[1, 2]], max_new_tokens=1)
    with pytest.raises(ValueError, match="parallel: a head over a vocabulary needs an embedding"):
        distributed.tensor_parallel(last, Alone())


def test_a_target_token_changes_no_logits_before_it(library: Backend) -> None:
    model = Transformer(17, 13, 6, 2, 1, 1, max_len=7)
    params = on(library, model.init(dtype="float64"))
    src, tgt = library.asarray([[5, 6, 7], [8, 9, 0]]), np.array([[1, 4, 5, 2], [1, 6, 2, 3]])
    before, _ = model.forward(params, src, library.asarray(tgt))
    tgt[:, 2] = 12
    after, _ = model.forward(params, src, library.asarray(tgt))
    before, after = library.to_numpy(before), library.to_numpy(after)
    assert np.array_equal(before[:, :2], after[:, :2])
    assert (before[:, 2:] != after[:, 2:]).any(axis=(0, 2)).all()


def test_padding_changes_neither_loss_nor_gradients(library: Backend) -> None:
    model = Transformer(17, 13, 6, 2, 1, 1, max_len=11, pad_id=3)
    params = on(library, model.init(dtype="float64"))
    src, tgt = np.array([[5, 6, 7], [8, 9, 3]]), np.array([[1, 4, 5, 2], [1, 6, 2, 3]])

    def loss_and_gradients(pad_src: int, pad_tgt: int) -> dict[str, np.ndarray]:
        padded = (
            library.asarray(np.pad(ids, ((0, 0), (0, n)), constant_values=3))
            for ids, n in ((src, pad_src), (tgt, pad_tgt))
        )
        src_ids, ids = padded
        loss, cache = model.loss(params, src_ids, ids[:, :-1], ids[:, 1:])
        return named(library, loss, (cache.backward(),))

    require_close(loss_and_gradients(4, 3), loss_and_gradients(0, 0), FLOAT64)


def test_a_sequence_counts_the_same_alone(library: Backend) -> None:
    """The mean over a batch is that over its tokens, whichever row they are in."""
    model = Transformer(17, 13, 6, 2, 1, 1, max_len=7)
    params = on(library, model.init(dtype="float64"))
    src, tgt = np.array([[5, 6, 7], [8, 9, 0]]), np.array([[1, 4, 5, 2], [1, 6, 2, 0]])

    def loss(rows: slice) -> float:
        arrays = (library.asarray(ids[rows]) for ids in (src, tgt[:, :-1], tgt[:, 1:]))
        return float(model.loss(params, *arrays)[0])

    first, second, both = loss(slice(0, 1)), loss(slice(1, 2)), loss(slice(0, 2))
    assert both == pytest.approx((3 * first + 2 * second) / 5, rel=1e-13)


def test_few_frames_between_a_loss_and_the_first_norm() -> None:
    """On the reference: what a reader must follow to come from a model to its arithmetic."""
    model = GPT(11, n_layers=1, d_model=8, n_heads=2, max_len=6)
    params, tokens = model.init(), np.ones((2, 4), int)
    frames: list[str] = []

    def called(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is ops.layer_norm.reference.__code__ and not frames:
            while frame.f_code is not test_few_frames_between_a_loss_and_the_first_norm.__code__:
                frames.append(frame.f_code.co_qualname)
                frame = frame.f_back

    with reference_only():
        sys.setprofile(called)
        try:
            model.loss(params, tokens, tokens)
        finally:
            sys.setprofile(None)
    assert frames[-1] == "LanguageModel.loss" and len(frames) <= 10, frames


def test_a_model_prints_equal_layers_once() -> None:
    """And is made again by what it prints."""
    model = GPT(11, n_layers=3, d_model=8, n_heads=2, max_len=6, tied=False)
    assert repr(model).count("BlockConfig(") == 1 and ",) * 3" in repr(model)
    assert "memory_len" not in repr(model)
    assert eval(repr(model), vars(layers.protocol) | vars(layers) | vars(models)) == model


BLOCK = block_config(8, 2, 11)
BARE = EmbedConfig(vocab_size=13, width=8, d_model=8, positions="none")
TOKENS = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])


def test_frequencies_go_by_the_largest_position_given() -> None:
    dynamic = RopeConfig(4, scaling="dynamic", factor=2.0, max_len=6)
    grown = RopeConfig(4, theta=1e4 * (1 + 2 * (24 / 6 - 1)) ** 2)  # what it is for 24 positions
    model, plain = (LanguageModel(BARE, (BLOCK,), rotary=config) for config in (dynamic, grown))
    params = model.init(dtype="float64")
    want, _ = plain.forward(params, TOKENS)
    got, _ = model.forward(params, TOKENS, positions=np.arange(20, 24))  # distances are the same
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("positions", ["alibi", "none"])
def test_positions_that_would_be_ignored_are_refused(positions: str) -> None:
    model = LanguageModel(BARE, (BLOCK,), alibi=positions == "alibi")
    params = model.init()
    model.forward(params, TOKENS, mask=TOKENS > 1)
    with pytest.raises(ValueError, match=r"^LanguageModel: positions need positions in the embed"):
        model.forward(params, TOKENS, positions=np.arange(4))


def test_a_mask_is_refused_where_positions_cannot_follow_it() -> None:
    model = GPT(13, n_layers=1, d_model=8, n_heads=2, max_len=7, position_mode="qkv")
    with pytest.raises(ValueError, match=r"^embed: position ids, also those of a mask, need "):
        model.forward(model.init(), TOKENS, mask=TOKENS > 1)


def test_groups_have_the_parameters_of_their_layers() -> None:
    wide = block_config(8, 2, 19)
    model = LanguageModel(BARE, (BLOCK, BLOCK, wide, wide), n_shared_layer_groups=2)
    params = model.init()
    assert [block.ffn.up.w.shape for block in params.stack.blocks] == [(8, 11), (8, 19)]
    model.forward(params, TOKENS)


@only("jax")
def test_runs_under_jit(library: Backend) -> None:
    """Tokens may be an argument of the compiled function, or a constant in it."""
    import jax

    model = GPT(13, n_layers=1, d_model=6, n_heads=2, max_len=7, dropout=0.3)
    params = on(library, model.init(dtype="float64"))
    tokens = library.asarray([[1, 2, 3, 4], [4, 3, 2, 1]])

    def step(params: Any, tokens: Any) -> Any:
        loss, cache = model.loss(params, tokens, tokens, dropout_key=RandomKey(1))
        return loss, cache.backward()

    wanted = tree.flatten(step(params, tokens))
    for compiled in (jax.jit(step), jax.jit(lambda params, _: step(params, tokens))):
        got = tree.flatten(compiled(params, tokens))
        require_close(*({k: np.asarray(v) for k, v in d.items()} for d in (got, wanted)), FLOAT64)


def on(library: Backend, params: Any) -> Any:
    """Parameters moved from NumPy to a backend, on its device."""
    return tree.map(library.asarray, params)
