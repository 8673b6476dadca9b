"""Optimisers by name, and parameter groups: one optimiser made of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

from xformer.base import tree
from xformer.base.choices import require_one_of
from xformer.base.typing import Array
from xformer.dispatch.checks import number, plain_numbers, require_sizes
from xformer.optim._checks import learning_rate, matching, rebuilt
from xformer.optim.adafactor import adafactor, adafactor_init
from xformer.optim.adam import adam, adam_init, adamw, adamw_init
from xformer.optim.lion import lion, lion_init
from xformer.optim.muon import muon, muon_init
from xformer.optim.sgd import sgd, sgd_init


class Optimiser(NamedTuple):
    """Two pure functions, `init` and `step`.

    A state is a tree of arrays and ints, whose structure is the same after every step.

    If `donate` is true, a step may overwrite params and state, which must not be used afterwards
    (as with donate_argnums of `jax.jit`). Adam and AdamW overwrite them if a kernel runs (on NumPy
    and CuPy), except for arrays that are read-only or share memory. The other optimisers always
    return new arrays.
    """

    init: Callable[[Any], Any]  # params -> state
    step: Callable[..., tuple[Any, Any]]  # (params, grads, state, *, lr, donate, **options) -> both


OPTIMISERS: dict[str, Optimiser] = {
    "sgd": Optimiser(partial(sgd_init, velocity=True), sgd),
    "adam": Optimiser(adam_init, adam),
    "adamw": Optimiser(adamw_init, adamw),
    "lion": Optimiser(lion_init, lion),
    "adafactor": Optimiser(adafactor_init, adafactor),
    "muon": Optimiser(muon_init, muon),
}


@dataclass(frozen=True)
class Rule:
    """Which parameters an optimiser updates, and with which options.

    Rule("stack.blocks.*", "muon", min_ndim=2)

    match: one pattern or several, as in `fnmatch`, for the dotted name of a parameter.
    optimiser: a name in `OPTIMISERS`, or an `Optimiser`.
    lr: a factor of the learning rate of every step.
    options: keyword arguments of the optimiser's step.
    min_ndim: the rule is only for parameters of at least so many dimensions.

    ValueError for an unknown optimiser and for negative numbers, TypeError for an lr that is not a
    number.
    """

    match: str | tuple[str, ...] = "*"
    optimiser: str | Optimiser = "adamw"
    lr: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    min_ndim: int = 0

    def __post_init__(self) -> None:
        plain_numbers(self)
        if isinstance(self.optimiser, str):
            require_one_of("Rule: optimiser", self.optimiser, OPTIMISERS)
        number("Rule", "lr", self.lr, low=0)
        require_sizes("Rule", 0, min_ndim=self.min_ndim)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns as a tuple."""
        return (self.match,) if isinstance(self.match, str) else tuple(self.match)

    def named(self, name: str) -> bool:
        """Whether `name` matches a pattern."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def owns(self, name: str, p: Array) -> bool:
        """Whether the rule is for the parameter p, called `name`."""
        return p.ndim >= self.min_ndim and self.named(name)

    @property
    def pair(self) -> Optimiser:
        """The `Optimiser`, also if the rule has only its name."""
        return OPTIMISERS[self.optimiser] if isinstance(self.optimiser, str) else self.optimiser


def grouped(*rules: Rule) -> Optimiser:
    """An optimiser made of several: the first rule that fits a parameter updates it.

    Each rule's optimiser gets a dict of its parameters by dotted name. The state is a dict of the
    rules' states; its keys are the rules' indices, as strings.

    ValueError if there are no rules. `init` and `step` raise ValueError for a parameter without a
    rule, and for a rule whose patterns match no name.
    """
    if not rules:
        raise ValueError("grouped: there must be at least one Rule, got none")

    def init(params: Any) -> dict[str, Any]:
        parts = _parts(tree.flatten(params), rules)
        return {key: rule.pair.init(part) for key, rule, part in parts}

    return Optimiser(init, GroupedStep(rules))


@dataclass(frozen=True)
class GroupedStep:
    """The step of `grouped`, which `sharded` asks for its rules."""

    rules: tuple[Rule, ...]

    def __call__(
        self, params: Any, grads: Any, state: dict[str, Any], *, lr: float, donate: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """The new params and the state; each rule's optimiser updates its parameters."""
        lr = learning_rate("grouped", lr)
        old = tree.flatten(params)
        named_grads = matching("grouped", old, grads, "the gradient")
        _require_groups(state, len(self.rules))
        new: dict[str, Any] = {}
        states: dict[str, Any] = {}
        for key, rule, part in _parts(old, self.rules):
            part_grads = {name: named_grads[name] for name in part}
            options = {"lr": lr * rule.lr, "donate": donate, **rule.options}
            stepped, states[key] = rule.pair.step(part, part_grads, state[key], **options)
            new |= tree.flatten(stepped)
        if new.keys() != old.keys():
            tree.unflatten(params, new)  # raises, and names the missing leaves
        return rebuilt(params, params, list(old.values()), [new[name] for name in old]), states


def decay_matrices(
    optimiser: str | Optimiser = "adamw", weight_decay: float = 0.1, **options: Any
) -> tuple[Rule, Rule]:
    """Two rules: weight decay for parameters of two dimensions or more, none for the rest.

    So biases and norms do not decay, as in nanoGPT.

    grouped(*decay_matrices("adamw", 0.1, betas=(0.9, 0.95)))
    """
    return (
        Rule("*", optimiser, options={**options, "weight_decay": weight_decay}, min_ndim=2),
        Rule("*", optimiser, options={**options, "weight_decay": 0.0}),
    )


def _parts(
    leaves: dict[str, Array], rules: tuple[Rule, ...]
) -> list[tuple[str, Rule, dict[str, Array]]]:
    """(key, rule, parameters by name) for each rule; the key is the rule's index."""
    parts = [(str(i), rule, dict[str, Array]()) for i, rule in enumerate(rules)]
    for name, p in leaves.items():
        part = next((part for _, rule, part in parts if rule.owns(name, p)), None)
        if part is None:
            raise ValueError(
                f"grouped: no rule is for {name or 'params'} of shape {tuple(p.shape)}"
            )
        part[name] = p
    for rule in rules:
        if leaves and not any(rule.named(name) for name in leaves):
            raise ValueError(f"grouped: {rule.match!r} matches none of {len(leaves)} parameters")
    return parts


def _require_groups(state: Any, n: int) -> None:
    wanted = {str(i) for i in range(n)}
    if not isinstance(state, dict) or state.keys() != wanted:
        got = ", ".join(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"grouped: state must be a dict by rule, 0 to {n - 1}, got {got}")
