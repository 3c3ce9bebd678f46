"""Writes the pages that are made from other files: docs/api.md from the docstrings, docs/cli.md
from the parser, docs/results.md and the README's table from the benchmarks' result files. A test
keeps them in step.

    make reference
"""

import argparse
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
WIDTH = 100
_MADE = "<!-- made by `make reference`: change what it is made from -->"


def api_page() -> str:
    import rekindle

    names = sorted(rekindle.__all__)
    objects = {name: getattr(rekindle, name) for name in names}
    functions = [n for n in names if inspect.isfunction(objects[n])]
    errors = [n for n in names if _is_error(objects[n])]
    classes = [n for n in names if n not in functions and n not in errors]
    parts = [
        _MADE,
        "# Python reference",
        "Everything below is imported as `import rekindle`. [Budgets](budgets.md) explains the "
        "options that are about memory.",
        "## Functions",
        *(part for name in functions for part in _function(f"rekindle.{name}", objects[name])),
        "## Classes",
        *(part for name in classes for part in _class(name, objects[name])),
        "## Errors",
        "Each says what was got, what was expected, and what to try. All are `RekindleError`.",
        _table(
            ("error", "raised for"),
            [(f"`{n}`", _flow(objects[n].__doc__ or "")) for n in errors],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _is_error(x: Any) -> bool:
    return inspect.isclass(x) and issubclass(x, Exception)


def _function(name: str, function: Any, level: str = "###") -> Iterator[str]:
    yield f"{level} `{name}`"
    yield f"```text\n{_signature(name.rpartition('.')[2], function)}\n```"
    if told := inspect.getdoc(function):
        yield _flow(told)


def _signature(name: str, function: Any) -> str:
    """One argument a line: these signatures are long."""
    parameters = list(inspect.signature(function).parameters.values())
    parts, star = [], False
    for parameter in parameters:
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        default = ""
        if parameter.default is not parameter.empty:
            default = f" = {parameter.default!r}"
        parts.append(f"{parameter.name}: {_annotation(parameter.annotation)}{default}")
    returns = inspect.signature(function).return_annotation
    end = f") -> {_annotation(returns)}"
    line = f"{name}({', '.join(parts)}{end}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + end


def _annotation(annotation: Any) -> str:
    if isinstance(annotation, str):
        text = annotation.strip("\"'")
    else:
        text = inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text)


def _class(name: str, cls: Any) -> Iterator[str]:
    yield f"### `rekindle.{name}`"
    yield _flow(inspect.getdoc(cls) or "")
    meanings = _fields(cls) | {
        key: " ".join((inspect.getdoc(member) or "").split())
        for key, member in vars(cls).items()
        if isinstance(member, property)
    }
    told = [(f"`{key}`", meaning) for key, meaning in meanings.items() if meaning]
    if told:
        yield _table(("attribute", "meaning"), told)
    if others := [f"`{key}`" for key, meaning in meanings.items() if not meaning]:
        yield f"{'Also' if told else 'Attributes'}: {', '.join(others)}."
    for key, member in vars(cls).items():
        function = member.__func__ if isinstance(member, staticmethod) else member
        if key[0] != "_" and inspect.isfunction(function):
            yield from _function(f"{name}.{key}", function, "####")


def _fields(cls: Any) -> dict[str, str]:
    """The fields of a dataclass, each with the comment behind it."""
    lines = re.findall(r"^    (\w+): [^#\n]*?(?:  # (.*))?$", inspect.getsource(cls), re.M)
    known = getattr(cls, "__annotations__", {})
    return {name: comment for name, comment in lines if name in known and name[0] != "_"}


def cli_page() -> str:
    from rekindle.cli.entry import build_parser

    parser = build_parser()
    commands = dict(_commands(parser))
    rows = [(f"[`{name}`](#{_anchor(name)})", _help(parser, name)) for name in _own(parser)]
    parts = [
        _MADE,
        "# Command line",
        f"{parser.description} {parser.epilog} `--json` prints one JSON object, for "
        "scripts; every command with a result has it.",
        _table(("command", "what it does"), rows),
        *(part for name, command in commands.items() for part in _command(name, command)),
        "## Options in Python and on the command line",
        "An option has one name: underscores become hyphens, and `no-` turns an option off that is "
        "on by default. `time_limit_s` leaves its unit out. `rekindle.plan` and "
        "`rekindle.rematerialize` take these:",
        _options_table(commands["plan"]),
    ]
    return "\n\n".join(parts) + "\n"


def _command(name: str, command: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## `rekindle {name}`"
    yield command.description or ""
    actions = [a for a in command._actions if a.help != argparse.SUPPRESS and a.dest != "help"]
    if actions and not _own(command):
        # Doubled percent signs are argparse's own.
        rows = [(_argument(a), (a.help or "").replace("%%", "%")) for a in actions]
        yield _table(("argument", "meaning"), rows)


def _options_table(plan: argparse.ArgumentParser) -> str:
    """Each option of `rekindle.plan` and what it is called on the command line."""
    from rekindle.plans.options import Options

    shown = [a for a in plan._actions if a.help != argparse.SUPPRESS and a.option_strings]
    by_name = {a.dest: f"`{a.option_strings[-1]}`" for a in shown}
    return _table(
        ("Python", "command line"),
        [(f"`{f.name}`", by_name.get(f.name, "Python only")) for f in dataclasses.fields(Options)],
    )


def _argument(action: argparse.Action) -> str:
    """`-o, --output FILE`, written here: argparse's own layout differs between Pythons."""
    value = action.metavar or action.dest
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if not action.option_strings:
        return f"`{value}`"
    names = ", ".join(action.option_strings)
    text = f"`{names}`" if action.nargs == 0 else f"`{names} {value}`"
    return f"{text}, required" if action.required else text


def _sub(parser: argparse.ArgumentParser) -> argparse._SubParsersAction | None:
    return next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)


def _own(parser: argparse.ArgumentParser) -> list[str]:
    sub = _sub(parser)
    return list(sub.choices) if sub else []


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    sub = _sub(parser)
    for name, command in (sub.choices if sub else {}).items():
        yield name, command
        for inner, below in _commands(command):
            yield f"{name} {inner}", below


def _help(parser: argparse.ArgumentParser, name: str) -> str:
    sub = _sub(parser)
    assert sub is not None
    text = next((c.help or "" for c in sub._choices_actions if c.dest == name), "")
    return text.replace("%%", "%")  # as argparse prints it


def _anchor(name: str) -> str:
    return "rekindle-" + name.replace(" ", "-")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in r) + " |" for r in lines
    )


def _flow(text: str) -> str:
    """Paragraphs as single lines of Markdown."""
    paragraphs = textwrap.dedent(text).strip().split("\n\n")
    return "\n\n".join(
        p if p.lstrip().startswith(("- ", "* ")) else " ".join(p.split()) for p in paragraphs
    )


# What is measured, the command that measures it, and the file with the answer.
RESULTS = (
    (
        "Step time and memory on a GPU",
        "python benchmarks/gpu/compare.py --plan-limit 4",
        "gpu/RESULTS.md",
        "Beside eager PyTorch, gradient checkpointing, selective checkpointing and torch.compile.",
    ),
    (
        "The default solver on the instances of the papers",
        "python benchmarks/auto/table.py --solvers auto",
        "auto/TABLE.md",
        "RL1 to RL4, CM1 and CM2 are graphs of the Moccasin and FastSA papers. No GPU is needed. "
        "[Side by side](side-by-side.md) compares every solver on these, on generated graphs and "
        "on graphs captured from real models.",
    ),
    (
        "FastSA's table with the solver `fastsa`",
        "python benchmarks/fastsa/table1.py 1",
        "fastsa/table1.md",
        "The paper's numbers and ours, on the same graphs.",
    ),
    (
        "HiRemate's table with the solver `hiremate`",
        "python benchmarks/hiremate/table4.py",
        "hiremate/table4.md",
        "The twelve models of the paper at the paper's memory. Time is in % of the step that keeps "
        "everything.",
    ),
    (
        "Rotor's table for chains with the solver `rotor`",
        "python benchmarks/rotor/run.py",
        "rotor/results.md",
        "",
    ),
)


def results_page() -> str:
    parts = [
        _MADE,
        "# Results",
        "Each section has the command that made it; run it from a clone. The results are stored "
        "beside the scripts, and `benchmarks/README.md` lists all of them.",
    ]
    for title, command, file, words in RESULTS:
        parts += [f"## {title}", *([words] if words else [])]
        parts.append(f"```bash\n# not run here: takes minutes\n{command}   # -> {file}\n```")
        parts.append(_lowered((BENCHMARKS / file).read_text(encoding="utf-8")))
    return "\n\n".join(parts) + "\n"


def _lowered(text: str) -> str:
    """A result file as a section of the page: its headings one level down, its title in bold."""
    text = re.sub(r"^# (.*)$", r"**\1**", text.strip(), flags=re.M)
    return re.sub(r"^(##+) (.*)$", r"#\1 \2", text, flags=re.M)


# The rows and columns of the README's table, of those of gpu/RESULTS.md.
README_MODELS = (
    "GPT-2 medium, bf16, 16 x 1024 tokens",
    "Llama 1B, bf16, 4 x 4096 tokens",
    "T5 base, 16 x 512 tokens",
    "ViT-L, 64 images of 224",
    "ResNet-101, 64 images of 224",
    "UNet, 32 images of 256",
)
README_COLUMNS = (
    "model",
    "eager",
    "gradient checkpointing",
    "Rekindle, the same memory",
    "Rekindle, half of eager's memory",
)
_README_TABLE = re.compile(r"(?<=<!-- results -->\n)(.*?)(?=<!-- end of results -->)", re.S)


def readme_page() -> str:
    """The README as it is, with its table of results made anew."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = (BENCHMARKS / "gpu" / "RESULTS.md").read_text(encoding="utf-8").splitlines()
    lines = lines[next(i for i, line in enumerate(lines) if line.startswith("| model |")) :]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    columns = [cells[0].index(name) for name in README_COLUMNS]
    rows = {row[0]: tuple(row[c] for c in columns) for row in cells[2:] if len(row) > columns[-1]}
    table = _table(README_COLUMNS, [rows[model] for model in README_MODELS])
    return _README_TABLE.sub(lambda _: table + "\n", text)


PAGES = {
    "docs/api.md": api_page,
    "docs/cli.md": cli_page,
    "docs/results.md": results_page,
    "README.md": readme_page,
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (ROOT / name).write_text(make(), encoding="utf-8")
