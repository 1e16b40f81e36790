"""`spottrain logs`: where the output of attempts and ranks is read, and where a broken stream goes on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from spottrain.contract import log_key
from spottrain.storage.open import open_store
from spottrain_cli import app
from spottrain_cli.jobs import Job, jobs
from spottrain_cli.log_sources import (
    Overlap,
    Pod,
    Source,
    Wanted,
    history,
    missing,
    nothing,
    pods,
    sources,
    startable,
)

from tests.support.costs import ENDED, attempt, document
from tests.support.sentences import Told

Json = dict[str, Any]
STORED = {(1, 0): ["a", "b"], (1, 1): ["c"], (2, 0): ["d"]}
RUNS = {"endTime": None, "cause": None, "startTime": "2026-11-23T11:06:00Z"}


def a_job(status: Json | None = None, *, mode: str = "Runtime", gpus: int = 1, **checkpoint: Any) -> Job:
    place = {"mode": mode, "uri": "s3://bucket/run", **checkpoint}
    return jobs(document(status or ENDED, spec={"checkpoint": place, "gpusPerWorker": gpus}), "it")[0]


def pod(attempt: int, worker: int = 0, *, over: bool = False, started: bool = True) -> Pod:
    name = f"gpt-{attempt}-{worker}"
    return Pod(name=name, attempt=attempt, worker=worker, container="trainer", started=started, over=over)


def named(found: list[Source]) -> list[tuple[int, str, str]]:
    return [(each.attempt, each.name, each.pod.name if each.pod else "".join(each.parts)) for each in found]


# --- where to read --------------------------------------------------------------------------------------
def test_pods_that_are_gone_are_read_from_the_store_and_others_from_kubectl() -> None:
    found = sources(a_job(), STORED, [pod(2)], Wanted())
    assert named(found) == [(1, "rank 0", "ab"), (1, "rank 1", "c"), (2, "worker 0", "gpt-2-0")]


def test_a_pod_that_has_not_started_has_no_logs() -> None:
    assert sources(a_job(), {}, [pod(1, started=False)], Wanted()) == []


def test_an_attempt_and_a_rank_are_chosen() -> None:
    found = sources(a_job(), STORED, [], Wanted(attempt=1, rank=1))
    assert named(found) == [(1, "rank 1", "c")]
    assert sources(a_job(), STORED, [pod(3), pod(3, 1)], Wanted(attempt=3, rank=1))[0].name == "worker 1"


def test_where_ranks_share_a_pod_the_store_tells_them_apart_once_it_is_over() -> None:
    job, wanted = a_job(gpus=2), Wanted(attempt=1, rank=1)
    assert named(sources(job, STORED, [pod(1, over=True)], wanted)) == [(1, "rank 1", "c")]
    assert named(sources(job, STORED, [pod(1)], wanted)) == [(1, "worker 0", "gpt-1-0")]
    assert named(sources(job, STORED, [pod(1, over=True)], Wanted())) == [
        (1, "worker 0", "gpt-1-0"),
        (2, "rank 0", "d"),
    ]


def test_a_pod_names_its_trainer_and_says_whether_it_is_over() -> None:
    def listed(state: str, **annotations: str) -> Json:
        labels = {"spottrain.io/attempt": "2", "spottrain.io/rank": "1"}
        statuses = [{"name": "proxy", "state": {"running": {}}}, {"name": "train", "state": {state: {}}}]
        metadata = {"name": "p", "labels": labels, "annotations": annotations}
        return {"items": [{"metadata": metadata, "status": {"containerStatuses": statuses}}]}

    name = {"spottrain.io/trainer-container": "train"}
    assert pods(listed("running", **name)) == [
        Pod(name="p", attempt=2, worker=1, container="train", started=True, over=False)
    ]
    assert pods(listed("terminated", **name))[0].over and not pods(listed("waiting", **name))[0].started
    assert pods(listed("running"))[0].container == "trainer"


# --- in which order -------------------------------------------------------------------------------------
def test_the_next_attempt_waits_for_the_one_before_and_the_pods_of_a_gang_print_together() -> None:
    job = a_job()
    gang = sources(job, {}, [pod(1), pod(1, 1), pod(2)], Wanted())
    assert [each.name for each in startable(gang, set(), [])] == ["worker 0", "worker 1"]
    late = startable(gang, {(1, "worker 0")}, [(1, "worker 0")])
    assert [(each.attempt, each.name) for each in late] == [(1, "worker 1")]
    both = {(1, "worker 0"), (1, "worker 1")}
    assert startable(gang, both, [(1, "worker 1")]) == []
    assert [each.attempt for each in startable(gang, both, [])] == [2]


def test_what_was_shown_from_a_pod_is_not_shown_again_from_the_store() -> None:
    found = sources(a_job(), STORED, [], Wanted())
    assert [each.attempt for each in startable(found, {(1, "worker 0")}, [])] == [2]


def test_ranks_in_the_store_come_one_after_the_other() -> None:
    found = sources(a_job(), STORED, [], Wanted())
    assert [each.name for each in startable(found, set(), [])] == ["rank 0"]
    assert startable(found, {(1, "rank 0")}, [(1, "rank 0")]) == []
    assert [each.name for each in startable(found, {(1, "rank 0")}, [])] == ["rank 1"]


def test_the_history_ends_where_an_attempt_still_prints() -> None:
    found = sources(a_job(), STORED, [pod(2, over=True), pod(3)], Wanted())
    assert {each.attempt for each in history(found)} == {1, 2}
    assert history(found[:-1]) == found[:-1]


# --- what is said of what is not there ------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["Runtime", "Sync", "Self"])
def test_attempts_of_which_nothing_is_there_are_named(mode: str, told: Told) -> None:
    told(missing(a_job(mode=mode), [Source(attempt=2, number=0)], Wanted()))


def test_logs_that_nobody_wanted_to_keep_are_named(told: Told) -> None:
    told(missing(a_job(logs="None"), [], Wanted()))


def test_a_store_that_cannot_be_read_is_the_reason(told: Told) -> None:
    told(missing(a_job(), [], Wanted(attempt=2), "bucket bucket: no credentials"))


def test_attempts_that_run_or_never_started_are_not_missed() -> None:
    job = a_job(ENDED | {"attempts": [attempt(1) | RUNS, {"number": 2}]})
    assert missing(job, [], Wanted()) == ""


NOTHING: dict[str, tuple[Json, Wanted]] = {
    "no pod": ({"attempt": 0}, Wanted()),
    "it starts": ({"attempt": 1, "attempts": [attempt(1) | RUNS]}, Wanted()),
    "they are gone": (ENDED, Wanted()),
    "another attempt": (ENDED, Wanted(attempt=7, rank=3)),
}


@pytest.mark.parametrize("name", NOTHING)
def test_no_logs_at_all_say_why(name: str, told: Told) -> None:
    status, wanted = NOTHING[name]
    found = [Source(attempt=1, number=0)] if wanted.rank else []
    told(nothing(a_job(status), found, wanted))


# --- a stream that broke --------------------------------------------------------------------------------
def again(had: list[bytes], stream: list[bytes]) -> tuple[list[bytes], bool]:
    overlap = Overlap(had)
    new = [line for each in stream for line in overlap.take(each)]
    return [*new, *overlap.rest()], overlap.gap


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_that_was_opened_again_goes_on_after_the_last_line(seed: int) -> None:
    chance = random.Random(seed)
    log = [f"{number} {chance.randrange(3)}".encode() for number in range(200)]
    at, tail = chance.randrange(1, 200), chance.randrange(50, 150)
    had, later = log[:at][-tail:], log[-tail:]
    expected = log[max(at, len(log) - tail) :]
    assert again(had, later) == (expected, at < len(log) - tail)


def test_lines_that_look_alike_are_not_printed_twice() -> None:
    assert again([b"x", b"x", b"y", b"x"], [b"y", b"x", b"z"]) == ([b"z"], False)
    assert again([b"x", b"x"], [b"x", b"x", b"z"]) == ([b"z"], False)


def test_the_first_stream_has_everything_and_a_silent_one_nothing() -> None:
    assert again([], [b"a", b"b"]) == ([b"a", b"b"], False)
    assert again([b"a"], []) == ([], False)


# --- the verb -------------------------------------------------------------------------------------------
def test_the_logs_of_a_job_whose_pods_are_gone_come_from_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = tmp_path / "run"
    store = open_store(str(folder))
    for key, body in ((1, 1), b"one\ntw"), ((1, 2), b"o\n"), ((2, 1), b"three"):
        store.put(log_key(key[0], 0, key[1]), body)
    job = document(ENDED, spec={"checkpoint": {"mode": "Runtime", "uri": str(folder)}})
    (tmp_path / "job").write_text(json.dumps(job))
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(f'#!/bin/sh\ncase "$*" in *pods*) echo "{{}}";; *) /bin/cat {tmp_path}/job;; esac\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(kubectl.parent))
    for follow in ([], ["-f"]):
        assert app.main(["logs", "gpt", *follow]) == 0
        out, err = capfdbinary.readouterr()
        assert out == b"one\ntwo\nthree\n" and b"==> attempt 2 <==" in err
    assert app.main(["logs", "gpt", "--attempt", "9"]) == 3 and capfdbinary.readouterr()
    assert app.main(["logs", "gpt", "--attempt", "1", "-o", "json"]) == 0
    found = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert found[0] == {"attempt": 1, "source": "", "line": "one"}
