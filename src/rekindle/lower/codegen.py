"""fx graph -> a Python function over one list.

The function takes its arguments out of the list and empties it, so that they can die early, and
drops each name after its last use. fx can write such code too, in three times the time; and what it
has written it keeps for good, of plans that are long gone.
"""

import itertools
import keyword
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from rekindle.capture.changing_sizes import ChangingSizes
from rekindle.capture.node_facts import facts, has_facts
from rekindle.torch_compat import is_symbolic, size_text

_number = itertools.count()
_WORD = re.compile(r"[A-Za-z_]\w*")


def compile_boxed(
    graph: fx.Graph, changing: ChangingSizes | None = None
) -> tuple[Callable[[list[Any]], Any], str]:
    """The function of a graph of placeholders, calls and one output, and its source. Sizes that
    change are the last items of its list."""
    return _Writer(graph, () if changing is None else changing.names).function()


def name_line(error: BaseException) -> None:
    """Adds to an error that came out of such a function which line of the model it was."""
    trace = error.__traceback__
    while trace is not None:
        source = trace.tb_frame.f_globals.get("__loader__")
        if isinstance(source, _Source):
            place = source.places[trace.tb_lineno - 1]
            if place:
                error.add_note(f"rekindle: while running what the model does at {place}")
            return
        trace = trace.tb_next


class _Source:
    """Where `traceback` finds the lines of code that has no file."""

    def __init__(self, text: str, places: list[str]) -> None:
        self.text = text
        self.places = places  # per line, the model's

    def get_source(self, _name: str) -> str:
        return self.text


class _Writer:
    def __init__(self, graph: fx.Graph, sizes: Sequence[str]) -> None:
        self.nodes = list(graph.nodes)
        self.taken = {node.name for node in self.nodes}
        # No node is called so: their names are those of ops and of placeholders.
        self.sizes = {name: f"size_{name}" for name in sizes}
        assert self.taken.isdisjoint(self.sizes.values())
        self.taken.update(self.sizes.values())
        self.names: dict[int, str] = {}  # id of what the code refers to -> its name
        self.scope: dict[str, Any] = {}
        self.last_reads: dict[fx.Node, list[str]] = {}  # node -> names that die with it
        read: set[fx.Node] = set()
        for node in reversed(self.nodes):
            for argument in node.all_input_nodes:
                if argument not in read:
                    read.add(argument)
                    self.last_reads.setdefault(node, []).append(argument.name)
        # Walked from the end: the first reader that is met is the last one to run.
        self.read = read

    def function(self) -> tuple[Callable[[list[Any]], Any], str]:
        inputs = [node for node in self.nodes if node.op == "placeholder"]
        names = [*(node.name for node in inputs), *self.sizes.values()]
        lines = ["def run(args):"]
        if names:
            # A statement of its own, so that no name for the unpacked list stays behind.
            lines.append(f"    [{', '.join(names)}] = args")
            lines.append("    args.clear()")
            idle = [node.name for node in inputs if node not in self.read]
            if idle:
                lines.append(f"    del {', '.join(idle)}")
        calls = [node for node in self.nodes if node.op != "placeholder"]
        places = [""] * len(lines) + [facts(n).where if has_facts(n) else "" for n in calls]
        lines += ["    " + self._line(node) for node in calls]
        source = "\n".join(lines) + "\n"
        name = f"<rekindle>.{next(_number)}"
        self.scope.update(__name__=name, __loader__=_Source(source, places))
        exec(compile(source, name, "exec"), self.scope)  # a graph of ours, no text from outside
        return self.scope.pop("run"), source

    def _line(self, node: fx.Node) -> str:
        if node.op == "output":
            return f"return {self._text(node.args[0])}"
        args = [self._text(a) for a in node.args]
        if node.op == "call_method":
            called = f"{args.pop(0)}.{node.target}"
        else:
            assert node.op == "call_function", f"{node} is {node.op}"
            called = self._name(node.target, getattr(node.target, "__name__", "call"))
        args += [f"{k}={self._text(v)}" for k, v in node.kwargs.items()]
        text = f"{called}({', '.join(args)})"
        if node in self.read:
            text = f"{node.name} = {text}"
        dying = self.last_reads.get(node)
        return f"{text}; del {', '.join(dying)}" if dying else text

    def _text(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return str(arg.name)
        if arg is None or type(arg) in (bool, int, str):
            return repr(arg)
        # inf and nan have no literal: they are given by a name in the scope, as everything below.
        if type(arg) is float and math.isfinite(arg):
            return repr(arg)
        if self.sizes and is_symbolic(arg):
            return self._number(arg)
        if isinstance(arg, list):
            return f"[{', '.join([self._text(a) for a in arg])}]"
        if type(arg) is tuple:
            return f"({''.join([self._text(a) + ', ' for a in arg])})"
        if isinstance(arg, dict):
            items = [f"{self._text(k)}: {self._text(v)}" for k, v in arg.items()]
            return f"{{{', '.join(items)}}}"
        if isinstance(arg, slice):
            return f"slice({', '.join(map(self._text, (arg.start, arg.stop, arg.step)))})"
        return self._name(arg, str(arg))

    def _number(self, number: Any) -> str:
        """A number that hangs on sizes, as an expression over them."""
        text = size_text(number)
        return f"({_WORD.sub(lambda word: self.sizes.get(word[0], word[0]), text)})"

    def _name(self, thing: Any, like: str) -> str:
        """A name for something that the code refers to, as near to its own as can be."""
        # By id: two things may be equal and not the same. The scope keeps each alive, so an id
        # stays its own.
        known = self.names.get(id(thing))
        if known is not None:
            return known
        base = "".join([c if c.isalnum() and c.isascii() else "_" for c in like])[:40]
        if not base.isidentifier() or keyword.iskeyword(base) or base == "run":
            base = f"_{base}"
        name = base
        for i in itertools.count(1):
            if name not in self.taken:
                break
            name = f"{base}_{i}"
        self.taken.add(name)
        self.scope[name] = thing
        self.names[id(thing)] = name
        return name
