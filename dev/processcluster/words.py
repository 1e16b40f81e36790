"""Paths and variables in the words of a container, as they are on this machine. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

_VARIABLE = re.compile(r"\$(\$)?\((\w+)\)")


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """With `$(NAME)` replaced where NAME is known; `$$(NAME)` is a literal `$(NAME)`."""

    def value(found: re.Match[str]) -> str:
        if found[1]:
            return f"$({found[2]})"
        return environment.get(found[2], found[0])

    return _VARIABLE.sub(value, text)


def translated(text: str, paths: Mapping[str, str]) -> str:
    """With each path of the container replaced by the folder that stands for it, in one pass.

    Replacing one path after the other would also replace what an earlier replacement brought in.
    """
    if not paths:
        return text
    longest_first = sorted(paths, key=len, reverse=True)
    any_path = "|".join(re.escape(path) for path in longest_first)
    pattern = rf"(?:(?<=file://)|(?<![\w/.-]))({any_path})(?=$|[/:;,\s\"'\])}}])"
    return re.sub(pattern, lambda found: paths[found[1]], text)
