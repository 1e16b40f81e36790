"""The local cluster's metadata endpoint speaks to the agent's own sources, as each of the three clouds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from localcluster import metadata
from localcluster.layout import NODES, NodePaths
from localcluster.shell import write_json
from spottrain_operator import names
from spottrain_operator.agent.log import utc_now
from spottrain_operator.agent.sources import Source
from spottrain_operator.agent.sources.aws import Aws
from spottrain_operator.agent.sources.azure import Azure
from spottrain_operator.agent.sources.choose import source_of
from spottrain_operator.agent.sources.client import Client
from spottrain_operator.agent.sources.gcp import Gcp

from tests.unit.agent.fakes import FakeApi, running, until

NODE = NODES[0]


class Endpoint:
    """One node's, on loopback instead of 169.254.169.254, and its notice as the supervisor writes it."""

    def __init__(self, root: Path) -> None:
        self.paths = NodePaths(root=root)
        known = metadata.Metadata(node=NODE, paths=self.paths, instance_id="i-0123456789abcdef0")
        self.server = metadata.serve(known, ("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def reclaim(self, seconds: float) -> datetime:
        now = time.time()
        end = datetime.fromtimestamp(now + seconds, UTC)
        text = end.strftime("%Y-%m-%dT%H:%M:%SZ")
        notice = {"action": "terminate", "time": text, "deadline": now + seconds, "published_at": now}
        write_json(self.paths.notice, notice)
        return datetime.fromisoformat(text)

    def cancel(self) -> None:
        self.paths.notice.unlink()


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    endpoint = Endpoint(tmp_path / NODE.name)
    yield endpoint
    endpoint.server.shutdown()
    endpoint.server.server_close()


@pytest.mark.parametrize(
    ("make", "says_when"), [(Aws, True), (partial(Gcp, wait_seconds=30.0), False), (Azure, True)]
)
async def test_a_notice_is_told_and_taken_back_whichever_cloud_the_agent_reads(
    endpoint: Endpoint, api: FakeApi, make: Callable[[Client], Source], says_when: bool
) -> None:
    api.add_pod("a")  # not acknowledged, then
    async with running(make, endpoint.url, api, now=utc_now) as agent:
        await until(lambda: agent.readiness()[0], "the agent was ready")
        end = endpoint.reclaim(60)
        await until(lambda: bool(api.taints()), "the node was tainted")
        deadline = datetime.fromisoformat(api.annotations("a")[names.DEADLINE_ANNOTATION])
        endpoint.cancel()
        await until(lambda: not api.taints(), "the taint was taken away")
    if says_when:
        assert deadline == end
    else:
        assert timedelta(seconds=20) < deadline - utc_now() <= timedelta(seconds=25)


async def test_azures_event_is_acknowledged_when_no_trainer_is_left(
    endpoint: Endpoint, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(Azure, endpoint.url, api, now=utc_now):
        endpoint.reclaim(60)
        soon = timedelta(seconds=11)
        await until(lambda: bool(api.taints()), "the node was tainted")
        await until(
            lambda: datetime.fromisoformat(api.annotations()[names.DEADLINE_ANNOTATION]) <= utc_now() + soon,
            "the event has begun",
        )
    assert '"event": "acknowledged"' in capsys.readouterr().out


async def test_it_is_taken_for_aws_where_nobody_says_what_it_is(endpoint: Endpoint) -> None:
    async with aiohttp.ClientSession() as session:
        assert type(await source_of(names.Platform.AUTO, Client(session, endpoint=endpoint.url))) is Aws


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """One without a notice, for all questions: to end a server takes half a second."""
    endpoint = Endpoint(tmp_path_factory.mktemp("endpoint") / NODE.name)
    yield endpoint
    endpoint.server.shutdown()
    endpoint.server.server_close()


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/latest/meta-data/spot/instance-action", {}, 401),
        ("/computeMetadata/v1/instance/preempted", {}, 403),
        ("/computeMetadata/v1/instance/nonsense", {"Metadata-Flavor": "Google"}, 404),
        ("/metadata/scheduledevents?api-version=2020-07-01", {}, 400),
        ("/metadata/scheduledevents", {"Metadata": "true"}, 400),
        ("/metadata/nonsense?api-version=2020-07-01", {"Metadata": "true"}, 404),
    ],
)
async def test_each_cloud_wants_its_own_header(
    silent: Endpoint, path: str, headers: dict[str, str], status: int
) -> None:
    async with aiohttp.ClientSession() as session, session.get(silent.url + path, headers=headers) as reply:
        assert reply.status == status
