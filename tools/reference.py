"""Writes the pages that are made from other files: docs/api.md from the docstrings, docs/cli.md
from the parser, docs/results.md and the README's table from the benchmarks' result files. A test
keeps them in step.

    make reference
"""

import argparse
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
    ]
    return "\n\n".join(parts) + "\n"


def _command(name: str, command: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## `rekindle {name}`"
    yield command.description or ""
    actions = [a for a in command._actions if a.help != argparse.SUPPRESS and a.dest != "help"]
    if actions and not _own(command):
        yield _table(("argument", "meaning"), [(_argument(a), a.help or "") for a in actions])


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
        "Step times against eager PyTorch and against the model's own switch for recomputing its "
        "blocks, with the memory that was measured.",
    ),
    (
        "The default solver on the instances of the papers",
        "python benchmarks/auto/table.py --solvers auto",
        "auto/TABLE.md",
        "RL1 to RL4 and CM1, CM2 are the graphs that Moccasin and FastSA were published with. No "
        "GPU is needed to run this. [Side by side](side-by-side.md) has every solver on these, on "
        "generated families and on graphs captured from real models.",
    ),
    (
        "FastSA's table, by `fastsa`",
        "python benchmarks/fastsa/table1.py 1",
        "fastsa/table1.md",
        "The paper's numbers beside ours, on the same graphs.",
    ),
    (
        "HiRemate's table, by `hiremate`",
        "python benchmarks/hiremate/table4.py",
        "hiremate/table4.md",
        "The twelve models of the paper at the paper's memory; time in per cent of keep-all's.",
    ),
    (
        "Chains: Rotor's table, by `rotor`",
        "python benchmarks/rotor/run.py",
        "rotor/results.md",
        "",
    ),
)


def results_page() -> str:
    parts = [
        _MADE,
        "# Results",
        "Every number has a script in `benchmarks/` that makes it, and a file beside the script "
        "that holds it. Run the command from a clone; `benchmarks/README.md` lists them all.",
    ]
    for title, command, file, words in RESULTS:
        parts += [f"## {title}", *([words] if words else [])]
        parts.append(f"```bash\n# not run here: takes minutes\n{command}   # -> {file}\n```")
        parts.append(_lowered((BENCHMARKS / file).read_text(encoding="utf-8")))
    return "\n\n".join(parts) + "\n"


def _lowered(text: str) -> str:
    """A result file as a section of the page: its headings two levels down, its title in bold."""
    text = re.sub(r"^# (.*)$", r"**\1**", text.strip(), flags=re.M)
    return re.sub(r"^#+ (.*)$", r"### \1", text, flags=re.M)


# The rows of the README's table: a model of benchmarks/gpu, and how people call it.
README_MODELS = {
    "gpt2-medium-fp32-eager": "GPT-2 medium, fp32",
    "gpt2-medium-bf16-sdpa": "GPT-2 medium, bf16, sdpa",
    "llama-1b-4x4096": "Llama 1B, bf16, 4x4096",
    "vit-large": "ViT-L, batch 64",
    "mixer-b16": "Mixer-B16, batch 64",
    "transformer-6-6": "nn.Transformer 6-6",
    "resnet101": "ResNet-101, batch 64",
    "regnet-x-32gf": "RegNet-X 32GF, batch 32",
    "unet": "UNet, 32x256x256",
}
README_COLUMNS = {
    "eager": "eager",
    "own": "own block switch",
    "rekindle@1.0": "Rekindle, all kept",
    "rekindle@0.5": "Rekindle, half of eager's memory",
    "rekindle@own": "Rekindle, the switch's memory",
}
_README_TABLE = re.compile(r"(?<=<!-- results -->\n)(.*?)(?=<!-- end of results -->)", re.S)


def readme_page() -> str:
    """The README as it is, with its table of results made anew."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = (BENCHMARKS / "gpu" / "RESULTS.md").read_text(encoding="utf-8").splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    head, rows = cells[0], {row[0]: row for row in cells[2:]}
    columns = [head.index(name) for name in README_COLUMNS]
    table = _table(
        ("model", *README_COLUMNS.values()),
        [
            (title, *(_short_cell(rows[model][c]) for c in columns))
            for model, title in README_MODELS.items()
            if model in rows
        ],
    )
    return _README_TABLE.sub(lambda _: table + "\n", text)


def _short_cell(cell: str) -> str:
    """`62.7 ms (+18.6 %), 2.96` -> `+18.6 %`: the README tells what changes."""
    match = re.search(r"\(([+-][\d.]+ %)\)", cell)
    if match:
        return match[1]
    match = re.fullmatch(r"([\d.]+ ms), ([\d.]+)", cell)
    return f"{match[1]}, {match[2]} GiB" if match else cell


PAGES = {
    "docs/api.md": api_page,
    "docs/cli.md": cli_page,
    "docs/results.md": results_page,
    "README.md": readme_page,
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (ROOT / name).write_text(make(), encoding="utf-8")
