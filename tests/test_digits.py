"""Arrays of many digits, `xformer gradcheck --digits`, and docs/accuracy.md."""

from __future__ import annotations

import decimal
import math
import re
import runpy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from xformer import backends, ops, tree
from xformer.arrays.digits import Precise
from xformer.arrays.digits import digits as in_digits
from xformer.cli import gradcheck, main
from xformer.proofs.catalogue import Case, cases
from xformer.proofs.digits import CONSTANTS, Accuracy, Errors, accuracy

gmpy2 = pytest.importorskip("gmpy2", reason="extra digits is not installed")

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "accuracy.md").read_text(encoding="utf-8")
LONG = ("additive_attention", "linear_cross_entropy", "experts", "sdpa")  # half of the time
QUICK = [case for case in cases() if case.group == "ops" and case.subject not in LONG]
EPS = 2.0**-52


def by_name(name: str) -> Case:
    (found,) = (case for case in cases() if case.name == name)
    return found


# ---- Gradients ----


@pytest.mark.parametrize(
    "name",
    [
        *("linear_cross_entropy: no b", "experts: 2 of 5", "sdpa: all options, sinks too"),
        *("additive_attention: S > T", "block: Shaw", "block: XL", "mixture: 2 of 3"),
        *("EncoderDecoder: T5", "stack: other windows, rotary", "LanguageModel: experts"),
    ],
)
def test_to_fifty_digits(name: str) -> None:
    check(by_name(name))


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_every_case_to_fifty_digits(case: Case) -> None:
    check(case)


def check(case: Case) -> None:
    found = accuracy(case)
    assert found.ok
    assert found.agreed == 50 or case.subject in CONSTANTS
    assert max(*found.reference, *found.kernels) < 1e-12


class Scaled(NamedTuple):
    factor: float

    def backward(self, dy: Any) -> Any:
        return dy * self.factor


def scaled(note: str, forward: Any, factor: float) -> Case:
    def make(rng: Any, backend: Any) -> Any:
        return lambda x: (forward(x), Scaled(factor)), (rng.normal((5,)),)

    return Case("ops", f"scaled: {note}", make)


def test_a_constant_in_float64_is_found() -> None:
    """x / 3 and x * (1 / 3) differ by less than any check in float64 can show."""
    case = scaled("third", lambda x: x / 3, 1 / 3)
    assert case.check(backends.get("numpy"), exact=True).ok
    found = accuracy(case)
    assert found.agreed == 16
    assert not found.ok
    assert accuracy(scaled("half", lambda x: x / 2, 0.5)).ok


def test_a_gradient_that_is_not_finite_is_no_proof() -> None:
    for factor in (math.nan, math.inf):
        with np.errstate(invalid="ignore"):
            found = accuracy(scaled("broken", lambda x: x, factor))
        assert (found.agreed, found.ok) == (0, False)


def test_agreed() -> None:
    errors = Errors(0.0, 0.0)
    for proof, agreed in ((0.0, 50), (1e-70, 50), (2e-17, 16), (3.0, 0), (math.nan, 0)):
        assert Accuracy(QUICK[0], 50, proof, errors, errors).agreed == agreed


@pytest.mark.parametrize("name", ["layer_norm: x (5, 7), eps inside", "sdpa: softcap, bias"])
def test_differences_are_the_judge(name: str) -> None:
    """The derivative by a central difference, without dual numbers, to 30 digits."""
    case = by_name(name)
    with in_digits(50) as backend:
        fn, args = case.build(backend)
        rng = backend.generator(3, "float64")
        v = [rng.normal(x.shape) for x in args]
        y, cache = fn(*args)
        dy = rng.normal(y.shape)
        h = gmpy2.mpfr(10) ** -16

        def along(step: Any) -> Any:
            moved = [x + Precise(v.numbers * step) for x, v in zip(args, v, strict=True)]
            return (fn(*moved)[0] * dy).numbers.sum()

        numeric = (along(h) - along(-h)) / (2 * h)
        grads = cache.backward(dy)
        by_hand = sum((g * x).numbers.sum() for g, x in zip(grads[: len(v)], v, strict=True))
        assert abs(numeric - by_hand) < 1e-29 * abs(by_hand)
        assert abs(numeric - by_hand) > 0  # a difference is not exact


# ---- The arrays ----


def test_numbers_have_the_digits() -> None:
    """exp, log and sqrt of Python's decimal numbers, and identities of the others."""
    with decimal.localcontext() as context, in_digits(60) as backend:
        context.prec = 80
        xp = backend.xp
        host = np.asarray([0.3, 1.7, 2.9])
        x = backend.asarray(host)

        def near(y: Any, wanted: list[Any]) -> bool:
            got = [decimal.Decimal(f"{number:.75g}") for number in y.numbers]
            pairs = zip(got, wanted, strict=True)
            return all(abs(a - b) < decimal.Decimal("1e-60") for a, b in pairs)

        exact = [decimal.Decimal(float(number)) for number in host]
        assert near(xp.exp(x), [number.exp() for number in exact])
        assert near(xp.log(x), [number.ln() for number in exact])
        assert near(xp.sqrt(x), [number.sqrt() for number in exact])
        assert near(x**-0.5, [1 / number.sqrt() for number in exact])
        assert near(1 / x, [1 / number for number in exact])
        e = [(2 * number).exp() for number in exact]
        assert near(xp.tanh(x), [(number - 1) / (number + 1) for number in e])
        assert near(xp.sin(x) ** 2 + xp.cos(x) ** 2, [decimal.Decimal(1)] * 3)
        assert near(xp.sin(x) - backend.asarray(np.sin(host)), [decimal.Decimal(0)] * 3) is False
        assert np.allclose(backend.to_numpy(xp.sin(x)), np.sin(host), rtol=EPS, atol=0)


FUNCTIONS = {
    "abs": lambda xp, x, i: xp.abs(x),
    "sign": lambda xp, x, i: xp.sign(x),
    "isfinite": lambda xp, x, i: xp.isfinite(x / x) & ~xp.isnan(x),
    "infinite": lambda xp, x, i: xp.isfinite(x * float("inf")),
    "compared": lambda xp, x, i: (x < 0) | (x >= 0.5) & (x != 0.25),
    "where": lambda xp, x, i: xp.where(x > 0, x, 0.0) / 3,
    "maximum": lambda xp, x, i: xp.minimum(xp.maximum(x, -0.5), 0.5) / 3,
    "max": lambda xp, x, i: xp.max(x, axis=-1, keepdims=True) - xp.min(x),
    "mean": lambda xp, x, i: xp.mean(x, axis=(0, 2)) + xp.mean(x),
    "sum": lambda xp, x, i: xp.sum(x, axis=1, keepdims=True) + xp.sum(x[:0, ...], axis=0),
    "matmul": lambda xp, x, i: x @ x.mT + xp.matmul(x, xp.matrix_transpose(x)),
    "no terms": lambda xp, x, i: x[..., :0] @ x.mT[:, :0, :] + 1,
    "likes": lambda xp, x, i: xp.zeros_like(x) / 3 + xp.ones_like(x) + xp.full_like(x, 0.5),
    "integers": lambda xp, x, i: xp.zeros_like(x, dtype=xp.int64),
    "take": lambda xp, x, i: xp.take(x, i, axis=0),
    "concat": lambda xp, x, i: (
        xp.concat([x, x / 2], axis=1) + xp.stack([x[0, 0, 0], x[1, 1, 1]])[0]
    ),
    "sort": lambda xp, x, i: xp.sort(x, axis=-1, descending=True),
    "argsort": lambda xp, x, i: xp.argsort(x, axis=-1, descending=True),
    "astype": lambda xp, x, i: xp.astype(i, xp.float64) / 3 + xp.astype(x > 0, x.dtype)[0, 0, 0],
    "truncated": lambda xp, x, i: xp.astype(x * 10, xp.int64),
    "arange": lambda xp, x, i: xp.arange(3, dtype=xp.float64) / 7,
    "cumulative_sum": lambda xp, x, i: xp.cumulative_sum(x, axis=1),
    "broadcast": lambda xp, x, i: xp.broadcast_to(x[:1, ...], x.shape) - 1,
    "negated": lambda xp, x, i: 1 - -x,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_those_of_numpy(name: str) -> None:
    host, index = np.random.default_rng(0).normal(size=(2, 3, 4)), np.asarray([1, 0, 1])
    wanted = np.asarray(FUNCTIONS[name](backends.get("array-api-strict").xp, *strict(host, index)))
    with in_digits(30) as backend:
        y = FUNCTIONS[name](backend.xp, backend.asarray(host), index)
        assert isinstance(y, Precise) == (wanted.dtype.kind == "f")
        assert not isinstance(y, Precise) or all(isinstance(n, gmpy2.mpfr) for n in y.numbers.flat)
        got = backend.to_numpy(y)
    assert got.dtype == wanted.dtype
    assert np.allclose(got, wanted, rtol=8 * EPS, atol=8 * EPS)
    assert got.shape == wanted.shape


def strict(*arrays: Any) -> list[Any]:
    return [backends.get("array-api-strict").asarray(x) for x in arrays]


def test_the_context() -> None:
    """Its digits end with it, and contexts may be nested."""
    before = gmpy2.get_context().precision
    with in_digits(20) as backend:
        third = 1 / backend.asarray(np.asarray(3.0))
        with in_digits(100) as inner:
            assert f"{(1 / inner.asarray(np.asarray(3.0))).numbers[()]:.99f}".endswith("3" * 99)
        assert third.numbers[()].precision == (1 / backend.asarray(3.0)).numbers[()].precision
        assert float(third) == 1 / 3
        assert bool(third)
        assert "Precise(" in repr(third)
    assert gmpy2.get_context().precision == before


def test_values_of_float64_are_exact() -> None:
    host = np.random.default_rng(1).normal(size=(3, 5))
    with in_digits(17) as backend:
        assert np.array_equal(backend.to_numpy(backend.asarray(host)), host)
        assert backend.to_numpy(backend.asarray(np.arange(3))).dtype == np.dtype("int64")


def test_another_library_is_the_judge() -> None:
    """mparray, an array library with mpmath's numbers, gives the same 50 digits of a gradient."""
    mparray = pytest.importorskip("mparray", reason="mparray is not installed")
    import mpmath

    host = np.random.default_rng(2).normal(size=(3, 1, 2, 5, 4))
    found: list[list[Any]] = []
    with in_digits(50) as backend, mpmath.workdps(65):
        for asarray in (backend.asarray, mparray.asarray):
            q, k, v, dctx = (asarray(part) for part in (*host, host[0]))
            ctx, cache = ops.sdpa(q, k, v, causal=True)
            grads = tree.flatten({"ctx": ctx, "grads": cache.backward(dctx)[:3]})
            found.append([getattr(x, "numbers", getattr(x, "_data", None)) for x in grads.values()])
        for ours, theirs in zip(*found, strict=True):
            for a, b in zip(ours.flat, theirs.flat, strict=True):
                assert abs(mpmath.mpf(f"{a:.70g}") - b) < 1e-50


# ---- The command ----


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gradcheck", "--digits", "40", "--only", "layer_norm"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert re.search(r"^layer_norm +40( +\d\.\de-1[67]){4}$", out, re.MULTILINE)
    assert "13 checks, 0 failed" in out
    assert main(["gradcheck", "--digits", "40", "--only", "erf:", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^erf: x \(5, 11\) +17 ", out, re.MULTILINE)
    assert "fewer than 40 digits because of constants in float64:\n  erf: coefficients" in out


def test_a_wrong_gradient(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(x: Any) -> Any:
        raise ValueError("scaled: no")

    third = scaled("third", lambda x: x / 3, 1 / 3)
    broken = scaled("broken", raises, 1.0)
    monkeypatch.setattr(gradcheck, "cases", lambda: (third, broken))
    assert main(["gradcheck", "--digits", "50"]) == 1
    out, err = capsys.readouterr()
    assert "scaled: third: the gradients agree to 16 digits only" in out
    assert "scaled: broken: the gradients agree to 0 digits only" in out
    assert "2 checks, 2 failed" in out
    assert "ValueError: scaled: no" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["16"], "--digits must be an int of at least 17, got 16"),
        (["10001"], "--digits must be at most 10000, got 10001"),
        (["50", "--exact"], "--digits is not possible with --exact or --backend"),
        (["50", "--backend", "numpy"], "--digits is not possible with --exact or --backend"),
    ],
)
def test_wrong_options(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gradcheck", "--only", "mse", "--digits", *words]) == 1
    assert said in capsys.readouterr().err


def test_without_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gmpy2", None)
    assert main(["gradcheck", "--only", "mse", "--digits", "50"]) == 1
    assert "digits needs gmpy2: " in (err := capsys.readouterr().err)
    assert err.endswith("Install it with pip install 'xformer-array[digits]'\n")


# ---- The page ----


GROUPS = ("ops", "layers", "models")


def listed(group: str) -> dict[str, list[str]]:
    """The rows of a table by the name of their subject."""
    text = PAGE.partition(f"<!-- {group} -->")[2].partition("<!-- end -->")[0]
    lines = re.findall(r"^\| `.*", text, re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row for row in rows}


@pytest.mark.parametrize("group", GROUPS)
def test_the_page_has_every_subject(group: str) -> None:
    subjects = dict.fromkeys(case.subject for case in cases() if case.group == group)
    assert list(listed(group)) == list(subjects)


@pytest.mark.parametrize("group", GROUPS)
def test_only_constants_keep_gradients_from_fifty_digits(group: str) -> None:
    for name, (_, agreed, *_, constants) in listed(group).items():
        assert (agreed == "50") == (constants == "")
        assert constants == CONSTANTS.get(name, "")


def test_no_constants_are_listed_in_vain() -> None:
    named = {name for group in GROUPS for name, row in listed(group).items() if row[-1]}
    assert named == set(CONSTANTS)


def compare(group: str, cases: list[Case]) -> None:
    """The rows of these cases, made anew, are those of the page."""
    made = runpy.run_path(str(DOCS / "make_accuracy_page.py"))
    rows = list(made["rows"](cases))
    assert rows
    for row in rows:
        known = listed(group)[row[0].strip("`")]
        assert (known[1], known[-1]) == (row[1], row[-1])
        for old, new in zip(map(float, known[2:6]), map(float, row[2:6]), strict=True):
            assert old / 4 <= new <= old * 4  # the processor, and BLAS


def test_the_page_is_up_to_date_for_quick_ops() -> None:
    compare("ops", QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_the_page_is_up_to_date(group: str) -> None:
    compare(group, [case for case in cases() if case.group == group])


def test_the_code_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(block, {"__name__": "accuracy"})
    said = re.findall(r"# (0\.\d+)\.\.\.", block)
    assert capsys.readouterr().out.startswith(said[0])
