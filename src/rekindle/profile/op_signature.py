"""What makes two ops cost the same: target, shapes, strides, dtypes, devices, storages, constants.

`signature(node)` reads one fx node whose tensors are described and gives an `OpCall`: the
call with every tensor replaced by a `TensorSpec`. Its `key` is canonical JSON, so it is the same in
every process and can be a key on disk. Nothing else of the graph enters.
"""

import hashlib
import json
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from rekindle.capture.changing_sizes import SizesAt, number_key
from rekindle.capture.node_facts import facts, has_facts


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its data. `alias` numbers the storages of one call: equal number, same."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int
    alias: int
    device: str
    lazy: str = ""  # "conj", "neg": bits that an op resolves by a copy of its own

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def itemsize(self) -> int:
        return int(self.torch_dtype.itemsize)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def touched_bytes(self) -> int:
        """Distinct bytes that reading the whole tensor touches: expanded dimensions count once."""
        distinct = math.prod(n for n, s in zip(self.shape, self.stride, strict=True) if s or n == 0)
        return distinct * self.itemsize

    @property
    def is_dense(self) -> bool:
        """Some order of its dimensions lays it out without gaps."""
        order = sorted((s, n) for n, s in zip(self.shape, self.stride, strict=True) if n != 1)
        expected = 1
        for stride, size in order:
            if stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call: `args` and `kwargs` hold TensorSpec where the node has tensors."""

    target: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorSpec | None, ...]  # None: not a tensor
    num_inputs: int  # distinct storages among the inputs; an output's alias below it is a view
    key: str

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return tuple(tensor_specs((self.args, self.kwargs)))

    def is_new(self, output: TensorSpec | None) -> bool:
        """The output has a storage of its own, made by this op."""
        return output is not None and output.alias >= self.num_inputs

    @property
    def is_view(self) -> bool:
        """No output has a storage of its own, and nothing is written."""
        if any(self.is_new(out) for out in self.outputs) or not self.outputs:
            return False
        return not writes_inputs(self.target)

    @property
    def device(self) -> str:
        """The device that does the work: where the outputs are, else the inputs."""
        for spec in (*self.outputs, *self.inputs):
            if spec is not None and spec.device != "cpu":
                return spec.device
        return "cpu"


def signature(node: fx.Node, at: SizesAt | None = None) -> OpCall:
    """The call of a `call_function` node; raises ValueError for any other node. `at`: the sizes,
    where they change."""
    if node.op != "call_function" or not callable(node.target):
        raise ValueError(f"node {node.name} is {node.op}, and only call_function nodes have a cost")
    storages: dict[int, int] = {}
    args = tuple(_describe(a, storages, at) for a in node.args)
    kwargs = {k: _describe(v, storages, at) for k, v in sorted(node.kwargs.items())}
    num_inputs = len(storages)
    outputs = tuple(_outputs(facts(node).value, storages, at))
    # By name, not by object: the key must be the same in another process.
    name = target_name(node.target)
    record = [name, [_record(a) for a in args], {k: _record(v) for k, v in kwargs.items()}]
    key = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return OpCall(node.target, name, args, kwargs, outputs, num_inputs, key)


class QuickKeys:
    """Tells equal calls of one graph apart from different ones without writing them out: every
    tensor is read once, and a call is a tuple of small numbers. Equal keys mean equal signatures;
    the reverse need not hold."""

    def __init__(self, with_symbols: bool = False) -> None:
        self._with_symbols = with_symbols  # calls are equal if they are for all sizes
        self._kinds: dict[fx.Node, Any] = {}
        self._numbers: dict[Hashable, int] = {}

    def key(self, node: fx.Node) -> Hashable:
        storages: dict[int, int] = {}
        args = tuple([self._part(a, storages) for a in node.args])
        if not node.kwargs:
            return (node.target, args)
        kwargs = tuple([(k, self._part(v, storages)) for k, v in sorted(node.kwargs.items())])
        return (node.target, args, kwargs)

    def _part(self, arg: Any, storages: dict[int, int]) -> Any:
        if isinstance(arg, fx.Node):
            kind = self._kinds.get(arg)
            if kind is None:
                kind = self._read(facts(arg).value) if has_facts(arg) else arg
                self._kinds[arg] = kind
            return self._numbered(kind, storages)
        if isinstance(arg, (list, tuple)):
            return tuple([self._part(a, storages) for a in arg])
        if self._with_symbols:
            arg = number_key(arg)
        return (type(arg), arg)  # 1, 1.0 and True are equal to Python and not to an op

    def _read(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            # What a TensorSpec tells, in a form that takes a third of the time to write.
            numbers: tuple[Any, ...] = (*value.shape, *value.stride(), value.storage_offset())
            numbers += (storage.nbytes(),)
            if self._with_symbols:
                numbers = tuple(map(number_key, numbers))
            spec = (numbers, value.dtype, value.device, value.is_conj(), value.is_neg())
            number = self._numbers.setdefault(spec, len(self._numbers))
            return [StorageWeakRef(storage).cdata, number]
        if isinstance(value, (list, tuple)):
            return tuple(self._read(v) for v in value)
        return (type(value), value)

    def _numbered(self, kind: Any, storages: dict[int, int]) -> Any:
        if isinstance(kind, list):
            storage, number = kind
            return (storages.setdefault(storage, len(storages)), number)
        if isinstance(kind, tuple) and kind and isinstance(kind[0], (list, tuple)):
            return tuple([self._numbered(k, storages) for k in kind])
        return kind


def target_name(target: Any) -> str:
    """The name of an op, the same in every process."""
    if hasattr(target, "overloadpacket"):  # an ATen (or custom) op: "aten.mm.default"
        return str(target)
    module = getattr(target, "__module__", None) or ""
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", str(target))
    return f"{module}.{name}" if module else str(name)


def packet_of(call: OpCall) -> str:
    """ "aten.mm" of "aten.mm.default"; the whole name of anything else."""
    return call.name.rpartition(".")[0] if hasattr(call.target, "overloadpacket") else call.name


def writes_inputs(target: Any) -> bool:
    """The op changes one of its arguments."""
    schema = getattr(target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def tensor_specs(tree: Any) -> Iterator[TensorSpec]:
    """All specs in nested arguments, in order."""
    if isinstance(tree, TensorSpec):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensor_specs(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensor_specs(item)


def map_specs(tree: Any, fn: Callable[[TensorSpec], Any]) -> Any:
    """The tree with `fn` applied to each TensorSpec."""
    if isinstance(tree, TensorSpec):
        return fn(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_specs(item, fn) for item in tree)
    if isinstance(tree, dict):
        return {k: map_specs(v, fn) for k, v in tree.items()}
    return tree


def _plain(number: Any) -> Any:
    return number


def spec_of(
    tensor: torch.Tensor, storages: dict[int, int], at: SizesAt | None = None
) -> TensorSpec:
    """What an op's time may depend on of a tensor. `storages` numbers those that were seen before:
    two arguments over one storage cost another time than two of their own."""
    storage = tensor.untyped_storage()
    alias = storages.setdefault(StorageWeakRef(storage).cdata, len(storages))
    number = _plain if at is None else at.number
    return TensorSpec(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple([int(number(n)) for n in tensor.shape]),
        stride=tuple([int(number(n)) for n in tensor.stride()]),
        offset=int(number(tensor.storage_offset())),
        storage_bytes=int(number(storage.nbytes())),
        alias=alias,
        device=tensor.device.type,
        lazy=("conj" if tensor.is_conj() else "") + ("neg" if tensor.is_neg() else ""),
    )


def _describe(arg: Any, storages: dict[int, int], at: SizesAt | None) -> Any:
    if isinstance(arg, fx.Node):
        if not has_facts(arg):  # a submodule or constant fetched by get_attr
            owner = arg.graph.owning_module
            if arg.op == "get_attr" and owner is not None:
                return _describe(_fetch(owner, str(arg.target)), storages, at)
            raise ValueError(f"nothing is known of node {arg.name}: capture it with fake tensors")
        return _describe(facts(arg).value, storages, at)
    if isinstance(arg, torch.Tensor):
        return spec_of(arg, storages, at)
    if isinstance(arg, torch.SymInt | torch.SymFloat | torch.SymBool):
        if at is not None:
            return at.number(arg)
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(arg)]
        return kind(arg)
    if isinstance(arg, (tuple, list)):
        return tuple(_describe(a, storages, at) for a in arg)
    if isinstance(arg, dict):
        return {k: _describe(v, storages, at) for k, v in sorted(arg.items())}
    return arg


def _fetch(owner: Any, path: str) -> Any:
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


def _outputs(
    value: Any, storages: dict[int, int], at: SizesAt | None
) -> Iterator[TensorSpec | None]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _outputs(item, storages, at)
    elif isinstance(value, torch.Tensor):
        yield spec_of(value, storages, at)
    else:
        yield None


def _record(value: Any) -> Any:
    """A constant or a spec as JSON data in which different values are never equal."""
    if isinstance(value, TensorSpec):
        fields = (value.dtype, value.shape, value.stride, value.offset, value.storage_bytes)
        return {"tensor": [*fields, value.alias, value.device, value.lazy]}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        # JSON has no inf and no nan; and 1.0 is another argument than 1.
        return {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": repr(value)}
    if isinstance(value, (tuple, list)):
        return [_record(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _record(v) for k, v in sorted(value.items())}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value)}
    # A subgraph of a higher-order op: its code says what it computes.
    if isinstance(value, fx.GraphModule):
        return {"code": hashlib.sha256(value.code.encode()).hexdigest()}
    return {"object": f"{type(value).__module__}.{type(value).__qualname__}"}
