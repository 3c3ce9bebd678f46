"""Guards on what Dynamo reads and holds too weakly, or not at all.

Each is about a value that a call can see and that Dynamo compares by `==`, by its length or never:
0.0 and -0.0, the order of an OrderedDict, a key that is absent, an attribute of a metaclass, what
`functools.lru_cache` keeps, classes registered with an abstract one.
"""

import abc
import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import EnumMeta
from typing import Any

from rekindle.errors import CaptureError
from rekindle.torch_compat.dynamo_patches import attribute_reader, changed


@contextlib.contextmanager
def guarded_as_read() -> Iterator[None]:
    """All of them."""
    with (
        _equal_numbers_told_apart(),
        _orders_guarded(),
        _absent_keys_guarded(),
        _attributes_of_dictionaries_guarded(),
        _attributes_of_metaclasses_guarded(),
        _caches_compared(),
        _abstract_classes_guarded(),
    ):
        yield


def _add(builder: Any, guard: Any, holds: Callable[[Any], bool], words: str) -> None:
    """A guard of Python's own on the value of a source; `words` say what must hold of it."""
    parts = [f"{builder.arg_ref(guard)} {words}"]
    if isinstance(_value(builder, guard), dict):
        # The guards of a dictionary take none of Python's, and an empty one's are not asked.
        root, now = builder.guard_manager.root, _evaluator(builder, guard)
        root.add_lambda_guard(lambda scope: holds(now(scope)), parts, None)
    else:
        manager = builder.get_guard_manager(guard)
        manager.add_lambda_guard(holds, parts, guard.user_stack)


def _value(builder: Any, guard: Any) -> Any:
    """What a guard is about, now."""
    return builder.get(guard)


def _evaluator(builder: Any, guard: Any) -> Callable[[Any], Any]:
    """What finds the value that a guard is about in the arguments of a call."""
    from torch._dynamo import guards

    source, known = guard.originating_source, builder.scope["G"]
    if hasattr(source, "get_value"):
        names = guards._get_closure_vars()
        return lambda scope: source.get_value({"L": scope, "G": known}, names, {})
    code = compile(source.name(), "<guard>", "eval")  # older releases
    return lambda scope: eval(code, {**guards.CLOSURE_VARS, "L": scope, "G": known})


def install(source: Any, holds: Callable[[Any], bool], words: str) -> None:
    """`holds` must be true of the value of this source; `words` say it of the value."""
    from torch._dynamo.guards import install_guard

    def hold(builder: Any, guard: Any) -> None:
        _add(builder, guard, holds, words)

    install_guard(source.make_guard(hold))


def _written(value: Any) -> Any:
    """A constant such that equal ones compute the same: 0.0 is not -0.0, and 1 is not True."""
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(repr(item) for item in value)
    return repr(value)


def _is_ambiguous(value: Any) -> bool:
    """Whether values that compare equal to this one may differ. Dynamo compares the types of
    numbers, but not of the numbers inside of containers."""
    if isinstance(value, (float, complex)):
        return value == 0
    return isinstance(value, (set, frozenset, tuple, list, slice))


@contextlib.contextmanager
def _equal_numbers_told_apart() -> Iterator[None]:
    from torch._dynamo.guards import GuardBuilder

    def change(read: Any) -> Any:
        def match(self: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
            read(self, guard, *args, **kwargs)
            value = _value(self, guard)
            if _is_ambiguous(value):
                expected = _written(value)
                _add(self, guard, lambda now: _written(now) == expected, f"is exactly {value!r}")

        return match

    with changed(GuardBuilder, "EQUALS_MATCH", change):
        yield


@contextlib.contextmanager
def _orders_guarded() -> Iterator[None]:
    """An OrderedDict keeps an order that is not its dictionary's, which the guards walk."""
    from torch._dynamo.variables.builder import VariableBuilder

    def change(read: Any) -> Any:
        def wrap(self: Any, value: Any) -> Any:
            found = read(self, value)
            # The length is guarded: one entry has one order.
            if isinstance(value, OrderedDict) and len(value) > 1 and self.source is not None:
                keys = list(value)
                install(self.source, lambda now: _same(list(now), keys), "is in its order")
            return found

        return wrap

    with changed(VariableBuilder, "_wrap", change):
        yield


def _same(now: list[Any], then: list[Any]) -> bool:
    """Whether both lists hold the same keys in the same order; keys may be anything hashable."""
    return len(now) == len(then) and all(
        a is b or (hash(a) == hash(b) and bool(a == b)) for a, b in zip(now, then, strict=True)
    )


@contextlib.contextmanager
def _absent_keys_guarded() -> Iterator[None]:
    """`d[key]` that raises a KeyError which the model handles: another call may find the key."""
    from torch._dynamo.variables import ConstDictVariable

    def change(read: Any) -> Any:
        def getitem(self: Any, tx: Any, key: Any) -> Any:
            if self.source is not None and key not in self:
                self.install_dict_contains_guard(tx, [key])
            return read(self, tx, key)

        return getitem

    name = "getitem_const_raise_exception_if_absent"
    with changed(ConstDictVariable, name, change):
        yield


_ABSENT = object()


@contextlib.contextmanager
def _attributes_of_dictionaries_guarded() -> Iterator[None]:
    """What the class of a dictionary gives, an attribute of the dictionary's own would hide."""
    from torch._dynamo.variables import UserDefinedObjectVariable

    def change(read: Any) -> Any:
        def var_getattr(self: Any, tx: Any, name: str) -> Any:
            if self.source is not None and isinstance(self.value, dict):
                table = getattr(self.value, "__dict__", None)
                if table is not None and name not in table:

                    def holds(now: Any) -> bool:
                        return name not in vars(now)

                    install(self.source, holds, f"has no {name} of its own")
            return read(self, tx, name)

        return var_getattr

    reader = attribute_reader(UserDefinedObjectVariable)
    with changed(UserDefinedObjectVariable, reader, change):
        yield


@contextlib.contextmanager
def _attributes_of_metaclasses_guarded() -> Iterator[None]:
    from torch._dynamo.variables import UserDefinedClassVariable

    def change(read: Any) -> Any:
        def var_getattr(self: Any, tx: Any, name: str) -> Any:
            found = read(self, tx, name)
            kind = type(self.value)
            if kind in (type, abc.ABCMeta) or issubclass(kind, EnumMeta) or self.source is None:
                return found
            of_class = any(name in vars(cls) for cls in self.value.__mro__)
            value = inspect.getattr_static(kind, name, _ABSENT)
            if not of_class and value is not _ABSENT:

                def holds(now: Any) -> bool:
                    return bool(inspect.getattr_static(type(now), name, _ABSENT) is value)

                install(self.source, holds, f"has the metaclass's {name}")
            return found

        return var_getattr

    reader = attribute_reader(UserDefinedClassVariable)
    with changed(UserDefinedClassVariable, reader, change):
        yield


@contextlib.contextmanager
def _caches_compared() -> Iterator[None]:
    """Dynamo reads through `functools.lru_cache` as if nothing were cached; the cache may hold
    what was computed before something changed."""
    from torch._dynamo.variables.functions import WrapperUserFunctionVariable

    def change(read: Any) -> Any:
        def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            found = read(self, tx, args, kwargs)
            cached = self.wrapper_obj
            given = [*self.self_args(), *args, *kwargs.values()]
            plain = hasattr(cached, "cache_info") and not self.self_args()
            # torch's own keep tables, of functions for instance, that are no constants to Dynamo.
            plain = plain and not self.get_module().startswith("torch.")
            if not plain or not all(a.is_python_constant() for a in (found, *given)):
                return found
            now = cached(
                *(a.as_python_constant() for a in args),
                **{name: a.as_python_constant() for name, a in kwargs.items()},
            )
            if now is not found.as_python_constant() and _written(now) != _written(
                found.as_python_constant()
            ):
                raise CaptureError(
                    f"{getattr(cached, '__qualname__', cached)} is cached (functools.lru_cache), "
                    f"and its cache holds {now!r} where it would compute "
                    f"{found.as_python_constant()!r} now; clear the cache, or compute it outside "
                    "of forward"
                )
            return found

        return call_function

    with changed(WrapperUserFunctionVariable, "call_function", change):
        yield


@contextlib.contextmanager
def _abstract_classes_guarded() -> Iterator[None]:
    """`isinstance` of an abstract class also means classes that are registered with it later."""
    from torch._dynamo.variables import BuiltinVariable

    def change(read: Any) -> Any:
        def call_isinstance(self: Any, tx: Any, arg: Any, classes: Any) -> Any:
            found = read(self, tx, arg, classes)
            asked = classes.as_python_constant()
            for cls in asked if isinstance(asked, tuple) else (asked,):
                abstract = type(cls) is abc.ABCMeta and not cls.__module__.startswith(_KNOWN)
                if abstract and getattr(arg, "source", None) is not None:
                    _guard_kind(arg.source, cls)
            return found

        return call_isinstance

    with changed(BuiltinVariable, "call_isinstance", change):
        yield


# With the classes of these, nobody registers others while a model trains.
_KNOWN = ("collections", "typing", "numbers", "torch", "io", "transformers")


def _guard_kind(source: Any, cls: type) -> None:
    def holds(now: Any) -> bool:
        return isinstance(now, cls) is is_one

    is_one: bool | None = None

    def hold(builder: Any, guard: Any) -> None:
        nonlocal is_one
        is_one = isinstance(_value(builder, guard), cls)
        _add(builder, guard, holds, f"is{'' if is_one else ' not'} a {cls.__name__}")

    from torch._dynamo.guards import install_guard

    install_guard(source.make_guard(hold))
