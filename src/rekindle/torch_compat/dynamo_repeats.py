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
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from rekindle.torch_compat.alike import alike, described
from rekindle.torch_compat.unchanged import Unchanged

LOCAL = "repeated"  # of the function that Dynamo reads: the tensors of repeated blocks
_FEWEST = 3  # siblings of one class that are worth a look
_MOST_READ = 4  # blocks of one class that are read, each unlike the others
_MOST_KEPT = 4  # models whose blocks were seen as they are: a copy of the first, for one
_NOT_THERE = (KeyError, AttributeError, IndexError, TypeError)
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


class Repeats:
    """The blocks of a call that were not read themselves: whether they are still as they were, or
    like the block that was read for them, and the tensors in them."""

    __slots__ = ("_blocks", "_firsts", "_found", "_namespace", "_seen")

    def __init__(
        self, found: "_Found", scope: Mapping[str, Any], namespace: Mapping[str, Any]
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
class _Found:
    """What one attempt to read a call has repeated."""

    output: Any = None  # Dynamo's, of this attempt
    read: dict[type, list[_Block]] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)  # expressions
    firsts: list[str] = field(default_factory=list)  # of tensors of blocks that were read
    pairs: list[tuple[int, int, frozenset[str]]] = field(default_factory=list)
    tensors: list[tuple[int, int]] = field(default_factory=list)  # the pair, and which of `firsts`
    values: list[torch.Tensor] = field(default_factory=list)  # those tensors


@contextlib.contextmanager
def repeated(model: Any, question: Any, noted: Any) -> Iterator[_Found]:
    """Inside, Dynamo reads blocks of the model that are alike once. `question` is the target of
    nodes that stand for questions to the data; `noted` is what was read without a guard."""
    from torch._dynamo.variables import UnspecializedNNModuleVariable

    found = _Found()
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
        return _Reader(found, tx, self, args, kwargs, question, noted).call(plainly)

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
        found: _Found,
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
                found[number] = ([(name, id(value)) for name, value in put.items()], content)
        return found

    # ---- a block that is read

    def _read(self, plainly: Callable[[], Any], known: list[_Block]) -> Any:
        output = self.output
        last = next(iter(reversed(output.graph.nodes)), None)
        before = self._noted()
        guards = set(output.guards)
        out = plainly()
        nodes = []
        for node in reversed(output.graph.nodes):
            if node is last:
                break
            if node.op != "placeholder":
                nodes.append(node)
        nodes.reverse()
        if before != self._noted() or (self._surroundings(), self._changes()) != self.state:
            return out
        result = self._result(out, set(nodes))
        if result is None or not all(map(self._is_repeatable, nodes)):
            return out
        words = self._words([g for g in output.guards if g not in guards])
        if words is not None:
            given, arguments = self.given, tuple(self.arguments)
            known.append(
                _Block(
                    *(self.module, self._expression(), self._path(), given, arguments),
                    *(tuple(nodes), result, self.state, words),
                )
            )
        return out

    def _noted(self) -> Any:
        """What repeating a block would leave out."""
        noted = self.noted
        unguarded = (len(noted.aspects), noted.prepared.num_calls)
        effects = self.output.side_effects
        done = (len(effects.tensor_hooks), len(effects.save_for_backward))
        drawn = len(self.output.random_calls)
        return (set(self.output.nn_modules), len(self.found.pairs), unguarded, done, drawn)

    def _is_repeatable(self, node: fx.Node) -> bool:
        target = node.target
        if node.op == "call_module" or isinstance(target, torch._ops.HigherOrderOperator):
            return False
        return target is not self.question

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

    def _words(self, new: list[Any]) -> frozenset[str] | None:
        """What guards speak of, all of them: a block may have been read in part before. None where
        one is about which object it is that stands in the block."""
        own = self._own_objects()
        scope = {"L": self.tx.output.root_tx.f_locals, "G": self.tx.output.root_tx.f_globals}
        for guard in new:
            kind, name = guard.create_fn_name(), _name(guard.originating_source)
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
            words.update(_WORD.findall(_name(guard.originating_source)))
        return frozenset(words)

    def _own_objects(self) -> set[int]:
        found = {id(m) for m in self.module.modules()}
        found.update(map(id, self.module.parameters()))
        found.update(map(id, self.module.buffers()))
        return found

    def _expression(self) -> str:
        return _name(self.variable.source)

    def _path(self) -> str:
        source = self.variable.get_nn_module_stack_source()
        return re.sub(r"\._(?:modules)\[(['\"])([^'\"\]]+)\1\]", r".\2", _name(source))

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
        expression = _name(argument.source)
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


def _name(source: Any) -> str:
    name = source.name  # a method, until torch 2.11
    return str(name() if callable(name) else name)
