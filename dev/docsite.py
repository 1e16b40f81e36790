"""Links between Markdown files, and mkdocs' hook by which they work on the site as they do on GitHub.

A page of docs/ may link to any file of the repository. On the site such a file lies below `repository/`, a
Markdown file as a page of its own. mkdocs is in the environment of `make docs` alone.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = "docs/"
ELSEWHERE: Final = "repository/"
"""Folder of the site for files outside docs/."""
FENCE: Final = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1`* *$", re.MULTILINE | re.DOTALL)
CODE: Final = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
LINK: Final = re.compile(r"\]\(([^()\s]+)\)")
HEADING: Final = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
ABSOLUTE: Final = re.compile(r"[a-z][a-z0-9+.-]*:|/", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A relative link of a Markdown file."""

    start: int
    end: int
    path: str
    """File or folder in the repository."""
    anchor: str


def links_of(path: str, text: str) -> Iterator[Link]:
    """Yields the relative links of the Markdown file at `path` of the repository, those in code left out."""
    for found in LINK.finditer(_without_code(text)):
        if ABSOLUTE.match(found[1]):
            continue
        name, _, anchor = found[1].partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), name)) if name else path
        yield Link(start=found.start(1), end=found.end(1), path=file_of(target), anchor=anchor)


def file_of(path: str) -> str:
    """The README.md of a folder, else the path as it is."""
    return posixpath.join(path, "README.md") if (ROOT / path).is_dir() else path


def anchors_of(text: str) -> set[str]:
    """What GitHub makes of a file's headings; the site is configured for the same."""
    found: set[str] = set()
    for heading in HEADING.findall(_blanked(FENCE, text)):
        plain = re.sub(r"\]\([^)]*\)|[`*\[\]]", "", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(next(name for name in _numbered(slug) if name not in found))
    return found


def _numbered(slug: str) -> Iterator[str]:
    yield slug
    yield from (f"{slug}-{n}" for n in range(1, 100))


def place_of(path: str) -> str:
    """Where a file of the repository lies on the site."""
    return path.removeprefix(DOCS) if path.startswith(DOCS) else ELSEWHERE + path


def source_of(place: str) -> str:
    return place.removeprefix(ELSEWHERE) if place.startswith(ELSEWHERE) else DOCS + place


def _without_code(text: str) -> str:
    return _blanked(CODE, _blanked(FENCE, text))


def _blanked(pattern: re.Pattern[str], text: str) -> str:
    """Keeps the length, so that positions stay."""
    return pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


# --- mkdocs ------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> None:
    """Adds the files outside docs/ that the navigation names or a page links to, and what those link to."""
    from mkdocs.structure.files import File  # type: ignore[import-not-found]

    pages = [source_of(file.src_uri) for file in files if file.src_uri.endswith(".md")]
    pages += [source_of(place) for place in re.findall(rf"{ELSEWHERE}[\w./-]+", str(config.nav))]
    for path in reached_from(pages):
        if not path.startswith(DOCS):
            files.append(File.generated(config, place_of(path), abs_src_path=str(ROOT / path)))


def reached_from(pages: list[str]) -> set[str]:
    """These files of the repository, and all that they lead to by links."""
    found: set[str] = set()
    waiting = list(pages)
    while waiting:
        path = waiting.pop()
        if path in found or not (ROOT / path).is_file():
            continue
        found.add(path)
        if path.endswith(".md"):
            waiting += [link.path for link in links_of(path, (ROOT / path).read_text())]
    return found


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Points each relative link to where its file lies on the site."""
    here = page.file.src_uri
    for link in reversed(list(links_of(source_of(here), markdown))):
        place = posixpath.relpath(place_of(link.path), posixpath.dirname(here) or ".")
        target = f"{place}#{link.anchor}" if link.anchor else place
        markdown = markdown[: link.start] + target + markdown[link.end :]
    return markdown
