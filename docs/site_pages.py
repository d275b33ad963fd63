"""Site pages kept elsewhere in the tree: the README and the contributor's guide."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to the site, with their links relative to `docs/`."""
    for page, source in PAGES.items():
        text = (ROOT / source).read_text("utf-8").replace("](docs/", "](")
        for other, file in PAGES.items():
            text = text.replace(f"]({file}", f"]({other}")
        files.append(File.generated(config, page, content=text))
    return files
