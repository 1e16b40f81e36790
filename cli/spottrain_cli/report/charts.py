"""The charts of the page, as SVG that stretches to the width of the screen, with labels in HTML. Pure.

Positions along an axis are percentages, so text keeps its size on a phone and patterns are not stretched.
Whatever has a colour also has a pattern, a dash, a shape or a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from spottrain.core.log_format import duration
from spottrain.core.series import Point

from spottrain_cli import timeline
from spottrain_cli.figures import dollars
from spottrain_cli.jobs import BUCKETS
from spottrain_cli.report.curves import Axis, Column, axis_of, columns, number
from spottrain_cli.report.facts import Break, Report, Span
from spottrain_cli.report.markup import Markup, element, joined

WIDTH, HEIGHT = 1000.0, 300.0
"""Of the coordinates of a plot, which the browser stretches."""
APART: Final = 11.0
"""Least percentage of the width between two labels."""
MOST_ROWS: Final = 100
MOST_BREAKS: Final = 400
STEPS_OF_TIME: Final = [
    *(float(seconds) for seconds in (1, 2, 5, 10, 20, 30)),
    *(60.0 * minutes for minutes in (1, 2, 5, 10, 20, 30)),
    *(3600.0 * hours for hours in (1, 2, 4, 6, 12)),
    *(86400.0 * days for days in (1, 2, 5, 10, 20, 50, 100, 500)),
]
MARKS: Final = {timeline.DONE: "✓", "": "▶"}
"""Before the cause of an attempt's end; ✕ for the others."""


# --- curves over the steps --------------------------------------------------------------------------------
def loss_chart(report: Report) -> Markup | None:
    """Returns the loss over the steps; None where no point has one."""

    def value(point: Point) -> tuple[float, float, float] | None:
        if point.loss is None:
            return None
        low, high = point.lossMin, point.lossMax
        return point.loss, point.loss if low is None else low, point.loss if high is None else high

    found = columns(report.points, value, _last_step(report))
    if not found:
        return None
    axis = axis_of(found)
    scale = ", logarithmic scale" if axis.logarithmic else ""
    return _chart(f"Loss{scale}", f"last: {number(found[-1].mean)}", found, axis, report)


def speed_chart(report: Report) -> Markup | None:
    """Returns samples or steps a second over the steps; None where nothing is known."""
    points = [point for curve in report.curves for point in curve[1:] or curve]
    by_samples = bool(points) and all(point.samples for point in points)

    def value(point: Point) -> tuple[float, float, float] | None:
        if point.seconds <= 0:
            return None
        speed = (point.samples if by_samples else point.steps) / point.seconds
        return speed, speed, speed

    found = columns(points, value, _last_step(report))
    if not found:
        return None
    unit = "samples/s" if by_samples else "steps/s"
    means = sorted(column.mean for column in found)
    typical = f"typical: {number(means[len(means) // 2])} {unit}"
    return _chart(f"Speed, {unit}", typical, found, axis_of(found, from_zero=True), report)


def _last_step(report: Report) -> int:
    """Returns the end of the steps' axis: of those that are done, and of all while it runs."""
    done = max((point.step for point in report.points), default=0)
    return max(done, (report.total or 0) if report.live else 0, 1)


def _chart(title: str, figure: str, found: list[Column], axis: Axis, report: Report) -> Markup:
    steps = Axis(low=0.0, high=float(_last_step(report)))
    shown = _thinned(report.breaks, steps)
    drawn = element(
        "svg",
        *(_level(axis.share(tick)) for tick in axis.ticks()),
        _band(found, steps, axis),
        *(_vertical(steps.share(each.step)) for each in report.breaks[:MOST_BREAKS]),
        element("path", class_="curve", d=_path(_places(found, steps, axis, "mean"))),
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        preserveAspectRatio="none",
        data_last=f"{steps.high:.0f}",
        data_low=repr(axis.low),
        data_high=repr(axis.high),
        data_log="1" if axis.logarithmic else None,
        role="img",
        aria_label=f"{title} over steps 0 to {steps.high:,.0f}; {figure}",
    )
    return element(
        "figure",
        element("figcaption", element("h3", title), element("span", figure)),
        element(
            "div",
            element("div", *(_at("bottom", axis.share(t), number(t)) for t in axis.ticks()), class_="values"),
            element("div", *(_break_label(each, steps) for each in shown), class_="breaks"),
            element("div", drawn, class_="area"),
            element(
                "div", *(_at("left", steps.share(t), f"{t:,.0f}") for t in steps.ticks()), class_="steps"
            ),
            class_="plot",
        ),
    )


def _band(found: Sequence[Column], steps: Axis, axis: Axis) -> Markup | None:
    """Returns the area between the least and the greatest values; None where each is its mean."""
    if all(each.low == each.high for each in found):
        return None
    around = [*_places(found, steps, axis, "high"), *reversed([*_places(found, steps, axis, "low")])]
    return element("path", class_="band", d=_path(around) + "Z")


def _places(found: Sequence[Column], steps: Axis, axis: Axis, value: str) -> Iterator[tuple[float, float]]:
    """Yields the coordinates of a value of each column."""
    for each in found:
        yield steps.share(each.step) * WIDTH, (1 - axis.share(getattr(each, value))) * HEIGHT


def _path(places: Iterable[tuple[float, float]]) -> str:
    return "".join(f"{'L' if n else 'M'}{x:.1f} {y:.1f}" for n, (x, y) in enumerate(places))


def _level(share: float) -> Markup:
    y = f"{(1 - share) * HEIGHT:.1f}"
    return element("line", class_="level", x1=0, x2=f"{WIDTH:g}", y1=y, y2=y)


def _vertical(share: float) -> Markup:
    x = f"{share * WIDTH:.1f}"
    return element("line", class_="break", x1=x, x2=x, y1=0, y2=f"{HEIGHT:g}")


def _thinned(breaks: Sequence[Break], steps: Axis) -> list[Break]:
    """Returns those whose labels have room."""
    shown: list[Break] = []
    for each in sorted(breaks, key=lambda found: found.step):
        if not shown or 100 * (steps.share(each.step) - steps.share(shown[-1].step)) >= APART:
            shown.append(each)
    return shown


def _break_label(each: Break, steps: Axis) -> Markup:
    words = f"attempt {each.number} ended ({each.cause}); the next went on after step {each.step:,}"
    return element("span", each.number, style=f"left:{100 * steps.share(each.step):.2f}%", title=words)


def _at(side: str, share: float, text: str) -> Markup:
    edge = "first" if share < 0.04 else "last" if share > 0.96 else None
    return element("span", text, class_=edge, style=f"{side}:{100 * share:.2f}%")


# --- attempts over time -----------------------------------------------------------------------------------
def time_line(report: Report) -> Markup | None:
    """Returns a bar for each attempt: waiting, starting, training, and how it ended."""
    begun, seconds = report.begun, report.seconds
    if begun is None or not seconds:
        return None
    time = Axis(low=0.0, high=seconds)
    ticks = _times(seconds)
    rows = [_row(span, report, time) for span in report.spans[-MOST_ROWS:] if span.start is not None]
    scale = element(
        "div", *(_at("left", time.share(t), duration(t) if t else "0") for t in ticks), class_="times"
    )
    return element("div", *rows, scale, class_="spans")


def _row(span: Span, report: Report, time: Axis) -> Markup:
    begun = report.begun or 0.0
    now = report.made - begun
    start, bound, first, end = (
        None if moment is None else moment - begun
        for moment in (span.start, span.bound, span.first, span.end)
    )
    assert start is not None
    end = now if end is None else end
    bound = end if bound is None else bound
    first = end if first is None else first
    bars = [
        _bar("waiting", start, min(bound, end), time),
        _bar("startup", bound, min(first, end), time),
        _bar("productive", first, end, time),
    ]
    where = element("span", span.node, class_="node") if span.node else None
    place = element("span", span.place, class_="quiet") if span.place else None
    head = joined(element("b", f"Attempt {span.number}"), " ", where, " ", place)
    drawn = element("svg", *bars, role="img", aria_label=_said(span))
    return element(
        "div",
        element("div", head, class_="who"),
        drawn,
        element(
            "div",
            element("b", f"{MARKS.get(span.cause, '✕')} {span.cause or 'running'}"),
            _end(span),
            class_="how",
        ),
        class_="span",
    )


def _said(span: Span) -> str:
    ended = f"ended by {span.cause}" if span.cause else "running"
    return f"attempt {span.number} on {span.node or 'this machine'}, {ended}"


def _end(span: Span) -> Markup:
    parts = [f"steps {span.start_step or 0:,} to {span.last_step:,}"] if span.last_step is not None else []
    parts += [f"{span.lost:,} of them done again"] if span.lost else []
    parts += ["lost no step"] if span.lost == 0 else []
    parts += [dollars(span.spent)] if span.spent is not None else []
    parts += ["counts as a failure"] if span.charged else []
    parts += [span.why] if span.why else []
    return joined(*(joined(" · ", part) for part in parts))


def _bar(name: str, start: float, end: float, time: Axis) -> Markup | None:
    if end <= start:
        return None
    x, width = 100 * time.share(start), 100 * (time.share(end) - time.share(start))
    return _share(name, x, max(width, 0.3))


def _times(seconds: float) -> list[float]:
    step = next((each for each in STEPS_OF_TIME if seconds / each <= 4), STEPS_OF_TIME[-1])
    return [number * step for number in range(int(seconds / step) + 1)][:12]


# --- where the time went ----------------------------------------------------------------------------------
def part_bar(parts: dict[str, float]) -> Markup:
    """Returns one bar of all parts, in their order."""
    total, at = sum(parts.values()), 0.0
    drawn = []
    for name, seconds in parts.items():
        width = 100 * seconds / total
        if width > 0:
            drawn.append(_share(name, at, width))
        at += width
    words = ", ".join(f"{BUCKETS[name]} {seconds / total:.0%}" for name, seconds in parts.items() if seconds)
    return element("svg", *drawn, class_="stack", role="img", aria_label=words)


def swatch(name: str) -> Markup:
    return element("svg", _share(name, 0.0, 100.0), class_="swatch", aria_hidden="true")


def _share(name: str, at: float, width: float) -> Markup:
    return element("rect", class_=f"part {name}", x=f"{at:.2f}%", width=f"{width:.2f}%", y=0, height="100%")


def amount_bar(parts: dict[str, float], whole: float) -> Markup:
    """Returns a bar of amounts, of which `whole` would be the full width."""
    at, drawn = 0.0, []
    for name, amount in parts.items():
        width = 100 * amount / whole if whole > 0 else 0.0
        drawn.append(_share(name, at, width))
        at += width
    return element("svg", *drawn, class_="stack", aria_hidden="true")
