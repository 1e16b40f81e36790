"""One pod on one machine, as a kubelet has it: start, stop with grace, report, let go of what is deleted.

kwok's nodes have no kubelet; this is theirs. Everything goes to the API server directly. Made by play.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from typing import Any, Final

from spottrain.contract import PROGRESS_PORT, Env
from spottrain_operator.names import (
    DEADLINE_ANNOTATION,
    RANK_LABEL,
    TRAINER_CONTAINER,
)

from tests.chaosop.api import Api, Json
from tests.chaosop.audit import Mark
from tests.chaosop.scene import Blow
from tests.chaosop.trainer import Attempt, End, Trainer, heard

SIGKILLED: Final = End(code=137, reason="Error")
NEVER_STARTED: Final = End(code=137, reason="ContainerStatusUnknown", message="could not be located")
ENDED_BY: Final[dict[Blow, tuple[str, str, bool]]] = {
    Blow.OVER_LIMIT: ("Evicted", "Pod ephemeral local storage usage exceeds the total limit", False),
    Blow.PRESSURE: ("Evicted", "The node was low on resource: memory.", True),
    Blow.SHUTDOWN: ("Terminated", "Pod was terminated in response to imminent node shutdown.", True),
    Blow.REJECTED: ("OutOfnvidia.com/gpu", "Pod was rejected: Node didn't have enough resource", False),
}
"""What the kubelet says of a pod that it ends itself: reason, message, and whether it is disrupted."""
Say = Callable[[str], None]


@dataclass(kw_only=True)
class Machine:
    """What a Node object stands for."""

    name: str
    capacity: str = "SPOT"
    """Or ON_DEMAND, as EKS labels it."""
    on: bool = True
    pods: dict[str, Pod] = field(default_factory=dict)

    async def power_off(self) -> None:
        """Everything on it stops between two instructions."""
        self.on = False
        for pod in list(self.pods.values()):
            await pod.kill()


@dataclass(kw_only=True)
class Pod:
    raw: Json
    api: Api
    attempt: Attempt
    machines: dict[str, Machine]
    random: Random
    say: Say
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    address: str
    trainer: Trainer | None = None
    end: End | None = None
    blow: Blow | None = None
    """By which the kubelet itself has ended it."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _kill_at: float | None = None
    _told: bool = False
    _writing: asyncio.Task[None] | None = None
    _started: str = ""
    _task: asyncio.Task[None] | None = None

    # --- what is known of it ---
    @property
    def name(self) -> str:
        name: str = self.raw["metadata"]["name"]
        return name

    @property
    def rank(self) -> int:
        return int(self.raw["metadata"]["labels"].get(RANK_LABEL, "0"))

    @property
    def node(self) -> str:
        node: str = self.raw["spec"].get("nodeName", "")
        return node

    @property
    def deleted(self) -> bool:
        return "deletionTimestamp" in self.raw["metadata"]

    def start(self) -> None:
        self._task = self.spawn(self._live())

    def update(self, raw: Json) -> None:
        self.raw = raw
        if self.deleted:
            self.stop_within(int(raw["metadata"].get("deletionGracePeriodSeconds") or 0))
        if DEADLINE_ANNOTATION in (raw["metadata"].get("annotations") or {}):
            self._tell()
        self._news.set()

    def stop_within(self, seconds: float) -> None:
        """SIGTERM, and SIGKILL when the grace is over; a grace is shortened later, never lengthened."""
        at = time.monotonic() + seconds
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)
        self._tell()
        self._news.set()

    def _tell(self) -> None:
        self._told = True
        if self.trainer is not None:
            self.trainer.told = True
            self.trainer.news.set()

    async def kill(self) -> None:
        """By SIGKILL to the kubelet as well: nobody reports. Its machine is off, or its object is gone."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._writing is not None:  # what has left the machine may arrive
            await self._writing
        await self._died()
        await self.attempt.noted()

    async def _died(self) -> None:
        self.attempt.trainers.pop(self.rank, None)
        if self.trainer is not None and self.rank == 0:
            await self.attempt.let_go(Mark.DEATH)
        if self.trainer is not None and self.end is None and not self.attempt.finished:
            self.attempt.lost = True
            self.attempt.tell()

    # --- its life ---
    async def _live(self) -> None:
        await self._until(lambda: bool(self.node))
        machine = self.machines.get(self.node)
        if machine is None or not machine.on:
            return
        machine.pods[self.name] = self
        await self._until(lambda: self.deleted, seconds=self.random.uniform(0.05, 0.4))
        act = self.attempt.act
        if self.deleted:
            await self._report(NEVER_STARTED)
        elif act.blow is Blow.REJECTED and act.rank == self.rank:
            self.attempt.strike()
            self.blow = Blow.REJECTED
            await self._report(None)
        else:
            await self._run()
        await self._until(lambda: self.deleted)
        await self.api.delete_pod(self.raw, grace=0)

    async def _run(self) -> None:
        env = {e["name"]: e.get("value", "") for e in self._trainer_spec()["env"]}
        known = env.get(Env.KNOWN_DURABLE_STEP)
        self.trainer = Trainer(
            attempt=self.attempt,
            rank=self.rank,
            job_uid=env[Env.JOB_UID],
            gate_until=float(env.get(Env.GATE_UNTIL) or 0),
            known_durable=int(known) if known else None,
        )
        self.attempt.trainers[self.rank] = self.trainer
        self.attempt.tell()
        server = await asyncio.start_server(self._answer, self.address, PROGRESS_PORT)
        try:
            await self._report_running()
            self.trainer.told = self._told
            end = await self._stopped_with_grace(self.trainer)
        finally:
            server.close()
        self.say(f"{self.name}: trainer ended: {end}")
        if end.code == 0 or self.attempt.stopping:
            self.attempt.trainers.pop(self.rank, None)
        else:
            await self._died()
        await self._report(end)

    def _trainer_spec(self) -> dict[str, Any]:
        containers: list[dict[str, Any]] = self.raw["spec"]["containers"]
        return next(c for c in containers if c["name"] == TRAINER_CONTAINER)

    async def _stopped_with_grace(self, trainer: Trainer) -> End:
        running = asyncio.create_task(trainer.run())
        try:
            while not running.done() and self.blow not in (Blow.OVER_LIMIT, Blow.PRESSURE):
                left = None if self._kill_at is None else self._kill_at - time.monotonic()
                if left is not None and left <= 0:
                    break
                news = asyncio.create_task(self._news.wait())
                await asyncio.wait({running, news}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                self._news.clear()
            end = running.result() if running.done() else SIGKILLED
        finally:
            running.cancel()
            await asyncio.wait({running})
        if self.rank == 0:
            await self.attempt.let_go(Mark.DEATH)
        return end

    def end_by(self, blow: Blow) -> None:
        self.blow = blow
        self._news.set()

    async def _until(self, look: Callable[[], bool], *, seconds: float | None = None) -> None:
        end = None if seconds is None else time.monotonic() + seconds
        while not look() and (end is None or time.monotonic() < end):
            self._news.clear()
            await heard(self._news, None if end is None else end - time.monotonic())

    # --- what it tells ---
    async def _report_running(self) -> None:
        self._started = now()
        conditions = [
            {"type": kind, "status": "True"} for kind in ("Initialized", "Ready", "ContainersReady")
        ]
        await self._write(
            {
                "phase": "Running",
                "conditions": conditions,
                "podIP": self.address,
                "podIPs": [{"ip": self.address}],
                "containerStatuses": [self._container({"running": {"startedAt": self._started}}, ready=True)],
            }
        )

    async def _report(self, end: End | None) -> None:
        """Phase and reason as the kubelet gives them; None where no container ever was."""
        self.end = end
        status: Json = {"phase": "Succeeded" if end is not None and end.code == 0 else "Failed"}
        if end is not None:
            reason = end.reason or ("Completed" if end.code == 0 else "Error")
            times = {"startedAt": self._started or now(), "finishedAt": now()}
            state = {"exitCode": end.code, "reason": reason, "message": end.message} | times
            status["containerStatuses"] = [self._container({"terminated": state})]
        if self.blow is not None:
            reason, message, disrupted = ENDED_BY[self.blow]
            status |= {"phase": "Failed", "reason": reason, "message": message}
            if disrupted:
                status["conditions"] = [disruption("TerminationByKubelet", message)]
        await self._write(status)

    def _container(self, state: Json, *, ready: bool = False) -> Json:
        name = self._trainer_spec()["name"]
        return {"name": name, "image": "x", "imageID": "", "ready": ready, "restartCount": 0, "state": state}

    async def _write(self, status: Json) -> None:
        self._writing = asyncio.create_task(self._send(status))
        await asyncio.shield(self._writing)

    async def _send(self, status: Json) -> None:
        raw = await self.api.patch_pod_status(self.raw, status)
        words = status.get("reason") or status["phase"]
        self.say(f"{self.name}: {words}" + ("" if raw is not None else ", but the pod is gone"))
        if raw is not None and self.end is not None and self.end.done:
            self.attempt.told_done = True

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            body = self.trainer.progress().encode() if self.trainer is not None else b"{}"
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
        writer.close()


def disruption(reason: str, message: str) -> Json:
    stamp = {"lastTransitionTime": now()}
    return {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message} | stamp


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
