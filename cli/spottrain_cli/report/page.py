"""The report as one page of HTML, which loads nothing from elsewhere. Pure.

Its one script shows the figures under the pointer; without it the page lacks nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from spottrain.core.log_format import duration

from spottrain_cli.figures import dollars, lower_bound
from spottrain_cli.jobs import BUCKETS, Cost
from spottrain_cli.report import charts
from spottrain_cli.report.facts import Report, headline, saving
from spottrain_cli.report.findings import Finding, findings
from spottrain_cli.report.markup import Markup, element, joined

MARK: Final = '<meta name="generator" content="spottrain report"/>'
"""In every report, so that only a report is overwritten by one."""
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script}'"
"""The browser loads nothing and runs the page's own script alone, whatever a job's text holds."""
PATTERNS: Final = {
    "startup": "M-2 2L2 -2M0 8L8 0M6 10L10 6",
    "dataWait": "",
    "checkpointStall": "M2 0V8M6 0V8",
    "restore": "M0 2H8M0 6H8",
    "rollback": "M0 0L8 8M0 8L8 0",
    "waiting": "M-2 6L2 10M0 0L8 8M6 -2L10 2",
    "other": None,
}
"""What each part is filled with; an empty one with dots, None with nothing but the ground."""
PAID: Final = {"use": "nodes with pods of the job", "boot": "nodes that boot", "idle": "nodes that end"}


def page(report: Report) -> str:
    """Returns the whole page."""
    sections = [_head(report), *_findings(report), *_attempts(report), *_steps(report), *_time(report)]
    sections += [*_cost(report), *_notes(report), _foot(report)]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element(
            "meta",
            http_equiv="Content-Security-Policy",
            content=POLICY.format(script=_digest(_file("page.js"))),
        ),
        Markup(MARK),
        element("title", f"{report.title}: {headline(report)}"),
        element("style", Markup(_file("page.css"))),
    )
    return (
        "<!doctype html>\n"
        + element(
            "html",
            head,
            element("body", _patterns(), *sections, element("script", Markup(_file("page.js")))),
            lang="en",
        )
        + "\n"
    )


@cache
def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _patterns() -> Markup:
    """Returns the fills of the parts, which tell them apart without colour."""
    return element(
        "svg",
        element("defs", *(_pattern(name, path) for name, path in PATTERNS.items())),
        class_="defs",
        aria_hidden="true",
    )


def _pattern(name: str, path: str | None) -> Markup:
    ground = element("rect", class_="ground", width=8, height=8)
    drawn = None
    if path:
        drawn = element("path", class_="mark", d=path)
    elif path is not None:
        drawn = joined(*(element("circle", class_="dot", cx=x, cy=x, r=1.3) for x in (2, 6)))
    return element("pattern", ground, drawn, id=name, width=8, height=8, patternUnits="userSpaceOnUse")


# --- sections -------------------------------------------------------------------------------------------
def _head(report: Report) -> Markup:
    tiles = [
        element("div", element("b", value), element("span", name), class_="tile")
        for name, value in _tiles(report)
    ]
    return element(
        "header",
        element("h1", report.title),
        element("p", element("b", headline(report))),
        *(element("p", sentence) for sentence in report.sentences),
        element("div", *tiles, class_="tiles"),
    )


def _tiles(report: Report) -> Iterator[tuple[str, str]]:
    if report.step is not None:
        total = f" of {report.total:,}" if report.total else ""
        yield f"{report.word}s done", f"{report.step:,}{total}"
    if report.loss is not None:
        yield "last loss", f"{report.loss:.4g}"
    if report.seconds is not None:
        yield "so far" if report.live else "from start to end", duration(report.seconds)
    if report.parts is not None:
        yield (
            "of the time trained the model",
            f"{report.parts['productive'] / sum(report.parts.values()):.0%}",
        )
    if report.cost is not None:
        yield "spent", lower_bound(report.cost.spent, known=report.cost.known)
    if (less := saving(report)) is not None:
        yield f"{'less' if less >= 0 else 'more'} than on demand", f"{abs(less)} %"


def _findings(report: Report) -> Iterator[Markup]:
    yield element("h2", "What was slow")
    for each in findings(report):
        yield _finding(each)


def _finding(each: Finding) -> Markup:
    fix = element("p", element("b", "Fix: "), each.fix) if each.fix else None
    return element("div", element("b", each.title), element("p", each.text), fix, class_="finding")


def _attempts(report: Report) -> Iterator[Markup]:
    drawn = charts.time_line(report)
    if drawn is None:
        return
    yield element("h2", "Attempts and nodes" if report.nodes else "Attempts")
    yield element("p", *_legend("waiting", "startup", "productive"), class_="quiet")
    if len(report.spans) > charts.MOST_ROWS:
        yield element("p", f"The last {charts.MOST_ROWS} of {len(report.spans)}.", class_="quiet")
    yield drawn


def _legend(*names: str) -> Iterator[Markup]:
    words = {"waiting": "waiting for nodes", "startup": "starting", "productive": "training"}
    for name in names:
        yield joined(charts.swatch(name), words[name], "   ")


def _steps(report: Report) -> Iterator[Markup]:
    drawn = [each for each in (charts.loss_chart(report), charts.speed_chart(report)) if each is not None]
    if not drawn:
        return
    yield element("h2", "Loss and speed")
    breaks = "A dashed line: an attempt ended, with its number. " if report.breaks else ""
    band = "A band is between the least and the greatest values; the first point of an attempt, which has "
    band += "the compilation in it, is not in the speed."
    yield element("p", breaks + band, class_="quiet")
    yield from drawn


def _time(report: Report) -> Iterator[Markup]:
    if report.parts is None:
        return
    total, paid = sum(report.parts.values()), _paid(report)
    yield element("h2", "Where the time went")
    yield charts.part_bar(report.parts)
    rows = [
        (
            joined(charts.swatch(name), BUCKETS[name]),
            duration(seconds),
            f"{seconds / total:.1%}",
            paid.get(name),
        )
        for name, seconds in report.parts.items()
    ]
    columns = ["part", "time", "share", *(["paid"] if paid else [])]
    yield _table(columns, [row[: len(columns)] for row in rows])
    if paid:
        yield element("p", "Paid: the cost of nodes while pods ran, by these times.", class_="quiet")


def _paid(report: Report) -> dict[str, str]:
    """Returns what each part has cost: the cost of use, by shares of the time with all nodes."""
    parts, cost = report.parts, report.cost
    if parts is None or cost is None or not cost.known or not cost.use or not report.allocated:
        return {}
    without = max(0.0, sum(parts.values()) - report.allocated)
    held = parts | {"waiting": max(0.0, parts["waiting"] - without)}
    whole = sum(held.values())
    return {name: f"${float(cost.use) * seconds / whole:,.2f}" for name, seconds in held.items()}


def _cost(report: Report) -> Iterator[Markup]:
    cost = report.cost
    if cost is None or cost.spent is None:
        return
    yield element("h2", "What it cost")
    ideal = float(cost.onDemandIdeal or 0)
    whole = max(float(cost.spent), ideal)
    yield _amount(f"Spent: {lower_bound(cost.spent, known=cost.known)}", _spent(cost), whole)
    if ideal:
        yield _amount(
            f"The same training on demand: {dollars(cost.onDemandIdeal or cost.spent)}",
            {"ondemand": ideal},
            whole,
        )
    rows = [
        (joined(charts.swatch(name), PAID[name]), f"${amount:,.2f}") for name, amount in _spent(cost).items()
    ]
    yield _table(["of it", "dollars"], rows)
    less = saving(report)
    if less is not None:
        than = "less" if less >= 0 else "more"
        yield element("p", f"It cost {abs(less)} % {than} than on-demand nodes without interruptions.")
    yield element("p", "By the operator's price list; only the cloud's bill is exact.", class_="quiet")


def _spent(cost: Cost) -> dict[str, float]:
    return {name: float(getattr(cost, name) or 0) for name in PAID}


def _amount(words: str, parts: dict[str, float], whole: float) -> Markup:
    return element("div", element("div", words), charts.amount_bar(parts, whole), class_="amount")


def _notes(report: Report) -> Iterator[Markup]:
    if report.notes:
        yield element("h2", "What is not on this page")
        yield element("ul", *(element("li", note) for note in report.notes))


def _foot(report: Report) -> Markup:
    made = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(report.made))
    state = "; it still runs, so make it again for more" if report.live else ""
    return element("footer", element("p", f"Made by spottrain report at {made}{state}."))


def _table(columns: list[str], rows: Sequence[Sequence[Markup | str | None]]) -> Markup:
    head = [element("th", name, class_="number" if number else None) for number, name in enumerate(columns)]
    body = [
        element(
            "tr",
            *(element("td", cell, class_="number" if number else None) for number, cell in enumerate(row)),
        )
        for row in rows
    ]
    return element("div", element("table", element("tr", *head), *body), class_="scroll")
