"""`spottrain checkpoints repair`, and what the other commands do where HEAD is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from spottrain.checkpoint.head.state import BEST, HeadState
from spottrain.contract import HEAD_KEY, OnExisting
from spottrain.errors import RunError

from tests.support.command import checkpoints as main
from tests.support.headcheckpoints import save
from tests.unit.cli.conftest import Place


def lost(place: Place, *steps: int, done: bool = False) -> None:
    place.ended(*steps, done=done)
    place.store.delete([HEAD_KEY])


def test_head_is_made_again_and_a_job_resumes_from_it(place: Place) -> None:
    first = place.ended(10, 14)
    later = place.owner("A", attempt=2)
    save(place.store, later, 12)  # it had fallen back to 10
    place.store.delete([HEAD_KEY])
    code, out, _ = place("repair")
    assert code == 0 and "HEAD names 3 checkpoints again" in out and "onExisting: Resume" in out
    assert place.steps == [12, 14, 10] and place.head.state is HeadState.RELEASED
    assert place.head.term > 2 and {e.key for e in first.checkpoints} < place.head.keys
    assert [e.bytes for e in place.head.checkpoints[1:]] == [e.bytes for e in first.checkpoints]
    assert "incomplete" not in place("list").out and place("verify").code == 0
    with pytest.raises(RunError):
        save(place.store, later, 16)
    with pytest.raises(RunError, match="onExisting"):
        place.owner("A", attempt=3)
    claim = place.owner("A", attempt=3, on_existing=OnExisting.RESUME, claims=False).claim()
    assert claim is not None and [entry.step for entry in claim.resume] == [12, 14, 10]


@pytest.mark.parametrize("text", [b"", b"not JSON", b'{"format": 1, "jobUID": "A"}'])
def test_a_head_that_cannot_be_read_is_replaced(place: Place, text: bytes) -> None:
    place.ended(1, 2)
    place.store.put(HEAD_KEY, text)
    assert place("repair").code == 0 and place.steps == [2, 1]


def test_a_head_that_went_back_keeps_the_marks_of_earlier_jobs(place: Place) -> None:
    place.ended(7)
    place.owner("B", on_existing=OnExisting.FRESH).release()
    before = place.body(HEAD_KEY)
    again = place.owner("B", attempt=2)
    save(place.store, again, 3)
    place.store.put(HEAD_KEY, before)
    assert "newer than its HEAD" in place("delete", "--yes").err and place("repair").code == 0
    assert [(e.step, e.keptAs) for e in place.head.checkpoints] == [(3, ""), (7, "job:A")]


def test_a_run_that_was_done_is_done_again(place: Place) -> None:
    place.ended(4, 8, done=True)
    facts = {"checkpoint": place.head.checkpoints[0].key, "step": 8}
    place.store.put("final/manifest.json", json.dumps(facts).encode())
    place.store.delete([HEAD_KEY])
    assert place("repair").code == 0 and place.head.state is HeadState.DONE


def test_damaged_checkpoints_are_named_and_said_and_one_that_can_be_read_is_enough(place: Place) -> None:
    lost(place, 1, 2, 3)
    keys = [key for key in place.store.list("checkpoints/") if key.endswith("r00000-00.safetensors")]
    place.flip_a_bit(keys[2])
    facts = place.facts("repair")
    assert [(each["step"], each["condition"]) for each in facts["checkpoints"]] == [
        (3, "DAMAGED"),
        (2, "ok"),
        (1, "ok"),
    ]
    assert place.steps == [3, 2, 1]
    place.store.delete([HEAD_KEY])
    for key in keys[:2]:
        place.flip_a_bit(key)
    assert "none of them can be used" in place("repair").err and place.store.get(HEAD_KEY) is None


def test_what_needs_no_repair_is_left_as_it_is(place: Place, tmp_path: Path) -> None:
    place.ended(1)
    before = place.body(HEAD_KEY)
    assert "there is nothing to repair" in place("repair").err
    newer = json.dumps(json.loads(before) | {"format": 9}).encode()
    place.store.put(HEAD_KEY, newer)
    assert "newer spottrain" in place("repair").err
    assert place.body(HEAD_KEY) == newer
    place.store.delete(place.store.list(""))
    assert "no job has saved checkpoints there" in place("repair").err


def test_no_command_takes_checkpoints_without_head_for_nothing(place: Place, tmp_path: Path) -> None:
    lost(place, 4, 8, done=True)
    place.store.put("logs/attempt-000001/rank-00000/000001.log", b"x")
    before = place.store.list("")
    for words in (
        ["delete", "--yes"],
        ["delete", "--job-uid", "A", "--yes"],
        ["prune", "--keep", "1", "--orphans", "--yes"],
        ["release", "--yes"],
        ["verify"],
        ["download", "--to", str(tmp_path / "out")],
        ["copy", "--to", str(tmp_path / "other")],
    ):
        code, _, err = place(*words)
        assert code == 3 and "2 checkpoints (step 8, 4)" in err and "checkpoints repair" in err, words
    assert "checkpoints repair" in place("list").out and "orphans" not in place("list").out
    assert place.store.list("") == before


def test_nothing_is_copied_to_where_head_is_lost(place: Place, tmp_path: Path) -> None:
    lost(place, 4)
    other = Place(tmp_path / "other", place._capsys)
    other.ended(1)
    code, _, err = other("copy", "--to", str(place.folder))
    assert code == 3 and "no HEAD object" in err and place.store.get(HEAD_KEY) is None


def test_the_best_one_is_marked_again(place: Place) -> None:
    it = place.holds(1, 2)
    progress = {"best": 0.5, "best_kept": 0.5, "best_step": 1}
    save(place.store, it, 3, tree={"model": {}, "progress": progress})
    place.store.delete([HEAD_KEY])
    assert place("repair").code == 0
    assert [(e.step, e.keptAs) for e in place.head.checkpoints] == [(3, ""), (2, ""), (1, BEST)]


@pytest.mark.parametrize("uri", [" {}", "{}\n", '"{}"', " '{}' \t"])
def test_a_uri_is_read_as_it_was_meant(place: Place, uri: str) -> None:
    place.ended(1)
    assert main(["list", uri.format(place.folder)]) == 0
