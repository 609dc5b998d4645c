# SPDX-License-Identifier: Apache-2.0
"""Links of the repository's Markdown files, made to hold where the files come together as pages."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^\s*(```|~~~)")
_INCLUDE = re.compile(r"^(```\{literalinclude\}) (\S+)$")


class Repository:
    """Knows which file has become which page."""

    def __init__(self, root: Path, pages: dict[str, Path], folder: Path) -> None:
        self._root = root
        self._page_of = {path.resolve(): name for name, path in pages.items()}
        self._folder = folder

    def moved(self, name: str, path: Path) -> str:
        """Return the text of a file, as the page `name`."""
        lines = []
        is_code = False
        for line in path.read_text().splitlines():
            include = _INCLUDE.match(line)
            if include is not None:
                line = f"{include[1]} {self._copied(name, self._existing(path, include[2]))}"
            if _FENCE.match(line):
                is_code = not is_code
            if not is_code:
                line = _LINK.sub(lambda match: self._link(name, path, match), line)
            lines.append(line)
        return "\n".join(lines) + "\n"

    def _existing(self, path: Path, target: str) -> Path:
        found = (path.parent / target).resolve()
        if not found.exists():
            raise SystemExit(f"{path.relative_to(self._root)}: {target} does not exist")
        return found

    def _link(self, name: str, path: Path, match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return match[0]
        file, hash_sign, anchor = target.partition("#")
        found = self._existing(path, file)
        if found.is_dir():
            found = found / "README.md"
        if found in self._page_of:
            page = os.path.relpath(f"{self._page_of[found]}.md", Path(name).parent)
            return f"{mark}[{text}]({page}{hash_sign}{anchor})"
        if not found.is_file():
            raise SystemExit(f"{path.relative_to(self._root)}: {target} is neither a file nor a page")
        return f"{mark}[{text}]({self._copied(name, found)})"

    def _copied(self, name: str, file: Path) -> str:
        """Put a file beside the pages, to be shown or downloaded; returns the way there from page `name`."""
        copy = self._folder / "files" / file.relative_to(self._root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        return os.path.relpath(copy, (self._folder / name).parent)
