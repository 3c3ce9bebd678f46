"""Functions whose globals are no module's: code run by `exec` in a session, a notebook, a doctest.

Dynamo looks up the globals of such a function in the module of the same name, where they are not,
or are others.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any


class _Scope:
    """Globals, as the attributes of an object: guarded, read and written like a module's."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.__dict__ = table


@contextlib.contextmanager
def globals_of_any_scope() -> Iterator[None]:
    """Inside, Dynamo reads the globals that a function has, whosever they are."""
    from torch._dynamo.source import AttrSource, GlobalSource
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator
    from torch._dynamo.variables.builder import VariableBuilder

    read = InliningInstructionTranslator.get_globals_source_and_value
    scopes: dict[int, _Scope] = {}

    @functools.wraps(read)
    def get_globals_source_and_value(self: Any, name: str) -> Any:
        table = self.f_globals
        module = sys.modules.get(table.get("__name__", ""))
        if module is None or vars(module) is table:
            return read(self, name)
        scope = scopes.setdefault(id(table), _Scope(table))
        source = GlobalSource(self.output.install_global_by_id("___unnamed_scope", scope))
        return scope, VariableBuilder(self, source)(scope), AttrSource(source, name)

    InliningInstructionTranslator.get_globals_source_and_value = get_globals_source_and_value
    try:
        yield
    finally:
        InliningInstructionTranslator.get_globals_source_and_value = read
