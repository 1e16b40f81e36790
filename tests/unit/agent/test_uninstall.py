"""What the chart's uninstall hook does to trainer pods and TrainingJobs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from spottrain_operator import names
from spottrain_operator.errors import ApiError
from spottrain_operator.io.cluster import Json, Page
from spottrain_operator.uninstall import uninstall

OURS = [names.OUTCOME_FINALIZER, "theirs/finalizer"]
HELD = [names.CHECKPOINTS_FINALIZER]


def thing(name: str, finalizers: list[str] | None, namespace: str = "ml") -> Json:
    meta: Json = {"namespace": namespace, "name": name, "uid": f"uid-{name}", "resourceVersion": "1"}
    return {"metadata": meta if finalizers is None else meta | {"finalizers": finalizers}}


def operator(name: str, served: str | None, **meta: str) -> Json:
    """A Deployment of the chart. An empty value is not stored."""
    variable = {"name": "SPOTTRAIN_OPERATOR_NAMESPACES"} | ({"value": served} if served else {})
    container = {"name": "operator", "env": [{"name": "OTHER", "value": "x"}, variable]}
    spec = {"template": {"spec": {"containers": [container]}}}
    return {"metadata": {"namespace": "system", "name": name} | meta, "spec": spec}


@dataclass
class FakeCluster:
    pods: list[Json] = field(default_factory=list)
    jobs: list[Json] = field(default_factory=list)
    operators: list[Json] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)
    """Status with which the release of this is refused."""
    list_errors: dict[str, int] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)

    async def pages(self, kind: str, namespace: str) -> AsyncIterator[Page]:
        self.asked.add(namespace)
        if kind in self.list_errors:
            raise ApiError(self.list_errors[kind], "no")
        items = {"pods": self.pods, names.PLURAL: self.jobs, "deployments": self.operators}[kind]
        yield Page(items=items, version="1")

    async def get(self, kind: str, name: str, namespace: str = "") -> Json | None:
        return next((raw for raw in self.jobs if raw["metadata"]["name"] == name), None)

    async def patch(self, kind: str, name: str, namespace: str, change: Json, *, uid: str, **_: Any) -> Json:
        if kind == names.PLURAL:
            assert names.CHECKPOINTS_FINALIZER not in change["metadata"]["finalizers"]
        self._release(name, uid)
        return {}

    def _release(self, name: str, uid: str) -> None:
        assert uid == f"uid-{name}"
        if status := self.answers.get(name):
            raise ApiError(status, "the server's words")
        self.released.add(name)


async def test_only_what_carries_our_finalizers_is_touched_and_in_all_namespaces() -> None:
    cluster = FakeCluster(
        pods=[thing("a", OURS), thing("b", ["theirs/finalizer"]), thing("c", None, "other")],
        jobs=[thing("j", HELD, "other"), thing("k", ["theirs/finalizer"])],
    )
    assert await uninstall(cast(Any, cluster)) == 0
    assert (cluster.asked, cluster.released) == ({""}, {"a", "j"})


async def test_thousands_are_freed() -> None:
    cluster = FakeCluster(pods=[thing(f"p{n}", OURS) for n in range(3000)])
    assert await uninstall(cast(Any, cluster)) == 0
    assert len(cluster.released) == 3000


@pytest.mark.parametrize(
    ("there", "released"),
    [
        ([], {"a", "j", "k"}),
        ([operator("second", "research,  ml")], {"k"}),
        ([operator("second", "")], set()),
        ([operator("second", "ml", deletionTimestamp="2026-01-01T00:00:00Z")], {"a", "j", "k"}),
    ],
)
async def test_what_another_operator_serves_is_left_alone(
    there: list[Json], released: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [thing("j", HELD), thing("k", HELD, "other")]
    cluster = FakeCluster(pods=[thing("a", OURS)], jobs=jobs, operators=there)
    assert await uninstall(cast(Any, cluster)) == 0
    assert cluster.released == released
    assert ("served by the operator system/second" in capsys.readouterr().out) == (len(released) < 3)


async def test_what_is_gone_meanwhile_is_no_error() -> None:
    cluster = FakeCluster(pods=[thing("a", OURS), thing("b", OURS)], answers={"a": 404})
    assert await uninstall(cast(Any, cluster)) == 0


async def test_where_the_definition_is_gone_there_are_no_jobs() -> None:
    cluster = FakeCluster(pods=[thing("a", OURS)], list_errors={names.PLURAL: 404})
    assert await uninstall(cast(Any, cluster)) == 0
    assert cluster.released == {"a"}


async def test_what_stays_held_is_named_and_does_not_stop_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = FakeCluster([thing("a", OURS), thing("b", OURS)], [thing("j", HELD)], answers={"a": 403})
    assert await uninstall(cast(Any, cluster)) == 1
    assert cluster.released == {"b", "j"}
    said = capsys.readouterr()
    assert said.out == (
        "spottrain.io/outcome: removed from 1 of 2 pods\n"
        "spottrain.io/checkpoints: removed from 1 of 1 trainingjobs\n"
    )
    assert said.err == "the finalizer is still on ml/a: the server's words\n"


@pytest.mark.parametrize("kind", ["pods", names.PLURAL, "deployments"])
async def test_a_list_that_is_refused_is_a_sentence(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await uninstall(cast(Any, FakeCluster(list_errors={kind: 403}))) == 1
    assert capsys.readouterr().err == "gave up, run it again: ApiError no\n"
