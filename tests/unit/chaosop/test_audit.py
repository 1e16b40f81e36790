"""What is read out of the audit log; each fault is put into a log, and is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaosop.audit import Entry, Mark, Tail, made_after, made_twice, mark_query, overlaps, parse


def line(second: int = 0, *, verb: str = "create", resource: str = "pods", **more: Any) -> dict[str, Any]:
    """An event of the log as the API server writes it at level Metadata."""
    name = more.pop("name", "job-1-0")
    ref = {"resource": resource, "namespace": "chaos-1", "name": name, "apiVersion": "v1"}
    path = f"/api/v1/namespaces/chaos-1/{resource}"
    return {
        "stage": "ResponseComplete",
        "verb": verb,
        "requestURI": more.pop("uri", f"{path}?fieldManager=spottrain-operator"),
        "objectRef": ref | more.pop("ref", {}),
        "responseStatus": {"code": 201},
        "stageTimestamp": f"2026-11-21T12:00:{second:02d}.000001Z",
    } | more


def marked(second: int, mark: Mark, attempt: int) -> dict[str, Any]:
    uri = f"/api/v1/namespaces/chaos-1/configmaps/marks?{mark_query(mark, attempt)}"
    code = {"responseStatus": {"code": 200}}
    return line(second, verb="patch", resource="configmaps", name="marks", uri=uri) | code


def entries(*lines: dict[str, Any]) -> list[Entry]:
    found = (parse(json.dumps(each)) for each in lines)
    return [entry for entry in found if entry is not None]


def test_a_pod_that_is_made_is_an_entry() -> None:
    (entry,) = entries(line(5))
    assert entry == Entry(at="2026-11-21T12:00:05.000001Z", namespace="chaos-1", pod="job-1-0")


@pytest.mark.parametrize(
    "other",
    [
        line(uri="/api/v1/namespaces/chaos-1/pods?dryRun=All&fieldManager=x"),
        line(responseStatus={"code": 409}),
        line(verb="patch"),
        line(resource="events"),
        line(ref={"subresource": "binding"}),
        line(stage="RequestReceived"),
    ],
    ids=["dry run", "refused", "patch", "event", "binding", "received only"],
)
def test_what_makes_no_pod_is_none(other: dict[str, Any]) -> None:
    assert entries(other) == []


def test_a_name_that_is_posted_twice_with_success_is_found() -> None:
    assert made_twice(entries(line(1), line(2, name="job-2-0"))) == []
    assert made_twice(entries(line(1), line(9), line(2, name="job-2-0"))) == ["job-1-0"]
    assert made_twice(entries(line(1), line(2, responseStatus={"code": 409}))) == []


def test_an_attempt_that_claims_before_another_has_let_go_is_found() -> None:
    for end in (Mark.RELEASE, Mark.DEATH):
        first, second = marked(1, Mark.CLAIM, 1), marked(5, Mark.CLAIM, 2)
        assert overlaps(entries(first, marked(4, end, 1), second)) == []
        assert overlaps(entries(first, second, marked(6, end, 1))) == [(1, 2)]
    assert overlaps(entries(marked(1, Mark.CLAIM, 1), marked(2, Mark.CLAIM, 1))) == []


def test_every_pair_that_overlaps_is_found_also_backwards() -> None:
    claims = [marked(n, Mark.CLAIM, n) for n in (1, 2, 3)]
    assert overlaps(entries(*claims)) == [(1, 2), (1, 3), (2, 3)]
    assert overlaps(entries(marked(1, Mark.CLAIM, 3), marked(2, Mark.CLAIM, 2))) == [(3, 2)]


def test_a_pod_that_is_made_after_the_end_is_found() -> None:
    made = entries(line(1), line(9, name="job-2-0"))
    assert made_after(made, "2026-11-21T12:00:09.100000Z") == []
    assert made_after(made, "2026-11-21T12:00:05.000000Z") == ["job-2-0"]


# --- the log as a file -------------------------------------------------------------------------------
def test_the_log_is_read_as_it_grows_and_never_half_a_line(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    first, second = (json.dumps(line(n, name=f"job-{n}-0")) + "\n" for n in (1, 2))
    log.write_text(first + second[:40])
    tail = Tail(log)
    assert [e.pod for e in tail.entries("chaos-1")] == ["job-1-0"]
    log.write_text(first + second)
    assert [e.pod for e in tail.entries("chaos-1")] == ["job-1-0", "job-2-0"]
    assert tail.entries("chaos-2") == []


def test_a_log_that_was_rotated_is_refused_with_a_sentence(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    log.write_text(json.dumps(line(1)) + "\n")
    tail = Tail(log)
    tail.entries("chaos-1")
    log.write_text("")
    with pytest.raises(RuntimeError, match="rotated: play fewer scenes"):
        tail.entries("chaos-1")
