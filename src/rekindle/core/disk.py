"""Files on disk: JSON that is read strictly and written whole or not at all, and caches."""

import contextlib
import json
import os
import tempfile
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from rekindle.errors import FileError, InvalidProblem, RekindleError, brief


def own_version() -> str:
    """The release that writes a file."""
    try:
        return version("rekindle")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


def cache_home() -> Path:
    """Where measurements and solutions are kept: $REKINDLE_CACHE_DIR, else
    $XDG_CACHE_HOME/rekindle, else ~/.cache/rekindle."""
    own = os.environ.get("REKINDLE_CACHE_DIR")
    if own:  # an empty one counts as none, as XDG has it
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rekindle"


def read_json(path: str | os.PathLike[str]) -> Any:
    """A file as JSON, read strictly: no repeated keys, no NaN, no lone surrogates. What is wrong
    is a `FileError` that names the file."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise FileError(f"{path} is not UTF-8 text; expected a JSON file") from None
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise FileError(f"{path!r} is not a file name") from None
    try:
        record = json.loads(text, object_pairs_hook=_no_repeats, parse_constant=_no_constant)
        # Only an escape can bring one into text that was decoded.
        if "\\ud" in text or "\\uD" in text:
            _no_surrogates(record)
        return record
    except RekindleError as error:
        raise FileError(f"{path}: {error}") from None
    except RecursionError:  # not a ValueError, and no reason to end the process
        raise FileError(f"{path} is not understood: it is nested too deeply") from None
    except ValueError as error:
        raise FileError(f"{path} is not valid JSON: {error}") from None


def write_json(path: str | os.PathLike[str], record: Any) -> None:
    """A record as compact JSON, written whole or not at all."""
    write_text(path, json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """A text as UTF-8, written whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes the whole file or nothing: a temporary file in the same folder, then one rename."""
    target = Path(path)
    temporary = None  # in the same folder: a rename between file systems is a copy
    try:
        with tempfile.NamedTemporaryFile(
            "wb", dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(content)
            file.flush()
            # Else a crash may leave the new name on an empty file.
            os.fsync(file.fileno())
        # A temporary file is private; a written one has the rights of any other. The umask can only
        # be read by setting it.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(target)
    except OSError as error:
        raise FileError(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        # After the rename there is nothing left of it; after an error, or Ctrl-C, there is.
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Python keeps the last one in silence; which was meant cannot be known.
    record = dict(pairs)
    if len(record) < len(pairs):
        twice = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
        _fail(f"the key {brief(twice)!r} stands twice in one object")
    return record


def _no_surrogates(record: Any) -> None:
    """Half a surrogate pair can be written as an escape, but is no text: it has no UTF-8."""
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        _fail("a string holds half a surrogate pair, which is not text")


def _no_constant(name: str) -> NoReturn:
    _fail(f"{name} is not a number that JSON knows")


def _fail(sentence: str) -> NoReturn:
    raise InvalidProblem(sentence)
