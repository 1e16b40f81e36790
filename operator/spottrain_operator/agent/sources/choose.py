"""Chooses the cloud's metadata service of this node: as configured, or the one of three that responds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from spottrain_operator.agent.findings import Unreadable
from spottrain_operator.agent.sources import aws, azure, gcp
from spottrain_operator.agent.sources.client import Client, Source
from spottrain_operator.names import Platform

_SOURCES: Final[Mapping[str, Callable[[Client], Source]]] = {
    Platform.AWS: aws.Aws,
    Platform.GCP: gcp.Gcp,
    Platform.GKE: gcp.Gcp,
    Platform.AZURE: azure.Azure,
}
_PROBES: Final = {
    Platform.AWS: aws.new_token,
    Platform.GCP: gcp.instance_id,
    Platform.AZURE: azure.instance_name,
}
"""In order of preference, if several respond."""


async def source_of(platform: str, client: Client) -> Source:
    """Returns a platform's source; for `Auto` the one that responds. Raises Unreadable with a sentence."""
    if platform in _SOURCES:
        return _SOURCES[platform](client)
    answers = await asyncio.gather(*(ask(client) for ask in _PROBES.values()), return_exceptions=True)
    for cloud, answer in zip(_PROBES, answers, strict=True):
        if not isinstance(answer, BaseException):
            return _SOURCES[cloud](client)
        if not isinstance(answer, Unreadable):
            raise answer
    reasons = " ".join(f"{cloud}: {answer}." for cloud, answer in zip(_PROBES, answers, strict=True))
    raise Unreadable(
        "no metadata service of AWS, GCP or Azure responds on this node, so no notice can be seen; set "
        "agent.platform and agent.metadataEndpoint if it has one, else keep the agent off it "
        f"(agent.nodeSelector). {reasons}"
    )
