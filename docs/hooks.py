"""For mkdocs: links that lead out of `docs/`, which work on GitHub as they are, work in the built site, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(\.\./([^)#]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pictures of the benchmarks to the site, as `images/NAME.png`; the repository has them once."""
    for path in sorted((ROOT / "recipes" / "benchmarks").glob("*.png")):
        files.append(File.generated(config, f"images/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, config: Any, **kwargs: Any) -> str:
    """Point pictures to `images/`, and other links out of `docs/` to the repository; without one, keep their text."""

    def replaced(match: re.Match[str]) -> str:
        picture, text, path, anchor = match.groups(default="")
        if picture:
            return f"![{text}](images/{Path(path).name})"
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor})" if config.repo_url else text

    return LINK.sub(replaced, markdown)
