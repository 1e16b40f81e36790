"""How each blow is dealt: what trainer, kubelet, cloud or hand does. Called by play.py, once an attempt.

An act is taken down as performed (`attempt.strike`) just before its first effect that anyone can see.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from localcluster.fakenodes import SILENT
from spottrain_operator.names import (
    DEADLINE_ANNOTATION,
    NOTICE_SEEN_ANNOTATION,
    SOURCE_ANNOTATION,
    TERMINATING_TAINT,
)

from tests.chaosop.api import MERGE, node_path, pod_path
from tests.chaosop.audit import Mark
from tests.chaosop.kubelet import Machine, Pod, disruption
from tests.chaosop.scene import Blow
from tests.chaosop.trainer import REFUSAL, Attempt, End

if TYPE_CHECKING:
    from tests.chaosop.play import Play

TOLERANCE: Final = 1.5
"""Seconds between a node's silence and the deletion of its pods; 30 in our pods, but time is short here."""
SHUTDOWN_GRACE: Final = 5.0
EFFECTS: Final = ("NoSchedule", "NoExecute")
ENDS: Final = {
    Blow.REFUSED: End(code=64, message=REFUSAL),
    Blow.REFUSED_BARE: End(code=64, message="usage: train.py [--epochs N]"),
    Blow.SAVED_BARE: End(code=75),
    Blow.LOST_BARE: End(code=79),
    Blow.CRASHED: End(code=1, message="Traceback (most recent call last): boom"),
    Blow.KILLED: End(code=137),
    Blow.OUT_OF_MEMORY: End(code=137, reason="OOMKilled"),
}
"""What a trainer ends with that ends by itself, beside those that have saved."""
RANK_0S: Final = frozenset({Blow.DONE, Blow.DONE_BARE, Blow.SAVED, Blow.LOST})
"""Ends that the owner of HEAD alone can begin."""
DISRUPTIONS: Final = {Blow.PREEMPTED: "PreemptionByScheduler", Blow.TAINTED: "DeletionByTaintManager"}


async def deal(play: Play, attempt: Attempt) -> None:
    """The attempt's act. Returns without having done anything where the job has been done before it."""
    blow = attempt.act.blow
    if blow is Blow.REJECTED:
        return  # by the kubelet, when it is asked to start the pod
    deal_it = _DEALERS.get(blow, _ends_by_itself)
    await deal_it(play, attempt)


async def _ends_by_itself(play: Play, attempt: Attempt) -> None:
    act = attempt.act
    await attempt.training.wait()
    await asyncio.sleep(act.after)
    trainer = attempt.trainers.get(0 if act.blow in RANK_0S else act.rank)
    if trainer is None or attempt.stopping:
        return
    attempt.strike()
    match act.blow:
        case Blow.DONE:
            trainer.order = await trainer.finish()
        case Blow.SAVED | Blow.LOST:
            trainer.order = await trainer.stop(lost=act.blow is Blow.LOST)
        case Blow.DONE_BARE:
            trainer.order = await trainer.finish(bare=True)
        case _:
            trainer.order = ENDS[act.blow]
    attempt.tell()


async def _by_the_kubelet(play: Play, attempt: Attempt) -> None:
    pod = await _at_its_time(play, attempt)
    attempt.strike()
    pod.end_by(attempt.act.blow)


async def _shutdown(play: Play, attempt: Attempt) -> None:
    pod = await _at_its_time(play, attempt)
    machine = play.machines[pod.node]
    closed = {"spec": {"taints": [{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}]}}
    await play.api.try_call("PATCH", node_path(machine.name), closed, kind=MERGE)
    attempt.strike()
    pod.end_by(Blow.SHUTDOWN)
    pod.stop_within(SHUTDOWN_GRACE)
    await play.until(lambda: pod.end is not None, "the shutdown to end the pod")
    await asyncio.sleep(0.5)
    await play.remove_node(machine)


# --- by hand -------------------------------------------------------------------------------------------
async def _deleted(play: Play, attempt: Attempt) -> None:
    pod = await _at_its_time(play, attempt)
    if (
        attempt.act.blow is Blow.STRIPPED
    ):  # of a pod that it never saw and that leaves no trace nobody can know
        await play.until(lambda: play.has_seen(attempt), "the operator to have seen the pod")
    attempt.strike()
    match attempt.act.blow:
        case Blow.FORCED:
            await play.api.delete_pod(pod.raw, grace=0)
        case Blow.STRIPPED:
            await play.api.delete_pod(pod.raw, grace=0)
            await _strip(play, pod)
        case Blow.EVICTED:
            await _evict(play, pod)
        case Blow.PREEMPTED | Blow.TAINTED as blow:
            reason = DISRUPTIONS[blow]
            await play.api.patch_pod_status(pod.raw, {"conditions": [disruption(reason, "for another")]})
            await play.api.delete_pod(pod.raw)
        case _:
            await play.api.delete_pod(pod.raw)


async def _deleted_early(play: Play, attempt: Attempt) -> None:
    """No node takes a pod until this one is deleted."""
    pod = await play.pod_of(attempt)
    await asyncio.sleep(attempt.act.after)
    await play.predecessors_word(attempt)
    attempt.strike()
    await play.api.delete_pod(pod.raw)
    await play.cordon(False)


async def _strip(play: Play, pod: Pod) -> None:
    meta = {"uid": pod.raw["metadata"]["uid"], "finalizers": None}
    path = pod_path(play.scene.namespace, pod.name)
    await play.api.try_call("PATCH", path, {"metadata": meta}, kind=MERGE)


async def _evict(play: Play, pod: Pod) -> None:
    meta = {"name": pod.name, "namespace": play.scene.namespace}
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
    await play.api.try_call("POST", f"{pod_path(play.scene.namespace, pod.name)}/eviction", body)


# --- by the cloud --------------------------------------------------------------------------------------
async def _notice(play: Play, attempt: Attempt) -> None:
    act = attempt.act
    pod = await _at_its_time(play, attempt)
    machine, deadline = play.machines[pod.node], time.monotonic() + act.warning
    attempt.strike()
    await _announce(play, pod, act.warning, told=act.told)
    await asyncio.sleep(max(0.0, deadline - time.monotonic()))
    await play.remove_node(machine)
    await _clean(play, machine, act.cleaning)


async def _announce(play: Play, pod: Pod, seconds: float, *, told: bool) -> None:
    """What the agent writes: on its node, and on the pod where it has come so far."""
    seen = datetime.now(UTC)
    end = seen + timedelta(seconds=seconds)
    notes = {DEADLINE_ANNOTATION: end.isoformat(), SOURCE_ANNOTATION: "AWS spot/instance-action"}
    taint = {"key": TERMINATING_TAINT, "value": str(int(end.timestamp())), "effect": "NoSchedule"}
    on_node = {
        "metadata": {"annotations": notes | {NOTICE_SEEN_ANNOTATION: seen.isoformat()}},
        "spec": {"taints": [taint]},
    }
    await play.api.try_call("PATCH", node_path(pod.node), on_node, kind=MERGE)
    if told:
        path = pod_path(play.scene.namespace, pod.name)
        meta = {"uid": pod.raw["metadata"]["uid"], "annotations": notes}
        await play.api.try_call("PATCH", path, {"metadata": meta}, kind=MERGE)


async def _vanished(play: Play, attempt: Attempt) -> None:
    pod = await _at_its_time(play, attempt)
    machine = play.machines[pod.node]
    attempt.strike()
    await play.remove_node(machine)
    await _clean(play, machine, attempt.act.cleaning)


async def _lost_at_done(play: Play, attempt: Attempt) -> None:
    await attempt.training.wait()
    await asyncio.sleep(attempt.act.after)
    pod = await play.pod_of(attempt)
    if attempt.stopping or not attempt.holds:
        return
    attempt.strike()
    await attempt.let_go(Mark.RELEASE, "done")
    await play.remove_node(play.machines[pod.node])


async def _silent(play: Play, attempt: Attempt) -> None:
    """Its kubelet is mute; then its pods are deleted for the taint, or the cloud removes the object."""
    pod = await _at_its_time(play, attempt)
    machine = play.machines[pod.node]
    attempt.strike()
    await machine.power_off()
    play.grow_soon(machine.capacity)
    taints = [{"key": "node.kubernetes.io/unreachable", "effect": effect} for effect in EFFECTS]
    patch = {"metadata": {"labels": {SILENT: "true"}}, "spec": {"taints": taints}}
    await play.api.try_call("PATCH", node_path(machine.name), patch, kind=MERGE)
    await asyncio.sleep(TOLERANCE)
    if attempt.act.evicts:
        for gone in machine.pods.values():
            words = "Taint manager: deleting due to NoExecute taint"
            conditions = [disruption("DeletionByTaintManager", words)]
            await play.api.patch_pod_status(gone.raw, {"conditions": conditions})
            await play.api.delete_pod(gone.raw)
        await asyncio.sleep(2 * attempt.act.cleaning + 10)  # the operator must not need it to go
    await play.remove_node(machine)
    await _clean(play, machine, attempt.act.cleaning)


async def _clean(play: Play, machine: Machine, seconds: float) -> None:
    """What the pod garbage collector does to pods whose Node is no more."""
    await asyncio.sleep(seconds)
    for pod in machine.pods.values():
        if pod.end is None:
            status = {
                "phase": "Failed",
                "conditions": [disruption("DeletionByPodGC", "PodGC: node no longer exists")],
            }
            await play.api.patch_pod_status(pod.raw, status)
        await play.api.delete_pod(pod.raw, grace=0)


async def _at_its_time(play: Play, attempt: Attempt) -> Pod:
    """The pod to be hit: once it trains and its seconds are over, or as soon as it has a node."""
    if attempt.act.after:
        await attempt.training.wait()
        await asyncio.sleep(attempt.act.after)
    pod = await play.pod_of(attempt)
    await play.until(lambda: bool(pod.node), "a node for the pod")
    if attempt.number > 1 and attempt.workers > 1:
        await play.until(lambda: len(play.pods_of(attempt)) == attempt.workers, "all pods of the gang")
    await play.predecessors_word(attempt)
    return pod


Dealer = Callable[["Play", Attempt], Awaitable[None]]
_DEALERS: Final[dict[Blow, Dealer]] = {
    Blow.OVER_LIMIT: _by_the_kubelet,
    Blow.PRESSURE: _by_the_kubelet,
    Blow.SHUTDOWN: _shutdown,
    Blow.DELETED: _deleted,
    Blow.DELETED_EARLY: _deleted_early,
    Blow.FORCED: _deleted,
    Blow.STRIPPED: _deleted,
    Blow.EVICTED: _deleted,
    Blow.PREEMPTED: _deleted,
    Blow.TAINTED: _deleted,
    Blow.NOTICE: _notice,
    Blow.VANISHED: _vanished,
    Blow.SILENT: _silent,
    Blow.LOST_AT_DONE: _lost_at_done,
}
