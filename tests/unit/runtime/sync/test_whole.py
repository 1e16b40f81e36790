"""What is a whole checkpoint: a quiet folder, a marker, names that appear by a rename."""

from __future__ import annotations

import pytest
from spottrain.contract import SyncWhen
from spottrain.sync.folder import Node, NodeKind, Tree, leads_out
from spottrain.sync.whole import Judgement, NamedRule

QUIET = SyncWhen(quietSeconds=30)
LATEST = SyncWhen(marker="latest")
STATES = SyncWhen(marker="checkpoint-*/state.json")
STEPS = SyncWhen(renamed="step_*")


def file(stamp: int, size: int = 1) -> Node:
    return Node(kind=NodeKind.FILE, size=size, mtime_ns=stamp, ctime_ns=stamp, inode=1, stamp=stamp)


def folder(stamp: int = 0) -> Node:
    return Node(kind=NodeKind.FOLDER, mode=0o755, stamp=stamp)


def seen(when: SyncWhen, *looks: tuple[float, Tree]) -> NamedRule:
    rule = NamedRule(when)
    for now, tree in looks:
        rule.look(tree, {}, now)
    return rule


def judge(rule: NamedRule, committed: Tree, now: float) -> Judgement:
    return rule.judge(committed, lambda path: True, now)


def paths(verdict: Judgement) -> list[str] | None:
    return None if verdict.tree is None else sorted(verdict.tree)


# --- quietSeconds ---------------------------------------------------------------------------------------
def test_a_folder_is_whole_after_the_quiet_seconds_and_not_before() -> None:
    rule = seen(QUIET, (0, {}), (10, {"a": file(1)}), (20, {"a": file(2)}))
    assert judge(rule, {}, 49.9).tree is None
    assert paths(judge(rule, {}, 50)) == ["a"]


def test_what_is_committed_already_is_not_committed_again() -> None:
    tree = {"a": file(1)}
    assert judge(seen(QUIET, (0, tree)), tree, 100) == Judgement()


def test_a_folder_from_which_all_files_are_gone_does_not_replace_the_newest_checkpoint() -> None:
    committed = {"old": folder(), "old/a": file(1)}
    verdict = judge(seen(QUIET, (0, committed), (1, {"old": folder()})), committed, 100)
    assert verdict.tree is None and "no checkpoint now" in verdict.why


# --- a marker at the top --------------------------------------------------------------------------------
def test_what_is_older_than_the_marker_is_whole_and_what_is_newer_is_left_out() -> None:
    before = {"s1": folder(5), "s1/w": file(5), "latest": file(6)}
    tree = before | {"s2": folder(8), "s2/w": file(8), "s3": folder(9)}
    verdict = judge(seen(LATEST, (0, before), (1, tree)), {}, 1)
    assert paths(verdict) == ["latest", "s1", "s1/w"]


def test_without_a_new_marker_nothing_is_committed() -> None:
    committed = {"s1": folder(5), "s1/w": file(5), "latest": file(6)}
    tree = committed | {"s2": folder(8), "s2/w": file(8)}
    verdict = judge(seen(LATEST, (0, committed), (1, tree)), committed, 1)
    assert verdict.tree is None and "latest was not written again" in verdict.why
    assert "no file latest" in judge(seen(LATEST, (0, {"a": file(1)})), {}, 0).why


def test_a_file_that_was_written_over_after_the_marker_stands_against_a_commit() -> None:
    first = {"model": file(5), "latest": file(6)}
    again = {"model": file(9), "latest": file(6)}
    verdict = judge(seen(LATEST, (0, {"model": file(5)}), (1, again)), {}, 1)
    assert verdict.tree is None and "model was written to after latest" in verdict.why
    done = again | {"latest": file(10)}
    rule = seen(LATEST, (0, first), (1, again), (2, done))
    assert paths(judge(rule, first, 2)) == ["latest", "model"]


# --- patterns -------------------------------------------------------------------------------------------
def test_a_marker_that_was_emptied_to_be_written_says_nothing_yet() -> None:
    committed = {"w": file(1), "latest": file(2)}
    verdict = judge(seen(LATEST, (0, {"w": file(3), "latest": file(4, size=0)})), committed, 0)
    assert verdict.tree is None and verdict.why.startswith("latest is empty, which it was not before")
    always = {"w": file(1), "latest": file(2, size=0)}
    again = {"w": file(3), "latest": file(4, size=0)}
    assert paths(judge(seen(LATEST, (0, again)), always, 0)) == ["latest", "w"]


def test_a_folder_without_its_marker_is_left_out() -> None:
    tree = {
        "checkpoint-1": folder(),
        "checkpoint-1/w": file(1),
        "checkpoint-1/state.json": file(2),
        "checkpoint-2": folder(),
        "checkpoint-2/w": file(3),
        "log": file(4),
    }
    verdict = judge(seen(STATES, (0, tree)), {}, 0)
    assert paths(verdict) == ["checkpoint-1", "checkpoint-1/state.json", "checkpoint-1/w"]
    verdict = judge(seen(STATES, (0, tree)), verdict.tree or {}, 0)
    assert verdict.tree is None and "checkpoint-2 and 1 others match no" in verdict.why


def test_renamed_entries_are_whole_as_soon_as_they_are_there() -> None:
    tree = {"step_1": folder(), "step_1/w": file(1), "tmp_2": folder(), "tmp_2/w": file(2), "step_9": file(3)}
    assert paths(judge(seen(STEPS, (0, tree)), {}, 0)) == ["step_1", "step_1/w", "step_9"]


def test_orbax_temporary_folders_never_match() -> None:
    when = SyncWhen(renamed="[0-9]*")
    tree = {"100": folder(), "100/d": file(1), "200.orbax-checkpoint-tmp": folder()}
    tree["200.orbax-checkpoint-tmp/d"] = file(2)
    assert paths(judge(seen(when, (0, tree)), {}, 0)) == ["100", "100/d"]


def test_an_old_checkpoint_that_is_deleted_before_the_next_is_there_stays_stored() -> None:
    committed = {"step_1": file(1)}
    verdict = judge(seen(STEPS, (0, committed), (1, {"tmp": file(2)})), committed, 1)
    assert verdict.tree is None
    both = committed | {"step_2": file(3)}
    assert paths(judge(seen(STEPS, (0, both), (1, {"step_2": file(3)})), both, 1)) == ["step_2"]


# --- words ----------------------------------------------------------------------------------------------
def test_the_rule_is_read_from_json() -> None:
    assert SyncWhen.from_json("").each_file and not QUIET.each_file
    for when in (SyncWhen(), QUIET, LATEST, STATES, STEPS):
        assert SyncWhen.from_json(when.to_json()) == when


@pytest.mark.parametrize(
    "text",
    [
        '{"quietSeconds": 0}',
        '{"quietSeconds": true}',
        '{"marker": "../x"}',
        '{"marker": "/a"}',
        '{"marker": "**/a"}',
        '{"renamed": ""}',
        '{"marker": "a", "renamed": "b"}',
        '{"other": 1}',
        "[]",
        "{",
    ],
)
def test_a_bad_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        SyncWhen.from_json(text)


@pytest.mark.parametrize(
    ("path", "target", "out"),
    [
        ("l", "a", False),
        ("d/l", "../a", False),
        ("d/l", "../../a", True),
        ("l", "/etc", True),
        ("l", "..", True),
    ],
)
def test_links_that_lead_out_are_known(path: str, target: str, out: bool) -> None:
    assert leads_out(path, target) is out
