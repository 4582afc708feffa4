"""For mkdocs: what GitHub shows of other folders (links out of `docs/`, the file of devices) is in the site, too."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DEVICES = ROOT / "hf_ckpt" / "forecast" / "devices.csv"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(\.\./([^)#]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add to the site what the repository has once: the README as its first page, the pictures of the benchmarks as
    `images/NAME.png`."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "index.md", content=first_page()))
    for path in sorted((ROOT / "recipes" / "benchmarks").glob("*.png")):
        files.append(File.generated(config, f"images/{path.name}", abs_src_path=str(path)))
    return files


def first_page() -> str:
    """The README with its links as those of a page in `docs/`."""

    def moved(match: re.Match[str]) -> str:
        path = match[1]
        return "](" + (path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}")

    return re.sub(r"\]\((?!\w+://|#)([^)]+)", moved, (ROOT / "README.md").read_text(encoding="utf-8"))


def on_page_markdown(markdown: str, config: Any, **kwargs: Any) -> str:
    """Point pictures to `images/`, and other links out of `docs/` to the repository; without one, keep their text.

    Where a page has the comment `devices.csv`, it gets the table of devices.
    """

    def replaced(match: re.Match[str]) -> str:
        picture, text, path, anchor = match.groups(default="")
        if picture:
            return f"![{text}](images/{Path(path).name})"
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor})" if config.repo_url else text

    return LINK.sub(replaced, markdown).replace("<!-- devices.csv -->", table_of_devices())


def table_of_devices() -> str:
    """The rows of `devices.csv` as a table in Markdown."""
    with DEVICES.open(encoding="utf-8") as file:
        heads, *rows = csv.reader(file)
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))
