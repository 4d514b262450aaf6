"""The site's first page is the README. mkdocs calls this (mkdocs.yml)."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def on_files(files: Any, config: Any) -> None:
    """Adds README.md as index.md, with its links as seen from docs/."""
    from mkdocs.structure.files import File

    text = (ROOT / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
