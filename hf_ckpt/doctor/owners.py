"""The owners of files that hf_ckpt reads. `owners.yaml` has a row for each."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_ckpt.spec.files import read_values


@dataclasses.dataclass(frozen=True)
class Owner:
    """A program, and how to read its files."""

    name: str
    telltales: str = ""
    """Keys that its files are recognised by; `a.b` is the key b under a. The owner with most of them is taken."""
    part: str = "values"
    """The part of `ConfigFiles` that a file is: `values`, `launch` or `engine`."""
    refused: str = ""
    """Why its files are refused."""
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Field of a `Question` -> the keys that may set it, in the order of lookup."""
    sections: bool = False
    """Whether keys stand in sections. Both are then one key, `section.key`."""
    weights: str = "dtype"
    """What decides the type of weights: `dtype` (a key), `autocast` (its type), `frozen` (float32 if trained), or
    `fsdp2` (a key; weights in float32 compute in bfloat16)."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Its defaults for keys that no dataclass has, or whose dataclass does not say them."""
    choices: Mapping[str, Mapping[Any, Mapping[str, Any]]] = dataclasses.field(default_factory=dict)
    """Key -> value -> fields of a `Question` that follow from it. Other values cannot be planned for."""
    others: str = ""
    """Further keys that are read, and keys that only look like one that is read."""
    checkpointing: str = ""
    """Keys that enable its own checkpointing or offloading."""
    needs: tuple[str, str] | None = None
    """A key, and a word that its value needs before hf_ckpt sees a spec; None if the kwargs are enough."""
    advice: str = ""
    """What to do if that is missing."""
    configs: tuple[str, ...] = ()
    """Dataclasses of options. A file is for the first that knows most of its keys; its name is the key `config`."""
    library: str = "transformers"
    """Where the dataclasses are, and TRL's of further options."""

    @property
    def keys(self) -> set[str]:
        """The keys that are read, and those that only look like one."""
        texts = (*self.fields.values(), self.others, self.checkpointing)
        return {*" ".join(texts).split(), *self.choices, *self.defaults}

    def chosen(self, key: str, value: Any) -> Mapping[str, Any] | None:
        """Return the fields that follow from the value of a key in `choices`; None if it cannot be planned for."""
        # YAML reads `true`, `True` and `none` as values of several types, and people write all of them as texts, too.
        rows = {str(choice).lower(): fields for choice, fields in self.choices[key].items()}
        return rows.get(str(value).lower())

    def options(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the dataclasses for a file with their defaults. Raises `ImportError` without them."""
        library = importlib.import_module(self.library)
        classes = [getattr(library, name) for name in self.configs]
        classes.sort(key=lambda config: -len(config.__dataclass_fields__.keys() & written.keys()))
        # TRL's scripts parse a file into these, too (trl/scripts/sft.py).
        beside = [getattr(library, name, None) for name in ("ScriptArguments", "ModelConfig")]
        used = [config for config in (*classes[:1], *beside) if config is not None]
        options = {field.name: field.default for config in used for field in dataclasses.fields(config)}
        return {**options, "config": classes[0].__name__ if classes else ""}


OWNERS: tuple[Owner, ...] = tuple(Owner(**row) for row in read_values(Path(__file__).with_name("owners.yaml")))
"""All owners. Trainer is the first, because the others share its keys."""


def without_sections(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of sections under `section.key`, and others as they are."""
    values: dict[str, Any] = {}
    for name, section in written.items():
        if isinstance(section, dict):
            values |= {f"{name}.{key}": value for key, value in section.items()}
        else:
            values[name] = section
    return values


def owner_of(written: Mapping[str, Any]) -> Owner:
    """Return the owner of a file that has these values."""
    keys = without_sections(written).keys()
    # `max` takes the first of equals: a file without a telltale is Trainer's.
    return max(OWNERS, key=lambda owner: len(keys & set(owner.telltales.split())))
