"""What of a script survives a reclaim, by what it and the modules beside it import."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final


class Keeper(StrEnum):
    """Who saves and restores."""

    LIBRARY = "library"
    """The runtime attaches to the Trainer of a library."""
    OWN = "own"
    """The script uses spottrain's Trainer, Run or a callback."""
    NOBODY = "nobody"
    SYNC = "sync"
    """A sidecar keeps the folder to which the script writes."""
    IMAGE = "image"
    """checkpoint.mode Self."""
    UNSEEN = "unseen"
    """The script is in the image, and cannot be read from here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survival:
    keeper: Keeper
    evidence: str
    """What it was concluded from."""
    todo: str = ""

    def __str__(self) -> str:
        return f"{SURVIVES[self.keeper]} ({self.evidence}){'; ' + self.todo if self.todo else ''}"


SURVIVES: Final = {
    Keeper.LIBRARY: "After a reclaim the training goes on with the next step",
    Keeper.OWN: "After a reclaim the training goes on with the next step",
    Keeper.NOBODY: "Nothing survives a reclaim, and the job fails at its end: nobody says that it trained",
    Keeper.SYNC: "After a reclaim the newest whole checkpoint of the folder is restored",
    Keeper.IMAGE: "After a reclaim the command starts again, and restores what it has saved itself",
    Keeper.UNSEEN: "What survives a reclaim is not seen from here",
}
TRAINERS: Final = {
    "transformers": "transformers 5.10 or newer",
    "trl": "transformers 5.10 or newer",
    "sentence_transformers": "transformers 5.10 or newer",
    "lightning": "lightning 2.6 or newer",
    "pytorch_lightning": "lightning 2.6 or newer",
}
"""Libraries to whose Trainer the runtime attaches, and what the image must have."""
LOOP: Final = (
    "add three to six lines to the loop (docs/own-loop.md), or keep the folder that it writes with "
    "--sync-path (docs/sync.md)"
)
OWN_NAMES: Final = frozenset({"Trainer", "Run"})


def of(script: str, texts: Mapping[str, str]) -> Survival:
    """Returns what survives of the script. `texts` has it and the modules beside it, by path."""
    found = [each for path in reached(script, texts) for each in _uses(path, texts[path])]
    for keeper in (Keeper.OWN, Keeper.LIBRARY):
        best = next((each for each in found if each.keeper is keeper), None)
        if best is not None:
            return best
    return Survival(
        keeper=Keeper.NOBODY,
        evidence=f"{script} has no Trainer of Hugging Face or Lightning, and nothing of spottrain",
        todo=LOOP,
    )


def of_files(script: str) -> Survival:
    """Returns the same of a script on this machine."""
    folder = Path(script).parent
    texts = {path.as_posix(): path.read_text(errors="replace") for path in folder.glob("*.py")}
    return of(Path(script).as_posix(), texts)


def reached(script: str, texts: Mapping[str, str]) -> list[str]:
    """Returns the script and the modules beside it that it imports, by their paths."""
    folder = script.rpartition("/")[0]
    todo, seen = [script], []
    while todo:
        path = todo.pop(0)
        if path in seen or path not in texts:
            continue
        seen.append(path)
        for module, _, _ in _imports(_parsed(texts[path])):
            base = "/".join(filter(None, [folder, *module.split(".")]))
            todo += [f"{base}.py", f"{base}/__init__.py"]
    return seen


def _uses(path: str, text: str) -> Iterator[Survival]:
    """Yields what one file uses: a name that it imports, or an attribute of a module that it imports."""
    tree = _parsed(text)
    modules: dict[str, str] = {}
    for module, name, node in _imports(tree):
        if module.startswith("spottrain.integrations"):
            yield Survival(keeper=Keeper.OWN, evidence=f"{path}:{node.lineno} uses {module}")
        root = module.partition(".")[0]
        alias = _alias(node, name or module)
        if name is None or (root in ("lightning", "pytorch_lightning") and name == "pytorch"):
            modules[alias] = root
        elif use := _judged(root, name, path, node.lineno):
            yield use
    for at in ast.walk(tree):
        if isinstance(at, ast.Attribute):
            root = modules.get(_root(at), "")
            if use := _judged(root, at.attr, path, at.lineno):
                yield use


def _judged(root: str, name: str, path: str, line: int) -> Survival | None:
    where = f"{path}:{line}"
    if root == "spottrain" and name in OWN_NAMES:
        return Survival(keeper=Keeper.OWN, evidence=f"{where} uses spottrain.{name}")
    if root in TRAINERS and name.endswith("Trainer"):
        words = (
            f"{where} uses {name} of {root}, to which the runtime attaches; the image needs {TRAINERS[root]}"
        )
        return Survival(keeper=Keeper.LIBRARY, evidence=words)
    return None


def _imports(tree: ast.AST) -> Iterator[tuple[str, str | None, ast.Import | ast.ImportFrom]]:
    """Yields module and name of each import; no name for `import module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield each.name, None, node
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                yield node.module or each.name, each.name, node


def _alias(node: ast.Import | ast.ImportFrom, name: str) -> str:
    found = next((each for each in node.names if each.name == name), None)
    return found.asname if found is not None and found.asname else name.partition(".")[0]


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _parsed(text: str) -> ast.AST:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # said by Python when it runs
        return ast.Module(body=[], type_ignores=[])
