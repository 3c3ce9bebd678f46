"""The blocks of a call that stand in its graph as another block was read (see `dynamo_repeats`)."""

import contextlib
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rekindle.torch_compat.alike import alike
from rekindle.torch_compat.unchanged import Unchanged

LOCAL = "repeated"  # of the function that Dynamo reads: the tensors of repeated blocks
_MOST_KEPT = 4  # models whose blocks were seen as they are: a copy of the first, for one
_NOT_THERE = (KeyError, AttributeError, IndexError, TypeError)


class Repeats:
    """The blocks of a call that were not read themselves: whether they are still as they were, or
    like the block that was read for them, and the tensors in them."""

    __slots__ = ("_blocks", "_firsts", "_found", "_namespace", "_seen")

    def __init__(
        self, found: "Found", scope: Mapping[str, Any], namespace: Mapping[str, Any]
    ) -> None:
        self._found = found
        self._namespace = namespace
        self._blocks = _tuple_of(found.blocks)
        self._firsts = _tuple_of(found.firsts)
        self._seen: tuple[tuple[Unchanged, tuple[int, ...]], ...] = ()
        if found.tensors:
            with contextlib.suppress(*_NOT_THERE, ValueError):  # else they are compared at a call
                self._see(self._now(scope), found.values)
        found.values.clear()

    def __bool__(self) -> bool:
        return bool(self._found.tensors)

    @property
    def num_blocks(self) -> int:
        return len(self._found.pairs)

    def check(self, scope: dict[str, Any]) -> bool:
        """Whether a call of this scope repeats the blocks that were repeated when it was read. The
        guards of the others hold. Leaves the tensors in the scope."""
        if not self:
            return True
        found = self._tensors(scope)
        scope[LOCAL] = (self, found)
        return found is not None

    def tensors(self, scope: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of the repeated blocks, in the order in which the graph takes them."""
        if not self:
            return []
        whose, found = scope.get(LOCAL) or (None, None)
        if whose is not self:
            found = self._tensors(scope)
        assert found is not None
        given: list[torch.Tensor] = found
        return given

    def given(self, code: types.CodeType, names: dict[str, Any]) -> Callable[..., Any]:
        """The function of this code, called with a scope in which the tensors may be."""
        function = types.FunctionType(code, names)
        if not self:
            return functools.partial(function, **{LOCAL: ()})

        def call(**scope: Any) -> Any:
            return function(**{**scope, LOCAL: self.tensors(scope)})

        return call

    def different(self, scope: dict[str, Any]) -> str | None:
        """The first block that is not like the one that was read for it."""
        if not self or self._tensors(scope) is not None:
            return None
        for first, other, words in self._found.pairs:
            name = self._found.blocks[other]
            with contextlib.suppress(*_NOT_THERE):
                blocks = self._now(scope)
                like = alike(blocks[first], blocks[other])
                part = like if isinstance(like, str) else "".join(sorted(like.differing & words))
                if not part:
                    continue
                name = f"{name}.{part}"
            return f"{name} is like that of {self._found.blocks[first]}"
        return "the blocks of the model share nothing"

    def _now(self, scope: Mapping[str, Any]) -> tuple[nn.Module, ...]:
        return self._blocks({"L": scope, "G": self._namespace})

    def _tensors(self, scope: dict[str, Any]) -> list[torch.Tensor] | None:
        try:
            blocks = self._now(scope)
        except _NOT_THERE:
            return None
        for seen, at in self._seen:
            inside = seen.tensors(blocks)
            if inside is not None:
                return [inside[i] for i in at]
        return self._compared(scope, blocks)

    def _compared(
        self, scope: dict[str, Any], blocks: tuple[nn.Module, ...]
    ) -> list[torch.Tensor] | None:
        """As `_tensors`, where something in the blocks is new: they are compared again."""
        try:
            firsts = self._firsts({"L": scope, "G": self._namespace})
            likes = []
            for first, other, words in self._found.pairs:
                like = alike(blocks[first], blocks[other])
                if isinstance(like, str) or like.differing & words:
                    return None
                likes.append(like)
            found = [likes[pair].tensors[id(firsts[i])] for pair, i in self._found.tensors]
            if len({*map(id, found), *map(id, firsts)}) < len(found) + len({*map(id, firsts)}):
                return None  # two of them are one
            self._see(blocks, found)
        except (*_NOT_THERE, ValueError):
            return None
        return found

    def _see(self, blocks: Sequence[nn.Module], tensors: list[torch.Tensor]) -> None:
        """Remembers the blocks as they are now, and where in them the tensors are."""
        now = Unchanged(blocks)
        position = {id(t): i for i, t in enumerate(now.tensors(blocks) or ())}
        at = tuple([position[id(t)] for t in tensors])
        self._seen = ((now, at), *self._seen[: _MOST_KEPT - 1])


def _tuple_of(expressions: list[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    code = compile(f"({''.join(e + ', ' for e in expressions)})", "<blocks>", "eval")
    return functools.partial(eval, code)


@dataclass(slots=True)
class Found:
    """What one attempt to read a call has repeated."""

    output: Any = None  # Dynamo's, of this attempt
    read: dict[type, list[Any]] = field(default_factory=dict)  # blocks, by their class
    blocks: list[str] = field(default_factory=list)  # expressions
    firsts: list[str] = field(default_factory=list)  # of tensors of blocks that were read
    pairs: list[tuple[int, int, frozenset[str]]] = field(default_factory=list)
    tensors: list[tuple[int, int]] = field(default_factory=list)  # the pair, and which of `firsts`
    values: list[torch.Tensor] = field(default_factory=list)  # those tensors
