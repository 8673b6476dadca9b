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
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

from xformer.choices import did_you_mean, require_one_of
from xformer.showing import short

P = ParamSpec("P")
R = TypeVar("R")
Unsupported = Callable[..., str | None]
Observer = Callable[..., Callable[..., Any]]  # (op, its implementation) -> what runs instead

# Module that defines an array type -> folder under backends/, if the two names differ.
_FOLDERS = {"jaxlib": "jax"}

# Name in `kernels` -> the library that its kernels for NumPy arrays are registered for.
_SETS = {"numpy": "numpy", "numba": "numba", "mkl": "numba"}

_chosen: ContextVar[str] = ContextVar("kernels", default="numpy")
_reference_only: ContextVar[bool] = ContextVar("reference_only", default=False)
# Ops that run their references, whatever the rest does.
_without_kernels: ContextVar[tuple[Any, ...]] = ContextVar("without_kernels", default=())
_unfused: ContextVar[bool] = ContextVar("unfused", default=False)
_inference: ContextVar[bool] = ContextVar("inference", default=False)
_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)
_DECIDING: Any = _chosen, _reference_only, _without_kernels, _unfused, _inference
_ops: list[Overridable[..., Any]] = []
_libraries: dict[type, str] = {}


class Kernel(NamedTuple):
    """A faster implementation of an op for the arrays of one library."""

    run: Callable[..., Any]
    library: str
    unsupported: Unsupported | None  # same arguments -> why it cannot run, or None
    storage_dtypes: tuple[str, ...] = ()  # dtypes that only kernels can read


class Refused(TypeError):
    """Raised by `library_of` for an array type that a backend rejects, such as some subclasses.

    got: the type and the reason, for messages that end with "got ..."
    """

    def __init__(self, got: str) -> None:
        super().__init__(f"an array must be of a library's own type, got {got}")
        self.got = got


@short
class NoCache(NamedTuple):
    """The cache that ops and models return within `inference()`. It has no backward."""

    def backward(self, *dy: Any) -> Any:
        """Raise RuntimeError."""
        raise RuntimeError(f"backward: the cache was {_MADE}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: the cache was {_MADE}")


_MADE = "made within inference(), which saves nothing"


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
        library = None if kind is list else _libraries.get(kind)  # faster than `_library`
        if library is None:
            library = self._library(args, kwargs)
        if library not in self._imported:
            self.import_kernels(library)
        kernels = self.kernels.get(library)
        if library == "numpy" and _chosen.get() != "numpy":
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
            if (observe := _observer.get()) is not None:
                run = observe(self, run)
            if self.drops and _inference.get():
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
        registered, chosen = self.import_kernels(library), _SETS[_chosen.get()]
        if library != "numpy" or chosen == "numpy":
            return registered
        return [*self.import_kernels(chosen), *registered]

    def stored_by(self, library: str) -> set[str]:
        """The storage dtypes of all kernels for a library's arrays."""
        return {name for kernel in self.import_kernels(library) for name in kernel.storage_dtypes}

    def _off(self) -> str | None:
        """The context that switches the kernels of this op off; None if there is none."""
        if _reference_only.get() or self in _without_kernels.get():
            return "reference_only()"
        return "unfused()" if self.composite and _unfused.get() else None

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


def library_of(array_type: type) -> str:
    """The name of the library that defines `array_type`. The first call imports its backend.

    A library without a folder under `backends/` runs the references. ImportError if a backend
    cannot be imported: otherwise it would be slow without a message. Refused if the backend's
    `refusal` rejects the type: a subclass may compute differently from its library's arrays.
    """
    library = _libraries.get(array_type)
    if library is None:
        library = _libraries[array_type] = _find_library(array_type)
    return library


def refusal(array_type: type) -> str | None:
    """The reason why an array type is not supported; None if it is."""
    try:
        library_of(array_type)
    except Refused as error:
        return error.got
    return None


def _find_library(array_type: type) -> str:
    named: str | None = getattr(array_type, "__xformer_library__", None)
    if named is not None:
        return named
    roots = [base.__module__.partition(".")[0] for base in array_type.__mro__]
    names = [_FOLDERS.get(root, root) for root in roots]
    for name in names:  # a user's subclass belongs to the library of its base class
        if (package := package_of(name)) is not None:
            backend = importlib.import_module(package)
            if hasattr(backend, "refusal") and (why := backend.refusal(array_type)):
                raise Refused(why)
            return name
    return names[0]


@functools.cache
def package_of(library: str) -> str | None:
    """The package with the backend of a library; None if there is none.

    It is a folder of `xformer.backends`, or the value of an entry point in the group
    `xformer.backends` whose name is that of the library's module.
    """
    package = f"xformer.backends.{library}"
    if importlib.util.find_spec(package) is not None:
        return package
    return plugins().get(library)


@functools.cache
def plugins() -> dict[str, str]:
    """Backends of other distributions: their packages by the name of the library's module."""
    from importlib.metadata import entry_points  # takes long to import

    return {point.name: point.value for point in entry_points(group="xformer.backends")}


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


def is_reference_only() -> bool:
    """Whether the call is within `reference_only()`."""
    return _reference_only.get()


@contextmanager
def kernels(name: Any) -> Iterator[None]:
    """A context in which the kernels of backend `name` run for NumPy arrays.

    name: "numpy"; "numba": its kernels are tried before NumPy's; "mkl": like "numba", with matmuls
        by Intel's MKL. Or the backend of that name.

    Other threads and tasks are not affected. `active()` of a backend of that name enters this
    context, and so do functions that get the backend as an argument. Use it around a call, never
    across a yield: a generator would leave its caller in the context.

    ValueError for another name. `backends.Unusable`, an ImportError that names the extra, if the
    backend is not installed.
    """
    name = getattr(name, "name", name)
    if name not in _SETS:
        require_one_of("kernels: name", name, _SETS)
    if name != "numpy":
        _require_usable(name)
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen_kernels() -> str:
    """The backend whose kernels run for NumPy arrays: the name in `kernels`, else "numpy"."""
    return _chosen.get()


@functools.cache  # errors are not cached
def _require_usable(name: str) -> None:
    importlib.import_module("xformer.backends").require_kernels(name)


@contextmanager
def reference_only(*ops: Overridable[..., Any]) -> Iterator[None]:
    """A context in which every op, or each of `ops`, runs its reference and no kernel.

    TypeError for what is no op, such as a name.
    """
    for op in ops:
        if not isinstance(op, Overridable):
            raise TypeError(f"reference_only: ops must be ops, such as xf.ops.linear, got {op!r}")
    every = _reference_only.set(not ops or _reference_only.get())
    chosen = _without_kernels.set((*_without_kernels.get(), *ops))
    try:
        yield
    finally:
        _without_kernels.reset(chosen)
        _reference_only.reset(every)


@contextmanager
def unfused() -> Iterator[None]:
    """A context in which ops that call other ops run their references, and the others kernels.

    So the cache of a model has a node for each layer and each op, as `xf.watch` and `xf.edit` need.
    """
    token = _unfused.set(True)
    try:
        yield
    finally:
        _unfused.reset(token)


@contextmanager
def inference() -> Iterator[None]:
    """A context in which ops save nothing for backward, so that a forward needs less memory.

    A backward then raises RuntimeError. Use it around a call, never across a yield: a generator
    would leave its caller in the context. On JAX, the remaining caches hold only arrays and
    numbers, so a function compiled by `jax.jit` may return them.
    """
    token = _inference.set(True)
    try:
        yield
    finally:
        _inference.reset(token)


@contextmanager
def observed(observer: Observer | None) -> Iterator[None]:
    """A context in which `observer(op, run)` returns the function that is called instead of `run`.

    run: the chosen kernel, or the reference. None: no observer, as outside.
    """
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def observer() -> Observer | None:
    """The observer of the calls in this context; None if there is none."""
    return _observer.get()


def is_inference() -> bool:
    """Whether the call is within `inference()`, so that nothing must be saved for backward."""
    return _inference.get()


def contexts() -> tuple[Any, ...]:
    """The values of all contexts that decide which function an op runs, and what it returns."""
    return tuple(x.get() for x in _DECIDING)


@contextmanager
def again(values: tuple[Any, ...]) -> Iterator[None]:
    """Set these values of `contexts()`: backward runs a forward again as it ran first."""
    tokens = [x.set(value) for x, value in zip(_DECIDING, values, strict=True)]
    try:
        yield
    finally:
        for x, token in zip(_DECIDING, tokens, strict=True):
            x.reset(token)


def saved(cache: Any) -> Any:
    """`cache`, which only backward uses; NoCache within `inference()`."""
    return NoCache() if _inference.get() else cache


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
