"""Elements of HTML and SVG. Whatever is put into one is escaped, so no text of a job can become markup."""

from __future__ import annotations

from html import escape
from typing import Any, Final

EMPTY: Final = frozenset({"br", "circle", "line", "meta", "path", "polyline", "rect", "use"})
"""Elements without content."""


class Markup(str):
    """Text that is markup already."""


def element(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """Returns an element. Children and attributes that are None are left out.

    `class_` is written class, and an underscore within a name as a dash: `stroke_width` is stroke-width.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in EMPTY:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*children: Any) -> Markup:
    """Returns the children one after the other."""
    texts = (each if isinstance(each, Markup) else escape(str(each)) for each in children if each is not None)
    return Markup("".join(texts))
