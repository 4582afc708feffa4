"""Read JSON and YAML files, and write files atomically."""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_ckpt.errors import FileError, reason_of, shown


def read_values(path: str | Path) -> Any:
    """Return the value in a JSON or YAML file. Raises `ValueError` with the reason if it cannot be read."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    return parse_values(content, only_json=Path(path).suffix.lower() == ".json")


def parse_values(content: bytes | str, *, only_json: bool = False) -> Any:
    """Return the value of a JSON or YAML text, in UTF-8. Raises `ValueError` if it is neither, or not the one asked.

    A mapping that has a key twice is refused, too: of the two values, one would do nothing.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        try:  # first, because PyYAML takes a hundred times as long
            return json.loads(text, object_pairs_hook=without_repeats)
        except ValueError:
            if only_json:
                raise
        return yaml.load(text, Loader=_Loader)
    # PyYAML raises other errors for values that do not fit their tags: an impossible date, or `!!bool maybe`.
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not valid {'JSON' if only_json else 'YAML'}: {reason_of(error)}") from error


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of (key, value) pairs. Raises `ValueError` if a key is there twice."""
    for key, times in collections.Counter(key for key, _ in pairs).items():
        if times > 1:
            raise ValueError(f"`{shown(key, quoted=False)}` is given twice")
    return dict(pairs)


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, if PyYAML was built with libyaml


class _Loader(_SafeLoader):
    """Refuses a mapping with a key that is there twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        without_repeats([(key.value, None) for key, _ in node.value])
        return super().construct_mapping(node, deep)


def refuse_unwritable(path: str | Path, suffixes: Sequence[str] = ()) -> None:
    """Raise `FileError` if a file cannot be written to a path. Call it before the work whose result goes there.

    Args:
        path: of the file, in an existing folder.
        suffixes: allowed suffixes in lower case; empty for all.
    """
    path = Path(path)
    if suffixes and path.suffix.lower() not in suffixes:
        raise FileError(f"{str(path)!r} must end in {' or '.join(suffixes)}.")
    if not os.access(path.parent, os.W_OK):
        raise FileError(f"{str(path)!r} cannot be written: {str(path.parent)!r} is not a folder, or it is read-only.")


def write_text(path: str | Path, text: str, suffixes: Sequence[str] = ()) -> None:
    """Write a text to a file atomically, as UTF-8. Raises `FileError` as `refuse_unwritable` does."""
    refuse_unwritable(path, suffixes)
    target = Path(os.path.realpath(path))  # a link stays a link
    beside = target.with_name(f".{target.name}.{os.urandom(4).hex()}.tmp")
    try:
        # In a folder that others may write to, a link at this name would lead to another file: "x" follows no link.
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise FileError(f"{str(path)!r} cannot be written: {error.strerror or error}.") from error


def append_line(path: str | Path, line: str) -> None:
    """Append a line to a file. Raises `FileError` if that fails."""
    if Path(path).is_fifo():  # to open it waits for a reader
        raise FileError(f"{str(path)!r} cannot be written: it is a pipe, not a file.")
    try:
        with open(path, "ab+") as file:
            if file.tell() > 0:  # a process that was killed may have written only a part of its last line
                file.seek(-1, os.SEEK_END)
                line = line if file.read() == b"\n" else f"\n{line}"
            file.write(f"{line}\n".encode())
    except OSError as error:
        raise FileError(f"{str(path)!r} cannot be written: {error.strerror or error}.") from error
