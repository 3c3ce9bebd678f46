"""Functions in whose place Dynamo was told to read another one."""

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def own_code_read() -> Iterator[None]:
    """Inside, Dynamo reads the code that eager runs, where there is code to read. A function of C
    has none; for those, and for Python's own, the substitutes are torch's."""
    from torch._dynamo.variables.functions import PolyfilledFunctionVariable, UserFunctionVariable

    read = PolyfilledFunctionVariable.call_function

    @functools.wraps(read)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        torchs = str(self.traceable_fn.__module__).startswith("torch.")
        if torchs or not isinstance(self.fn, types.FunctionType):
            return read(self, tx, args, kwargs)
        own = UserFunctionVariable(self.fn, source=self.source)
        return own.call_function(tx, args, kwargs)

    PolyfilledFunctionVariable.call_function = call_function
    try:
        yield
    finally:
        PolyfilledFunctionVariable.call_function = read
