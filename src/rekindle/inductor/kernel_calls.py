"""One call of Inductor's wrapper -> a Python function of tensors that allocates what the kernel
writes, launches it, and gives back what was made.

The function is the target of a node in a graph, as an op of torch is: it reads its arguments, and
its results are new. What it writes into of its arguments stands in `CallForm.written`.
"""

import ast
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rekindle.inductor.wrapper import NotCompiled
from rekindle.torch_compat import is_overload


@dataclass(frozen=True, slots=True)
class Fresh:
    """A buffer that a call allocates before the kernel runs."""

    name: str
    allocation: str
    cleared: bool
    scratch: bool  # nobody reads it afterwards


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call with its tensors taken out: what the function of a node is made from."""

    kernel: str  # what is called, for people
    definition: str  # of the kernel: equal calls of equal kernels cost the same
    params: tuple[str, ...]
    fresh: tuple[Fresh, ...]
    call: str
    has_result: bool
    written: tuple[int, ...]  # positions of the params that are written into
    # Params that may be left out of a second run, and what is allocated in their place.
    statistics: Mapping[int, str]
    is_random: bool


def function_of(form: CallForm, scope: dict[str, Any]) -> Callable[..., Any]:
    """The function of a call. `scope`: the globals of the wrapper."""
    lines = [f"def run({', '.join(form.params)}):"]
    for position, allocation in form.statistics.items():
        lines.append(f"    if {form.params[position]} is None:")
        lines.append(f"        {form.params[position]} = {allocation}")
    for buffer in form.fresh:
        lines.append(f"    {buffer.name} = {buffer.allocation}")
        if buffer.cleared:
            lines.append(f"    {buffer.name}.zero_()")
    if form.has_result:
        lines.append(f"    return {form.call}")
    else:
        lines.append(f"    {form.call}")
        made = [buffer.name for buffer in form.fresh if not buffer.scratch]
        made = made or [form.params[i] for i in form.written[:1]]
        lines.append(f"    return {', '.join(made)}" if made else "    return None")
    text = "\n".join(lines)
    digest = hashlib.sha256((text + form.definition).encode()).hexdigest()[:16]
    names: dict[str, Any] = {}
    exec(compile(text, f"<rekindle {form.kernel}>", "exec"), scope, names)
    function: Any = names["run"]
    function.__name__ = form.kernel
    # The name under which costs are kept on disk: the same kernel in another process has it too.
    function.__qualname__ = f"{form.kernel}.{digest}"
    function.__module__ = "inductor"
    function.statistics = tuple(form.statistics)
    function.is_random = form.is_random
    return function  # type: ignore[no-any-return]


def restrided(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A copy with these strides."""
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def called(call: ast.Call, scope: Mapping[str, Any]) -> Any:
    """What a call of the wrapper calls: a kernel, an op, or a function of a library."""
    func = call.func
    if isinstance(func, ast.Attribute) and func.attr == "run" and isinstance(func.value, ast.Name):
        func = func.value
    try:
        return eval(compile(ast.Expression(func), "<wrapper>", "eval"), dict(scope))
    except (NameError, AttributeError) as error:
        raise NotCompiled(f"Inductor's wrapper calls {ast.unparse(func)}: {error}") from None


def written_arguments(
    call: ast.Call, target: Any, kernels: Mapping[str, ast.Call]
) -> Sequence[ast.expr]:
    """The arguments of a call that it writes into. Raises NotCompiled where that is not known."""
    name = ast.unparse(call.func)
    out = [k.value for k in call.keywords if k.arg == "out"]
    if is_overload(target):
        return [*_by_schema(call, target), *(o for o in out if o not in call.args)]
    if name in kernels and ast.unparse(kernels[name].func) == "async_compile.cpp_pybinding":
        kinds = ast.literal_eval(kernels[name].args[0])
        pairs = zip(call.args, kinds, strict=True)
        return [argument for argument, kind in pairs if not kind.startswith("const ")]
    if name.endswith(".run") and hasattr(target, "triton_meta"):
        return _by_triton(call, target)
    if name.startswith("extern_kernels."):
        return out
    packet = isinstance(target, type(torch.ops.aten.add))
    if packet and name.endswith("_"):
        return [*call.args[:1], *out]
    if packet:
        return out
    raise NotCompiled(f"nothing is known of {name}, which Inductor's wrapper calls")


def _by_schema(call: ast.Call, target: Any) -> list[ast.expr]:
    found = []
    keywords = {k.arg: k.value for k in call.keywords}
    for position, argument in enumerate(target._schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write:
            if position < len(call.args):
                found.append(call.args[position])
            elif argument.name in keywords:
                found.append(keywords[argument.name])
    return found


def _by_triton(call: ast.Call, kernel: Any) -> list[ast.expr]:
    """Arguments of generated kernels have telling names; others are refused."""
    signature = kernel.triton_meta["signature"]
    names = [n for n, kind in signature.items() if kind != "constexpr"]
    # Templates are given the grid besides.
    if len(names) > len(call.args) or not all(map(_is_number, call.args[len(names) :])):
        raise NotCompiled(f"{kernel_name(call)} has arguments {names} and is given others")
    mutated = set(kernel.mutated_arg_names or ())
    found = []
    for name, argument in zip(names, call.args, strict=False):
        if name in mutated or name.startswith(("out_ptr", "in_out_ptr", "ws_ptr", "sem_ptr")):
            found.append(argument)
        elif not name.startswith(("in_ptr", "arg_", "load_seed", "ks")) and not _is_number(
            argument
        ):
            raise NotCompiled(f"argument {name} of {kernel_name(call)} is not known")
    return found


def _is_number(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Constant | ast.UnaryOp)


def draws(target: Any) -> bool:
    """Whether an op draws from a random number generator."""
    if not is_overload(target):
        return False
    # Forms that write into `out` do not always carry the tag of the op.
    packet = target.overloadpacket
    forms = [getattr(packet, name) for name in packet.overloads()]
    return any(torch.Tag.nondeterministic_seeded in form.tags for form in forms)


def kernel_name(call: ast.Call) -> str:
    """What is called, for people."""
    return ast.unparse(call.func).removesuffix(".run").removeprefix("torch.ops.")


def definition_of(call: ast.Call, kernels: Mapping[str, ast.Call]) -> str:
    """The source of the kernel that is called; "" for an op."""
    found = kernels.get(kernel_name(call))
    return "" if found is None else ast.unparse(found)
