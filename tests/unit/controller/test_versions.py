"""Operators of several versions, one after the other, with jobs running."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spottrain_operator import names
from spottrain_operator.api.training_job import Status
from spottrain_operator.api.views import pod_view
from spottrain_operator.api.wire import merge_patch
from spottrain_operator.rendering import trainer_pod

from tests.builders import KEY, POOL, make_job
from tests.unit.controller.fake_cluster import Json, World, begun, merged


# --- names ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("job", ["a", "a.b-" + "x" * 249, "x" * 253, "a-" * 120 + "b"], ids=len)
def test_every_name_of_a_jobs_objects_is_a_label_with_the_hash_of_its_uid(job: str) -> None:
    number = hashlib.sha256(b"uid").hexdigest()[: names.HASH_DIGITS]
    made = [
        names.pod_name(job, "uid", 123456, 12345),
        names.object_name(job, "uid", suffix="-cleanup"),
        names.object_name(job, "uid", prefix="gang-"),
    ]
    for name in made:
        assert len(name) <= 63 and f"-{number}" in name and "." not in name and not name.startswith("-")
        assert name == name.lower() and name[0].isalpha() and name[-1].isalnum()
    assert len(names.job_label(job)) <= 63


def test_a_new_job_has_32_bits_of_its_uid_in_its_names() -> None:
    job = make_job()
    assert job.pod_name(1).split("-")[-3] == hashlib.sha256(KEY.uid.encode()).hexdigest()[:8]


def test_a_pod_with_its_jobs_name_is_ours_and_a_copy_is_not() -> None:
    name = names.pod_name(KEY.name, KEY.uid, 1)
    raw = trainer_pod.pod(make_job(), Status(attempt=1), POOL)
    meta = raw["metadata"]
    meta |= {"uid": "u", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    for named, ours in ((name, True), (name[:-1] + "7", False), (name.replace("-", "-0", 1), False)):
        meta["name"] = named
        assert (pod_view(raw) is not None) is ours, named


async def after_backoff(w: World) -> None:
    await w.settle()
    await w.after(600)


# --- fields, conditions and causes of a newer version ---------------------------------------------------
NEWER_CONDITION = {
    "type": "EnergyBudgetKept",
    "status": "True",
    "reason": "BelowBudget",
    "message": "as a newer version says it",
    "lastTransitionTime": "2026-03-01T12:00:00Z",
}


def written_by_a_newer_version(raw: dict[str, Any]) -> None:
    status = raw["status"]
    status["energy"] = {"joules": "12", "nodes": [{"name": "n", "joules": "1"}]}
    status["phase"] = "Hibernating"
    status["conditions"].append(NEWER_CONDITION)
    status["attempts"][0]["energyJoules"] = "7"
    status.setdefault("progress", {})["forecast"] = {"eta": 3}


async def test_what_a_newer_version_has_written_survives_a_restart_of_the_job() -> None:
    w = await begun()
    written_by_a_newer_version(w.cluster.jobs[KEY.name])
    w._start()
    await w.ends(w.pod(1), 137)
    status = w.cluster.jobs[KEY.name]["status"]
    assert status["attempt"] == 2 and status["attempts"][0]["cause"]
    assert status["energy"] == {"joules": "12", "nodes": [{"name": "n", "joules": "1"}]}
    assert [list(record) for record in status["attempts"] if "energyJoules" in record] == [], (
        "a list is written as a whole"
    )
    assert status["progress"]["forecast"] == {"eta": 3}
    (kept,) = [c for c in status["conditions"] if c["type"] == "EnergyBudgetKept"]
    assert kept == NEWER_CONDITION


@pytest.mark.parametrize(
    "defaults",
    [
        {"checkpoint": {"uri": "s3://b/ns/job", "region": "eu-1"}},
        {"serviceAccountName": "me", "priority": {"class": "low"}},
        {"priority": {"class": "low"}},
        {"serviceAccountName": "me", "pools": []},
        {},
    ],
)
async def test_the_defaults_that_a_newer_version_has_filled_in_are_written_as_they_were_read(
    defaults: dict[str, Any],
) -> None:
    w = await begun()
    w.cluster.jobs[KEY.name]["status"]["defaults"] = copy.deepcopy(defaults)
    w._start()
    await w.ends(w.pod(1), 137)
    status = w.cluster.jobs[KEY.name]["status"]
    assert status["attempt"] == 2 and status["defaults"] == defaults


async def test_a_cause_of_a_newer_version_stays_in_the_record() -> None:
    w = await begun()
    w.cluster.end(w.pod(1), 137)
    await after_backoff(w)
    w.cluster.jobs[KEY.name]["status"]["attempts"][0]["cause"] = "Hibernated"
    w._start()
    w.cluster.bind(w.pod(2), "node-b")
    await w.ends(w.pod(2), 137)
    causes = [record.cause for record in w.status.attempts]
    assert causes[0] == "Hibernated" and w.status.attempt == 3


JSON = st.recursive(
    st.integers(0, 2) | st.lists(st.integers(0, 1), max_size=2),
    lambda value: st.dictionaries(st.sampled_from("abc"), value, max_size=3),
)


@given(old=st.dictionaries(st.sampled_from("abc"), JSON), new=st.dictionaries(st.sampled_from("abc"), JSON))
def test_a_merge_patch_makes_one_object_of_another_and_names_what_differs(old: Json, new: Json) -> None:
    patch = merge_patch(old, new)
    assert merged(old, patch) == new
    assert merged(old | {"newer": {"field": 1}}, patch) == new | {"newer": {"field": 1}}
    assert bool(patch) == (old != new)
