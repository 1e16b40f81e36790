"""The code blocks of the documentation, and the manifests in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = (
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "dev/README.md", "examples/README.md")),
    ROOT / "charts" / "spottrain" / "README.md",
)
BLOCK: Final = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
HEREDOC: Final = re.compile(r"^(.*(?:-f -|\.yaml|\.json).*<<'?EOF'?.*)\n((?:.*\n)*?)EOF$", re.MULTILINE)
"""A shell's command that gets or writes YAML or JSON, and that text."""
VARIABLE: Final = re.compile(r"\$\{?[A-Z_]+\}?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block of code."""

    page: str
    line: int
    language: str
    title: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    for path in PAGES:
        text = path.read_text()
        for found in BLOCK.finditer(text):
            yield Block(
                page=path.relative_to(ROOT).as_posix(),
                line=text.count("\n", 0, found.start()) + 1,
                language=found[2],
                title=found[3].strip(),
                text=re.sub(f"^{found[1]}", "", found[4], flags=re.MULTILINE),
            )


def documents() -> Iterator[tuple[Block, str, Any]]:
    """Each YAML document of a yaml block, and of what bash writes by `<<EOF`, its variables replaced.

    Yields the block, its title or the command that gets the text, and the document.
    """
    for block in blocks():
        texts = [(block.title, block.text)] if block.language == "yaml" else []
        if block.language == "bash":
            texts = [(line, VARIABLE.sub("name", text)) for line, text in HEREDOC.findall(block.text)]
        for name, text in texts:
            yield from ((block, name, found) for found in yaml.safe_load_all(text) if found)


def manifests(kind: str) -> list[tuple[str, Any]]:
    """The complete objects of a kind, with their places."""
    return [
        (block.place, found)
        for block, _, found in documents()
        if isinstance(found, dict) and found.get("kind") == kind and "spec" in found
    ]
