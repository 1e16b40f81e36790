"""What the operator may use of Kueue, by what the cluster serves."""

from __future__ import annotations

from typing import Any

import pytest
from spottrain_operator.api.kueue import Kueue, KueueApi
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.workloads import Workloads, served
from spottrain_operator.errors import ApiError
from spottrain_operator.settings import Settings

from tests.support.environment import read
from tests.unit.controller.fake_cluster import FakeCluster, KeySet


def serving(*versions: str) -> FakeCluster:
    cluster = FakeCluster()
    if versions:
        cluster.serves = {"kueue.x-k8s.io": {"versions": [{"version": version} for version in versions]}}
    return cluster


@pytest.mark.parametrize(
    ("versions", "api"),
    [
        (("v1beta1",), KueueApi.V1BETA1),
        (("v1beta1", "v1beta2"), KueueApi.V1BETA2),
        (("v1", "v1beta2"), KueueApi.V1BETA2),
        ((), None),
        (("v1",), None),
    ],
)
async def test_the_newest_version_that_the_operator_knows_is_used(
    versions: tuple[str, ...], api: KueueApi | None
) -> None:
    found = await served(serving(*versions))
    assert found.api is api and bool(found.missing) is (api is None)


async def test_a_newer_kueue_is_told_from_none() -> None:
    assert "serves v1 only" in (await served(serving("v1"))).missing
    assert "install Kueue" in (await served(serving())).missing


async def test_what_is_not_known_yet_is_not_used_and_a_failure_changes_nothing() -> None:
    class Silent(FakeCluster):
        async def served(self, group: str) -> dict[str, Any] | None:
            raise ApiError(503, "the server is currently unable to handle the request")

    workloads = Workloads(Silent(), Caches(), KeySet())  # type: ignore[arg-type]
    before = workloads.kueue()
    await workloads.discover()
    assert before.api is None and before == workloads.kueue() and "not asked yet" in before.missing


def test_it_is_off_by_default() -> None:
    assert not read(Settings, {}).kueue and read(Settings, {"SPOTTRAIN_OPERATOR_KUEUE": "true"}).kueue
    assert "kueue.enabled" in Kueue().missing
