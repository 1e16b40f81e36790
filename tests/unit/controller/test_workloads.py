"""What the operator may use of Kueue, by what the cluster serves."""

from __future__ import annotations

from typing import Any

import pytest
from spottrain_operator.api.kueue import OFF
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.workloads import Workloads, why_not_served
from spottrain_operator.errors import ApiError
from spottrain_operator.settings import Settings

from tests.support.environment import read
from tests.unit.controller.fake_cluster import FakeCluster, KeySet


def serving(*versions: str) -> FakeCluster:
    cluster = FakeCluster()
    if versions:
        cluster.serves = {"kueue.x-k8s.io": {"versions": [{"version": version} for version in versions]}}
    return cluster


@pytest.mark.parametrize("versions", [("v1beta2",), ("v1beta1", "v1beta2"), ("v1", "v1beta2")])
async def test_the_version_that_the_operator_knows_is_used(versions: tuple[str, ...]) -> None:
    assert await why_not_served(serving(*versions)) == ""


async def test_another_kueue_is_told_from_none() -> None:
    assert "serves v1 and not v1beta2" in await why_not_served(serving("v1"))
    assert "install Kueue" in await why_not_served(serving())


async def test_what_is_not_known_yet_is_not_used_and_a_failure_changes_nothing() -> None:
    class Silent(FakeCluster):
        async def served(self, group: str) -> dict[str, Any] | None:
            raise ApiError(503, "the server is currently unable to handle the request")

    workloads = Workloads(Silent(), Caches(), KeySet())  # type: ignore[arg-type]
    before = workloads.missing()
    await workloads.discover()
    assert before == workloads.missing() and "not asked yet" in before


def test_it_is_off_by_default() -> None:
    assert not read(Settings, {}).kueue and read(Settings, {"SPOTTRAIN_OPERATOR_KUEUE": "true"}).kueue
    assert "kueue.enabled" in OFF
