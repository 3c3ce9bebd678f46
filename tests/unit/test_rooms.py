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
NO_TORCH = ("core", "solve", "partition", "report")
MAY_USE_TORCH_COMPAT = (
    "frontend",
    "capture",
    "rewrite",
    "program",
    "lower",
    "runtime",
    "nn_sequential",
    "integrate",
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_file(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = list(imported(tree))
    if room(path) in NO_TORCH:
        assert not [name for name in names if name.split(".")[0] == "torch"]
    if room(path) not in (*MAY_USE_TORCH_COMPAT, "torch_compat"):
        assert not [name for name in names if name.startswith("rekindle.torch_compat")]
    if room(path) != "torch_compat":
        assert not list(private_torch(tree)), "private torch names belong in torch_compat.py"
    assert path.stem not in ("utils", "helpers")
    assert ast.get_docstring(tree), "a module opens with what it is for"


def test_the_rules_find_offenders():
    tree = ast.parse("import torch._C\nfrom torch.fx import _x\nimport torch\ntorch._y.z()\n")
    assert list(private_torch(tree)) == ["torch._C", "torch.fx._x", "torch._y"]


def test_problem_rooms_load_without_torch():
    code = "import rekindle.cli, rekindle.core, rekindle.solve, sys; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
