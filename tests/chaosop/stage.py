"""The control plane, the proxy and the operator, and as many scenes on it as there are lanes.

Called by random_faults.py and test_scenes.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import aiohttp
from localcluster.apiserver import ApiServer, api_server
from localcluster.fakenodes import fake_nodes
from spottrain_operator.names import POD_SELECTOR

from tests.api.kube import Kube
from tests.chaosop.api import Api, Json, job_path
from tests.chaosop.audit import Tail
from tests.chaosop.faults import jumps
from tests.chaosop.journal import Journal
from tests.chaosop.judge import Verdict, judge, moved
from tests.chaosop.play import Play
from tests.chaosop.process import Operator
from tests.chaosop.proxy import FaultProxy
from tests.chaosop.scene import Scene
from tests.chaosop.truth import Deed

CRD: Final = Path(__file__).resolve().parents[2] / "crds" / "trainingjobs.yaml"
LONGEST_RUN: Final = 3 * 3600.0
READY_SECONDS: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class Act:
    """A scene that has been played."""

    scene: Scene
    verdict: Verdict
    deeds: tuple[Deed, ...]
    attempts: int
    moves: int
    """From on-demand back to spot."""
    seconds: float
    log: Path | None = None
    """All that happened in it, where something was wrong."""


@dataclass(kw_only=True)
class Stage:
    server: ApiServer
    api: Api
    proxy: FaultProxy
    operator: Operator
    journal: Journal
    scenes: dict[str, Scene]
    plays: dict[str, Play] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tail = Tail(self.server.audit_log)

    async def play_all(self, scenes: Sequence[Scene], lanes: int) -> AsyncIterator[Act]:
        """As they end. An error in one of the world's own parts ends all."""
        waiting, playing = list(reversed(scenes)), set[asyncio.Task[Act]]()
        try:
            while waiting or playing:
                while waiting and len(playing) < lanes:
                    playing.add(asyncio.create_task(self._play(waiting.pop())))
                done, playing = await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in playing:
                task.cancel()

    async def _play(self, scene: Scene) -> Act:
        began, place = time.monotonic(), scene.namespace
        self.scenes[place] = scene
        play = Play(scene=scene, api=self.api, say=lambda what: self.journal.say(place, what))
        self.plays[place] = play
        try:
            seen = await play.run()
        finally:
            self.plays.pop(place)
            self.scenes.pop(place)
        verdict = judge(seen, self._tail.entries(place), scene.policy)
        log = (
            self.journal.keep(place, [str(scene), *verdict.problems], self.operator.log)
            if verdict.problems
            else None
        )
        self.journal.forget(place)
        self._tail.forget(place)
        return Act(
            scene=scene,
            verdict=verdict,
            deeds=seen.deeds,
            attempts=len(play.attempts),
            moves=len(moved(seen.status)),
            seconds=time.monotonic() - began,
            log=log,
        )

    def saw_job(self, kind: str, raw: Json) -> None:
        if (play := self.plays.get(raw["metadata"]["namespace"])) is not None:
            play.saw_job(kind, raw)

    def saw_pod(self, kind: str, raw: Json) -> None:
        if (play := self.plays.get(raw["metadata"]["namespace"])) is not None:
            play.saw_pod(kind, raw)


@asynccontextmanager
async def stage(folder: Path, *, seed: int, longest_jump: float) -> AsyncIterator[Stage]:
    """`folder` takes the logs. `longest_jump`: of the operator's clock, in seconds; 0 for none."""
    with api_server() as server, fake_nodes(server):
        kube = Kube.from_kubeconfig(server.kubeconfig)
        await asyncio.to_thread(kube.install, CRD)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(auto_decompress=True, connector=connector) as session:
            opened = _open(server, kube, session, folder, seed)
            async with opened.proxy.running():
                moments = jumps(seed, longest=longest_jump, until=LONGEST_RUN)
                async with opened.operator.running(opened.proxy.port, moments), _following(opened):
                    await _ready(opened.operator)
                    yield opened


def _open(server: ApiServer, kube: Kube, session: aiohttp.ClientSession, folder: Path, seed: int) -> Stage:
    journal = Journal(folder=folder)
    scenes: dict[str, Scene] = {}
    operator = Operator(folder=folder, random=Random(f"{seed}/operator"), say=journal.say_to_all)
    proxy = FaultProxy(
        kube=kube, session=session, seed=seed, scenes=scenes, kill=operator.kill, say=journal.say
    )
    api = Api(kube=kube, session=session)
    return Stage(server=server, api=api, proxy=proxy, operator=operator, journal=journal, scenes=scenes)


@asynccontextmanager
async def _following(opened: Stage) -> AsyncIterator[None]:
    watches = [
        asyncio.create_task(opened.api.follow("/api/v1/pods", opened.saw_pod, selector=POD_SELECTOR)),
        asyncio.create_task(opened.api.follow(job_path("").replace("/namespaces/", ""), opened.saw_job)),
    ]
    try:
        yield
    finally:
        for watch in watches:
            watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*watches)


async def _ready(operator: Operator) -> None:
    end = time.monotonic() + READY_SECONDS
    while not operator.log.exists() or "caches are filled" not in operator.log.read_text():
        if time.monotonic() > end:
            raise RuntimeError(f"the operator is not ready after {READY_SECONDS:.0f} s; see {operator.log}")
        await asyncio.sleep(0.1)


def blows(acts: Iterable[Act]) -> Counter[str]:
    return Counter(str(deed.blow) for act in acts for deed in act.deeds)
