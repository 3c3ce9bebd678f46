"""Runs the blocks of one page, given as JSON on standard input, in one session each for Python and
for the shell, in the current folder. Started by test_code_blocks.py in a process of its own."""

import json
import linecache
import os
import subprocess
import sys
import time


def run_python(name: str, text: str, names: dict) -> None:
    lines = text.splitlines(keepends=True)
    linecache.cache[name] = (len(text), None, lines, name)  # so that a traceback shows the line
    exec(compile(text, name, "exec"), names)


def run_shell(name: str, text: str) -> None:
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=False)
    if done.returncode:
        sys.exit(f"{name}: exit code {done.returncode}")


def main() -> None:
    names: dict = {"__name__": "__main__"}
    for block in json.load(sys.stdin):
        start = time.perf_counter()
        if block["language"] == "python":
            run_python(block["name"], block["text"], names)
        else:
            run_shell(block["name"], block["text"])
        print(f"{block['name']}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # as in an interactive session
    main()
