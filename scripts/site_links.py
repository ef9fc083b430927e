"""A hook of mkdocs: what docs/ says of files elsewhere in the repository, as the site says it.

On the site there is no `../deploy/x.yaml`: such a link becomes the file's path. In the repository it stays a link.
"""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+([^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page, before its links are checked."""
    depth = page.file.src_uri.count("/")

    def shown(found: re.Match[str]) -> str:
        if found[0].count("../") <= depth:
            return found[0]
        words, path = found[1], found[2]
        return f"`{path}`" if path in words else f"{words} (`{path}`)"

    return _OUTSIDE.sub(shown, markdown)
