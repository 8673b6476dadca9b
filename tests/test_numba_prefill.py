"""numba's `advance` by the first tokens of texts: as the reference, and as far as it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from causal_models import NAMES, V, causal
from test_numba_advance import LAYOUTS, replaced, small
from test_numpy_advance import FORMS, LEFT

from xformer import dispatch, kernels, reference_only, tree
from xformer.layers.advance import advance
from xformer.typing import Array

pytest.importorskip("numba", reason="extra numba is not installed")
from xformer.backends.numba import blocks, prefill


@pytest.fixture(autouse=True, params=[0, 1000], ids=["columns", "rows"])
def numba(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What pieces are of, as soon as each thread has one."""
    monkeypatch.setattr(blocks, "WIDE", request.param)
    with kernels("numba"), threadpoolctl.threadpool_limits(3, user_api="blas"):
        yield


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One element for each time that the kernel has read first tokens: how many of a text."""
    calls: list[int] = []

    def run(x: Array, *args: Any, **options: Any) -> Any:
        calls.append(x.shape[1])
        return prefill.advance(x, *args, **options)

    replaced(monkeypatch, advance, prefill.advance, run)
    return calls


def begun(
    model: Any, params: Any, shape: tuple[int, int], seed: int, mask: Array | None = None
) -> list[Any]:
    """Logits of all first tokens and of one more, and the state after each of the two."""
    ids = np.random.default_rng(seed).integers(0, V, (shape[0], shape[1] + 1))
    first, state = model.extend(params, ids[:, :-1], model.start(), every=True, mask=mask)
    last, after = model.extend(params, ids[:, -1:], state)
    return [first, last, *(x for s in (state, after) for own in s.past for x in (own.k, own.v))]


def require_exact(model: Any, params: Any, shape: tuple[int, int], **options: Any) -> None:
    """Within twice the reference's distance from the reference in float64, of five texts' median.

    Of one text it is a matter of luck: layers blow up what a few numbers are off.
    """
    double = tree.map(lambda p: p.astype(np.float64), params)
    offs, scales = [], []
    for seed in range(5):
        got = begun(model, params, shape, seed, **options)
        with reference_only():
            plain = begun(model, params, shape, seed, **options)
            exact = begun(model, double, shape, seed, **options)
        for one, wanted in zip(got, exact, strict=True):
            assert one.dtype == np.float32 and one.shape == wanted.shape
        offs.append([[_size(a - w) for a, w in zip(x, exact, strict=True)] for x in (got, plain)])
        scales.append([_size(wanted) for wanted in exact])
    off, off_plain = np.median(offs, axis=0)
    assert np.all(off <= 2 * off_plain + 2 * np.finfo(np.float32).eps * np.median(scales, axis=0))


def _size(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2)))


@pytest.mark.parametrize("shape", [(1, 1), (1, 23), (3, 5), (4, 16)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, shape: tuple[int, int], ran: list[int]) -> None:
    for interleaved in (False, True):
        require_exact(*small(form, interleaved=interleaved), shape)
    assert ran == 10 * [shape[1]]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_layout(layout: Callable[[Array], Array], ran: list[int]) -> None:
    for form in FORMS:
        model, params = small(form)
        params = params._replace(stack=tree.map(layout, params.stack))
        require_exact(model, params, (2, 9))
    assert len(ran) == 5 * len(FORMS)


@pytest.mark.parametrize("name", NAMES)
def test_every_family(name: str, ran: list[int]) -> None:
    """Post-LN too, of which loops by one token know nothing."""
    model, params = causal(name)
    params = tree.map(lambda p: p.astype(np.float32), params)
    require_exact(getattr(model, "network", model), params, (2, 7))
    assert len(ran) == (0 if name in LEFT - {"post-norm"} else 5)


def test_some_texts_after_the_others(ran: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of each to its own place."""
    model, params = small("gated silu, no biases")
    seen: list[int] = []
    through = blocks._through

    def counted(plan: Any, x: Array, *given: Any) -> None:
        seen.append(len(x))
        through(plan, x, *given)

    monkeypatch.setattr(blocks, "_through", counted)
    monkeypatch.setattr(blocks, "SIZE", 2 * 6 * 80)
    require_exact(model, params, (5, 6))
    assert ran == 5 * [6] and seen == 5 * [2, 2, 1]


def test_the_text_of_another_stays(ran: list[int]) -> None:
    """Two texts that begin alike have memory of their own, and so have states of one text."""
    model, params = small("layer norms")
    ids = np.arange(12)[None] % V
    _, one = model.extend(params, ids, model.start())
    before = [x.copy() for own in one.past for x in (own.k, own.v)]
    _, other = model.extend(params, ids + 1, model.start())
    model.extend(params, ids[:, :1], other)
    after = [x for own in one.past for x in (own.k, own.v)]
    assert all(map(np.array_equal, before, after)) and len(ran) == 2


def test_what_it_leaves_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model, params = small("layer norms")
    ids = np.ones((2, 6), int)
    mask = np.ones((2, 6), bool)
    mask[0, :3] = False
    require_exact(model, params, (2, 6), mask=mask)
    _, state = model.extend(params, ids, model.start(), mask=mask)
    x, start = np.ones((2, 6, 24), np.float32), model.start().past
    options: Any = {"configs": model.blocks, "past": start, "n_past": 0}
    said = dispatch.explain(advance, x, params.stack, **options)
    assert "numba.prefill.advance" in said.splitlines()[0]
    for why, given in (
        ("not the first tokens", (x, options | {"past": state.past, "n_past": 6})),
        ("not the first tokens", (x, options | {"past": start[:2]})),
        ("not the first tokens", (x, options | {"past": (state.past[0], *start[1:])})),
        ("float32", (x.astype(np.float64), options)),
        ("padding", (x, options | {"mask": np.ones((2, 1, 1, 6), bool)})),
    ):
        assert why in str(prefill.outside(given[0], params.stack, **given[1]))
    shared = params.stack._replace(relative=np.ones((4, 4), np.float32))
    assert "relative bias" in str(prefill.outside(x, shared, **options))
    monkeypatch.setattr(blocks, "SIZE", 100)
    monkeypatch.setattr(prefill, "SIZE", 100)
    assert "more than 100 numbers" in str(prefill.outside(x, params.stack, **options))
