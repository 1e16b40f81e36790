"""Events go through `logging`, so a program's own configuration holds; each line is whole, whoever writes."""

from __future__ import annotations

import io
import logging
import os
import pty
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
from spottrain.contract import LOG_FORMAT
from spottrain.core import log
from spottrain.core.log_format import Event

from tests.support.terminal import screen

LOGGER = logging.getLogger("spottrain")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    before = (LOGGER.level, LOGGER.handlers[:], LOGGER.propagate, root.handlers[:], root.level)
    yield
    LOGGER.level, LOGGER.handlers[:], LOGGER.propagate, root.handlers[:], root.level = before
    LOGGER.setLevel(before[0])  # and forget which levels were enabled


class Collects(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


# --- a program's own configuration ------------------------------------------------------------------------
def test_basic_config_repeats_no_line_and_loses_none(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    root.handlers.clear()
    logging.basicConfig(level=logging.DEBUG)
    log.event("released")
    said = capsys.readouterr()
    assert said.out.count("event=released") == 1 and said.err == ""


def test_a_handler_gets_the_sentence_the_facts_and_the_place_of_the_call(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = Collects()
    LOGGER.addHandler(own)
    log.event("save-failed", step=3, error="no network")
    log.step(4, 9, loss=0.5)
    failed, step = own.records
    assert failed.getMessage() == "The save of step 3 failed: no network" and failed.levelname == "WARNING"
    assert isinstance(failed.msg, Event) and failed.msg.facts == {"step": 3, "error": "no network"}
    assert failed.filename == os.path.basename(__file__)
    assert (step.name, step.levelname, step.getMessage()) == ("spottrain.steps", "INFO", "Step 4/9: loss 0.5")
    assert capsys.readouterr().out.count("\n") == 2, "and standard output has them too"


def test_a_program_that_propagates_gets_the_records_at_its_root_logger() -> None:
    own = Collects()
    logging.getLogger().addHandler(own)
    log.event("released")
    assert not own.records
    LOGGER.propagate = True
    log.event("released")
    assert [record.getMessage() for record in own.records] == ["Released"]


def test_levels_are_the_programs(capsys: pytest.CaptureFixture[str]) -> None:
    LOGGER.setLevel(logging.WARNING)
    log.event("released")
    log.step(1, None, loss=1.0)
    log.event("prune-failed", error="403")
    assert [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()] == [
        "event=prune-failed error=403"
    ]


def test_a_formatter_and_the_removal_of_our_handler_hold(capsys: pytest.CaptureFixture[str]) -> None:
    log.console.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    try:
        log.event("released")
    finally:
        log.console.setFormatter(None)
    LOGGER.removeHandler(log.console)
    log.event("released")
    assert capsys.readouterr().out == "INFO Released\n"


def test_records_of_other_code_have_the_same_format(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("spottrain.plugin").exception("no %s", "luck")
    assert capsys.readouterr().out.split(" ", 1)[1] == (
        "event=log logger=spottrain.plugin message=\"no luck\" error=ValueError('why')\n"
    )


@pytest.mark.parametrize(("chosen", "line"), [("text", "Released\n"), ("json", '"event": "released"}\n')])
def test_the_environment_names_the_format(
    chosen: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LOG_FORMAT, chosen)
    log.event("released")
    assert capsys.readouterr().out.endswith(line)
    assert log.text("released").endswith(line)


# --- whole lines --------------------------------------------------------------------------------------------
class Slow(io.StringIO):
    """Gives another thread its turn inside each write."""

    def write(self, text: str) -> int:
        half = len(text) // 2
        super().write(text[:half])
        threading.Event().wait(0.001)
        return super().write(text[half:])


def test_lines_of_several_threads_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def write() -> None:
        for _ in range(20):
            log.event("released")

    out = Slow()
    monkeypatch.setattr(sys, "stdout", out)
    writers = [threading.Thread(target=write) for _ in range(4)]
    for each in writers:
        each.start()
    for each in writers:
        each.join(30)
    lines = out.getvalue().splitlines()
    assert len(lines) == 80 and all(line.endswith("Z event=released") for line in lines)


def test_a_reader_that_is_gone_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    out = os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stdout", out)
    log.event("released")
    with pytest.raises(BrokenPipeError):
        out.close()


def test_a_child_forked_while_a_line_is_written_can_write(capfd: pytest.CaptureFixture[str]) -> None:
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        assert log.console.lock is not None
        with log.console.lock:
            held.set()
            go.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(30)
    with capfd.disabled():
        pid = os.fork()
        if not pid:
            signal.alarm(30)
            sys.stdout = io.StringIO()
            log.event("released")
            os._exit(7 if "event=released" in sys.stdout.getvalue() else 1)
        status = os.waitpid(pid, 0)[1]
    go.set()
    holder.join(30)
    assert os.waitstatus_to_exitcode(status) == 7


# --- in a terminal ------------------------------------------------------------------------------------------
class Screen:
    """A pseudo-terminal, which `handler` makes the standard output and error of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.master, slave = pty.openpty()
        self.out = os.fdopen(slave, "w", buffering=1)
        self.err = os.fdopen(os.dup(slave), "w", buffering=1)
        self._monkeypatch = monkeypatch
        monkeypatch.delenv(LOG_FORMAT, raising=False)
        self.sent = ""

    def handler(self) -> log.ConsoleHandler:
        """In the test, for pytest replaces standard output after the set-up."""
        self._monkeypatch.setattr(sys, "stdout", self.out)
        self._monkeypatch.setattr(sys, "stderr", self.err)
        handler = log.ConsoleHandler()
        LOGGER.handlers[:] = [handler]
        return handler

    def rows(self) -> list[str]:
        """Rows until now; a mark at the end of the output says what that is."""
        os.write(self.out.fileno(), b"\0")
        while "\0" not in self.sent:
            self.sent += os.read(self.master, 65536).decode()
        self.sent = self.sent.replace("\0", "")
        return screen(self.sent)

    def words(self) -> list[str]:
        """The rows without their time of day."""
        return [row[9:] if row[:2].isdigit() else row for row in self.rows()]

    def close(self) -> None:
        self.out.close()
        self.err.close()
        os.close(self.master)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    screen = Screen(monkeypatch)
    yield screen
    screen.close()


def test_a_terminal_shows_what_a_person_can_use_and_nothing_after_the_end_but_warnings(shown: Screen) -> None:
    shown.handler()
    log.event("trained", steps=3)
    log.event("emergency-budget", seconds=2.0, warning="too small")
    log.event("sigterm", source="SIGINT", deadline="2025-11-21T12:04:01.000Z")
    log.event("end", outcome="badConfiguration", code=64)
    log.event("compiled", graphs=2)
    log.event("prune-failed", error="403")
    assert shown.words() == [
        "Warning: A save at a notice takes 2.0 s. too small",
        "Interrupted: saving, then it stops, within 0 ms",
        "Warning: Prune failed: 403",
        "",
    ]


class Cell(io.StringIO):
    """A notebook's output: no terminal, although its descriptor is one."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def fileno(self) -> int:
        return self._fd


def test_a_notebook_started_from_a_terminal_gets_every_line_in_its_cell(
    shown: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown.handler()
    cell = Cell(shown.out.fileno())
    monkeypatch.setattr(sys, "stdout", cell)
    monkeypatch.setattr(sys, "stderr", Cell(shown.err.fileno()))
    log.step(1, 10, loss=2.0)
    print("printed")
    assert "step=1/10" in cell.getvalue() and shown.rows() == [""]


def test_a_record_of_other_code_that_cannot_be_formatted_is_no_error_of_the_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    LOGGER.handlers[:] = [log.console]  # pytest's own raises
    logging.getLogger("spottrain.mine").info("x %d", "a")
    assert "Logging error" in capsys.readouterr().err


def test_a_line_reaches_an_output_that_knows_ascii_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    log.event("save-failed", step=3, error="größer")
    assert b"gr\\xf6\\xdfer" in raw.getvalue()
