"""Exercises: a file that the learner completes, inputs, the right answer, and known mistakes.

There are two kinds. A gradient exercise has a forward function and its backward:

    y, saved = softmax(x)                # saved: what the learner's backward needs
    dx = softmax_backward(dy, saved)     # gradients of the positional arguments, in order

An exercise without a backward has one function, whose outputs are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from xformer import ops

Draw = Callable[[np.random.Generator], tuple[dict[str, Any], dict[str, Any]]]
Formula = Callable[[SimpleNamespace, Any], dict[str, Any]]

GRADIENTS = """\
The first function returns (y, saved). You choose what is in `saved`: all that backward needs.
The second one gets `saved` and dy, the gradient of the loss with respect to y, in the shape of y.
It returns the gradients of the arrays in the order of the arguments: {gradients}.

"""
RULES = """\
Use functions of the array API standard only (`xp.exp(x)`, `xp.where`, `@`, and
`xp.sum(x, axis=-1, keepdims=True)`, not `x.sum(-1)`): then the file runs on NumPy, PyTorch, JAX and
others. Do not write into arrays; those of JAX cannot be written to.

Lecture: docs/lectures/{lecture}.md
Check:   xformer exercise {name} --check
"""
IMPORTS = "from array_api_compat import array_namespace\n"


class Mistake(NamedTuple):
    """A known wrong formula.

    says: what is wrong and what is right.
    formula: formula(a, dy) returns NumPy arrays by their rows ("y", "dx"); a has the inputs and
        options as attributes. ValueError if the shapes of `a` do not fit the wrong formula.
    errata: the name of the same mistake in tests/documents/test_errata.py.
    """

    says: str
    formula: Formula
    errata: str = ""


@dataclass(frozen=True)
class Exercise:
    """An exercise, for one or two functions of a file.

    name: the name of the exercise and its file.
    summary: one line.
    task: the text of the file's docstring, without the rules that all exercises share.
    code: the functions of the file, incomplete or with a mistake.
    reference: a function of the same arguments. It returns (y, cache), and `cache.backward(dy)` the
        gradients; without a backward it returns the outputs.
    draws: by the name of the case, functions that draw (arrays, options) of NumPy arrays.
    source, page: the file of our own implementation, and the page about it.
    outputs: names of what the function returns, without `saved`.
    has_backward: whether there is a backward.
    mistakes: known wrong formulas.
    function: the name of the function; None: `name`.
    planted: what is wrong with the code, if the exercise is to find the mistake in it.
    lecture: 1 to 6; `EXERCISES` sets it.
    """

    name: str
    summary: str
    task: str
    code: str
    reference: Callable[..., Any]
    draws: dict[str, Draw]
    source: str
    page: str
    outputs: tuple[str, ...] = ("y",)
    has_backward: bool = True
    mistakes: tuple[Mistake, ...] = ()
    function: str | None = None
    planted: tuple[str, ...] = ()
    lecture: int = 0

    @property
    def function_name(self) -> str:
        """The name of the forward function in the learner's file."""
        return self.function or self.name

    @property
    def stub(self) -> str:
        """The text of the file that the learner completes."""
        rules = RULES.format(name=self.name, lecture=self.lecture)
        if self.has_backward:
            rules = GRADIENTS.format(gradients=", ".join(self.gradient_names)) + rules
        return f'"""{self.task}\n{rules}"""\n\n{IMPORTS}{self.code}'

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """The names of the gradients: d and the name of the array."""
        if not self.has_backward:
            return ()
        arrays, _ = self.draw(next(iter(self.draws)))
        return tuple(f"d{name}" for name in arrays)

    def draw(self, case: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arrays and options of a case; the same in every call."""
        return self.draws[case](np.random.default_rng(list(case.encode())))


def unwritten(
    signature: str, formula: str, returns: str = "y, saved", *, has_backward: bool = True
) -> str:
    """The `code` of a function that the learner writes, and of its backward.

    signature: name, arrays and options: "dropout(x, *, rate, key)".
    formula: the docstring.
    """
    name, _, arguments = signature.removesuffix(")").partition("(")
    arrays = arguments.partition(", *, ")[0].split(", ")
    code = f'''

def {signature}:
    """{formula}"""
    xp = array_namespace({arrays[0]})
    raise NotImplementedError  # return {returns}
'''
    if not has_backward:
        return code
    *others, last = arrays
    grads = ", ".join(f"d{array}" for array in arrays)
    what = f"{grads}, in the shape of {last}"
    if others:
        what = f"({grads}), in the shapes of {', '.join(others)} and {last}"
    return f'''{code}

def {name}_backward(dy, saved):
    """{what}."""
    raise NotImplementedError  # return {grads}
'''


def of_op(name: str) -> dict[str, Any]:
    """The reference, source and page of an exercise about one of our ops."""
    page = f"docs/derivations/{name}.md"
    return {"reference": getattr(ops, name), "source": f"xformer/ops/{name}.py", "page": page}


def normal(
    options: dict[str, Any] | Callable[[np.random.Generator], dict[str, Any]] | None = None,
    scale: float = 1.0,
    **shapes: tuple[int, ...],
) -> Draw:
    """A function that draws normal arrays of these shapes, of standard deviation `scale`.

    options: of the exercise's function, or a function that draws them.
    """

    def draw(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
        arrays = {name: scale * rng.normal(size=shape) for name, shape in shapes.items()}
        return arrays, options(rng) if callable(options) else dict(options or {})

    return draw
