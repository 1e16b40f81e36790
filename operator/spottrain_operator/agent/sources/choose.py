"""Chooses the cloud's metadata service of this node: as configured, or the one of three that responds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from spottrain_operator.agent.sources import Source
from spottrain_operator.agent.sources.aws import Aws, new_token
from spottrain_operator.agent.sources.azure import Azure, instance_name
from spottrain_operator.agent.sources.client import Client, Unanswered
from spottrain_operator.agent.sources.gcp import Gcp, get
from spottrain_operator.names import Platform

_INSTANCE_ID: Final = "instance/id"


async def source_of(platform: str, client: Client) -> Source:
    """Returns a platform's source; for `Auto` the one that responds. Raises Unanswered with a sentence."""
    match platform:
        case Platform.AWS:
            return Aws(client)
        case Platform.GCP | Platform.GKE:
            return Gcp(client)
        case Platform.AZURE:
            return Azure(client)
    return await _answering(client)


async def _answering(client: Client) -> Source:
    """Prefers AWS, then GCP, then Azure, if several respond."""
    asked = (new_token(client), _gcp_id(client), instance_name(client))
    answers = await asyncio.gather(*asked, return_exceptions=True)
    makers: tuple[Callable[[Client], Source], ...] = (Aws, Gcp, Azure)
    for answer, make in zip(answers, makers, strict=True):
        if not isinstance(answer, BaseException):
            return make(client)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, Unanswered):
            raise answer
    raise Unanswered(
        "no metadata service of AWS, GCP or Azure responds on this node, so no notice can be seen; set "
        "agent.platform and agent.metadataEndpoint if it has one, else keep the agent off it "
        "(agent.nodeSelector). "
        f"AWS: {answers[0]}. GCP: {answers[1]}. Azure: {answers[2]}."
    )


async def _gcp_id(client: Client) -> str:
    reply = await get(client, _INSTANCE_ID)
    if reply.status != 200:
        raise Unanswered(f"GET {_INSTANCE_ID} returned {reply.status}")
    return reply.text
