"""The rules about who may import what.

The layers are checked by import-linter (`make check`); here stands what it cannot say.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "rekindle"
FILES = sorted(SOURCE.rglob("*.py"))
MAX_FUNCTION_LINES = 80
NO_TORCH = ("core", "solve", "partition", "report")
MAY_USE_TORCH_COMPAT = (
    "frontend",
    "capture",
    "rewrite",
    "inductor",
    "program",
    "lower",
    "runtime",
    "nn_sequential",
    "integrate",
)


OFFERED = ast.literal_eval(
    next(
        node.value
        for node in ast.parse((SOURCE / "torch_compat" / "__init__.py").read_text("utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
)


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of all that is imported, anywhere in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def not_offered(names: list[str]) -> Iterator[str]:
    """What is imported from inside `torch_compat`, past what it offers."""
    inside = (n for n in names if n.startswith("rekindle.torch_compat."))
    return (n for n in inside if n.removeprefix("rekindle.torch_compat.") not in OFFERED)


def private_torch(tree: ast.AST) -> Iterator[str]:
    for name in imported(tree):
        parts = name.split(".")
        if parts[0] == "torch" and any(part.startswith("_") for part in parts):
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            text = ast.unparse(node)
            if text.startswith("torch.") and not node.attr.startswith("__"):
                yield text


def undocumented(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        is_public = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
        if is_public and not ast.get_docstring(node):
            yield node.name


def too_long(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES:
                yield node.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_file(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = list(imported(tree))
    if room(path) in NO_TORCH:
        assert not [name for name in names if name.split(".")[0] == "torch"]
    if room(path) not in (*MAY_USE_TORCH_COMPAT, "torch_compat"):
        assert not [name for name in names if name.startswith("rekindle.torch_compat")]
    if room(path) != "torch_compat":
        assert not list(not_offered(names)), "import what torch_compat offers from the package"
    if room(path) != "torch_compat":
        assert not list(private_torch(tree)), "private torch names belong in torch_compat"
    assert path.stem not in ("utils", "helpers")
    assert ast.get_docstring(tree), "a module opens with what it is for"
    assert not list(undocumented(tree)), "a public function or class says what it is for"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_functions_are_short(path):
    assert not list(too_long(ast.parse(path.read_text(encoding="utf-8"))))


def test_a_room_with_one_file_is_a_file():
    rooms = {path.parent for path in FILES} - {SOURCE}
    alone = [r for r in rooms if sum(p.name != "__init__.py" for p in FILES if r in p.parents) < 2]
    assert alone == []


def test_long_and_undocumented_functions_are_found():
    fits = "def f():\n" + "    pass\n" * (MAX_FUNCTION_LINES - 1)
    assert list(too_long(ast.parse(fits))) == []
    assert list(too_long(ast.parse(fits + "    pass\n"))) == ["f"]
    assert list(undocumented(ast.parse(fits))) == ["f"]
    assert list(undocumented(ast.parse("class _C:\n    pass\n"))) == []


def test_the_rules_find_offenders():
    tree = ast.parse("import torch._C\nfrom torch.fx import _x\nimport torch\ntorch._y.z()\n")
    assert list(private_torch(tree)) == ["torch._C", "torch.fx._x", "torch._y"]


def test_the_inside_of_torch_compat_is_its_own():
    tree = ast.parse("from rekindle.torch_compat import pytree\nimport rekindle.torch_compat.ops\n")
    assert list(not_offered(list(imported(tree)))) == ["rekindle.torch_compat.ops"]
    tree = ast.parse("from rekindle.torch_compat.dynamo import read_whole\n")
    assert len(list(not_offered(list(imported(tree))))) == 1


def imported_rooms(tree: ast.AST) -> set[str]:
    """Packages and top-level modules of rekindle that are imported anywhere in the file, inside
    functions and for type checkers too; "" where it is the root itself."""
    known = {room(path) for path in FILES} | {"_native"}
    names = (name.split(".") for name in imported(tree) if name.split(".")[0] == "rekindle")
    return {parts[1] if len(parts) > 1 and parts[1] in known else "" for parts in names}


def test_no_two_rooms_import_each_other():
    """The root alone is left out: it gives out the public names of all rooms, when they are asked
    for. So no room may import the root, but for the compiled module that lies in it."""
    edges = {
        (room(path), other)
        for path in FILES
        if path != SOURCE / "__init__.py"
        for other in imported_rooms(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert [pair for pair in sorted(edges) if pair[0] < pair[1] and pair[::-1] in edges] == []
    assert [here for here, other in edges if other in ("", "__init__")] == []
    assert ("api", "plan_object") in edges
    assert ("solve", "_native") in edges


def test_all_imports_of_rooms_are_seen():
    code = (
        "import rekindle\nfrom rekindle import _native\nfrom rekindle.core import simulate\n"
        "if TYPE_CHECKING:\n    from rekindle.api import plan\n"
        "def f():\n    import rekindle.solve.base\n"
    )
    assert imported_rooms(ast.parse(code)) == {"", "_native", "core", "api", "solve"}


def test_problem_rooms_load_without_torch():
    code = (
        "import rekindle.cli, rekindle.core, rekindle.solve, rekindle.plans.plan_account, sys; "
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
