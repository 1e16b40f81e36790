"""`spottrain checkpoints list|verify|prune` over a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from spottrain.checkpoint.head.owner import ClaimPolicy, HeadOwner, Identity
from spottrain.checkpoint.head.state import BEST, Head, HeadState
from spottrain.cli.checkpoints import main
from spottrain.contract import OnExisting
from spottrain.storage.base import Store
from spottrain.storage.open import open_store

from tests.support.headcheckpoints import Made, save

SHARD = "r00000-00.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run"))


def owner(
    store: Store, uid: str = "A", attempt: int = 1, on_existing: OnExisting = OnExisting.FAIL
) -> HeadOwner:
    who = Identity(job_uid=uid, job=f"job-{uid}", attempt=attempt)
    it = HeadOwner(store, who, ClaimPolicy(on_existing=on_existing))
    it.claim()
    return it


def ended(store: Store, *steps: int, best: int | None = None, done: bool = False) -> Head:
    """A run that committed these steps, oldest first, and released HEAD."""
    it = owner(store)
    for step in steps:
        save(store, it, step, best=step == best, keep=10)
    it.release(done)
    return head(store)


def head(store: Store) -> Head:
    found = store.get("HEAD")
    assert found is not None
    return Head.from_json(found.body)


def steps(store: Store) -> list[int]:
    return [entry.step for entry in head(store).checkpoints]


def ran(store: Store, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main([words[0], store.uri, *words[1:]])
    said = capsys.readouterr()
    return code, said.out, said.err


def facts(store: Store, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    _, out, err = ran(store, capsys, *words, "-o", "json")
    assert not err
    return json.loads(out)


def lose_a_byte(store: Store, key: str) -> None:
    found = store.get(key)
    assert found is not None
    store.put(key, found.body[:-1] + bytes([found.body[-1] ^ 1]))


# --- list -------------------------------------------------------------------------------------------
def test_list_shows_owner_and_checkpoints_newest_first(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(store, 5, 7, 9, best=7)
    code, out, _ = ran(store, capsys, "list")
    assert code == 0
    assert "released; last owner: job job-A (UID A, attempt 1, term 1)" in out
    rows = [line.split() for line in out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["9", "7", "5"]
    assert "newest" in rows[0] and "best" in rows[1]


def test_list_tells_orphans_from_what_a_running_job_uploads(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = owner(store)
    save(store, lost, 5)
    orphan = lost.new_key(6)
    store.put(f"{orphan}{SHARD}", b"half")
    assert facts(store, capsys, "list")["underWay"] == [{"key": f"{orphan}{SHARD}", "bytes": 4}]
    running = owner(store, attempt=2)
    fresh = running.new_key(6)
    store.put(f"{fresh}{SHARD}", b"part")
    seen = facts(store, capsys, "list")
    assert seen["head"]["state"] == "active"
    assert [each["key"] for each in seen["orphans"]] == [f"{orphan}{SHARD}"]
    assert [each["key"] for each in seen["underWay"]] == [f"{fresh}{SHARD}"]


def test_list_says_which_checkpoint_is_incomplete(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    newest = ended(store, 5, 7).checkpoints[0]
    store.delete([newest.key + SHARD])
    seen = facts(store, capsys, "list")
    assert [each["condition"] for each in seen["checkpoints"]] == ["incomplete", ""]


def test_list_of_a_uri_that_nobody_used_says_so(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    code, out, _ = ran(store, capsys, "list")
    assert code == 0 and "no HEAD" in out
    assert list((tmp_path / "run").iterdir()) == [], "who looks leaves nothing"
    assert main(["list", str(tmp_path / "typo")]) == 1
    assert "no folder" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


# --- verify -----------------------------------------------------------------------------------------
def test_verify_passes_what_is_whole(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    ended(store, 5, 7)
    code, out, _ = ran(store, capsys, "verify")
    assert (code, out.splitlines()[-1]) == (0, "2 checkpoints ok")


@pytest.mark.parametrize("name", [SHARD, "manifest.json"])
def test_verify_finds_a_flipped_bit(store: Store, capsys: pytest.CaptureFixture[str], name: str) -> None:
    bad = ended(store, 5, 7).checkpoints[1]
    lose_a_byte(store, bad.key + name)
    code, out, _ = ran(store, capsys, "verify")
    assert code == 1
    assert f"DAMAGED   step 5 ({bad.key})" in out and "ok        step 7" in out
    assert ran(store, capsys, "verify", "--step", "7")[0] == 0
    assert ran(store, capsys, "verify", "--step", "newest")[0] == 0


def test_verify_names_the_shard_and_the_bytes(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    key = ended(store, 5).checkpoints[0].key
    body = Made(step=5).objects()[SHARD]
    lose_a_byte(store, key + SHARD)
    problems = facts(store, capsys, "verify")["checkpoints"][0]["problems"]
    first = len(body) // 16 * 16
    assert problems == [f"{SHARD}: bytes {first} to {len(body) - 1} do not match their checksum"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"shards": []}, "is outside its shard"),
        ({"tensors": [{"name": "x", "dtype": "float32", "shape": [2], "pieces": []}]}, "do not cover it"),
        ({"tensors": [{"name": "x", "dtype": "object", "shape": [], "pieces": []}]}, "unknown type"),
        ({"format": 3}, "Use the image that wrote it"),
    ],
)
def test_verify_finds_a_manifest_whose_parts_do_not_fit(
    store: Store, capsys: pytest.CaptureFixture[str], more: dict[str, Any], said: str
) -> None:
    key = ended(store, 5).checkpoints[0].key
    Made(step=5, more=more).put(store, key)
    code, out, _ = ran(store, capsys, "verify")
    assert code == 1 and said in out


@pytest.mark.parametrize(("number", "age"), [(3, "a newer"), (1, "an older")])
def test_verify_does_not_call_another_format_damaged(
    store: Store, capsys: pytest.CaptureFixture[str], number: int, age: str
) -> None:
    other = ended(store, 5, 7).checkpoints[0]
    Made(step=7, more={"format": number}).put(store, other.key)
    code, out, _ = ran(store, capsys, "verify")
    assert code == 1 and "DAMAGED" not in out
    assert f"OTHER FORMAT  step 7 ({other.key})" in out and f"of {age} spottrain" in out
    assert out.endswith("1 of 2 checkpoints cannot be used\n")
    assert facts(store, capsys, "verify")["checkpoints"][0]["condition"] == "OTHER FORMAT"


@pytest.mark.parametrize("damage", ["missing", "longer", "shorter", "no manifest"])
def test_verify_finds_objects_that_are_gone_or_of_another_size(
    store: Store, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    key = ended(store, 5).checkpoints[0].key
    body = Made(step=5).objects()[SHARD]
    match damage:
        case "missing":
            store.delete([key + SHARD])
        case "longer":
            store.put(key + SHARD, body + b"x")
        case "shorter":
            store.put(key + SHARD, body[:-1])
        case "no manifest":
            store.delete([f"{key}manifest.json"])
    code, out, _ = ran(store, capsys, "verify")
    assert code == 1 and "DAMAGED   step 5" in out


def test_a_step_that_is_not_there_is_answered_with_those_that_are(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(store, 5, 7)
    assert "the steps are: 7, 5" in ran(store, capsys, "verify", "--step", "6")[2]
    assert "no best checkpoint" in ran(store, capsys, "verify", "--step", "best")[2]
    with pytest.raises(SystemExit):
        ran(store, capsys, "verify", "--step", "last")


# --- prune ------------------------------------------------------------------------------------------
def test_prune_leaves_the_newest_and_the_best_and_deletes_the_rests_objects(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(store, 3, 5, 7, 9, best=5)
    code, out, _ = ran(store, capsys, "prune", "--keep", "2", "--yes")
    assert code == 0 and "step 3" in out and out.endswith("deleted\n")
    assert steps(store) == [9, 7, 5]
    left = {entry.key for entry in head(store).checkpoints}
    assert {key.rsplit("/", 1)[0] + "/" for key in store.list("checkpoints/")} == left
    assert head(store).state is HeadState.RELEASED


def test_a_dry_run_shows_what_would_go_and_changes_nothing(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(store, 3, 5)
    before = store.get("HEAD"), store.list("")
    code, out, _ = ran(store, capsys, "prune", "--keep", "1", "--dry-run")
    assert code == 0 and "would delete: step 3" in out
    assert (store.get("HEAD"), store.list("")) == before


def test_without_a_yes_nothing_is_deleted(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Teletype:
        answer = "n"

        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return self.answer

    ended(store, 3, 5)
    assert "nothing was changed" in ran(store, capsys, "prune", "--keep", "1")[2]  # no terminal
    monkeypatch.setattr("sys.stdin", Teletype())
    assert ran(store, capsys, "prune", "--keep", "1")[0] == 1
    assert steps(store) == [5, 3]
    monkeypatch.setattr(Teletype, "answer", "y\n")
    code, _, asked = ran(store, capsys, "prune", "--keep", "1")
    assert code == 0 and "to delete: step 3" in asked
    assert steps(store) == [5]


def test_prune_under_a_running_job_is_refused_and_changes_nothing(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    it = owner(store)
    save(store, it, 3)
    save(store, it, 5)
    for words in (["--keep", "1"], ["--orphans"], ["--keep", "1", "--orphans", "--dry-run"]):
        code, _, err = ran(store, capsys, "prune", *words, "--yes")
        assert code == 1 and "job job-A (UID A, attempt 1) is using this URI" in err
    save(store, it, 7)
    assert steps(store) == [7, 5, 3]


def test_prune_deletes_orphans_of_all_terms_once_the_job_has_ended(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    it = owner(store)
    save(store, it, 3)
    orphan = f"{it.new_key(4)}{SHARD}"
    store.put(orphan, b"half")
    store.put("checkpoints/readme", b"mine")
    it.release()
    assert ran(store, capsys, "prune", "--keep", "1", "--yes")[1] == "nothing to delete\n"
    code, out, _ = ran(store, capsys, "prune", "--orphans", "--yes")
    assert code == 0 and "1 orphan object, 4 B" in out
    assert orphan not in store.list("") and "checkpoints/readme" in store.list("")
    assert steps(store) == [3]
    assert ran(store, capsys, "verify")[0] == 0


def test_what_an_earlier_job_left_goes_only_when_it_is_asked_for(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(store, 3, 5, best=3)
    later = owner(store, uid="B", on_existing=OnExisting.FRESH)
    save(store, later, 1)
    later.release()
    assert ran(store, capsys, "prune", "--keep", "1", "--yes")[1] == "nothing to delete\n"
    assert ran(store, capsys, "prune", "--keep", "1", "--earlier-jobs", "--yes")[0] == 0
    assert steps(store) == [1]


def test_an_incomplete_checkpoint_takes_no_place_among_the_kept(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = ended(store, 3, 5, 7).checkpoints[0]
    store.delete([newest.key + SHARD])
    assert ran(store, capsys, "prune", "--keep", "1", "--yes")[0] == 0
    assert steps(store) == [7, 5]


def test_a_checkpoint_with_damaged_content_does_not_count_towards_the_kept(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = ended(store, 3, 5, 7).checkpoints[0]
    lose_a_byte(store, newest.key + SHARD)
    code, out, _ = ran(store, capsys, "prune", "--keep", "1", "--yes")
    assert code == 0 and steps(store) == [7, 5]
    assert f"does not count: {newest.key} (DAMAGED: {SHARD}: bytes" in out and "sizes only" not in out


def test_with_no_verify_content_is_not_read_and_the_output_says_so(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    lose_a_byte(store, ended(store, 3, 5).checkpoints[0].key + SHARD)
    _, out, _ = ran(store, capsys, "prune", "--keep", "1", "--no-verify", "--dry-run")
    assert "would delete: step 3" in out and "checked by object sizes only, not read" in out
    assert "would delete" not in ran(store, capsys, "prune", "--keep", "1", "--dry-run")[1]


def test_where_nothing_can_be_read_nothing_is_deleted(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    for entry in ended(store, 3, 5, 7).checkpoints:
        lose_a_byte(store, entry.key + SHARD)
    seen = facts(store, capsys, "prune", "--keep", "1", "--yes")
    assert (len(seen["notCounted"]), seen["checkpoints"], seen["deleted"]) == (3, [], False)
    assert steps(store) == [7, 5, 3]


def test_a_prune_that_loses_to_a_claim_deletes_nothing(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(store, 3, 5)

    def claim_meanwhile(question: str, *, sure: bool) -> None:
        owner(store, attempt=2)

    monkeypatch.setattr("spottrain.cli.pruning.confirm", claim_meanwhile)
    code, _, err = ran(store, capsys, "prune", "--keep", "1", "--yes")
    assert code == 1 and "attempt 2) is using this URI" in err
    assert steps(store) == [5, 3]
    assert ran(store, capsys, "verify")[0] == 0


def test_prune_wants_to_be_told_what_shall_go(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    ended(store, 3)
    assert "give --keep N, --orphans, or both" in ran(store, capsys, "prune", "--yes")[2]
    with pytest.raises(SystemExit):
        ran(store, capsys, "prune", "--keep", "0")


def test_a_best_checkpoint_can_be_named_by_that_word(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(store, 5, 7, best=5)
    assert [e.keptAs for e in head(store).checkpoints] == ["", BEST]
    assert facts(store, capsys, "verify", "--step", "best")["checkpoints"][0]["step"] == 5


def test_reading_a_folder_without_our_own_files_in_it_works_and_adds_none(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(store, 5)
    shutil.rmtree(tmp_path / "run/.spottrain")  # as after a copy by hand that left hidden files out
    assert [ran(store, capsys, *words)[0] for words in (["list"], ["verify"])] == [0, 0]
    assert not (tmp_path / "run/.spottrain").exists()
