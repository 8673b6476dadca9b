"""One op, several implementations: the reference, and kernels that backends register for it.

`@overridable` marks a reference written in the array API. `@kernel(op, library)` registers a
function of the same signature for the arrays of one library. A backend keeps its kernel of an op in
`backends/<library>/<op>.py`, which is imported when the op is first asked to run on that library.
The choice is made once, going forward, by the type of the op's first array, or of the first in a
list; the cache that comes back decides who runs backward. For NumPy's arrays there are several
sets of kernels: `with kernels("numba")` chooses one.
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

from xformer.showing import short

P = ParamSpec("P")
R = TypeVar("R")
Unsupported = Callable[..., str | None]

# Module that defines an array type -> folder under backends/, where the two names differ.
_FOLDERS = {"jaxlib": "jax"}

# Kernels that `kernels` chooses for NumPy's arrays -> the library that they are registered for.
_SETS = {"numpy": "numpy", "numba": "numba", "mkl": "numba"}

_chosen: ContextVar[str] = ContextVar("kernels", default="numpy")
_reference_only: ContextVar[bool] = ContextVar("reference_only", default=False)
_inference: ContextVar[bool] = ContextVar("inference", default=False)
_ops: list[Overridable[..., Any]] = []
_libraries: dict[type, str] = {}


class Kernel(NamedTuple):
    """A faster implementation of an op for the arrays of one library."""

    run: Callable[..., Any]
    library: str
    unsupported: Unsupported | None  # same arguments -> why it cannot run, or None
    storage_dtypes: tuple[
        str, ...
    ] = ()  # dtypes of arrays that it reads and no reference computes in


class Refused(TypeError):
    """Arrays of a type that cannot be computed with; `got` says why."""

    def __init__(self, got: str) -> None:
        super().__init__(f"an array must be of a library's own type, got {got}")
        self.got = got


@short
class NoCache(NamedTuple):
    """What an op or a model gives in the place of its cache within `inference()`."""

    def backward(self, *dy: Any) -> Any:
        """RuntimeError."""
        raise RuntimeError(f"backward: the cache was {_MADE}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: the cache was {_MADE}")


_MADE = "made within inference(), which keeps nothing"


class Overridable(Generic[P, R]):
    """A callable op: checks its arguments, then runs the first kernel that can, or the reference.

    Attributes: `reference` (the array API implementation), `kernels` (library -> kernels that are
    known so far), `has_backward` (whether it returns (y, cache)) and `drops` (whether within
    `inference()` that cache is dropped).
    """

    def __init__(
        self, reference: Callable[P, R], *, backward: bool = True, drops: bool = True
    ) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference
        self.has_backward = backward
        self.drops = backward and drops
        self.kernels: dict[str, list[Kernel]] = {}
        self._imported: set[str] = set()  # libraries whose own kernel was looked for
        self._check: Callable[..., None] | None = getattr(reference, "check", None)

    def __get__(self, instance: Any, owner: Any = None) -> Overridable[P, R]:
        """The op itself. With this method `help` shows the op's signature, not this class."""
        return self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the op."""
        if self._check is not None:
            self._check(args, kwargs, self)
        kind = type(args[0]) if args else list
        library = None if kind is list else _libraries.get(kind)  # as `_library`, in less time
        if library is None:
            library = self._library(args, kwargs)
        if library not in self._imported:
            self.import_kernels(library)
        kernels = self.kernels.get(library)
        if library == "numpy" and _chosen.get() != "numpy":
            kernels = self.asked(library)
        run: Any = None
        if kernels:
            if not _reference_only.get():
                for kernel in kernels:
                    if kernel.unsupported is None or kernel.unsupported(*args, **kwargs) is None:
                        run = kernel.run
                        break
            if run is None and (why := self._refusal(kernels, args, kwargs)) is not None:
                raise TypeError(why)
        if run is None:
            run = self.reference
        if self.drops and _inference.get():
            y, _ = run(*args, **kwargs)
            return y, NoCache()  # type: ignore[return-value]  # in place of the op's own cache
        result: R = run(*args, **kwargs)
        return result

    def import_kernels(self, library: str) -> list[Kernel]:
        """The kernels for a library's arrays, those of its backend among them."""
        if library not in self._imported:
            if (package := package_of(library)) is not None:
                _import_if_there(f"{package}.{self.__name__}")
            self._imported.add(library)
        return self.kernels.setdefault(library, [])

    def asked(self, library: str) -> list[Kernel]:
        """The kernels that a call with a library's arrays asks here, in that order."""
        own, chosen = self.import_kernels(library), _SETS[_chosen.get()]
        if library != "numpy" or chosen == "numpy":
            return own
        return [*self.import_kernels(chosen), *own]

    def stored_by(self, library: str) -> set[str]:
        """Dtypes that a kernel of a library stores arrays in, beside those of references."""
        return {name for kernel in self.import_kernels(library) for name in kernel.storage_dtypes}

    def _refusal(self, kernels: list[Kernel], args: Any, kwargs: Any) -> str | None:
        """Why the reference cannot take what kernels alone read; None where it can."""
        for kernel in reversed(kernels):  # the most general one first
            if not kernel.storage_dtypes:
                continue
            dtypes = {str(getattr(array, "dtype", None)) for array in (*args, *kwargs.values())}
            for dtype in dtypes & set(kernel.storage_dtypes):
                why = kernel.unsupported and kernel.unsupported(*args, **kwargs)
                why = why or "reference_only() is active"
                return f"{self.__name__}: no kernel runs in {dtype}: {why}"
        return None

    def _library(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """That of the first array, which may be the first of a list."""
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
    *, backward: bool = True, drops: bool = True
) -> Callable[[Callable[P, R]], Overridable[P, R]]: ...


def overridable(
    reference: Callable[..., Any] | None = None, *, backward: bool = True, drops: bool = True
) -> Any:
    """Mark `reference` as an op that backends may override with kernels.

    It returns (y, cache), or anything else where it is `@overridable(backward=False)`. drops=False:
    its cache is made of its parts' own, which are dropped within `inference()`; what else it holds
    is asked for there. TypeError for a reference without a name.
    """
    if reference is not None and not hasattr(reference, "__name__"):
        raise TypeError(f"overridable: the reference must have a __name__, got {reference!r}")
    if reference is None:
        return functools.partial(overridable, backward=backward, drops=drops)
    op = Overridable(reference, backward=backward, drops=drops)
    _ops.append(op)
    return op


def kernel(
    op: Overridable[..., Any],
    library: str,
    *,
    unsupported: Unsupported | None = None,
    storage_dtypes: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as `op` for arrays of `library`.

    `unsupported(same arguments)` returns a sentence saying why the kernel cannot run, or None.
    storage_dtypes: dtypes beside float32 and float64 that it can read; references never see such
    arrays. Of several kernels for one library the last registered is asked first, and those of this
    library's backends after all others, whenever they are imported. For "numba" it is one of those
    that `kernels("numba")` asks. A kernel's cache is its own class with a `backward`, or the
    reference's cache, whose backward then runs.
    """

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        made, known = (
            Kernel(run, library, unsupported, storage_dtypes),
            op.kernels.setdefault(library, []),
        )
        others = [kernel for kernel in known if not _is_of_backend(kernel)]
        known.insert(len(others) if _is_of_backend(made) else 0, made)
        return run

    return register


def library_of(array_type: type) -> str:
    """The name of the library that defines `array_type`; imports its backend at first sight.

    A library without a folder under `backends/` runs the references. A backend that cannot be
    imported raises: silently slow would be worse. Refused where the backend's `refusal` has a
    reason: a subclass may compute otherwise than the arrays of its library.
    """
    library = _libraries.get(array_type)
    if library is None:
        library = _libraries[array_type] = _find_library(array_type)
    return library


def refusal(array_type: type) -> str | None:
    """What arrays of a type are that cannot be computed with; None where they can."""
    try:
        library_of(array_type)
    except Refused as error:
        return error.got
    return None


def _find_library(array_type: type) -> str:
    own: str | None = getattr(array_type, "__xformer_library__", None)
    if own is not None:
        return own
    roots = [base.__module__.partition(".")[0] for base in array_type.__mro__]
    names = [_FOLDERS.get(root, root) for root in roots]
    for name in names:  # a subclass of your own belongs to the library of its base
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
    packages = ("xformer.backends", *plugins().values())
    return str(kernel.run.__module__).startswith(tuple(f"{package}." for package in packages))


def _import_if_there(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.rpartition(".")[0]):
            raise


def is_reference_only() -> bool:
    """Whether this is within `reference_only()`."""
    return _reference_only.get()


@contextmanager
def kernels(name: str) -> Iterator[None]:
    """Within this context the kernels of backend `name` run for NumPy's arrays.

    name: "numpy"; "numba", whose kernels an op asks first and NumPy's after them; "mkl", the same
    with products of matrices by Intel's MKL. Nothing changes for other threads and other tasks.
    `active()` of a backend of that name enters this context, and so do functions that a backend is
    passed to. Around a call, and never across a yield: a generator would leave its caller in it.
    ValueError for another name; `backends.Unusable`, an ImportError that names the extra, where it
    is missing.
    """
    if name not in _SETS:
        raise ValueError(f"kernels: name must be one of {', '.join(_SETS)}, got {name!r}")
    if name != "numpy":
        _require_usable(name)
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen_kernels() -> str:
    """Whose kernels run for NumPy's arrays here: as `kernels` says, "numpy" outside of it."""
    return _chosen.get()


@functools.cache  # what is raised is not kept
def _require_usable(name: str) -> None:
    importlib.import_module("xformer.backends").require_kernels(name)


@contextmanager
def reference_only() -> Iterator[None]:
    """Within this context every op runs its reference, whatever kernels are registered."""
    token = _reference_only.set(True)
    try:
        yield
    finally:
        _reference_only.reset(token)


@contextmanager
def inference() -> Iterator[None]:
    """Within this context ops keep nothing for a backward, which raises RuntimeError.

    For a forward alone, in as much memory as that takes. Around one call, and never across a yield:
    a generator would leave its caller in this context. On JAX, what caches there still are hold
    arrays and numbers alone, which a function compiled by `jax.jit` may return.
    """
    token = _inference.set(True)
    try:
        yield
    finally:
        _inference.reset(token)


def is_inference() -> bool:
    """Whether `inference` is active: then what only a backward needs can be left out."""
    return _inference.get()


def saved(cache: Any) -> Any:
    """`cache`, of which only a backward makes use; within `inference` nothing of it."""
    return NoCache() if _inference.get() else cache


def explain(op: Overridable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Say which implementation of `op` these arguments would run, and why the others would not."""
    library = op._library(args, kwargs)
    asked, lines, chosen = op.asked(library), [], None
    for candidate in asked:
        name = f"{candidate.run.__module__}.{candidate.run.__name__}"
        if _reference_only.get():
            lines.append(f"- {name}: not run, reference_only() is active")
        elif chosen is not None:
            lines.append(f"- {name}: not asked, {chosen} comes first")
        elif candidate.unsupported and (why := candidate.unsupported(*args, **kwargs)):
            lines.append(f"- {name}: {why}")
        else:
            chosen = name
    if not asked:
        lines.append(f"- no kernel is registered for {library}")
    if chosen is None and op._refusal(asked, args, kwargs):
        chosen = "nothing, these arrays are not for the reference"
    return "\n".join([f"{op.__name__} on {library}: {chosen or 'the reference'}", *lines])


def ops() -> tuple[Overridable[..., Any], ...]:
    """Every op defined so far, in order of definition (for tests over the whole registry)."""
    return tuple(_ops)
