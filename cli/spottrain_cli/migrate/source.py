"""A document that is read by taking its fields out. What is left at the end was read by no rule: a loss.

So no field of a source can be lost without a word, whatever it is and whoever adds it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from spottrain_cli.errors import UsageError

Json = dict[str, Any]

NO_COUNTERPART: Final = "a TrainingJob has nothing like it"
SHOWN: Final = 160
"""Characters of a value that a note shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """What became of a field, where it is not simply carried."""

    path: str
    text: str
    lost: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


class Source:
    """Fields of one mapping of the document, and what has been said of them."""

    def __init__(self, fields: Mapping[str, Any], path: str = "", notes: list[Note] | None = None) -> None:
        self.path = path
        self.notes: list[Note] = [] if notes is None else notes
        self._fields = copy.deepcopy(dict(fields))
        self._parts: list[Source] = []

    def name(self, path: str) -> str:
        """Returns a path of this mapping as the whole document has it."""
        return f"{self.path}.{path}".strip(".")

    def note(self, path: str, text: str) -> None:
        self.notes.append(Note(path=self.name(path), text=text))

    def lose(self, path: str, text: str) -> None:
        self.notes.append(Note(path=self.name(path), text=text, lost=True))

    def has(self, path: str) -> bool:
        return self._find(path) is not None

    def look(self, path: str) -> Any:
        """Returns the value and leaves it there; None where there is none."""
        found = self._find(path)
        return None if found is None else found[0][found[1]]

    def take(self, path: str) -> Any:
        """Takes the value out; None where there is none, or null."""
        found = self._find(path)
        return None if found is None else found[0].pop(found[1])

    def whole(self, path: str, least: int = 0) -> int | None:
        """Takes a whole number. Raises UsageError where it is none."""
        value = self.take(path)
        if value is None:
            return None
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(
                f"{self.name(path)} is {value!r}, not a whole number of at least {least}; if the file is a "
                "template, fill its variables in first, such as by envsubst"
            )
        return value

    def mapping(self, path: str) -> Json:
        """Takes a mapping; {} where there is none."""
        found: Json = _typed(self.take(path) or {}, dict, self.name(path), "a mapping")
        return found

    def part(self, path: str) -> Source:
        """Takes a mapping out as a source of its own, whose rest counts with this one's."""
        return self.added(self.mapping(path), self.name(path))

    def parts(self, path: str) -> list[Source]:
        """Takes a list of mappings out, each as a source of its own."""
        items: list[Any] = _typed(self.take(path) or [], list, self.name(path), "a list")
        return [
            self.added(
                _typed(item, dict, f"{self.name(path)}[{at}]", "a mapping"), f"{self.name(path)}[{at}]"
            )
            for at, item in enumerate(items)
        ]

    def keep(self, path: str, value: Any) -> None:
        """Puts a value back, to be carried with the rest."""
        put(self._fields, path, value)

    def rest(self) -> Json:
        """Takes everything that is still there."""
        fields, self._fields = self._fields, {}
        return fields

    def left(self) -> Iterator[tuple[str, Any]]:
        """Yields path and value of each field that nobody has taken."""
        yield from _leaves(self._fields, self.path)
        for part in self._parts:
            yield from part.left()

    def lose_left(self) -> None:
        """Says of each field that nobody has taken that it is lost."""
        for path, value in list(self.left()):
            self.notes.append(Note(path=path, text=f"{shown(value)}: {NO_COUNTERPART}", lost=True))

    def added(self, fields: Json, path: str) -> Source:
        """Adds a mapping that was taken out, as a source whose rest counts with this one's."""
        part = Source(fields, path, self.notes)
        self._parts.append(part)
        return part

    def _find(self, path: str) -> tuple[Json, str] | None:
        """Returns the mapping that holds the path's last word, with that word."""
        at: Any = self._fields
        *above, last = path.split(".")
        for word in above:
            at = at.get(word) if isinstance(at, dict) else None
        return (at, last) if isinstance(at, dict) and at.get(last) is not None else None


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of one field. Exactly one of `to`, `note` and `lost` says it."""

    path: str
    to: str = ""
    """Field of the TrainingJob's spec that holds the same."""
    note: str = ""
    """Why nothing needs to be carried."""
    only: tuple[Any, ...] = ()
    """Values for which `note` holds; any other one is lost."""
    lost: str = ""
    """What to do instead."""


def apply(rules: Sequence[Rule], source: Source, spec: Json) -> None:
    """Takes the fields of the rules out of a source; what is carried is put into `spec`."""
    for rule in rules:
        value = source.take(rule.path)
        if value is None:
            continue
        if rule.to:
            put(spec, rule.to, value)
        elif value not in rule.only if rule.only else not rule.note:
            source.lose(rule.path, f"{shown(value)}: {rule.lost or NO_COUNTERPART}")
        else:
            source.note(rule.path, f"{shown(value)}: {rule.note}")


def put(fields: Json, path: str, value: Any) -> None:
    *above, last = path.split(".")
    for word in above:
        fields = fields.setdefault(word, {})
    fields[last] = value


def shown(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields what is not an empty mapping, an empty list or null."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}".strip("."))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{at}]")
    elif value is not None:
        yield path, value


def _typed(value: Any, kind: type, path: str, what: str) -> Any:
    if not isinstance(value, kind):
        raise UsageError(f"{path} is {shown(value)!r} and must be {what}")
    return value
