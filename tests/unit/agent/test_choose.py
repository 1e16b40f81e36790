"""Which metadata service the agent takes for that of its node."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from spottrain_operator.agent.findings import Unreadable
from spottrain_operator.agent.sources.aws import Aws
from spottrain_operator.agent.sources.azure import Azure
from spottrain_operator.agent.sources.choose import source_of
from spottrain_operator.agent.sources.client import Client, Source
from spottrain_operator.agent.sources.gcp import Gcp
from spottrain_operator.names import Platform

from tests.support.azuremetadata import fake_azure
from tests.support.gcpmetadata import fake_gcp
from tests.support.imds import fake_imds
from tests.support.loopback import on_loopback

Choose = Callable[..., Awaitable[Source]]


@pytest.fixture
async def choose() -> AsyncIterator[Choose]:
    async with aiohttp.ClientSession() as session:
        yield lambda url, platform=Platform.AUTO: source_of(
            platform, Client(session, endpoint=url, timeout=0.3)
        )


@pytest.mark.parametrize(("fake", "kind"), [(fake_imds, Aws), (fake_gcp, Gcp), (fake_azure, Azure)])
async def test_each_cloud_is_known_by_its_answer(
    choose: Choose, fake: Callable[[], object], kind: type
) -> None:
    async with fake() as server:  # type: ignore[attr-defined]
        assert type(await choose(server.url)) is kind


@pytest.mark.parametrize(
    ("platform", "kind"),
    [(Platform.AWS, Aws), (Platform.GCP, Gcp), (Platform.GKE, Gcp), (Platform.AZURE, Azure)],
)
async def test_a_platform_that_is_set_is_not_asked_for(
    choose: Choose, platform: Platform, kind: type
) -> None:
    assert type(await choose("http://127.0.0.1:1", platform)) is kind


async def test_where_nothing_answers_it_is_said_what_was_asked_and_what_to_do(choose: Choose) -> None:
    with pytest.raises(Unreadable) as refused:
        await choose("http://127.0.0.1:1")
    said = str(refused.value)
    assert said.startswith(
        "no metadata service of AWS, GCP or Azure responds on this node, so no notice can be seen; set agent."
    )
    for path in (
        "PUT /latest/api/token",
        "GET /computeMetadata/v1/instance/id",
        "GET /metadata/instance/compute",
    ):
        assert path in said


async def test_a_service_that_hides_its_token_behind_a_hop_is_told_of_the_hop_limit(choose: Choose) -> None:
    async with fake_imds() as imds:
        imds.hop_limit = 1
        with pytest.raises(Unreadable, match="HttpPutResponseHopLimit"):
            await choose(imds.url)


@pytest.mark.parametrize("status", [200, 401, 404, 500])
async def test_a_server_that_answers_everything_alike_is_no_metadata_service(
    choose: Choose, status: int
) -> None:
    """A login page, say, or a proxy."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, text="<html>" + "please log in\n" * 100)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with on_loopback(app) as url:
        with pytest.raises(Unreadable):
            await choose(url)
