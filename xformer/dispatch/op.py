"""Dispatch: an op is a reference implementation, and kernels that backends register for it.

`@overridable` marks a reference written in the array API. `@kernel(op, library)` registers a
function of the same signature for the arrays of one library. A backend has its kernels of an op in
`backends/<library>/<op>.py`, which is imported when the op first runs on that library.

The forward call chooses the implementation by the type of the op's first array, or of the first
array in a list. The cache that it returns determines the backward. NumPy arrays have several sets
of kernels: `with kernels("numba")` chooses one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

from xformer.base.choices import did_you_mean
from xformer.dispatch.contexts import (
    CHOSEN,
    INFERENCE,
    OBSERVER,
    REFERENCE_ONLY,
    SETS,
    UNFUSED,
    WITHOUT_KERNELS,
    NoCache,
)
from xformer.dispatch.libraries import LIBRARIES, Refused, library_of, package_of, plugins

P = ParamSpec("P")
R = TypeVar("R")
Unsupported = Callable[..., str | None]
_ops: list[Overridable[..., Any]] = []


class Kernel(NamedTuple):
    """A faster implementation of an op for the arrays of one library."""

    run: Callable[..., Any]
    library: str
    unsupported: Unsupported | None  # same arguments -> why it cannot run, or None
    storage_dtypes: tuple[str, ...] = ()  # dtypes that only kernels can read


class Overridable(Generic[P, R]):
    """A callable op: it checks its arguments, then runs a kernel that can, or the reference.

    Attributes:

    - `reference`: the implementation in the array API
    - `kernels`: library -> kernels that are registered so far
    - `has_backward`: whether it returns (y, cache)
    - `drops`: whether `inference()` replaces its cache by NoCache
    - `composite`: whether its reference calls other ops, so that `unfused()` switches its kernels
      off
    """

    def __init__(
        self,
        reference: Callable[P, R],
        *,
        backward: bool = True,
        drops: bool = True,
        composite: bool = False,
    ) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference
        self.composite = composite
        self.has_backward = backward
        self.drops = backward and drops
        self.kernels: dict[str, list[Kernel]] = {}
        self._imported: set[str] = set()  # libraries whose kernels were imported, if any
        self._check: Callable[..., None] | None = getattr(reference, "check", None)

    def __get__(self, instance: Any, owner: Any = None) -> Overridable[P, R]:
        """The op itself. This method makes `help` show the op's signature instead of the class."""
        return self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the op."""
        if self._check is not None:
            self._check(args, kwargs, self)
        kind = type(args[0]) if args else list
        library = None if kind is list else LIBRARIES.get(kind)  # faster than `_library`
        if library is None:
            library = self._library(args, kwargs)
        if library not in self._imported:
            self.import_kernels(library)
        kernels = self.kernels.get(library)
        if library == "numpy" and CHOSEN.get() != "numpy":
            kernels = self.asked(library)
        run: Any = None
        try:
            if kernels:
                if self._off() is None:
                    for kernel in kernels:
                        if (
                            kernel.unsupported is None
                            or kernel.unsupported(*args, **kwargs) is None
                        ):
                            run = kernel.run
                            break
                if run is None and (why := self._refusal(kernels, args, kwargs)) is not None:
                    raise TypeError(why)
            if run is None:
                run = self.reference
            if (observe := OBSERVER.get()) is not None:
                run = observe(self, run)
            if self.drops and INFERENCE.get():
                y, _ = run(*args, **kwargs)
                return y, NoCache()  # type: ignore[return-value]  # in place of the op's own cache
            result: R = run(*args, **kwargs)
            return result
        except TypeError:
            self._require_arguments(args, kwargs)
            raise

    def _require_arguments(self, args: Any, kwargs: Any) -> None:
        """TypeError, which names the op and its arguments, if the op does not take these."""
        signature = inspect.signature(self.reference)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            known = {
                n: n + "=" * (p.kind == p.KEYWORD_ONLY) for n, p in signature.parameters.items()
            }
            unknown = next((name for name in kwargs if name not in known), None)
            takes = did_you_mean(unknown, known) or f"; it takes {', '.join(known.values())}"
            raise TypeError(f"{self.__name__}: {error}{takes}") from None

    def import_kernels(self, library: str) -> list[Kernel]:
        """The kernels for a library's arrays. The first call imports the backend's kernels."""
        if library not in self._imported:
            if (package := package_of(library)) is not None:
                _import_if_there(f"{package}.{self.__name__}")
            self._imported.add(library)
        return self.kernels.setdefault(library, [])

    def asked(self, library: str) -> list[Kernel]:
        """The kernels that a call with a library's arrays tries in this context, in order."""
        registered, chosen = self.import_kernels(library), SETS[CHOSEN.get()]
        if library != "numpy" or chosen == "numpy":
            return registered
        return [*self.import_kernels(chosen), *registered]

    def stored_by(self, library: str) -> set[str]:
        """The storage dtypes of all kernels for a library's arrays."""
        return {name for kernel in self.import_kernels(library) for name in kernel.storage_dtypes}

    def _off(self) -> str | None:
        """The context that switches the kernels of this op off; None if there is none."""
        if REFERENCE_ONLY.get() or self in WITHOUT_KERNELS.get():
            return "reference_only()"
        return "unfused()" if self.composite and UNFUSED.get() else None

    def _refusal(self, kernels: list[Kernel], args: Any, kwargs: Any) -> str | None:
        """The reason why the reference cannot read the arrays; None if it can."""
        for kernel in reversed(kernels):  # the most general one first
            if not kernel.storage_dtypes:
                continue
            dtypes = {str(getattr(array, "dtype", None)) for array in (*args, *kwargs.values())}
            for dtype in dtypes & set(kernel.storage_dtypes):
                why = kernel.unsupported and kernel.unsupported(*args, **kwargs)
                why = why or f"{self._off()} is active"
                return f"{self.__name__}: no kernel runs in {dtype}: {why}"
        return None

    def _library(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The library of the first array, or of the first array in a list."""
        first = args[0] if args else kwargs.get(next(iter(inspect.signature(self).parameters)))
        try:
            return library_of(type(first[0] if isinstance(first, list) and first else first))
        except Refused as error:
            raise TypeError(f"{self.__name__}: {error}") from None

    def __repr__(self) -> str:
        known = sorted(library for library, kernels in self.kernels.items() if kernels)
        return f"<op {self.__name__}, kernels: {', '.join(known) or 'none'}>"

    def __reduce__(self) -> str:
        return self.__qualname__  # a module-level name: pickled by reference, like a function

    __name__: str
    __qualname__: str


@overload
def overridable(reference: Callable[P, R]) -> Overridable[P, R]: ...


@overload
def overridable(
    *, backward: bool = True, drops: bool = True, composite: bool = False
) -> Callable[[Callable[P, R]], Overridable[P, R]]: ...


def overridable(
    reference: Callable[..., Any] | None = None,
    *,
    backward: bool = True,
    drops: bool = True,
    composite: bool = False,
) -> Any:
    """A decorator: make `reference` an op for which backends may register kernels.

    backward: True if the reference returns (y, cache). False if it may return anything.
    drops: True if `inference()` replaces the whole cache by NoCache. False for a cache of caches of
        other ops, which are replaced one by one, and of values that `inference()` needs.
    composite: True if the reference calls other ops, whose caches its cache holds.
    TypeError if the reference has no `__name__`.
    """
    if reference is not None and not hasattr(reference, "__name__"):
        raise TypeError(f"overridable: the reference must have a __name__, got {reference!r}")
    if reference is None:
        return functools.partial(overridable, backward=backward, drops=drops, composite=composite)
    op = Overridable(reference, backward=backward, drops=drops, composite=composite)
    _ops.append(op)
    return op


def kernel(
    op: Overridable[..., Any],
    library: str,
    *,
    unsupported: Unsupported | None = None,
    storage_dtypes: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: register the function as a kernel of `op` for arrays of `library`.

    The function has the signature of `op`. Its cache is a class with a `backward`, or the
    reference's cache, whose backward then runs. Of several kernels for one library, the last
    registered one is tried first; kernels of xformer's backends are tried after all others.

    library: "numba": a kernel for NumPy arrays within `kernels("numba")`
    unsupported: a function of the same arguments that returns the reason why the kernel cannot run,
        or None
    storage_dtypes: dtypes beside float32 and float64 that the kernel can read; references never get
        arrays of these dtypes
    """

    if not isinstance(op, Overridable):
        raise TypeError(f"kernel: op must be an op, such as xformer.ops.sdpa, got {op!r:.100}")

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        new = Kernel(run, library, unsupported, storage_dtypes)
        known = op.kernels.setdefault(library, [])
        others = [kernel for kernel in known if not _is_of_backend(kernel)]
        known.insert(len(others) if _is_of_backend(new) else 0, new)
        return run

    return register


def _is_of_backend(kernel: Kernel) -> bool:
    module = f"{kernel.run.__module__}."
    if module.startswith("xformer."):  # most are; `plugins` takes long the first time
        return module.startswith("xformer.backends.")
    return any(module.startswith(f"{package}.") for package in plugins().values())


def _import_if_there(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.rpartition(".")[0]):
            raise


@contextmanager
def reference_only(*ops: Overridable[..., Any]) -> Iterator[None]:
    """A context in which every op, or each of `ops`, runs its reference and no kernel.

    TypeError for what is no op, such as a name.
    """
    for op in ops:
        if not isinstance(op, Overridable):
            raise TypeError(f"reference_only: ops must be ops, such as xf.ops.linear, got {op!r}")
    every = REFERENCE_ONLY.set(not ops or REFERENCE_ONLY.get())
    chosen = WITHOUT_KERNELS.set((*WITHOUT_KERNELS.get(), *ops))
    try:
        yield
    finally:
        WITHOUT_KERNELS.reset(chosen)
        REFERENCE_ONLY.reset(every)


def explain(op: Overridable[..., Any], *args: Any, **kwargs: Any) -> str:
    """A text: which implementation of `op` these arguments would run, and why others would not."""
    if not isinstance(op, Overridable):
        raise TypeError(f"explain: op must be an op, such as xformer.ops.sdpa, got {op!r:.100}")
    library = op._library(args, kwargs)
    asked, lines, chosen = op.asked(library), [], None
    for candidate in asked:
        name = f"{candidate.run.__module__}.{candidate.run.__name__}"
        if (off := op._off()) is not None:
            lines.append(f"- {name}: not run, {off} is active")
        elif chosen is not None:
            lines.append(f"- {name}: not asked, {chosen} comes first")
        elif candidate.unsupported and (why := candidate.unsupported(*args, **kwargs)):
            lines.append(f"- {name}: {why}")
        else:
            chosen = name
    if not asked:
        lines.append(f"- no kernel is registered for {library}")
    if chosen is None and op._refusal(asked, args, kwargs):
        chosen = "nothing, these arrays need a kernel"
    return "\n".join([f"{op.__name__} on {library}: {chosen or 'the reference'}", *lines])


def ops() -> tuple[Overridable[..., Any], ...]:
    """All ops that are defined so far, in the order of definition."""
    return tuple(_ops)
