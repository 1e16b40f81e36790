"""Pods that have a node and do not start: what is said, when the attempt ends, and what it costs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from spottrain_operator.api.observed import Ending, Observed, PodEvents, PodView, Waiting
from spottrain_operator.api.training_job import Job, Status
from spottrain_operator.api.views import pod_events, pod_view
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import Memory
from spottrain_operator.control.observe import Sources, observe
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Cause, Reason
from spottrain_operator.policies import restart, starting

from tests.builders import NOW, POOL, after, make_job, make_observed, make_pod, raw_spec, started, status_of
from tests.unit.controller.fake_cluster import FakeCluster
from tests.unit.controller.stories import Story, follows
from tests.unit.controller.test_interruptions import raw_pod

Json = dict[str, Any]
IMAGE = Waiting(reason="ImagePullBackOff", message='Back-off pulling image "x/y:typo"', container="trainer")
NO_SECRET = Waiting(
    reason="CreateContainerConfigError", message='secret "tokens" not found', container="trainer"
)
CREATING = Waiting(reason="ContainerCreating", container="trainer")
UNMOUNTED = Waiting(
    reason="FailedMount", message='MountVolume.SetUp failed for volume "d" : configmap "data" not found'
)
NO_DISK = replace(UNMOUNTED, message='MountVolume.SetUp failed for volume "d" : rpc error: no such device')
USED = Waiting(reason="FailedAttachVolume", message='Multi-Attach error for volume "d"')


def bound(**more: Any) -> PodView:
    """A pod that was bound a minute ago and has not started."""
    return make_pod(**({"phase": "Pending", "running_since": None, "bound": after(-60)} | more))


def failing_since(seconds: float | None, **policy: Any) -> Job:
    """A job whose first attempt cannot start since so many seconds."""
    status = started()
    since = after(-seconds) if seconds is not None else None
    record = replace(status.attempts[0], start_error_since=since)
    return make_job(raw_spec(failurePolicy=policy), status=replace(status, attempts=(record,)))


def seen(seconds: float | None, waiting: Waiting | None = None, **events: Any) -> Observed:
    """A pod that waits so, since so many seconds, and of which these Events tell."""
    o = make_observed(bound(waiting=waiting), job=failing_since(seconds, **events.pop("policy", {})))
    return replace(o, heard={p.uid: PodEvents(**events) for p in o.pods} if events else {})


# --- what is said ---------------------------------------------------------------------------------------
SAID: dict[str, tuple[Observed, str]] = {
    "the kubelet's first error": (
        seen(None, IMAGE),
        "Running=False/ImagePullBackOff warns=ImagePullBackOff !deletes",
    ),
    "an error of the configuration": (
        seen(None, NO_SECRET),
        "Running=False/CreateContainerConfigError warns=CreateContainerConfigError",
    ),
    "what only Events tell": (seen(None, trouble=UNMOUNTED), "Running=False/FailedMount warns=FailedMount"),
    "the event comes once though the reason goes to and fro": (
        seen(20, replace(IMAGE, reason="ErrImagePull", message="registry says 500")),
        "Running=False/ErrImagePull !warns !tells",
    ),
    "an attach that takes long is no error": (
        seen(None, slow="unmounted volumes=[d]"),
        "Running=False/ContainerStarting !warns",
    ),
    "a sidecar that cannot start beside a running trainer ends nothing": (
        make_observed(
            make_pod(waiting=replace(IMAGE, container="proxy")), job=failing_since(None), now=after(10_000)
        ),
        "Running=True warns=SidecarCannotStart !deletes",
    ),
    "a spec that cannot be read any more is no reason to end it": (
        replace(
            seen(400, IMAGE),
            job=replace(failing_since(400), spec=None, invalid="spec.template.spec must be a pod spec"),
        ),
        "Running=False/ImagePullBackOff !deletes",
    ),
    "a pod that is being set up is looked at again soon": (
        make_observed(bound(bound=after(-1)), job=failing_since(None)),
        "again=19",
    ),
}


@pytest.mark.parametrize("scene", SAID)
def test_a_pod_that_does_not_start_is_told_of(scene: str) -> None:
    observed, expected = SAID[scene]
    follows(expected, observed)


def test_since_when_it_fails_is_in_the_record() -> None:
    assert status_of(plan(seen(None, IMAGE))).attempts[-1].start_error_since == NOW
    slow = status_of(plan(seen(None, slow="unmounted volumes=[d]")))
    assert slow.attempts[-1].start_error_since is None


def raw_pending(**statuses: list[Json]) -> Waiting | None:
    raw = raw_pod()
    raw["status"] = {"phase": "Pending", **statuses}
    view = pod_view(raw)
    assert view is not None
    return view.waiting


def waits(name: str, reason: str, message: str = "") -> Json:
    return {"name": name, "state": {"waiting": {"reason": reason, "message": message}}}


def test_the_error_of_one_container_is_not_hidden_by_another_that_waits_for_it() -> None:
    init = [waits("fetch", "ImagePullBackOff", "no such image")]
    found = raw_pending(initContainerStatuses=init, containerStatuses=[waits("trainer", "PodInitializing")])
    assert found == Waiting(reason="ImagePullBackOff", message="no such image", container="fetch")
    beside = [waits("trainer", "ContainerCreating"), waits("proxy", "InvalidImageName", "X:Y")]
    found = raw_pending(containerStatuses=beside)
    assert found is not None and found.container == "proxy"
    assert raw_pending(containerStatuses=beside[:1]) == CREATING


# --- when it ends ---------------------------------------------------------------------------------------
def test_an_image_that_cannot_be_pulled_ends_the_attempt_after_the_timeout_and_is_tried_again() -> None:
    follows("!deletes again=1", seen(299, IMAGE))
    job = Story(failing_since(300).status)
    job.look("stopping1=StartFailed deletes=0", bound(waiting=IMAGE))
    gone = bound(waiting=None, deleted=after(0), phase="Failed")
    counts = "failures=0 interruptions=0 noProgress=0"
    job.look(f"attempt=2 !Failed cause1=StartFailed {counts} start=+10", gone, at=5)
    first = job.status.attempts[0]
    assert IMAGE.message in first.evidence and first.start_error_since == after(-300)


@pytest.mark.parametrize("waiting", [NO_SECRET, replace(IMAGE, reason="InvalidImageName")])
def test_an_error_of_the_configuration_fails_the_job_for_good(waiting: Waiting) -> None:
    job = Story(failing_since(301).status)
    job.look("stopping1=BadConfiguration", bound(waiting=waiting))
    gone = bound(waiting=None, deleted=after(0), phase="Failed")
    job.look(f"Failed=True/{waiting.reason}", gone, at=5)


@pytest.mark.parametrize(
    ("observed", "cause"),
    [
        (seen(301, trouble=UNMOUNTED), Cause.BAD_CONFIGURATION),
        (seen(301, trouble=NO_DISK), Cause.START_FAILED),  # another node may have it
        (seen(60, IMAGE, policy={"startTimeoutSeconds": 30}), Cause.START_FAILED),
        (seen(60, IMAGE, policy={"startTimeoutSeconds": 3600}), None),
        (seen(3000, IMAGE), Cause.START_FAILED),
        (seen(3000, IMAGE, pulling=True, set_up=True), None),
        (seen(600, trouble=USED), None),  # another node still has it
        (seen(901, trouble=USED), Cause.START_FAILED),
    ],
)
def test_a_start_is_given_up_in_its_time_and_for_its_cause(observed: Observed, cause: Cause | None) -> None:
    ending = starting.gives_up(observed)
    assert (ending.cause if ending else None) is cause


def test_a_config_that_the_kubelet_could_not_fetch_in_time_is_no_error_of_the_job() -> None:
    sync = replace(NO_SECRET, message="failed to sync configmap cache: timed out waiting for the condition")
    assert not starting.configuration(sync)


def test_while_an_image_is_pulled_its_events_are_read_again() -> None:
    assert starting.next_read(seen(3000, IMAGE, pulling=True, set_up=True)) == after(20)


def test_the_clock_begins_again_once_the_error_is_gone() -> None:
    status = plan(seen(200, CREATING)).status
    assert status is None or status.attempts[-1].start_error_since is not None, "its Events are not read yet"
    assert status_of(plan(seen(200, CREATING, set_up=True))).attempts[-1].start_error_since is None


def test_one_pod_of_a_gang_that_cannot_start_ends_the_whole_attempt() -> None:
    status = started()
    record = replace(status.attempts[0], start_error_since=after(-301), workers=2)
    job = Story(replace(status, attempts=(record,)), workers=2)
    job.look("deletes=0,1 stopping1=StartFailed", make_pod(rank=0), bound(rank=1, waiting=IMAGE))


def in_a_row(*causes: Cause) -> Status:
    """A status that has counted these endings."""
    status = Status()
    for cause in causes:
        status = restart.counted(status, Ending(cause=cause, evidence="", charged=False))
    return status


def test_ten_starts_in_a_row_are_the_end_of_it() -> None:
    job = make_job()
    assert job.spec is not None
    ending = starting.gives_up(seen(301, IMAGE))
    assert ending is not None
    policy = job.spec.failure_policy
    fails, between = Cause.START_FAILED, (Cause.REPLACED, Cause.SCHEDULING_TIMEOUT)
    assert restart.exhausted(in_a_row(*[fails] * 9), policy, ending, NOW) is None
    alternately = itertools.chain.from_iterable((fails, *between) for _ in range(9))
    found = restart.exhausted(in_a_row(Cause.SPOT_NOTICE, *alternately, fails), policy, ending, NOW)
    assert found is not None and found[0] == Reason.CANNOT_START and IMAGE.message in found[1]
    broken = in_a_row(*[fails] * 9, Cause.SPOT_NOTICE, fails)
    assert restart.exhausted(broken, policy, ending, NOW) is None, "one that ran in between ends the row"


# --- the Events -----------------------------------------------------------------------------------------
def event(reason: str, message: str = "", *, at: float = 0, **more: Any) -> Json:
    return {"reason": reason, "message": message, "lastTimestamp": rfc3339(after(at))} | more


ATTACHING = (
    "Unable to attach or mount volumes: unmounted volumes=[d], unattached volumes=[], "
    "failed to process volumes=[]: timed out waiting for the condition"
)
WRONG = ATTACHING.replace("process volumes=[]", "process volumes=[d]")
PULLS = [event("Pulling", at=1), event("Failed", at=1)]


def mount(message: str) -> Waiting:
    return Waiting(reason="FailedMount", message=message)


@pytest.mark.parametrize(
    ("events", "found"),
    [
        (
            [event("FailedMount", "second", at=9), event("FailedMount", "first", at=1), event("Scheduled")],
            PodEvents(trouble=mount("second")),
        ),
        (
            [event("FailedMount", "first", at=1), event("Pulling", "Pulling image", at=1)],
            PodEvents(set_up=True, pulling=True),
        ),
        ([event("FailedAttachVolume", "no", at=1), event("SuccessfulAttachVolume", at=2)], PodEvents()),
        ([event("FailedMount", ATTACHING, at=1)], PodEvents(slow=ATTACHING)),
        ([event("FailedMount", WRONG, at=1)], PodEvents(trouble=mount(WRONG))),
        (
            [event("FailedMount", "refused", at=1), event("FailedMount", ATTACHING, at=2)],
            PodEvents(trouble=mount("refused"), slow=ATTACHING),
        ),
        (PULLS, PodEvents(set_up=True)),
        ([*PULLS, event("BackOff", at=2), event("Pulling", at=30)], PodEvents(set_up=True, pulling=True)),
        ([*PULLS, event("Pulled", at=40)], PodEvents(set_up=True)),
    ],
    ids=[
        "the newest error before the containers begin",
        "what was mended is no trouble",
        "nor is an attach that came later",
        "waiting for an attach is slow",
        "a claim that cannot be processed is trouble",
        "an error beside a slow attach",
        "a pull that has failed",
        "that is under way again",
        "that has ended",
    ],
)
def test_events_tell_why_a_pod_is_not_set_up(events: list[Json], found: PodEvents) -> None:
    assert pod_events(events) == found


# --- which pods' Events are read --------------------------------------------------------------------------
class Counting(FakeCluster):
    """Counts how often a pod's Events are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []
        self.add_node("node-a")

    async def pod_events(self, uid: str) -> list[Json]:
        self.read.append(uid)
        return await super().pod_events(uid)


class World:
    def __init__(self, *pods: PodView) -> None:
        self.caches, self.memory = Caches(), Memory()
        for pod in pods:
            self.caches.pods.put(pod)


async def looked(cluster: FakeCluster, world: World, seconds: float, job: Job | None = None) -> Observed:
    sources = Sources(cluster=cluster, caches=world.caches, memory=world.memory, default_pool=POOL)
    return await observe(job or failing_since(None), sources, after(seconds))


async def test_events_are_read_only_of_a_pod_that_has_had_its_node_for_some_seconds_and_then_in_turn() -> (
    None
):
    cluster, pod = Counting(), bound(bound=NOW)
    cluster.told_of[pod.uid] = [event("FailedMount", "no such share", at=2)]
    world = World(pod)
    assert (await looked(cluster, world, 19)).heard == {} and cluster.read == []
    assert (await looked(cluster, world, 20)).heard[pod.uid].trouble == mount("no such share")
    await looked(cluster, world, 30)
    assert cluster.read == [pod.uid], "not again at every look"
    cluster.told_of[pod.uid].append(event("Pulling", at=39))
    assert (await looked(cluster, world, 40)).heard[pod.uid].set_up
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
        assert starting.next_read(await looked(cluster, world, seconds)) is not None
    assert set(cluster.read) == {p.uid for p in pods} and len(cluster.read) == 20
