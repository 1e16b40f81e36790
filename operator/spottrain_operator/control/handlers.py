"""The kopf handlers: login, start and stop, and the watch of the TrainingJobs.

Of kopf's watch handlers only on.event is used: the others write to the objects (four patches for a job), an
index costs O(N^2) at the start, and one failed patch ends a timer for ever (measured on kopf 1.45.2). Pods
and nodes have informers of their own (docs/adr/0015-informer.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from typing import Any

import kopf

from spottrain_operator.control.service import Service
from spottrain_operator.io.cluster import PAGE
from spottrain_operator.names import GROUP, PLURAL, VERSION, service_account

FIRST_BACKOFFS = (5.0,) * 60
LONGEST_BACKOFF = 30.0
SERVER_TIMEOUT = 300
"""Seconds after which a watch is restarted; stalled watches have been reported over the years."""


class Backoffs:
    """Seconds between the tries of one of kopf's requests; they do not end.

    kopf's default gives up after 54 s, and the process ends: an outage of the API server would leave it in
    CrashLoopBackOff, for minutes after the outage's end. And one watched namespace that was deleted (its LIST
    is refused with 403, for its RoleBinding is gone) would end the operator of all others.
    """

    def __iter__(self) -> Iterator[float]:
        return chain(FIRST_BACKOFFS, repeat(LONGEST_BACKOFF))


def registry(service: Service) -> kopf.OperatorRegistry:
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return login_of_pod(kwargs["settings"], os.environ) or kopf.login_with_kubeconfig(**kwargs)

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


def login_of_pod(settings: kopf.OperatorSettings, env: Mapping[str, str]) -> kopf.ConnectionInfo | None:
    """Returns the login with the pod's service account; None where there is none.

    kopf's own uses a DNS name, and the cluster's DNS may have run on the reclaimed node. This one uses the
    API server's address from the environment, like the official clients.
    """
    host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT")
    account = service_account(env)
    if not host or not port or not (account / "token").is_file():
        return None
    return kopf.ConnectionInfo(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        ca_path=str(account / "ca.crt"),
        token=(account / "token").read_text().strip(),
        trust_env=settings.networking.trust_env,
    )


def tune(settings: kopf.OperatorSettings) -> None:
    settings.posting.enabled = False  # the operator creates its own Events on the job
    settings.peering.standalone = True  # a stray peering object pauses every operator
    settings.scanning.disabled = True  # avoids the permission to list CRDs and namespaces
    settings.watching.server_timeout = SERVER_TIMEOUT
    settings.watching.chunk_size = PAGE  # otherwise one LIST response holds all jobs
    settings.networking.request_timeout = 60
    settings.networking.error_backoffs = Backoffs()
