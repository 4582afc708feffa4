"""Reading YAML and JSON texts, with one kind of error for all that can be wrong with them."""

from __future__ import annotations

from typing import Any


def load_yaml(text: str) -> Any:
    """Return the value of a YAML (or JSON) text. Raises `ValueError` where the text is not valid YAML."""
    import yaml

    try:
        return yaml.safe_load(text)
    # PyYAML lets other errors through for values that do not fit their tags: an impossible date, or `!!bool maybe`.
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error
