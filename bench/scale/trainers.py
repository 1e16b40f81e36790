"""What trainers answer on /progress, for all pods of the cluster.

    python -m bench.scale.trainers KUBECONFIG EPOCH

kwok gives each pod an address of this machine's (`needs`); here each running rank 0 listens on its own, as
it would in its pod, and answers with its job, attempt and number. Its step is the seconds since EPOCH, as in
kwok's termination messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from spottrain.contract import PROGRESS_PORT, Progress
from spottrain_operator.names import (
    ATTEMPT_LABEL,
    JOB_UID_LABEL,
    POD_SELECTOR,
    RANK_LABEL,
)

from bench.scale.client import Api, Json
from tests.api.kube import Kube

STATUS, IP = 2, 5
"""Columns of the table of pods."""
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(kw_only=True)
class Trainers:
    epoch: float
    servers: dict[str, asyncio.Server] = field(default_factory=dict)
    """By the pod's UID."""
    states: dict[str, str] = field(default_factory=dict)

    async def saw(self, kind: str, row: Json) -> None:
        meta, cells = row["object"]["metadata"], row["cells"]
        uid, status, address = meta["uid"], cells[STATUS], cells[IP]
        if kind == "DELETED" or status not in ("Running", "Terminating"):
            self.states.pop(uid, None)
            if (server := self.servers.pop(uid, None)) is not None:
                server.close()
            return
        self.states[uid] = "Training" if status == "Running" else "Saving"
        if uid in self.servers or address in ("", "<none>") or status != "Running":
            return
        answer = self._answer(uid, meta["labels"])
        with contextlib.suppress(OSError):  # the pod that had this address has not been seen to go
            self.servers[uid] = await asyncio.start_server(answer, address, PROGRESS_PORT)

    def _answer(self, uid: str, labels: dict[str, str]) -> Handler:
        # A first attempt continues from nothing: else each job would have an Event of a restore.
        start = 0 if labels[ATTEMPT_LABEL] == "1" else int(time.time() - self.epoch)

        def progress() -> bytes:
            step = int(time.time() - self.epoch)
            found = Progress(
                state=self.states.get(uid, "Saving"),
                attempt=int(labels[ATTEMPT_LABEL]),
                jobUID=labels[JOB_UID_LABEL],
                worker=int(labels[RANK_LABEL]),
                step=step,
                totalSteps=1_000_000,
                startStep=start,
                durableStep=step,
            )
            return found.to_json().encode()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:  # connections may be kept
                    await reader.readuntil(b"\r\n\r\n")
                    if uid not in self.states:  # the connections of a pod end with it
                        break
                    body = progress()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                    await writer.drain()
            writer.close()

        return answer


async def serve(kubeconfig: Path, epoch: float) -> None:
    """Until it is killed."""
    trainers = Trainers(epoch=epoch)
    path = f"/api/v1/pods?labelSelector={POD_SELECTOR},{RANK_LABEL}=0"
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        api = Api(kube=Kube.from_kubeconfig(kubeconfig), session=session)
        async for kind, row in api.watch(path, table=True):
            await trainers.saw(kind, row)


def main() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(serve(Path(sys.argv[1]), float(sys.argv[2])))


if __name__ == "__main__":
    main()
