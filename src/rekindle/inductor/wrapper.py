"""The text of Inductor's wrapper -> its steps: buffers, aliases, kernel calls, and what it returns.

Inductor writes one Python function per graph. With buffer reuse off it is a straight line: it
allocates each buffer once, calls kernels and library functions on buffers and views of them, and
returns a tuple. The text is what Inductor keeps in its cache, so it is there without compiling, and
it has hardly changed from release to release; whatever is not known here is refused by name.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rekindle.errors import CaptureError


class NotCompiled(CaptureError):
    """The graph cannot run with compiled kernels; the message says why."""


@dataclass(frozen=True, slots=True)
class Allocate:
    """A buffer without contents."""

    name: str
    call: ast.Call


@dataclass(frozen=True, slots=True)
class Clear:
    """A buffer is filled with zeros."""

    name: str


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name for a buffer, or for a view of it."""

    name: str
    shown: ast.expr


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of what a call gave back."""

    name: str
    whole: str
    index: int


@dataclass(frozen=True, slots=True)
class Run:
    """A kernel, or a function of a library, is called."""

    call: ast.Call
    result: str | None  # the name of what it gives back
    origins: tuple[str, ...] = ()  # the nodes of the traced graph that it computes


Step = Allocate | Clear | Alias | Part | Run


@dataclass(frozen=True, slots=True)
class Wrapper:
    """The steps of one graph."""

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    results: tuple[ast.expr, ...]
    kernels: dict[str, ast.Call]  # name -> how it was defined


# What checks or frees, and changes nothing else.
_IDLE_CALLS = frozenset({"assert_size_stride", "assert_alignment", "check_cuda_tensors"})
_IDLE_METHODS = frozenset({"args.clear", "torch.cuda.set_device"})
_STREAMS = frozenset({"get_raw_stream", "torch.cuda.current_stream"})


def read_wrapper(text: str) -> Wrapper:
    """The steps of a wrapper. Raises NotCompiled for a line that is not known."""
    tree = ast.parse(text)
    kernels = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "call"]
    if len(found) != 1:
        raise NotCompiled("Inductor's wrapper has no single function `call`")
    reader = _Reader()
    reader.read(found[0].body)
    steps = _with_origins(reader.steps, kernels, text.splitlines())
    return Wrapper(reader.inputs, tuple(steps), reader.results, kernels)


_ORIGINS = re.compile(r"# Topologically Sorted Source Nodes: \[([^\]]*)\]")


def _with_origins(
    steps: Sequence[Step], kernels: Mapping[str, ast.Call], lines: Sequence[str]
) -> Iterator[Step]:
    """Comments above a call, or above the definition of the kernel that is called, say what the
    kernel computes. A kernel that is called several times has one definition."""
    comments = {
        number: tuple(found[1].split(", "))
        for number, line in enumerate(lines, 1)
        if (found := _ORIGINS.search(line)) is not None
    }
    defined = sorted(call.lineno for call in kernels.values())
    before = 0
    for step in steps:
        if isinstance(step, Run):
            name = ast.unparse(step.call.func).removesuffix(".run")
            near = range(step.call.lineno, before, -1)
            above = next((comments[n] for n in near if n in comments), ())
            if not above and name in kernels:
                begin = kernels[name].lineno
                last = max((n for n in defined if n < begin), default=0)
                above = next((comments[n] for n in range(begin, last, -1) if n in comments), ())
            before = step.call.lineno
            step = replace(step, origins=above)
        yield step


def view_source(expr: ast.expr) -> ast.expr | None:
    """What a call of `reinterpret_tensor` shows; None for anything else."""
    if isinstance(expr, ast.Call) and isinstance(expr.func, ast.Name):
        if expr.func.id == "reinterpret_tensor":
            return expr.args[0]
        if expr.func.id == "alias" and len(expr.args) == 1:
            return expr.args[0]
    return None


class _Reader:
    def __init__(self) -> None:
        self.inputs: tuple[str, ...] = ()
        self.steps: list[Step] = []
        self.results: tuple[ast.expr, ...] = ()

    def read(self, body: list[ast.stmt]) -> None:
        for line in body:
            match line:
                case ast.With():  # the device
                    self.read(line.body)
                case ast.Delete():
                    pass
                case ast.Assign(targets=[target]):
                    self._assign(target, line.value)
                case ast.Expr(value=ast.Call() as call):
                    self._call(call)
                case ast.Return(value=ast.Tuple() as returned):
                    self.results = tuple(returned.elts)
                case _:
                    raise _unknown(line)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(value, ast.Name) and value.id == "args":
            assert isinstance(target, ast.Tuple | ast.List)
            self.inputs = tuple([ast.unparse(name) for name in target.elts])
            return
        if not isinstance(target, ast.Name):
            raise _unknown(target)
        match value:
            case ast.Call() if _is_allocation(value):
                self.steps.append(Allocate(target.id, value))
            case ast.Call(func=func) if ast.unparse(func) in _STREAMS:
                pass
            case ast.Name():
                self.steps.append(Alias(target.id, value))
            case ast.Subscript(value=ast.Name(id=whole), slice=ast.Constant(value=int() as i)):
                self.steps.append(Part(target.id, whole, i))
            case ast.Call() if view_source(value) is not None:
                self.steps.append(Alias(target.id, value))
            case ast.Call():
                self.steps.append(Run(value, target.id))
            case _:
                raise _unknown(value)

    def _call(self, call: ast.Call) -> None:
        name = ast.unparse(call.func)
        if name in _IDLE_CALLS or name in _IDLE_METHODS:
            return
        match call.func:
            case ast.Attribute(value=ast.Name(id=buffer), attr="zero_") if not call.args:
                self.steps.append(Clear(buffer))
            case _:
                self.steps.append(Run(call, None))


def _is_allocation(call: ast.Call) -> bool:
    match call.func:
        case ast.Name(id=name):
            return name.startswith("empty_strided")
        case ast.Attribute(value=ast.Call() as inner, attr="as_strided"):  # of a padded room
            return _is_allocation(inner)
    return False


def method_of(call: ast.Call) -> tuple[str, str] | None:
    """The buffer and the last method of a call such as `buf0[0 : 64].view(8, 8).sum(dim=0)`; None
    where it is a function that is called."""
    if not isinstance(call.func, ast.Attribute):
        return None
    at: ast.expr = call.func
    while not isinstance(at, ast.Name):
        match at:
            case ast.Attribute(value=inner) | ast.Subscript(value=inner) | ast.Call(func=inner):
                at = inner
            case _:
                return None
    return at.id, call.func.attr


def _unknown(line: ast.AST) -> NotCompiled:
    return NotCompiled(f"a line of Inductor's wrapper is not known: {ast.unparse(line)[:100]}")
