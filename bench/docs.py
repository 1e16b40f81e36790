"""The documentation in figures: words, then and now, links, code blocks, the way to a first resumed job.

Words are what `wc -w` counts in docs/ without decisions and generated pages; those of text leave out code
blocks and signs. Before is the last commit of 2026-11-24. `make docs` must have made .docs.

The last line is JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from typing import Final

import docsite

from tests.support.pages import ROOT, RUN, blocks

BEFORE: Final = "9945388"
OTHERS: Final = ("adr", "reference")
FIRST: Final = "## Which way for my script"
"""README's heading after the commands of the first try."""
COMMANDS: Final = re.compile(r"^(?:make setup|\.venv/bin/spottrain run)", re.MULTILINE)


def pages_before() -> list[str]:
    git = ["git", "-C", str(ROOT)]
    listed = subprocess.check_output([*git, "ls-tree", "--name-only", BEFORE, "docs/"], text=True).split()
    pages = [name for name in listed if name.endswith(".md")]
    return [subprocess.check_output([*git, "show", f"{BEFORE}:{name}"], text=True) for name in pages]


def words(pages: list[str]) -> int:
    return sum(len(text.split()) for text in pages)


def words_of_text(pages: list[str]) -> int:
    return sum(bool(re.search(r"\w", word)) for text in pages for word in docsite.FENCE.sub("", text).split())


def build() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        command = [str(ROOT / ".docs/bin/mkdocs"), "build", "--no-strict", "--site-dir", folder]
        done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=True)
        seconds = round(time.monotonic() - started, 1)
    return {"site_build_s": seconds, "broken_links": len(re.findall("^WARNING", done.stderr, re.MULTILINE))}


def main() -> None:
    pages: dict[str, list[str]] = {}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        pages.setdefault(path.parent.relative_to(ROOT / "docs").as_posix(), []).append(path.read_text())
    written = {kind: each for kind, each in pages.items() if kind not in OTHERS}
    now, before = [text for each in written.values() for text in each], pages_before()
    first = (ROOT / "README.md").read_text().partition(FIRST)[0]
    run = [(block.page, block.language) in RUN for block in blocks()]
    figures = {
        "words": {"before": words(before), "after": words(now)},
        "text": {"before": words_of_text(before), "after": words_of_text(now)},
        "kinds": {kind: words(each) for kind, each in pages.items()},
        "first_resumed": {"words": words([first]), "commands": len(COMMANDS.findall(first))},
        "blocks": {"all": len(run), "run": sum(run), "with_a_reason": len(run) - sum(run)},
        **build(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
