"""`spottrain watch`: a live view in a terminal, a line each so many seconds elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Protocol

from spottrain_cli import follow, live, progress_lines, timeline
from spottrain_cli.errors import CommandError
from spottrain_cli.jobs import Job
from spottrain_cli.kubectl import Access
from spottrain_cli.output import Format, coloured, console, print_facts

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

POLL_SECONDS: Final = 2.0
RETRIES: Final = "; it is asked again until it answers"


class View(Protocol):
    def say(self, sentence: str) -> None: ...

    def show(self, job: Job) -> None: ...


def watch(access: Access, ref: str, *, every: float, form: Format = Format.TEXT) -> int:
    """Shows the job until it settles, and returns the exit code that says how. Raises CommandError."""
    before: Job | None = None
    with _view(every, form) as view:

        def lost(error: CommandError) -> None:
            view.say(f"{error}{RETRIES}")

        for job in follow.states(access, ref, every=POLL_SECONDS, lost=lost):
            for sentence in progress_lines.news(before, job):
                view.say(sentence)
            view.show(live.newer(access, job))
            before = job
            if (code := follow.code_of(job)) is not None:
                for event in timeline.next_events(job, datetime.now(UTC)):
                    view.say(event)
                return code
    raise AssertionError("a job is followed without end")


@contextmanager
def _view(every: float, form: Format) -> Iterator[View]:
    if form is not Format.TEXT:
        yield Facts(form)
    elif sys.stdout.isatty():
        from rich.live import Live

        screen = Screen(out := console())
        with Live(console=out, get_renderable=screen.picture, refresh_per_second=2):
            yield screen
    else:
        yield Lines(every)


class Facts:
    """A stream of JSON lines or YAML documents for a program, one for each change; sentences to stderr."""

    def __init__(self, form: Format) -> None:
        self._form = form
        self._last: Job | None = None

    def say(self, sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)

    def show(self, job: Job) -> None:
        if job == self._last:
            return
        self._last = job
        if self._form is Format.JSON:
            print(json.dumps(timeline.facts(job)), flush=True)
        else:
            print("---")
            print_facts(timeline.facts(job), self._form)
            sys.stdout.flush()


class Lines:
    """A log: sentences at once, figures at intervals."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._next = 0.0

    def say(self, sentence: str) -> None:
        print(f"{datetime.now(UTC):%H:%M:%S}Z {sentence}", flush=True)

    def show(self, job: Job) -> None:
        if job.progress.step is not None and (time.monotonic() >= self._next or job.ended):
            self._next = time.monotonic() + self._every
            self.say(progress_lines.line(job, datetime.now(UTC)))


class Screen:
    """A live view at the end of the terminal, with sentences above it. Ages grow between two looks."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._job: Job | None = None

    def say(self, sentence: str) -> None:
        from rich.text import Text

        self._out.print(coloured(Text(f"{datetime.now(UTC):%H:%M:%S}Z {sentence}")))

    def show(self, job: Job) -> None:
        self._job = job

    def picture(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        if self._job is None:
            return Text("")
        lines: list[RenderableType] = [coloured(Text(timeline.title(self._job)))]
        if (share := progress_lines.share(self._job)) is not None:
            lines.append(ProgressBar(total=1.0, completed=share))
        lines.append(Text(progress_lines.line(self._job, datetime.now(UTC))))
        return Group(*lines)
