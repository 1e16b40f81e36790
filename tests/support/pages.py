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


RUN: Final = {
    ("docs/cluster/eks.md", "bash"): "tests/api/test_cluster_pages.py",
    ("docs/cluster/gke.md", "bash"): "tests/api/test_cluster_pages.py",
    ("docs/cluster/aks.md", "bash"): "tests/api/test_cluster_pages.py",
    ("docs/cost.md", "json"): "tests/unit/prices/test_aws.py",
    ("docs/own-loop.md", "python"): "tests/runs/test_epochs.py",
    ("docs/planning.md", "console"): "tests/unit/cli/planner/test_plan_command.py",
    ("docs/reference/commands.md", "text"): "dev/reference.py",
    ("examples/README.md", "diff"): "tests/contract/test_examples.py",
}
"""Blocks of a page and language that a test runs, or compares with what is run, and that test."""
NOT_RUN: Final = {
    "bash": "takes a cluster of one's own; bash parses it",
    "console": "takes a job or minutes; verbs and options are looked up in the reference",
    "diff": "a part of a script; whole ones are in examples/, which tests run",
    "dockerfile": "takes Docker",
    "python": "a part of a script; whole ones are in examples/, which tests run. Python compiles it",
    "text": "what is printed, or a picture",
    "yaml": "takes a cluster; held to the schema of the definition, or of the chart's values",
}
"""Why no test runs the other blocks of a language, and what is checked of them."""


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
