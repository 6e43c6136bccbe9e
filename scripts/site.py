"""What `mkdocs.yml` cannot say: pages outside of docs/ that others lead to are pages of the site, too.

Files stay where a reader of the repository looks for them, with links that work there. Here each link is turned into
one of the site; what is no page of it, a script or a folder, stands as text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ELSEWHERE = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/RESULTS.md",
    *(f"examples/{name}/README.md" for name in ("cifar_png", "dynamic_graph", "lattice_qr", "naive_gpt")),
)
_LINK = re.compile(r"(?<!!)\[((?:[^][]|\[[^][]*\])*)\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]+)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from elsewhere; they are reached by links alone."""
    for name in ELSEWHERE:
        added = File.generated(config, name, abs_src_path=str(ROOT / name))
        added.inclusion = added.inclusion.NOT_IN_NAV
        files.append(added)
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:  # noqa: ARG001
    """Links of the repository as links of the site."""
    here = page.file.src_uri
    folder = (ROOT if here in ELSEWHERE else DOCS) / os.path.dirname(here)

    def of_the_site(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / link[2]))
        name = os.path.relpath(target, DOCS if target.is_relative_to(DOCS) else ROOT)
        if files.get_file_from_path(name) is None:
            return link[1] if target.exists() else link[0]
        return f"[{link[1]}]({os.path.relpath(name, os.path.dirname(here) or '.')}{link[3] or ''})"

    return _LINK.sub(of_the_site, markdown)
