"""Makes the README the first page of the site. mkdocs calls this module (mkdocs.yml)."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def on_files(files: Any, config: Any) -> None:
    """Adds README.md as index.md, with links relative to docs/."""
    from mkdocs.structure.files import File

    text = (ROOT / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
