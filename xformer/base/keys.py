"""Keys by type and value: what a compiled call depends on besides its arrays.

Python says that 0.0 == -0.0, 1 == True and 1 == 1.0, and a list has no hash. A key here is equal to
another one only if types and values are equal, and every object has one, or `Unkeyed` says why not.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import operator
import sys
import types
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from array_api_compat import is_array_api_obj, is_numpy_array

MOST = 10_000  # objects that one key depends on

_PLAIN = {bool, int, str, bytes, type(None), type(...), range, types.CodeType}
_PAIR: Any = namedtuple("_PAIR", "field")
# Types of objects that do not change, or that a key cannot look into.
_WHOLE = (
    *(type, enum.Enum, types.ModuleType, types.BuiltinFunctionType, types.BuiltinMethodType),
    *(types.MemberDescriptorType, types.GetSetDescriptorType, types.MethodDescriptorType),
    *(types.WrapperDescriptorType, types.ClassMethodDescriptorType),
    type(_PAIR.field),
)
# Methods that no operator calls on an object that is there already.
_MAKES = {"__init__", "__new__", "__post_init__", "__setattr__", "__delattr__", "__del__"}
_BY_NAME = {"getattr", "hasattr", "vars", "__dict__", "attrgetter"}  # read attributes of any name
# What reads anything, and the type of an argument, which is another one while recording.
_UNKNOWN = {"globals", "locals", "eval", "exec", "type"}
_GETTERS = (operator.attrgetter, operator.methodcaller)


class Unkeyed(TypeError):
    """An object has no key: its value cannot be known, or it is too large."""


class Same:
    """A key that is equal only for the same object, which it keeps alive."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


def exact(x: Any) -> Any:
    """A hashable key that equals only the keys of objects of the same type and value.

    The key of a dataclass holds its fields; of another object, the object and its attributes; of a
    function, `Reads`. Unkeyed for arrays, and for objects that show no value, such as iterators.
    """
    kind = type(x)
    if kind in _PLAIN:
        return kind, x
    return _Walk(None, arrays=False).of(x)


class Reads:
    """What a function reads besides its arguments: closure, defaults, globals and attributes.

    It also looks into functions and classes that the function names, unless they are from the
    standard library, from xformer or installed packages. Attributes and globals count if one of
    these functions has their name. Arrays are compared by identity, and NumPy's by value too if
    `host_values`.
    """

    def __init__(self, fn: Callable[..., Any], *, host_values: bool) -> None:
        self.fn, self.host_values = fn, host_values
        self._names: set[str] = set()

    def key(self, kinds: Iterable[type] = ()) -> Any:
        """The key of all that it reads now. Unkeyed if something has no key.

        kinds: types of its arguments, whose methods and attributes it may use
        """
        while True:
            before = len(self._names)
            walk = _Walk(self._names, arrays=True, host_values=self.host_values)
            users = (kind for kind in kinds if not _is_library(kind.__module__))
            key = walk.called(self.fn), *map(walk.of, users)
            if len(self._names) == before:  # else a name was found after its object
                return key


class _Walk:
    """One walk over objects. names: of the attributes that count; None if all do."""

    def __init__(self, names: set[str] | None, *, arrays: bool, host_values: bool = False) -> None:
        self.names, self.arrays, self.host_values = names, arrays, host_values
        self.n, self.entered = 0, dict[int, Any]()

    def of(self, x: Any) -> Any:
        """The key of an object."""
        kind = type(x)
        if kind in _PLAIN:
            return kind, x
        if kind is float:
            return kind, x.hex()  # it tells -0.0 from 0.0, and NaN equals NaN
        if kind is complex:
            return kind, x.real.hex(), x.imag.hex()
        self.n += 1
        if self.n > MOST:
            raise Unkeyed(f"it depends on more than {MOST:,} objects besides its arguments")
        if id(x) in self.entered:  # a cycle, or the same object again
            return Same(x)
        self.entered[id(x)] = x
        return self._of_object(x, kind)

    def _of_object(self, x: Any, kind: type) -> Any:
        if isinstance(x, tuple | list):
            return kind, tuple(map(self.of, x))
        if isinstance(x, dict):
            return kind, tuple((self.of(name), self.of(part)) for name, part in x.items())
        if isinstance(x, set | frozenset):
            return kind, frozenset(map(self.of, x))
        if is_array_api_obj(x):
            return self._of_array(x)
        if isinstance(x, types.FunctionType | types.MethodType | functools.partial):
            return self.called(x)
        if hasattr(x, "__wrapped__") and self.names is not None:  # `xf.compile`, `functools.cache`
            return Same(x), self.of(x.__wrapped__)
        if isinstance(x, type) and self.names is not None and not _is_library(x.__module__):
            bases = [self.of(base) for base in x.__mro__[1:] if not _is_library(base.__module__)]
            return Same(x), tuple(bases), self._named(vars(x))
        if isinstance(x, _GETTERS) and self.names is not None:
            self.names.update(".".join(filter(_is_name, x.__reduce__()[1])).split("."))
        if isinstance(x, types.ModuleType) and self.names is not None:
            return Same(x), () if _is_library(x.__name__) else self._named(vars(x))
        if isinstance(x, property):
            return Same(x), self.of(x.fget)
        if isinstance(x, _WHOLE):
            return Same(x)
        if _is_library(kind.__module__) and (callable(x) or self.names is not None):
            return self._of_library(x, kind)
        return self._with_attributes(x, kind)

    def _of_array(self, x: Any) -> Any:
        if is_numpy_array(x) and type(x).__hash__ is not None:  # a scalar, which does not change
            return type(x), x.tobytes()
        if not self.arrays:
            raise Unkeyed(f"an array in an object that is no tree, {type(x).__name__}")
        if self.host_values and is_numpy_array(x):
            return type(x), str(x.dtype), x.shape, x.tobytes()
        return Same(x)

    def _of_library(self, x: Any, kind: type) -> Any:
        """The key of an object of a library in a closure. Its attributes are its own business."""
        if isinstance(x, Mapping):
            return kind, tuple((self.of(name), self.of(part)) for name, part in x.items())
        if hasattr(x, "__dict__") and not callable(x) and self.names is not None:
            return Same(x), self._named(vars(x))
        if callable(x) or hasattr(x, "__dict__") or _compares_values(kind):
            return Same(x)
        raise Unkeyed(f"it reads an object of type {kind.__name__}, whose state may change")

    def _with_attributes(self, x: Any, kind: type) -> Any:
        if dataclasses.is_dataclass(x) and self.names is None:
            fields = (field.name for field in dataclasses.fields(x))
            return kind, tuple(self.of(getattr(x, name, None)) for name in fields)
        attributes = dict(getattr(x, "__dict__", {}))
        slots = [name for base in kind.__mro__ for name in _slots(base)]
        attributes.update({name: getattr(x, name) for name in slots if hasattr(x, name)})
        if self.names is not None:
            bases = tuple(self.of(base) for base in kind.__mro__ if base is not object)
            return Same(x), bases, self._named(attributes)
        if attributes:
            return Same(x), tuple((name, self.of(part)) for name, part in attributes.items())
        if _compares_values(kind):
            return kind, x, repr(x)
        if hasattr(x, "__dict__"):
            return Same(x)
        raise Unkeyed(f"an object of type {kind.__name__}, whose state may change")

    def _named(self, attributes: Any) -> tuple[Any, ...]:
        """Keys of the attributes that functions name, and of methods for operators."""
        assert self.names is not None
        found = self.names & attributes.keys()
        found.update(x for x in attributes if x[:2] == "__" and _is_operator(x, attributes[x]))
        if not self.names.isdisjoint(_BY_NAME):
            found.update(name for name in attributes if not name.startswith("__"))
        return tuple((name, self.of(attributes[name])) for name in sorted(found))

    def called(self, fn: Any) -> Any:
        """The key of a function that is called: of what it reads."""
        if isinstance(fn, functools.partial):
            return self.of(fn.func), self.of(fn.args), self.of(fn.keywords)
        if isinstance(fn, types.MethodType):
            return self.called(fn.__func__), self.of(fn.__self__)
        if not isinstance(fn, types.FunctionType):
            calls = [vars(base).get("__call__") for base in type(fn).__mro__]
            call = next((x for x in calls if x is not None), None)
            is_python = isinstance(call, types.FunctionType)
            return self.of(fn), self.called(call) if is_python else None
        if _is_library(fn.__module__) and self.n:  # not the compiled function itself
            return Same(fn)
        if self.names is None:  # an argument: all that itself names
            return Reads(fn, host_values=False).key()
        self.n += 1
        names, why = _read_by(Same(fn.__code__))
        if why is not None and not _is_library(fn.__module__):
            raise Unkeyed(why)
        self.names.update(names)
        values = [fn.__globals__[name] for name in names if name in fn.__globals__]
        cells = [_content(cell) for cell in fn.__closure__ or ()]
        values += [sys.modules[name] for name in names if name in sys.modules]  # `import` within
        outside = [fn.__defaults__, fn.__kwdefaults__, *values, *cells]
        return Same(fn.__code__), tuple(map(self.of, outside)), self._named(vars(fn))


def _compares_values(kind: Any) -> bool:
    """Whether objects of a type have a hash by their values."""
    return kind.__hash__ is not None and kind.__hash__ is not object.__hash__


def _slots(base: type) -> tuple[str, ...]:
    names = vars(base).get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of the functions that it defines."""
    yield code
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            yield from _codes(x)


@functools.lru_cache(maxsize=MOST)
def _read_by(code: Same) -> tuple[dict[str, None], str | None]:
    """Names in a function's code and texts that may be names; why it has no key, or None."""
    codes = list(_codes(code.thing))
    names = (name for each in codes for name in each.co_names)
    texts = (text for each in codes for text in each.co_consts if _is_name(text))
    loaded = {x.argval for each in codes for x in dis.get_instructions(each) if _loads(x)}
    why = next((f"it reads what `{name}` returns" for name in sorted(_UNKNOWN & loaded)), None)
    return dict.fromkeys([*names, *texts]), why


def _is_name(x: Any) -> bool:
    return isinstance(x, str) and x.isidentifier()


def _loads(x: dis.Instruction) -> bool:
    """Whether an instruction reads a global or a builtin."""
    return x.opname in ("LOAD_GLOBAL", "LOAD_NAME")


def _is_operator(name: str, method: Any) -> bool:
    """Whether Python calls a class's method of this name for an operator or a builtin function."""
    return isinstance(method, types.FunctionType) and name not in _MAKES


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value yet
        return None


@functools.cache
def _is_library(module: str | None) -> bool:
    """Whether a module is of the standard library, of xformer or of an installed package."""
    root = (module or "").partition(".")[0]
    if root == "xformer" or root in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file
