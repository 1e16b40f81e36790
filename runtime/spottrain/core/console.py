"""Writes log events to standard output; in a terminal, with a progress line that is redrawn in place.

The progress line is on standard error, so it also shows where standard output goes to a file or a pipe.
Nothing may be written behind it. So in a terminal every line begins with a sequence that
clears the current one: the lines of this module, and those that other code of the process prints. That also
holds for the other ranks of a launcher, which share the terminal and cannot see each other's lines. No
control sequence is written to anything but a terminal.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, TextIO

from spottrain.contract import LOG_FORMAT, Env
from spottrain.core import patches
from spottrain.core.log_format import FORMATS, STEP, Event, chosen_format, event_of, text, wrapped
from spottrain.core.text import without_manifest

CLEAR: Final = "\x1b[2K\x1b[G"
"""Clears the line and moves to its start. Without a `\\r`, at which Python would flush the begun line."""
BAR: Final = "\u2501"  # a heavy line
REST: Final = "\u2500"  # a light one
PLAIN: Final = str.maketrans({BAR: "#", REST: "-"})
"""For a terminal whose encoding has no such lines."""
REDRAW_SECONDS: Final = 0.5
LOCK_SECONDS: Final = 1.0
"""Seconds to wait at the process's end for a terminal that takes nothing (Ctrl-S, a dead connection)."""
DEFAULT_WIDTH: Final = 80
"""Of a terminal that does not tell its size."""


def is_terminal(stream: TextIO) -> bool:
    """Whether the stream shows control sequences. False for streams that are not files.

    Both answers count: in a Jupyter kernel the descriptor is the server's terminal, the stream is the cell.
    """
    try:
        return stream.isatty() and os.isatty(stream.fileno()) and os.environ.get("TERM") != "dumb"
    except (OSError, ValueError, AttributeError):
        return False


class ConsoleHandler(logging.Handler):
    """Handler of the logger `spottrain`.

    Its lock serializes what this process writes to the terminal. `logging` renews the lock in a forked child.
    """

    def __init__(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """`wanted`: whether the progress line is shown now."""
        super().__init__()
        self._wanted = wanted
        self._drawing = False
        """Whether there is a progress line, which then replaces the lines of steps."""
        self._shown = False
        self._over = False
        """Whether the run has ended, after which a person needs no more sentences but warnings."""
        self._fd = -1
        self._lines = False
        """Whether the terminal shows BAR and REST."""
        self._unfinished = ""
        """Written by other code since its last line break: nothing, `text`, or `bar` if there is a `\\r`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the line at once. A reader that is gone must not stop a save."""
        try:
            self._emit(record, sys.stdout)
        except (OSError, ValueError, AttributeError):  # closed, gone, or None
            return
        except Exception:  # such as arguments of another module's record that do not fit its text
            self.handleError(record)

    def _emit(self, record: logging.LogRecord, stream: TextIO) -> None:
        event, terminal = event_of(record), is_terminal(stream)
        form = _format(terminal=terminal)
        if event.name == "end":
            self.close_progress()
        live = terminal and form is text
        if live and not self._wanted_by_people(event):
            return
        line = self.format(record) if self.formatter else form(event, record.levelno)
        start = ""
        if live:
            start = "\n" if self._unfinished == "text" else CLEAR
            line = line if Env.JOB_UID in os.environ else without_manifest(line)
            line = wrapped(line, _columns(stream.fileno()))
        line = f"{start}{line}\n"
        try:
            stream.write(line)  # one write: a split line cannot be parsed
        except UnicodeEncodeError:
            stream.write(line.encode("ascii", "backslashreplace").decode())
        stream.flush()

    def _wanted_by_people(self, event: Event) -> bool:
        ended, self._over = self._over, self._over or event.name == "end"
        if event.level < logging.WARNING and (ended or (self._drawing and event.name == STEP)):
            return False
        return event.for_people

    @property
    def on_terminal(self) -> bool:
        """Whether a person reads both the log and standard error in a terminal."""
        both = is_terminal(sys.stdout) and is_terminal(sys.stderr)
        return both and _format(terminal=True) is text

    def on_stderr(self, line: str) -> str:
        """Returns a line for standard error: broken between words if that is a terminal."""
        if not is_terminal(sys.stderr):
            return line
        return wrapped(line, _columns(sys.stderr.fileno()), indent="")

    # --- in a terminal ----------------------------------------------------------------------------------
    def start_terminal(self, progress: Callable[[int], str] | None, *, shared: bool = False) -> None:
        """Keeps the lines of all code of this process whole, if standard error is a terminal.

        `progress`: returns the progress line, of at most so many characters; None: another process shows it.
        It is shown until the event `end`. `shared`: other ranks write to the same terminal. Nothing changes
        where the log has another format than `text`.
        """
        stream = sys.stderr
        if self._drawing or not is_terminal(stream) or _format(terminal=True) is not text:
            return
        streams = {id(each): each for each in (sys.stdout, stream) if is_terminal(each)}  # may be one object
        for each in streams.values():
            if not self._clear_before_lines(each):
                return
            if shared and isinstance(each, io.TextIOWrapper):  # else PYTHONUNBUFFERED tears lines into pieces
                each.reconfigure(line_buffering=True, write_through=False)
        if progress is not None:
            self._drawing, self._fd = True, stream.fileno()
            self._lines = stream.encoding.lower().replace("-", "") == "utf8"
            atexit.register(self.close_progress)
            draw = threading.Thread(target=self._redraw, args=[progress], daemon=True)
            draw.name = "spottrain-progress-line"
            draw.start()

    def close_progress(self) -> None:
        """Removes the progress line for good. A terminal that takes nothing must not delay the end."""
        if not self._turn.acquire(timeout=LOCK_SECONDS):
            return
        try:
            if self._drawing:
                self._draw("")
                self._drawing = False
        finally:
            self._turn.release()

    @property
    def _turn(self) -> threading.RLock:
        assert self.lock is not None
        return self.lock

    def _clear_before_lines(self, stream: TextIO) -> bool:
        """Clears the progress line before what other code writes. The stream object stays the same.

        Returns False for a stream whose `write` cannot be replaced.
        """
        usual = stream.write

        def write(words: str) -> int:
            with self._turn:
                clear = not self._unfinished and not words.startswith(CLEAR) and is_terminal(stream)
                begun = words.rpartition("\n")[2]
                before = "" if "\n" in words else self._unfinished
                self._unfinished = "bar" if "\r" in begun else before or ("text" if begun else "")
                if begun.endswith("\r") and len(begun) > 1:  # a bar that has removed itself
                    self._unfinished = ""
                usual(CLEAR + words if clear else words)
                return len(words)

        try:
            patches.replace(stream, "write", write)
        except AttributeError:
            return False
        return True

    def _redraw(self, progress: Callable[[int], str]) -> None:
        while self._drawing:
            wanted = self._wanted()  # not under our lock: it may take that of `logging`
            try:
                with self._turn:
                    self._draw(progress(_width(self._fd)) if wanted else "")
            except OSError:
                pass
            except Exception:  # then the lines of steps come back
                self._drawing = False
            time.sleep(REDRAW_SECONDS)

    def _draw(self, line: str) -> None:
        """Bypasses the stream's buffer, whose lock a thread must not hold while the interpreter ends."""
        if self._drawing and not self._unfinished and (line or self._shown) and os.isatty(self._fd):
            shown = line.encode() if self._lines else line.translate(PLAIN).encode("ascii", "replace")
            os.write(self._fd, CLEAR.encode() + shown)
            self._shown = bool(line)


def _format(*, terminal: bool) -> Callable[[Event, int], str]:
    return FORMATS[chosen_format(os.environ.get(LOG_FORMAT, ""), terminal=terminal)]


def _columns(fd: int) -> int:
    return os.get_terminal_size(fd).columns or DEFAULT_WIDTH


def _width(fd: int) -> int:
    return _columns(fd) - 3  # in the last column some terminals wrap; and Ctrl-C appears as ^C
