"""numba's `ahead`: the tokens, logits and states of as many calls for one token each."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from causal_models import V

from xformer import dispatch, reference_only, tree
from xformer.generation import generate, prefill, stream
from xformer.generation.samplers import temperature
from xformer.models import LanguageModel
from xformer.models.ahead import ahead as op

pytest.importorskip("numba", reason="extra numba is not installed")
from test_numba_advance import replaced
from test_numba_extend import MODELS, numba, of_float32, why_not  # noqa: F401 - a fixture
from xformer.backends.append import LEAST
from xformer.backends.numba import extend, linear, plan

LONG = replace(MODELS["rotary"], blocks=MODELS["rotary"].blocks[:1])


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each call of the kernel, how many tokens it has read."""
    calls: list[int] = []
    own = extend.ahead

    def run(*args: Any, **options: Any) -> Any:
        found = own(*args, **options)
        calls.append(1 + len(found[0][0]))
        return found

    replaced(monkeypatch, op, own, run)
    return calls


def begun(model: LanguageModel, params: Any) -> Any:
    """A text of six tokens, of which the last has come alone."""
    _, state = model.extend(params, np.arange(5)[None], model.start())
    return model.extend(params, np.array([[7]]), state)[1]


def one_by_one(model: Any, params: Any, state: Any, n: int) -> tuple[list[int], list[Any], Any]:
    """The ids of n tokens more, the first of which is 3; logits after each, and the state."""
    ids, every = [3], []
    for _ in range(n):
        logits, state = model.extend(params, np.array([ids[-1:]]), state)
        every.append(logits)
        ids.append(int(logits.argmax()))
    return ids[:-1], every, state


def run(model: Any, params: Any, state: Any, most: int, stop: Any = ()) -> Any:
    options = {"network": model, "state": state, "most": most, "stop": stop}
    return op(np.array([[3]]), params, **options)


def require_equal(got: Any, wanted: Any) -> None:
    """States with the same keys and values."""
    assert got.length == wanted.length
    for one, other in zip(got.past, wanted.past, strict=True):
        np.testing.assert_array_equal(one.k, other.k)
        np.testing.assert_array_equal(one.v, other.v)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pair", [8, plan.PAIR])
def test_as_one_by_one(
    name: str, pair: int, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, in the buffers of the text and in new ones; and in small pieces, so that all
    threads have some of them."""
    monkeypatch.setattr(plan, "PAIR", pair)
    if pair == 8:
        monkeypatch.setattr(linear, "LEAST", 8)
        monkeypatch.setattr(extend, "LEAST", 8)
    model, chosen = MODELS[name], set()
    for seed in range(3):
        params = of_float32(model, seed)
        ids, every, wanted = one_by_one(model, params, begun(model, params), 11)
        chosen.update(ids)
        state = begun(model, params)
        for _ in ("its own buffers", "new ones, since those are taken"):
            more, logits, got = run(model, params, state, 11)
            assert [3, *more[0]] == ids and len(more) == 1
            np.testing.assert_array_equal(logits, every[-1])
            require_equal(got, wanted)
        one, other = (model.extend(params, np.array([[1]]), text) for text in (got, wanted))
        np.testing.assert_array_equal(one[0], other[0])
        require_equal(one[1], other[1])
    assert read == [11] * 6 and len(chosen) > 4


def test_it_reads_none_that_ends_a_text(read: list[int]) -> None:
    model = MODELS["learned positions"]
    params = of_float32(model)
    ids, every, _ = one_by_one(model, params, begun(model, params), 12)
    last = next(i for i in range(4, 12) if ids[i] not in ids[:i])
    stop = frozenset({V + 5, -1, 1 << 64, ids[last]})
    more, logits, got = run(model, params, begun(model, params), 12, stop)
    assert [3, *more[0]] == ids[:last] and read == [last]
    np.testing.assert_array_equal(logits, every[last - 1])
    require_equal(got, one_by_one(model, params, begun(model, params), last)[2])
    # Columns that it had for the others are free again.
    _, going_on = model.extend(params, np.array([[ids[last]]]), got)
    assert going_on.past.rooms == got.past.rooms
    require_equal(going_on, one_by_one(model, params, begun(model, params), last + 1)[2])


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_it_reads_none_after_logits_that_are_no_numbers(bad: float, read: list[int]) -> None:
    model = MODELS["a head with a bias"]
    params = of_float32(model)
    bias = params.head.b.copy()
    bias[4] = bad
    params = params._replace(head=params.head._replace(b=bias))
    more, logits, state = run(model, params, begun(model, params), 5)
    assert more == [[]] and read == [1] and state.length == 7
    assert not np.isfinite(logits[0, 4])
    with pytest.raises(ValueError, match="largest logit of each row must be finite"):
        generate(model, params, [[1, 2]], max_new=4)


def test_logits_that_exclude_tokens(read: list[int]) -> None:
    model = MODELS["a head with a bias"]
    params = of_float32(model)
    bias = params.head.b.copy()
    bias[4:] = -np.inf
    params = params._replace(head=params.head._replace(b=bias))
    ids = generate(model, params, [[1, 2]], max_new=9)
    assert read == [8]
    with reference_only():
        assert generate(model, params, [[1, 2]], max_new=9) == ids
    assert max(ids[0]) < 4
    params = params._replace(head=params.head._replace(b=np.full_like(bias, -np.inf)))
    more, logits, _ = run(model, params, begun(model, params), 5)
    assert more == [[]] and np.isneginf(logits).all()


def test_a_text_longer_than_its_room(read: list[int]) -> None:
    params = of_float32(LONG)
    n = 3 * LEAST
    ids = generate(LONG, params, [[1, 2, 3]], max_new=n)
    assert len(ids[0]) == n and max(read) == extend.MOST and len(read) < n / 8
    # The last is not read, and the first of new buffers comes alone, as does one of a last column.
    assert n - 8 < sum(read) < n
    text, new = prefill(LONG, params, [[1, 2, 3]]), []
    logits, state = text.logits, text.state
    for _ in range(n):
        new.append(int(logits.argmax()))
        logits, state = LONG.extend(params, np.array([new[-1:]]), state)
    assert ids == [new]


def test_steps_of_a_stream(read: list[int]) -> None:
    model = MODELS["learned positions"]
    params = of_float32(model)
    wanted = generate(model, params, [[1, 2]], max_new=20, sampler=temperature(0.0))
    assert not read  # what is drawn is not known ahead
    assert [list(step) for step in stream(model, params, [[1, 2]], max_new=20)] == [
        [i] for i in wanted[0]
    ]
    assert sum(read) == 19 and len(read) < 4

    class Same(list[Any]):
        """A filter, of which Python says that there is nothing in it."""

        def __call__(self, logits: Any, ids: Any) -> Any:
            return temperature(0.0)(logits, ids)

    before = len(read)
    assert generate(model, params, [[1, 2]], max_new=20, sampler=Same()) == wanted
    assert len(read) == before
    for n in (0, 1, 2, 3):
        assert generate(model, params, [[1, 2]], max_new=n) == [wanted[0][:n]]
    last = wanted[0][6]
    first = wanted[0].index(last)
    ended = generate(model, params, [[1, 2]], max_new=20, stop={last, 1 << 64})
    assert ended == [wanted[0][: first + 1]]
    before = len(read)
    both = generate(model, params, [[1, 2], [1, 2]], max_new=20)
    assert both == [*wanted, *wanted] and len(read) == before  # of one text alone
    # The prefix is what it was, and goes on as often as one likes.
    prefix = prefill(model, params, [[1, 2]])
    for _ in range(2):
        assert generate(model, params, prefix, max_new=20) == wanted


def test_up_to_the_end_of_the_context(read: list[int]) -> None:
    model = MODELS["learned positions"]  # of 40 tokens
    params = of_float32(model)
    (whole,) = generate(model, params, [[1, 2]], max_new=39)
    assert generate(model, params, [[1, 2]], max_new=20) == [whole[:20]]
    read.clear()
    slid = generate(model, params, [[1, 2]], max_new=45, slide=True, compiled=False)
    assert sum(read) == 38
    with reference_only():
        assert generate(model, params, [[1, 2]], max_new=45, slide=True) == slid


def test_frequencies_that_change_with_the_length(read: list[int]) -> None:
    rotary = replace(MODELS["rotary"].rotary, scaling="dynamic", factor=2.0, max_len=20)  # type: ignore[type-var]
    model = replace(MODELS["rotary"], rotary=rotary)
    params = of_float32(model)
    ids = generate(model, params, [[1, 2]], max_new=30)
    assert sum(read) == 18  # up to the 20th token
    with reference_only():
        assert generate(model, params, [[1, 2]], max_new=30) == ids


def test_large_weights_are_read_for_one_token(
    read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS["rotary"]
    params = of_float32(model)
    blocks = sum(p.size for p in tree.flatten(params.stack).values() if p.ndim == 2)
    weights = 4 * (blocks + params.embed.table.size)
    wanted = generate(model, params, [[1, 2]], max_new=9)
    for n, calls in ((1, []), (3, [3, 3, 2])):
        read.clear()
        keys = 4 * 11 * 2 * 12 * len(model.blocks)  # of more tokens than there are
        monkeypatch.setattr(extend, "READ", n * (weights + keys))
        assert generate(model, params, [[1, 2]], max_new=9) == wanted
        assert read == calls


def test_who_cannot_be_read_ahead() -> None:
    model = MODELS["learned positions"]
    params = of_float32(model)
    state, one = begun(model, params), np.array([[3]])

    def why(tokens: Any = one, **other: Any) -> str:
        options = {"network": model, "state": state, "most": 4, "stop": ()} | other
        return extend.not_ahead(tokens, params, **options) or ""

    class Negated(LanguageModel):
        def extend(self, *args: Any, **options: Any) -> Any:
            logits, state = super().extend(*args, **options)
            return -logits, state

    own = Negated(model.embed, model.blocks)
    assert why() == ""
    assert "not several tokens" in why(most=1)
    assert "not several tokens of one text" in why(np.array([[3], [3]]))
    assert "of another kind" in why(network=object()) and "of another kind" in why(network=own)
    assert "not causal" in why(network=replace(model, causal=False))
    assert "fit the model's context" in why(most=35)
    assert why(np.array([[V]])) == why_not(model, params, state, np.array([[V]]))
    text = dispatch.explain(op, one, params, network=model, state=state, most=4, stop=())
    assert "numba.extend.ahead" in text.splitlines()[0]
    negated = generate(own, params, [[1, 2]], max_new=9)
    with reference_only():
        assert generate(own, params, [[1, 2]], max_new=9) == negated


def test_the_reference_reads_one() -> None:
    model = MODELS["rotary"]
    params = of_float32(model)
    state = begun(model, params)
    with reference_only():
        more, logits, got = run(model, params, state, 5)
        wanted, longer = model.extend(params, np.array([[3]]), state)
    assert more == [[]] and got.length == longer.length == 7
    np.testing.assert_array_equal(logits, wanted)


def test_threads_that_go_on_with_one_text(read: list[int]) -> None:
    """One gets its buffers, the others new ones."""
    params = of_float32(LONG)
    prompt = [[1, 2, 3]]
    wanted = generate(LONG, params, prompt, max_new=40)
    read.clear()
    gate = threading.Barrier(4)
    prefix = prefill(LONG, params, prompt)

    def work(_: int) -> Any:
        gate.wait(10)
        return generate(LONG, params, prefix, max_new=40, compiled=False)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(4)))
    assert found == [wanted] * 4 and sum(read) > 4 * 30
