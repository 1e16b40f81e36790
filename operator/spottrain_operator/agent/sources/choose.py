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
    asked = (_is_aws(client), _is_gcp(client), _is_azure(client))
    answers = await asyncio.gather(*asked, return_exceptions=True)
    makers: tuple[Callable[[Client], Source], ...] = (Aws, Gcp, Azure)
    for answer, make in zip(answers, makers, strict=True):
        if answer is None:
            return make(client)
    unexpected = [a for a in answers if a is not None and not isinstance(a, Unanswered)]
    if unexpected:
        raise unexpected[0]
    raise Unanswered(
        "no cloud's metadata service answers on this node, so no notice can be seen; set agent.platform and "
        "agent.metadataEndpoint if it has one, else keep the agent off it (agent.nodeSelector). "
        f"AWS: {answers[0]}. GCP: {answers[1]}. Azure: {answers[2]}."
    )


async def _is_aws(client: Client) -> None:
    await new_token(client)


async def _is_gcp(client: Client) -> None:
    reply = await get(client, _INSTANCE_ID)
    if reply.status != 200:
        raise Unanswered(f"GET {_INSTANCE_ID} was answered {reply.status}")


async def _is_azure(client: Client) -> None:
    await instance_name(client)
