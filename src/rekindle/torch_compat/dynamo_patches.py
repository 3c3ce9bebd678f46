"""How methods of Dynamo are changed while it reads a call, and put back."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def changed(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """`change` makes the method out of the one that it stands for."""
    own = vars(owner).get(name)
    read = getattr(owner, name)
    setattr(owner, name, functools.wraps(read)(change(read)))
    try:
        yield
    finally:
        if own is None:  # it was inherited
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def attribute_reader(cls: type) -> str:
    """The method that reads an attribute; it has another name since torch 2.14."""
    return "var_getattr" if hasattr(cls, "var_getattr") else "tp_getattro_impl"
