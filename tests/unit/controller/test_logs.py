"""The operator's log is JSON lines that say which job and attempt they are about."""

from __future__ import annotations

import json
import logging
import sys

from spottrain_operator.io.logs import JsonLines, about

from tests.builders import KEY


def test_a_line_names_its_job_attempt_and_rank() -> None:
    record = logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": "pod %s", "args": ("p",)})
    record.__dict__ |= about(KEY, attempt=3, rank=1)
    line = json.loads(JsonLines().format(record))
    assert (line["namespace"], line["job"], line["attempt"], line["rank"]) == ("ns", "job", 3, 1)
    assert line["message"] == "pod p" and line["time"].endswith("Z") and "reason" not in line


def test_an_exception_is_one_line_too() -> None:
    try:
        raise ValueError("boom\nsecond")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    text = JsonLines().format(record)
    assert "\n" not in text and "boom" in json.loads(text)["traceback"]
