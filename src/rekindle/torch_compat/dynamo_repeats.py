"""Blocks of a model that are built alike are read once: the nodes of the first one's graph are
repeated with the tensors of each other.

What a block reads is its arguments, itself, and what all blocks share. The arguments have to be of
the same kind; the blocks alike in everything (see `alike`), but for plain attributes whose names no
guard mentions; and what they share must not have been changed in between. Dynamo's guards are on
the first of the blocks only. A call is covered where they hold and the others are as they were, or
are still like the first.
"""

import contextlib
import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from rekindle.torch_compat.alike import alike, described
from rekindle.torch_compat.dynamo_backward import source_name
from rekindle.torch_compat.repeated_blocks import LOCAL, Found

_FEWEST = 3  # siblings of one class that are worth a look
_MOST_READ = 4  # blocks of one class that are read, each unlike the others
# What is read of Dynamo may be elsewhere in a release that nobody tried: blocks are read each then.
_OF_ANOTHER_RELEASE = (AttributeError, TypeError, ImportError)
_WORD = re.compile(r"\w+")


def blocks_of(model: Any) -> set[int]:
    """Ids of the modules that have siblings of their own class, and modules in them."""
    found: set[int] = set()
    for module in model.modules() if isinstance(model, nn.Module) else ():
        by_class: dict[type, list[nn.Module]] = {}
        for child in module.children():
            if next(child.children(), None) is not None:
                by_class.setdefault(type(child), []).append(child)
        for alike_ones in by_class.values():
            if len(alike_ones) >= _FEWEST:
                found.update(map(id, alike_ones))
    return found


@dataclass(frozen=True, slots=True)
class _Block:
    """A block that was read: what it was given, what it became."""

    module: nn.Module
    expression: str  # of Dynamo's for the module
    path: str  # as nodes name it
    given: Any  # what the arguments are like
    arguments: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    out: Any
    surroundings: Any
    words: frozenset[str]  # in what guards say


@contextlib.contextmanager
def repeated(model: Any, question: Any, noted: Any) -> Iterator[Found]:
    """Inside, Dynamo reads blocks of the model that are alike once. `question` is the target of
    nodes that stand for questions to the data; `noted` is what was read without a guard."""
    from torch._dynamo.variables import UnspecializedNNModuleVariable

    found = Found()
    blocks = blocks_of(model)
    read = UnspecializedNNModuleVariable.call_function
    if not blocks:
        yield found
        return

    @functools.wraps(read)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        plainly = functools.partial(read, self, tx, args, kwargs)
        if id(self.value) not in blocks or self.source is None or len(tx.output.tracers) > 1:
            return plainly()
        if found.output is not tx.output:  # Dynamo has begun anew
            for part in (found.read, found.blocks, found.firsts, found.pairs):
                part.clear()
            found.tensors.clear()
            found.values.clear()
            found.output = tx.output
        try:
            reader = _Reader(found, tx, self, args, kwargs, question, noted)
        except _OF_ANOTHER_RELEASE:
            return plainly()
        return reader.call(plainly)

    UnspecializedNNModuleVariable.call_function = call_function
    try:
        yield found
    finally:
        UnspecializedNNModuleVariable.call_function = read
        found.output = None
        found.read.clear()


class _Reader:
    """One call of a block."""

    def __init__(
        self,
        found: Found,
        tx: Any,
        variable: Any,
        args: Any,
        kwargs: Any,
        question: Any,
        noted: Any,
    ) -> None:
        self.found, self.tx, self.output = found, tx, tx.output
        self.variable, self.module = variable, variable.value
        self.question, self.noted = question, noted
        self.arguments: dict[fx.Node, Any] = {}  # and their variables
        self.given = self._told((list(args), dict(kwargs)))
        self.state = (self._surroundings(), self._changes())

    def call(self, plainly: Callable[[], Any]) -> Any:
        if self.given is None:
            return plainly()
        known = self.found.read.setdefault(type(self.module), [])
        for block in known:
            plan = self._plan(block)
            if plan is not None:
                return self._repeat(block, *plan)
        if len(known) >= _MOST_READ:
            return plainly()
        return self._read(plainly, known)

    # ---- what a call is like

    def _told(self, nest: Any) -> Any:
        """What arguments are like, None where they are of a kind that cannot be compared. Notes
        the nodes of tensors."""
        from torch._dynamo.variables import ConstantVariable, TensorVariable, TupleVariable

        if isinstance(nest, (list, tuple)):
            told = [self._told(v) for v in nest]
            return None if None in told else (type(nest), *told)
        if isinstance(nest, dict):
            told = [self._told(v) for v in nest.values()]
            return None if None in told else (tuple(nest), *told)
        variable = nest.realize()
        if type(variable) is TensorVariable:
            node = variable.as_proxy().node
            number = list(self.arguments).index(node) if node in self.arguments else None
            self.arguments[node] = variable
            example = node.meta.get("example_value")
            if example is None:
                return None
            is_input = node.op == "placeholder"
            return ("tensor", number, node if is_input else described(example))
        if type(variable) is ConstantVariable:
            return ("plain", type(variable.value), repr(variable.value))
        if type(variable) is TupleVariable:
            return self._told(tuple(variable.items))
        # An object of the caller's, the same in each call.
        return None if variable.source is None else ("object", variable.source)

    def _surroundings(self) -> Any:
        """What a call could see besides its arguments and what guards are about."""
        modes = getattr(getattr(self.tx, "symbolic_torch_function_state", None), "mode_stack", ())
        autocast = [
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ]
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast,
            torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            [id(mode) for mode in modes],
        )

    def _changes(self) -> dict[int, Any]:
        """What the call has changed so far of objects that stay, by the id of each. An object that
        it made is no part of this: it gets to a block as an argument, and that is compared."""
        from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

        effects = self.output.side_effects
        found: dict[int, Any] = {}
        for number, variable in effects.id_to_variable.items():
            is_new = isinstance(variable.mutation_type, (AttributeMutationNew, ValueMutationNew))
            if not effects.is_modified(variable) or (is_new and not _is_tensor(variable)):
                continue
            put = effects.store_attr_mutations.get(variable, {})
            if put or not is_new:
                items = getattr(variable, "items", None)
                content = [*map(id, items)] if isinstance(items, (list, dict)) else []
                if isinstance(items, dict):
                    content += map(id, items.values())
                found[number] = ([(name, id(value)) for name, value in put.items()], content)
        return found

    # ---- a block that is read

    def _read(self, plainly: Callable[[], Any], known: list[_Block]) -> Any:
        output = self.output
        last = next(iter(reversed(output.graph.nodes)), None)
        before = self._noted()
        guards = set(output.guards)
        out = plainly()
        with contextlib.suppress(*_OF_ANOTHER_RELEASE):
            if before == self._noted() and (self._surroundings(), self._changes()) == self.state:
                block = self._block(out, last, {*output.guards} - guards)
                known.extend([] if block is None else [block])
        return out

    def _block(self, out: Any, last: fx.Node | None, guards: set[Any]) -> _Block | None:
        """What was read: from the node after `last` on, with these guards more than before."""
        nodes: list[fx.Node] = []
        for node in reversed(self.output.graph.nodes):
            if node is last:
                break
            if node.op != "placeholder":
                nodes.append(node)
        nodes.reverse()
        result = self._result(out, set(nodes))
        if result is None or not all(map(self._is_repeatable, nodes)):
            return None
        words = self._words(guards)
        if words is None:
            return None
        return _Block(
            *(self.module, self._expression(), self._path(), self.given, tuple(self.arguments)),
            *(tuple(nodes), result, self.state, words),
        )

    def _noted(self) -> Any:
        """What repeating a block would leave out."""
        noted = self.noted
        unguarded = (len(noted.aspects), len(noted.later), noted.prepared.num_calls)
        effects = self.output.side_effects
        done = (len(effects.tensor_hooks), len(effects.save_for_backward))
        drawn = len(self.output.random_calls)
        return (set(self.output.nn_modules), len(self.found.pairs), unguarded, done, drawn)

    def _is_repeatable(self, node: fx.Node) -> bool:
        target = node.target
        if node.op == "call_module" or isinstance(target, torch._ops.HigherOrderOperator):
            return False
        return target is not self.question and target != "requires_grad_"

    def _result(self, out: Any, nodes: set[fx.Node]) -> Any:
        """What a call returns, in nodes; None where it is of another kind."""
        from torch._dynamo.variables import ConstantVariable, TensorVariable, TupleVariable

        variable = out.realize()
        if type(variable) is TensorVariable:
            node = variable.as_proxy().node
            return node if node in self.arguments or self._is_own(node, nodes) else None
        if type(variable) is ConstantVariable:
            return variable
        if type(variable) is TupleVariable:
            items = tuple([self._result(item, nodes) for item in variable.items])
            return None if None in items else items
        return None

    def _is_own(self, node: fx.Node, nodes: set[fx.Node]) -> bool:
        """Whether the tensor of a node shares its data with no tensor from before."""
        if node not in nodes or node.op == "get_attr" or node.target is operator.getitem:
            return False
        example = node.meta.get("example_value")
        if not isinstance(example, torch.Tensor) or example._is_view():
            return False
        others = {id(n.meta.get("example_value")) for n in node.all_input_nodes}
        return id(example) not in others

    def _words(self, new: set[Any]) -> frozenset[str] | None:
        """What guards speak of, all of them: a block may have been read in part before. None where
        one is about which object it is that stands in the block."""
        own = self._own_objects()
        scope = {"L": self.tx.output.root_tx.f_locals, "G": self.tx.output.root_tx.f_globals}
        for guard in new:
            kind, name = guard.create_fn_name(), source_name(guard.originating_source)
            if kind in ("TENSOR_MATCH", "TYPE_MATCH", "EQUALS_MATCH", "CONSTANT_MATCH") or not name:
                continue
            try:
                value = eval(name, scope)
            except Exception:  # of something that is not there, for one
                continue
            if "ID_MATCH" in kind and id(value) in own:
                return None
            if isinstance(value, Mapping) and any(id(key) in own for key in value):
                return None
        words: set[str] = set()
        for guard in self.output.guards:
            words.update(_WORD.findall(source_name(guard.originating_source)))
        return frozenset(words)

    def _own_objects(self) -> set[int]:
        found = {id(m) for m in self.module.modules()}
        found.update(map(id, self.module.parameters()))
        found.update(map(id, self.module.buffers()))
        return found

    def _expression(self) -> str:
        return source_name(self.variable.source)

    def _path(self) -> str:
        source = self.variable.get_nn_module_stack_source()
        return re.sub(r"\._(?:modules)\[(['\"])([^'\"\]]+)\1\]", r".\2", source_name(source))

    # ---- a block that is like one that was read

    def _plan(self, block: _Block) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, Any]] | None:
        """The nodes and the tensors in the place of the block's own, where this is like it."""
        if self.given != block.given or self.state != block.surroundings:
            return None
        like = alike(block.module, self.module)
        if isinstance(like, str) or like.differing & block.words:
            return None
        if like.parts & self.state[1].keys():
            return None
        if not self._is_found_again():
            return None
        places = dict(zip(block.arguments, self.arguments, strict=True))
        tensors: dict[fx.Node, Any] = {}
        taken = {id(n.meta["grapharg"].example) for n in self.output.placeholders}
        for node in {n: None for made in block.nodes for n in made.all_input_nodes}:
            if node.op != "placeholder":
                if node not in places and node not in block.nodes and node.op != "get_attr":
                    return None  # it came another way than by the arguments
                continue
            argument = node.meta["grapharg"]
            other = like.tensors.get(id(argument.example))
            if other is None:
                continue
            if node in places or id(other) in taken or other is argument.example:
                return None
            tensors[node] = other
        return places, tensors

    def _is_found_again(self) -> bool:
        """Whether Dynamo's expression for the block can be evaluated at each call."""
        root = self.output.root_tx
        with contextlib.suppress(Exception):
            return (
                eval(self._expression(), {"L": root.f_locals, "G": root.f_globals}) is self.module
            )
        return False

    def _repeat(
        self, block: _Block, places: dict[fx.Node, fx.Node], tensors: dict[fx.Node, Any]
    ) -> Any:
        found = self.found
        first, other = (self._number(e) for e in (block.expression, self._expression()))
        found.pairs.append((first, other, block.words))
        for node, tensor in tensors.items():
            places[node] = self._input(node, tensor)
        graph, old, new = self.output.graph, block.path, self._path()
        for node in block.nodes:
            copy = graph.node_copy(node, lambda n: places.get(n, n))
            stack = node.meta.get("nn_module_stack")
            if stack:
                copy.meta["nn_module_stack"] = {
                    key: (new + path[len(old) :] if path.startswith(old) else path, cls)
                    for key, (path, cls) in stack.items()
                }
            places[node] = copy
        return self._variable(block.out, places)

    def _number(self, expression: str) -> int:
        if expression not in self.found.blocks:
            self.found.blocks.append(expression)
        return self.found.blocks.index(expression)

    def _input(self, like: fx.Node, tensor: torch.Tensor) -> fx.Node:
        """A new input of the graph, for the tensor that stands in the place of another's."""
        from torch._dynamo.source import GetItemSource, LocalSource
        from torch._dynamo.variables.builder import GraphArg

        found, output = self.found, self.output
        argument = like.meta["grapharg"]
        expression = source_name(argument.source)
        if expression not in found.firsts:
            found.firsts.append(expression)
        source = GetItemSource(LocalSource(LOCAL, is_input=True), len(found.tensors))
        found.tensors.append((len(found.pairs) - 1, found.firsts.index(expression)))
        found.values.append(tensor)
        last = output.placeholders[-1]
        with output.graph.inserting_after(last):
            node = output.graph.placeholder(f"{LOCAL}_{len(found.tensors)}", type(tensor))
        node.meta["example_value"] = like.meta["example_value"]
        node.meta["grapharg"] = GraphArg(source, tensor, False, argument.fake_tensor)
        return node

    def _variable(self, result: Any, places: dict[fx.Node, fx.Node]) -> Any:
        from torch._dynamo.variables import TupleVariable
        from torch._dynamo.variables.builder import wrap_fx_proxy

        if isinstance(result, tuple):
            return TupleVariable([self._variable(item, places) for item in result])
        if not isinstance(result, fx.Node):
            return result
        node = places[result]
        if node in self.arguments:
            return self.arguments[node]
        node.meta.pop("example_value", None)
        return wrap_fx_proxy(self.tx, fx.Proxy(node, self.output.current_tracer))


def _is_tensor(variable: Any) -> bool:
    from torch._dynamo.variables import TensorVariable

    return isinstance(variable, TensorVariable)
