"""stories260K writes the text that others published, whichever way its tokens are come by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from libraries import only
from truths import published

from xformer import pretrained
from xformer.backends import Backend
from xformer.generation import beam_search, generate, prefill, speculative, stream_text
from xformer.generation.samplers import compose, temperature, top_p
from xformer.pretrained.tokenizer import tokenizer

pytest.importorskip("tokenizers")
BOS, LENGTH = 1, 200


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return pretrained.load(published("stories260K.bin"))


@pytest.fixture(scope="module")
def own() -> Any:
    return tokenizer(published("tok512.bin"))


@pytest.fixture(scope="module")
def story() -> bytes:
    return published("stories260K_greedy_200_tokens.txt").read_bytes()


@only("numpy", "torch", "cupy")
def test_one_token_after_another(library: Backend, own: Any, story: bytes) -> None:
    model, params = pretrained.load(published("stories260K.bin"), backend=library.name)
    (ids,) = generate(model, params, [[BOS]], max_new_tokens=LENGTH)
    assert own.decode(ids).encode() == story


def test_as_a_stream(loaded: tuple[Any, Any], own: Any, story: bytes) -> None:
    pieces = list(stream_text(*loaded, own, "", max_new_tokens=LENGTH))
    assert "".join(pieces).encode() == story
    assert len(pieces) > LENGTH * 0.9


def test_in_a_batch_padded_on_the_left(loaded: tuple[Any, Any], own: Any, story: bytes) -> None:
    """Each row begins at another place of the story, and goes on as it does."""
    ids = own.encode(story.decode())
    prompts = [ids[:n] for n in (1, 90, 7, 33)]
    for prompt, new in zip(prompts, generate(*loaded, prompts, max_new_tokens=110), strict=True):
        assert story.startswith(own.decode(prompt + new).encode())


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_after_a_prompt_that_was_read_in_chunks(
    loaded: tuple[Any, Any], own: Any, story: bytes, chunk: int
) -> None:
    ids = own.encode(story.decode())[:100]
    prefix = prefill(*loaded, [ids], chunk=chunk)
    (new,) = generate(*loaded, prefix, max_new_tokens=LENGTH + 1 - len(ids))
    assert own.decode(ids + new).encode() == story


@pytest.mark.parametrize(("n_layers", "k"), [(1, 2), (3, 4), (5, 6)])
def test_by_the_guesses_of_its_own_first_layers(
    loaded: tuple[Any, Any], own: Any, story: bytes, n_layers: int, k: int
) -> None:
    model, params = loaded
    stack = params.stack._replace(blocks=params.stack.blocks[:n_layers])
    draft = replace(model, blocks=model.blocks[:n_layers]), params._replace(stack=stack)
    rounds = list(speculative(model, params, *draft, [BOS], k=k, max_new_tokens=LENGTH))
    assert own.decode([i for new in rounds for i in new]).encode() == story
    if n_layers == len(model.blocks):
        assert len(rounds) == -(-LENGTH // (k + 1))


def test_one_beam(loaded: tuple[Any, Any], own: Any, story: bytes) -> None:
    (((ids, _),),) = beam_search(*loaded, [[BOS]], n_beams=1, max_new_tokens=LENGTH)
    assert own.decode(ids).encode() == story


@only("torch", "jax", "cupy")
def test_a_seed_writes_the_same_story_on_every_library(
    library: Backend, loaded: tuple[Any, Any], own: Any
) -> None:
    sampler = compose(temperature(0.9), top_p(0.95))
    prompt = own.encode("Once upon a time")
    options: dict[str, Any] = {"max_new_tokens": 30, "sampler": sampler, "seed": 7}
    want = generate(*loaded, [prompt], **options)
    others = pretrained.load(published("stories260K.bin"), backend=library.name)
    assert generate(*others, [prompt], **options) == want
