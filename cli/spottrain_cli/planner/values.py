"""Values of the planner's options, and figures as a person reads them."""

from __future__ import annotations

import math
import re
from typing import Final

import typer
from spottrain.core.gpu_catalogue import GPUS

from spottrain_cli.planner.breakdown import Lever, Part

SCALES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
SECONDS: Final = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def amount(text: str) -> float:
    """Parses 7B, 1.3e9, 500k or $50K. Raises BadParameter."""
    match = re.fullmatch(r"\$?([0-9.]+(?:e[+-]?[0-9]+)?)([kmbgt]?)", text.strip().lower())
    try:
        value = float(match[1]) * SCALES[match[2]] if match else math.nan
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(f"{text!r} is not a number above 0, such as 7B, 1e21 or 500k")
    return value


def whole(text: str) -> int:
    value = amount(text)
    if value != int(value):
        raise typer.BadParameter(f"{text!r} is not a whole number")
    return int(value)


def share(text: str) -> float:
    """Parses a share above 0 and at most 1."""
    value = amount(text)
    if value > 1:
        raise typer.BadParameter(f"{text!r} is not a share between 0 and 1, such as 0.4")
    return value


def seconds(text: str) -> float:
    """Parses 90s, 10m, 72h or 3d."""
    match = re.fullmatch(r"([0-9.]+)(s|min|m|h|d)", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a time, such as 90s, 10m, 72h or 3d")
    return amount(match[1]) * SECONDS[match[2]]


def byte_rate(text: str) -> float:
    """Parses bytes or bits per second: 500MB/s, 1.2GB/s, 25Gbit/s."""
    match = re.fullmatch(r"([0-9.]+)\s*([kmgt])(b/s|bit/s)", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a rate, such as 500MB/s or 25Gbit/s")
    return amount(match[1]) * SCALES[match[2]] / (8 if match[3] == "bit/s" else 1)


def lever(text: str) -> Lever:
    """Parses NAME:hours=48/72, or NAME:hours=0.667 without the name if it is left out."""
    match = re.fullmatch(r"(?:(.+):)?(price|hours|runs)=([0-9.]+)(?:/([0-9.]+))?", text.strip())
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is not a lever, such as bf16:hours=48/72, spot:price=0.36 or runs=20/24"
        )
    part = Part(match[2])
    if match[1] and not match[1].isprintable():
        raise typer.BadParameter(f"the name in {text!r} has a character that cannot be printed")
    return Lever(name=match[1] or part.value, part=part, factor=amount(match[3]) / amount(match[4] or "1"))


def mfu(text: str) -> tuple[str, float]:
    """Parses 0.4, or H100=0.4 for one kind of GPU."""
    name, equals, value = text.rpartition("=")
    if equals and name not in (*GPUS, "cpu"):
        raise typer.BadParameter(f"{name!r} is not known: use {', '.join(GPUS)} or cpu")
    return name, share(value)


# --- figures --------------------------------------------------------------------------------------------
def short(value: float) -> str:
    """Writes a number with three digits and its scale: 7.83 B."""
    for limit, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e4, " k")):
        if value >= limit:
            return f"{value / limit if unit != ' k' else value / 1e3:.3g}{unit}"
    return f"{value:.4g}"


def gigabytes(value: float) -> str:
    return f"{value / 1e9:.1f} GB" if value >= 1e8 else f"{value / 1e6:.1f} MB"


def dollars(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"${value:,.0f}" if value >= 100 else f"${value:,.2f}" if value >= 0.01 else f"${value:.2g}"


def hours(value: float) -> str:
    if value < 1:
        return f"{60 * value:.2g} min"
    return f"{value:,.1f} h" if value < 100 else f"{value:,.0f} h"
