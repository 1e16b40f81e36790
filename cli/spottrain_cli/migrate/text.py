"""A converted manifest as a file: what became of the source stands above it, in comments."""

from __future__ import annotations

import textwrap
from typing import Any, Final

import yaml

from spottrain_cli.migrate.convert import Converted
from spottrain_cli.migrate.source import Json

WIDTH: Final = 110


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, and items of a list indented, as people write manifests."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def dump(document: Json) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH)


def _comment(sentence: str) -> list[str]:
    return textwrap.wrap(
        sentence,
        WIDTH,
        initial_indent="#   ",
        subsequent_indent="#     ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def manifest(converted: Converted) -> str:
    notes = [note for note in converted.notes if not note.lost]
    lines = [f"# From {converted.origin}, by spottrain init."]
    for title, found in (("Not carried:", converted.losses), ("Otherwise than before:", notes)):
        if found:
            lines += ["#", f"# {title}", *(line for note in found for line in _comment(str(note)))]
    documents = [dump(each) for each in (converted.manifest, *converted.others)]
    return "\n".join(lines) + "\n" + "---\n".join(documents)
