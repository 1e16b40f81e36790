"""`spottrain checkpoints list|verify|prune` over a folder."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from spottrain.checkpoint.head.state import BEST, HeadState
from spottrain.contract import OnExisting

from tests.support.headcheckpoints import Made, save
from tests.unit.cli.conftest import Place

SHARD = "r00000-00.safetensors"
MANIFEST = "manifest.json"


# --- list -------------------------------------------------------------------------------------------
def test_list_shows_owner_and_checkpoints_newest_first(place: Place) -> None:
    place.ended(5, 7, 9, best=7)
    code, out, _ = place("list")
    assert code == 0
    assert "released; last owner: job job-A (UID A, attempt 1, term 1)" in out
    rows = [line.split() for line in out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["9", "7", "5"]
    assert "newest" in rows[0] and "best" in rows[1]


def test_list_tells_orphans_from_what_a_running_job_uploads(place: Place) -> None:
    orphan = place.holds(5).new_key(6) + SHARD
    place.store.put(orphan, b"half")
    assert place.facts("list")["underWay"] == [{"key": orphan, "bytes": 4}]
    fresh = place.owner(attempt=2).new_key(6) + SHARD
    place.store.put(fresh, b"part")
    seen = place.facts("list")
    assert seen["head"]["state"] == "active"
    assert [each["key"] for each in seen["orphans"]] == [orphan]
    assert [each["key"] for each in seen["underWay"]] == [fresh]


def test_list_says_which_checkpoint_is_incomplete(place: Place) -> None:
    place.store.delete([place.ended(5, 7).checkpoints[0].key + SHARD])
    assert [each["condition"] for each in place.facts("list")["checkpoints"]] == ["incomplete", ""]


def test_list_of_a_uri_that_nobody_used_says_so_and_leaves_nothing(place: Place) -> None:
    assert place("list")[::2] == (3, f"spottrain: there is no folder {place.folder}; check the URI\n")
    assert not place.folder.exists()
    place.folder.mkdir()
    code, out, _ = place("list")
    assert code == 0 and "no HEAD" in out and list(place.folder.iterdir()) == []


# --- verify -----------------------------------------------------------------------------------------
def test_verify_passes_what_is_whole_also_where_our_own_files_are_missing_and_adds_none(place: Place) -> None:
    place.ended(5, 7, best=5)
    shutil.rmtree(place.folder / ".spottrain")  # as after a copy by hand that left hidden files out
    code, out, _ = place("verify")
    assert (code, out.splitlines()[-1]) == (0, "2 checkpoints ok")
    assert place.facts("verify", "--step", BEST)["checkpoints"][0]["step"] == 5
    assert place("list").code == 0 and not (place.folder / ".spottrain").exists()


@pytest.mark.parametrize("name", [SHARD, MANIFEST])
def test_verify_finds_a_flipped_bit(place: Place, name: str) -> None:
    bad = place.ended(5, 7).checkpoints[1]
    place.flip_a_bit(bad.key + name)
    code, out, _ = place("verify")
    assert code == 1
    assert f"DAMAGED   step 5 ({bad.key})" in out and "ok        step 7" in out
    first = (len(place.body(bad.key + SHARD)) - 1) // 16 * 16
    assert name == MANIFEST or f"{SHARD}: bytes {first} to " in out, "the last chunk of the shard"
    assert [place("verify", "--step", step).code for step in ("7", "newest")] == [0, 0]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"shards": []}, "is outside its shard"),
        ({"tensors": [{"name": "x", "dtype": "float32", "shape": [2], "pieces": []}]}, "do not cover it"),
        ({"tensors": [{"name": "x", "dtype": "object", "shape": [], "pieces": []}]}, "unknown type"),
    ],
)
def test_verify_finds_a_manifest_whose_parts_do_not_fit(
    place: Place, more: dict[str, Any], said: str
) -> None:
    Made(step=5, more=more).put(place.store, place.ended(5).checkpoints[0].key)
    code, out, _ = place("verify")
    assert code == 1 and said in out


@pytest.mark.parametrize(("number", "age"), [(3, "a newer"), (1, "an older")])
def test_verify_does_not_call_another_format_damaged(place: Place, number: int, age: str) -> None:
    other = place.ended(5, 7).checkpoints[0]
    Made(step=7, more={"format": number}).put(place.store, other.key)
    code, out, _ = place("verify")
    assert code == 1 and "DAMAGED" not in out and "Use the image that wrote it" in out
    assert f"OTHER FORMAT  step 7 ({other.key})" in out and f"of {age} spottrain" in out
    assert out.endswith("1 of 2 checkpoints cannot be used\n")
    assert place.facts("verify")["checkpoints"][0]["condition"] == "OTHER FORMAT"


@pytest.mark.parametrize("damage", ["no shard", "no manifest", "longer", "shorter"])
def test_verify_finds_objects_that_are_gone_or_of_another_size(place: Place, damage: str) -> None:
    key = place.ended(5).checkpoints[0].key
    body = place.body(key + SHARD)
    match damage:
        case "no shard":
            place.store.delete([key + SHARD])
        case "no manifest":
            place.store.delete([key + MANIFEST])
        case _:
            place.store.put(key + SHARD, body + b"x" if damage == "longer" else body[:-1])
    code, out, _ = place("verify")
    assert code == 1 and "DAMAGED   step 5" in out


def test_a_step_that_is_not_there_is_answered_with_those_that_are(place: Place) -> None:
    place.ended(5, 7)
    assert "the steps are: 7, 5" in place("verify", "--step", "6").err
    assert "no best checkpoint" in place("verify", "--step", "best").err
    assert place("verify", "--step", "last").code == 2


# --- prune ------------------------------------------------------------------------------------------
def test_prune_leaves_the_newest_and_the_best_and_deletes_the_rests_objects(place: Place) -> None:
    place.ended(3, 5, 7, 9, best=5)
    code, out, _ = place("prune", "--keep", "2", "--yes")
    assert code == 0 and "step 3" in out and out.endswith("deleted\n")
    assert [(e.step, e.keptAs) for e in place.head.checkpoints] == [(9, ""), (7, ""), (5, BEST)]
    left = {entry.key for entry in place.head.checkpoints}
    assert {key.rsplit("/", 1)[0] + "/" for key in place.store.list("checkpoints/")} == left
    assert place.head.state is HeadState.RELEASED


def test_a_dry_run_shows_what_would_go_and_changes_nothing(place: Place) -> None:
    place.ended(3, 5)
    before = place.store.get("HEAD"), place.store.list("")
    code, out, _ = place("prune", "--keep", "1", "--dry-run")
    assert code == 0 and "would delete: step 3" in out
    assert (place.store.get("HEAD"), place.store.list("")) == before


def test_without_a_yes_nothing_is_deleted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    class Teletype:
        answer = "n"

        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return self.answer

    place.ended(3, 5)
    assert "nothing was changed" in place("prune", "--keep", "1").err  # no terminal
    monkeypatch.setattr("sys.stdin", Teletype())
    assert place("prune", "--keep", "1").code == 2
    assert place.steps == [5, 3]
    monkeypatch.setattr(Teletype, "answer", "y\n")
    code, _, asked = place("prune", "--keep", "1")
    assert code == 0 and "to delete: step 3" in asked
    assert place.steps == [5]


def test_prune_under_a_running_job_is_refused_and_changes_nothing(place: Place) -> None:
    it = place.holds(3, 5)
    for words in (["--keep", "1"], ["--orphans"], ["--keep", "1", "--orphans", "--dry-run"]):
        code, _, err = place("prune", *words, "--yes")
        assert code == 1 and "job job-A (UID A, attempt 1) is using this URI" in err
    save(place.store, it, 7)
    assert place.steps == [7, 5, 3]


def test_prune_deletes_orphans_of_all_terms_once_the_job_has_ended(place: Place) -> None:
    it = place.holds(3)
    orphan = f"{it.new_key(4)}{SHARD}"
    place.store.put(orphan, b"half")
    place.store.put("checkpoints/readme", b"mine")
    it.release()
    assert place("prune", "--keep", "1", "--yes").out == "nothing to delete\n"
    code, out, _ = place("prune", "--orphans", "--yes")
    assert code == 0 and "1 orphan object, 4 B" in out
    assert orphan not in place.store.list("") and "checkpoints/readme" in place.store.list("")
    assert place.steps == [3] and place("verify").code == 0


def test_what_an_earlier_job_left_goes_only_when_it_is_asked_for(place: Place) -> None:
    place.ended(3, 5, best=3)
    later = place.owner("B", on_existing=OnExisting.FRESH)
    save(place.store, later, 1)
    later.release()
    assert place("prune", "--keep", "1", "--yes").out == "nothing to delete\n"
    assert place("prune", "--keep", "1", "--earlier-jobs", "--yes").code == 0
    assert place.steps == [1]


@pytest.mark.parametrize("damage", ["incomplete", "DAMAGED"])
def test_a_checkpoint_that_cannot_be_read_does_not_count_towards_the_kept(place: Place, damage: str) -> None:
    newest = place.ended(3, 5, 7).checkpoints[0]
    if damage == "incomplete":
        place.store.delete([newest.key + SHARD])
    else:
        place.flip_a_bit(newest.key + SHARD)
    code, out, _ = place("prune", "--keep", "1", "--yes")
    assert code == 0 and place.steps == [7, 5]
    assert f"does not count: {newest.key} ({damage}" in out and "sizes only" not in out


def test_with_no_verify_content_is_not_read_and_the_output_says_so(place: Place) -> None:
    place.flip_a_bit(place.ended(3, 5).checkpoints[0].key + SHARD)
    out = place("prune", "--keep", "1", "--no-verify", "--dry-run").out
    assert "would delete: step 3" in out and "checked by object sizes only, not read" in out
    assert "would delete" not in place("prune", "--keep", "1", "--dry-run").out


def test_where_nothing_can_be_read_nothing_is_deleted(place: Place) -> None:
    for entry in place.ended(3, 5, 7).checkpoints:
        place.flip_a_bit(entry.key + SHARD)
    seen = place.facts("prune", "--keep", "1", "--yes")
    assert (len(seen["notCounted"]), seen["checkpoints"], seen["deleted"]) == (3, [], False)
    assert place.steps == [7, 5, 3]


def test_a_prune_that_loses_to_a_claim_deletes_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.ended(3, 5)

    def claim_meanwhile(question: str, *, sure: bool) -> None:
        place.owner(attempt=2)

    monkeypatch.setattr("spottrain_cli.checkpoints.pruning.confirm", claim_meanwhile)
    code, _, err = place("prune", "--keep", "1", "--yes")
    assert code == 1 and "attempt 2) is using this URI" in err
    assert place.steps == [5, 3] and place("verify").code == 0


def test_prune_wants_to_be_told_what_shall_go(place: Place) -> None:
    place.ended(3)
    assert "give --keep N, --orphans, or both" in place("prune", "--yes").err
    assert place("prune", "--keep", "0").code == 2
