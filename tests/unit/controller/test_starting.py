"""Pods that have a node and do not start: what is said, when the attempt ends, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from spottrain_operator.api.observed import Delete, Limits, Observed, Plan, PodEvents, PodView, Waiting
from spottrain_operator.api.training_job import AttemptRecord, Job, Status
from spottrain_operator.api.views import pod_events, pod_view
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import Memory, remember
from spottrain_operator.control.observe import observe
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Cause, Condition, Reason
from spottrain_operator.policies import restart, starting

from tests.builders import (
    NOW,
    POOL,
    after,
    condition,
    make_job,
    make_observed,
    make_pod,
    raw_spec,
    started,
    status_of,
)
from tests.unit.controller.fake_cluster import FakeCluster
from tests.unit.controller.test_interruptions import raw_pod

Json = dict[str, Any]
IMAGE = Waiting(reason="ImagePullBackOff", message='Back-off pulling image "x/y:typo"', container="trainer")
NO_SECRET = Waiting(
    reason="CreateContainerConfigError", message='secret "tokens" not found', container="trainer"
)
UNMOUNTED = Waiting(
    reason="FailedMount", message='MountVolume.SetUp failed for volume "d" : configmap "data" not found'
)


def bound(**more: Any) -> PodView:
    """A pod that was bound a minute ago and has not started."""
    return make_pod(
        **({"phase": "Pending", "running_since": None, "bound": after(-60), "probed": False} | more)
    )


def failing_since(seconds: float | None, **policy: Any) -> Job:
    """A job whose first attempt cannot start since so many seconds."""
    status = started()
    since = after(-seconds) if seconds is not None else None
    record = replace(status.attempts[0], start_error_since=since)
    return make_job(raw_spec(failurePolicy=policy), status=replace(status, attempts=(record,)))


def running(made: Plan) -> tuple[str, str]:
    assert made.status is not None
    found = condition(made, Condition.RUNNING)
    assert found.status == "False"
    return found.reason, found.message


def heard(o: Observed, **events: Any) -> Observed:
    return replace(o, heard={p.uid: PodEvents(**events) for p in o.pods})


# --- what is said ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("waiting", [IMAGE, NO_SECRET])
def test_the_kubelets_first_error_is_a_condition_and_an_event_in_its_words(waiting: Waiting) -> None:
    made = plan(make_observed(bound(waiting=waiting), job=failing_since(None)))
    reason, message = running(made)
    assert reason == waiting.reason and waiting.message in message
    assert rfc3339(after(300)) in message, "when the attempt ends"
    event = next(e for e in made.events if e.reason == waiting.reason)
    assert event.warning and waiting.message in event.message
    assert made.status is not None and made.status.attempts[-1].start_error_since == NOW


def test_what_only_events_tell_is_said_too() -> None:
    made = plan(heard(make_observed(bound(), job=failing_since(None)), trouble=UNMOUNTED))
    reason, message = running(made)
    assert reason == "FailedMount" and 'configmap "data" not found' in message
    assert [e.reason for e in made.events if e.warning] == ["FailedMount"]


def test_the_event_comes_once_though_the_reason_goes_to_and_fro() -> None:
    pull = replace(IMAGE, reason="ErrImagePull", message="registry says 500")
    made = plan(make_observed(bound(waiting=pull), job=failing_since(20)))
    assert running(made)[0] == "ErrImagePull" and not made.events


def test_an_attach_that_takes_long_is_said_and_no_error() -> None:
    made = plan(heard(make_observed(bound(), job=failing_since(None)), slow="unmounted volumes=[d]"))
    reason, message = running(made)
    assert reason == "ContainerStarting" and "unmounted volumes=[d]" in message
    assert made.status is not None and made.status.attempts[-1].start_error_since is None


def raw_pending(**statuses: list[Json]) -> PodView:
    raw = raw_pod()
    raw["status"] = {"phase": "Pending", **statuses}
    view = pod_view(raw)
    assert view is not None
    return view


def waits(name: str, reason: str, message: str = "") -> Json:
    return {"name": name, "state": {"waiting": {"reason": reason, "message": message}}}


def test_an_init_containers_error_is_not_hidden_by_the_trainer_that_waits_for_it() -> None:
    pod = raw_pending(
        initContainerStatuses=[waits("fetch", "ImagePullBackOff", "no such image")],
        containerStatuses=[waits("trainer", "PodInitializing")],
    )
    assert pod.waiting == Waiting(reason="ImagePullBackOff", message="no such image", container="fetch")


def test_a_sidecars_error_is_seen_beside_a_trainer_that_is_still_being_made() -> None:
    pod = raw_pending(
        containerStatuses=[waits("trainer", "ContainerCreating"), waits("proxy", "InvalidImageName", "X:Y")]
    )
    assert pod.waiting is not None and pod.waiting.container == "proxy"
    assert raw_pending(containerStatuses=[waits("trainer", "ContainerCreating")]).waiting == Waiting(
        reason="ContainerCreating", container="trainer"
    )


def test_a_sidecar_that_cannot_start_beside_a_running_trainer_is_said_and_ends_nothing() -> None:
    pod = make_pod(waiting=replace(IMAGE, container="proxy"))
    made = plan(make_observed(pod, job=failing_since(None), now=after(10_000)))
    assert made.status is not None
    found = condition(made, Condition.RUNNING)
    assert found.status == "True"
    assert "container proxy" in found.message and IMAGE.message in found.message
    assert Reason.SIDECAR_CANNOT_START in [e.reason for e in made.events if e.warning]
    assert not any(isinstance(a, Delete) for a in (*made.before, *made.after))


def test_a_spec_that_cannot_be_read_any_more_keeps_nobody_from_saying_it() -> None:
    job = replace(failing_since(400), spec=None, invalid="spec.template.spec must be a pod's spec")
    made = plan(make_observed(bound(waiting=IMAGE), job=job))
    assert running(made)[0] == IMAGE.reason and not made.after, "nor is it ended by rules nobody can read"


# --- when it ends ---------------------------------------------------------------------------------------
def test_an_image_that_cannot_be_pulled_ends_the_attempt_after_the_timeout_and_is_tried_again() -> None:
    early = plan(make_observed(bound(waiting=IMAGE), job=failing_since(299)))
    assert not early.after and early.recheck_after == timedelta(seconds=1, milliseconds=50)
    late = make_observed(bound(waiting=IMAGE), job=failing_since(300))
    stopped = plan(late)
    assert stopped.status is not None and stopped.status.attempts[-1].stopping == Cause.START_FAILED
    assert [a.pod.uid for a in stopped.after if isinstance(a, Delete)] == [late.pods[0].uid]

    gone = bound(waiting=None, deleted=after(0), phase="Failed")
    judged = status_of(plan(make_observed(gone, job=make_job(status=stopped.status), now=after(5))))
    assert judged.attempt == 2 and not judged.is_true(Condition.FAILED)
    assert judged.attempts[0].cause == Cause.START_FAILED and IMAGE.message in judged.attempts[0].evidence
    assert (judged.failures, judged.interruptions, judged.no_progress) == (0, 0, 0), (
        "it is not the job's fault"
    )
    assert judged.next_start == after(15), "it backs off"
    assert judged.attempts[0].start_error_since == after(-300), "the record goes on saying when it began"


@pytest.mark.parametrize("waiting", [NO_SECRET, replace(IMAGE, reason="InvalidImageName")])
def test_an_error_of_the_configuration_fails_the_job_for_good(waiting: Waiting) -> None:
    stopped = status_of(plan(make_observed(bound(waiting=waiting), job=failing_since(301))))
    assert stopped.attempts[-1].stopping == Cause.BAD_CONFIGURATION
    gone = bound(waiting=None, deleted=after(0), phase="Failed")
    judged = status_of(plan(make_observed(gone, job=make_job(status=stopped), now=after(5))))
    failed = condition(judged, Condition.FAILED)
    assert failed.status == "True"
    assert failed.reason == waiting.reason and waiting.message in failed.message


def test_a_volume_of_a_configmap_that_is_not_there_is_an_error_of_the_configuration() -> None:
    o = heard(make_observed(bound(), job=failing_since(301)), trouble=UNMOUNTED)
    ending = starting.gives_up(o)
    assert ending is not None and ending.cause is Cause.BAD_CONFIGURATION
    disk = replace(UNMOUNTED, message='MountVolume.SetUp failed for volume "d" : rpc error: no such device')
    ending = starting.gives_up(heard(o, trouble=disk))
    assert ending is not None and ending.cause is Cause.START_FAILED, "another node may have it"


def test_a_config_that_the_kubelet_could_not_fetch_in_time_is_no_error_of_the_job() -> None:
    sync = replace(NO_SECRET, message="failed to sync configmap cache: timed out waiting for the condition")
    assert not starting.configuration(sync)


def test_the_timeout_is_settable() -> None:
    o = make_observed(bound(waiting=IMAGE), job=failing_since(60, startTimeoutSeconds=30))
    assert starting.gives_up(o) is not None
    o = make_observed(bound(waiting=IMAGE), job=failing_since(60, startTimeoutSeconds=3600))
    assert starting.gives_up(o) is None


def test_nothing_is_given_up_while_the_image_is_being_pulled() -> None:
    o = make_observed(bound(waiting=IMAGE), job=failing_since(3000))
    assert starting.gives_up(o) is not None
    pulling = heard(o, pulling=True, set_up=True)
    assert starting.gives_up(pulling) is None
    assert starting.next_read(pulling) == after(5), "it is asked again until the pull has ended"


def test_a_volume_that_another_node_still_has_is_waited_for_longer() -> None:
    used = Waiting(reason="FailedAttachVolume", message='Multi-Attach error for volume "d"')
    assert starting.gives_up(heard(make_observed(bound(), job=failing_since(600)), trouble=used)) is None
    assert starting.gives_up(heard(make_observed(bound(), job=failing_since(901)), trouble=used)) is not None


def test_the_clock_begins_again_once_the_error_is_gone() -> None:
    waiting = Waiting(reason="ContainerCreating", container="trainer")
    status = plan(make_observed(bound(waiting=waiting), job=failing_since(200))).status
    assert status is None or status.attempts[-1].start_error_since is not None, "its Events are not read yet"
    o = heard(make_observed(bound(waiting=waiting), job=failing_since(200)), set_up=True)
    status = status_of(plan(o))
    assert status.attempts[-1].start_error_since is None


def test_one_pod_of_a_gang_that_cannot_start_ends_the_whole_attempt() -> None:
    status = started()
    record = replace(status.attempts[0], start_error_since=after(-301), workers=2)
    job = make_job(raw_spec(workers=2), status=replace(status, attempts=(record,)))
    pods = (make_pod(rank=0), bound(rank=1, waiting=IMAGE))
    made = plan(make_observed(*pods, job=job))
    assert {a.pod.rank for a in made.after if isinstance(a, Delete)} == {0, 1}
    assert made.status is not None and made.status.attempts[-1].stopping == Cause.START_FAILED


def in_a_row(*causes: str) -> Status:
    records = tuple(AttemptRecord(number=n, cause=c) for n, c in enumerate(causes, 1))
    return Status(attempt=len(records), attempts=records)


def test_ten_starts_in_a_row_are_the_end_of_it() -> None:
    job = make_job()
    assert job.spec is not None
    ending = starting.gives_up(make_observed(bound(waiting=IMAGE), job=failing_since(301)))
    assert ending is not None
    policy = job.spec.failure_policy
    assert restart.exhausted(in_a_row(*["StartFailed"] * 9), policy, ending, NOW) is None
    found = restart.exhausted(
        in_a_row("SpotNotice", *["StartFailed"] * 9, "Replaced", "StartFailed"), policy, ending, NOW
    )
    assert found is not None and found[0] == Reason.CANNOT_START and IMAGE.message in found[1]
    broken = in_a_row(*["StartFailed"] * 9, "SpotNotice", "StartFailed")
    assert restart.exhausted(broken, policy, ending, NOW) is None, "one that ran in between ends the row"


# --- the Events -----------------------------------------------------------------------------------------
def event(reason: str, message: str = "", *, at: float = 0, **more: Any) -> Json:
    return {"reason": reason, "message": message, "lastTimestamp": rfc3339(after(at))} | more


ATTACHING = (
    "Unable to attach or mount volumes: unmounted volumes=[d], unattached volumes=[], "
    "failed to process volumes=[]: timed out waiting for the condition"
)


def test_the_newest_error_before_the_containers_begin_is_the_trouble() -> None:
    found = pod_events(
        [event("FailedMount", "second", at=9), event("FailedMount", "first", at=1), event("Scheduled")],
        "trainer",
    )
    assert found == PodEvents(trouble=Waiting(reason="FailedMount", message="second"))


def test_what_was_mended_is_no_trouble() -> None:
    events = [event("FailedMount", "first", at=1), event("Pulling", "Pulling image", at=1)]
    assert pod_events(events, "trainer") == PodEvents(set_up=True, pulling=True)
    events = [event("FailedAttachVolume", "no", at=1), event("SuccessfulAttachVolume", at=2)]
    assert pod_events(events, "trainer") == PodEvents()


def test_waiting_for_an_attach_is_slow_and_a_claim_that_cannot_be_processed_is_not() -> None:
    assert pod_events([event("FailedMount", ATTACHING, at=1)], "trainer") == PodEvents(slow=ATTACHING)
    wrong = ATTACHING.replace("process volumes=[]", "process volumes=[d]")
    found = pod_events([event("FailedMount", wrong, at=1)], "trainer")
    assert found.trouble == Waiting(reason="FailedMount", message=wrong)
    both = [event("FailedMount", "refused", at=1), event("FailedMount", ATTACHING, at=2)]
    assert pod_events(both, "trainer").trouble == Waiting(reason="FailedMount", message="refused")


def test_a_pull_is_under_way_until_it_has_failed_or_ended() -> None:
    pulls = [event("Pulling", at=1), event("Failed", at=1)]
    assert not pod_events(pulls, "trainer").pulling
    assert pod_events([*pulls, event("BackOff", at=2), event("Pulling", at=30)], "trainer").pulling
    assert not pod_events([*pulls, event("Pulled", at=40)], "trainer").pulling


# --- which pods' Events are read --------------------------------------------------------------------------
class Counting(FakeCluster):
    """Counts how often a pod's Events are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []
        self.add_node("node-a")

    async def pod_events(self, namespace: str, uid: str) -> list[Json]:
        self.read.append(uid)
        return await super().pod_events(namespace, uid)


async def looked(cluster: FakeCluster, world: Any, seconds: float) -> Observed:
    observed, learned = await observe(
        failing_since(None),
        caches=world.caches,
        cluster=cluster,
        memory=world.memory,
        default_pool=world.pool,
        pools={},
        limits=world.limits,
        now=after(seconds),
    )
    remember(observed, learned, world.caches, world.memory)
    return observed


class World:
    def __init__(self, *pods: PodView) -> None:
        self.caches, self.memory, self.limits, self.pool = Caches(), Memory(), Limits(), POOL
        for pod in pods:
            self.caches.pods.put(pod)


async def test_events_are_read_only_of_a_pod_that_has_had_its_node_for_some_seconds_and_then_in_turn() -> (
    None
):
    cluster, pod = Counting(), bound(bound=NOW)
    cluster.told_of[pod.uid] = [event("FailedMount", "no such share", at=2)]
    world = World(pod)
    assert (await looked(cluster, world, 3)).heard == {} and cluster.read == []
    o = await looked(cluster, world, 5)
    assert o.heard[pod.uid].trouble == Waiting(reason="FailedMount", message="no such share")
    await looked(cluster, world, 7)
    assert cluster.read == [pod.uid], "not again at every look"
    cluster.told_of[pod.uid].append(event("Pulling", at=9))
    assert (await looked(cluster, world, 10)).heard[pod.uid].set_up
    await looked(cluster, world, 60)
    assert len(cluster.read) == 2, "the status tells of all that comes now"


@pytest.mark.parametrize("pod", [bound(waiting=IMAGE), bound(node=""), make_pod()])
async def test_no_events_are_read_of_a_pod_whose_status_tells_all(pod: PodView) -> None:
    cluster = Counting()
    await looked(cluster, World(pod), 60)
    assert cluster.read == []


async def test_of_a_large_gang_only_some_are_read_at_a_look_and_each_has_its_turn() -> None:
    pods = [bound(rank=rank) for rank in range(20)]
    cluster, world = Counting(), World(*pods)
    await looked(cluster, world, 60)
    assert len(cluster.read) == 8
    for seconds in (60.1, 60.2):
        o = await looked(cluster, world, seconds)
        assert starting.next_read(o) is not None
    assert set(cluster.read) == {p.uid for p in pods} and len(cluster.read) == 20


def test_a_pod_that_is_being_set_up_is_looked_at_again_soon() -> None:
    assert plan(make_observed(bound(bound=after(-1)), job=failing_since(None))).recheck_after == timedelta(
        seconds=4, milliseconds=50
    )
