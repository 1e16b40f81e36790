"""The kopf handlers: login, start and stop, and the watch of the TrainingJobs.

Of kopf's watch handlers only on.event is used: the others write to the objects (four patches for a job), an
index costs O(N^2) at the start, and one failed patch ends a timer for ever (measured on kopf 1.45.2). Pods
and nodes have informers of their own (docs/adr/0015-informer.md).
"""

from __future__ import annotations

from typing import Any

import kopf

from spottrain_operator.control.service import Service
from spottrain_operator.environment import Endpoint, NotInPod
from spottrain_operator.io.cluster import PAGE
from spottrain_operator.names import GROUP, PLURAL, VERSION

BACKOFFS = (5.0,) * 60 + (30.0,) * 100_000
"""Seconds between the tries of one of kopf's requests: five minutes of short ones, then a month.

kopf's default gives up after 54 s, and the process ends: an outage of the API server would leave it in
CrashLoopBackOff, for minutes after the outage's end. And one watched namespace that was deleted (its LIST is
refused with 403, for its RoleBinding is gone) would end the operator of all others.
"""
SERVER_TIMEOUT = 300
"""Seconds after which a watch is restarted; stalled watches have been reported over the years."""


class NoDiffs(kopf.DiffBaseStorage):
    """Spares kopf two deep copies of a job at each event: no handler asks for what has changed."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        pass


def registry(service: Service) -> kopf.OperatorRegistry:
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        try:
            pod = Endpoint.in_pod()
        except NotInPod:
            return kopf.login_with_kubeconfig(**kwargs)
        return kopf.ConnectionInfo(
            server=pod.url,
            ca_path=str(pod.ca_file),
            token=pod.token(),
            trust_env=kwargs["settings"].networking.trust_env,
        )

    @kopf.on.startup(registry=handlers)
    async def startup(settings: kopf.OperatorSettings, **_: Any) -> None:
        tune(settings)
        await service.start()

    @kopf.on.cleanup(registry=handlers)
    async def cleanup(**_: Any) -> None:
        await service.stop()

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=handlers)
    async def job_event(event: kopf.RawEvent, **_: Any) -> None:
        service.saw_job(event["type"], event["object"])

    return handlers


def tune(settings: kopf.OperatorSettings) -> None:
    settings.posting.enabled = False  # the operator creates its own Events on the job
    settings.peering.standalone = True  # a stray peering object pauses every operator
    settings.scanning.disabled = True  # avoids the permission to list CRDs and namespaces
    settings.watching.server_timeout = SERVER_TIMEOUT
    settings.watching.chunk_size = PAGE  # otherwise one LIST response holds all jobs
    settings.persistence.diffbase_storage = NoDiffs()
    settings.networking.request_timeout = 60
    settings.networking.error_backoffs = BACKOFFS
