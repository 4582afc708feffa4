"""Read JSON and YAML files up to a size, and write files atomically."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_ckpt.errors import FileError, reason_of
from hf_ckpt.units import format_bytes

LARGEST_BYTES = 16 * 2**20
"""Larger files are not read."""
LARGEST_YAML_BYTES = 2**20
"""Larger YAML texts are not read: YAML takes about a hundred times as long as JSON."""
YAML_SUFFIXES = (".yaml", ".yml")
_DEEPEST_YAML = 100  # levels of nesting; PyYAML's loaders recurse for each


# --- reading --------------------------------------------------------------------------------------------------------


def read_values(path: str | Path) -> Any:
    """Return the value in a JSON or YAML file. Raises `ValueError` with the reason if it cannot be read."""
    return parse_values(read_bytes(path), Path(path).suffix)


def read_bytes(path: str | Path) -> bytes:
    """Return the content of a file.

    Raises `ValueError` with the reason if it cannot be read, is not a regular file, or is larger than `LARGEST_BYTES`.
    """
    try:
        mode = os.stat(path).st_mode  # before it is opened: opening a pipe waits for a writer
        if not stat.S_ISREG(mode):
            raise ValueError("Is a directory" if stat.S_ISDIR(mode) else "it is no regular file")
        with open(path, "rb") as file:
            content = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    if len(content) > LARGEST_BYTES:
        raise ValueError(f"it is larger than {format_bytes(LARGEST_BYTES)}")
    return content


def parse_values(content: bytes, suffix: str = "") -> Any:
    """Return the value of a JSON or YAML text, given as bytes in UTF-8.

    A text is JSON if its file has the suffix `.json`, or if it parses as JSON: the YAML parser is much slower. Raises
    `ValueError` if it is neither.
    """
    only_json = suffix.lower() == ".json"
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid {'JSON' if only_json else 'YAML'}: {error}") from error
    if only_json or text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:  # not JSON, too many digits, or nested too deep
            if only_json or len(content) > LARGEST_YAML_BYTES:
                raise ValueError(f"not valid JSON: {_reason(error)}") from error
    try:
        return load_yaml(text)
    except ValueError as error:
        raise ValueError(f"not valid YAML: {error}") from error


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Raises `ValueError` if the text is not valid YAML, is larger than `LARGEST_YAML_BYTES`, is nested too deep, or uses
    aliases (`*name`), with which a few bytes can expand to any number of values.
    """
    import yaml

    if len(text) > LARGEST_YAML_BYTES:
        raise ValueError(f"it is larger than {format_bytes(LARGEST_YAML_BYTES)}; write it as JSON")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        depth = 0
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                line = "" if event.start_mark is None else f"line {event.start_mark.line + 1} has "
                raise ValueError(f"{line}the alias *{event.anchor}; write out what it stands for")
            if depth > _DEEPEST_YAML:
                raise ValueError(f"it is nested more than {_DEEPEST_YAML} levels deep")
        return yaml.load(text, Loader=loader)
    # PyYAML raises other errors for values that do not fit their tags: an impossible date, or `!!bool maybe`.
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(_reason(error)) from error


def _reason(error: Exception) -> str:
    return "it is nested too deep" if isinstance(error, RecursionError) else reason_of(error)


# --- writing --------------------------------------------------------------------------------------------------------


def refuse_unwritable(path: str | Path, suffixes: Sequence[str] = ()) -> None:
    """Raise `FileError` if a file cannot be written to a path. Call it before the work whose result goes there.

    Args:
        path: of the file, in an existing folder.
        suffixes: allowed suffixes in lower case; empty for all.
    """
    path = Path(path)
    if suffixes and path.suffix.lower() not in suffixes:
        raise FileError(f"{str(path)!r} must end in {' or '.join(suffixes)}.")
    try:
        os.path.realpath(
            path
        )  # raises what `is_dir` and `exists` do not: a path with a null character, a loop of links
        if not path.parent.is_dir():
            raise FileError(f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}.")
        if path.exists() and not path.is_file():
            raise FileError(f"{str(path)!r} cannot be written: it is {'a folder' if path.is_dir() else 'no file'}.")
        if not os.access(path.parent, os.W_OK):
            raise FileError(f"{str(path)!r} cannot be written: its folder is read-only.")
    except (OSError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{str(path)!r} cannot be written: {getattr(error, 'strerror', None) or error}.") from error


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Context manager for atomic writing: yields a temporary path, and renames it to `path` at the end.

    If the block raises, `path` is unchanged. Raises `FileError` if the file cannot be written.
    """
    refuse_unwritable(path)
    target = Path(os.path.realpath(path))  # a link stays a link
    beside = target.with_name(f".hf_ckpt-{uuid.uuid4().hex}.tmp")
    try:
        yield beside
        os.replace(beside, target)
    except OSError as error:
        raise FileError(f"{str(path)!r} cannot be written: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text to a file atomically, as UTF-8. Raises `FileError` if it cannot be written."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")


def append_line(path: str | Path, line: str) -> None:
    """Append a line to a regular file. If that fails, raise `FileError` and leave the file unchanged."""
    data = line.encode() + b"\n"
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        # Not opened, because opening a pipe waits for a reader. Opening a directory is an error.
        raise FileError(f"{str(path)!r} cannot be written: it is no regular file.")
    try:
        with open(path, "ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(end)
                raise
    except OSError as error:
        raise FileError(f"{str(path)!r} cannot be written: {error.strerror or error}.") from error
