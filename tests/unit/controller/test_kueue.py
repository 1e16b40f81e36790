"""A job with a Kueue queue: its Workload, pods only while that is admitted, quota given back afterwards."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api import kueue
from spottrain_operator.api.kueue import (
    Admission,
    Assigned,
    Told,
    WorkloadView,
    digest,
    nodes_of,
    status_patch,
    workload_view,
)
from spottrain_operator.api.node_pools import Pool, of_node
from spottrain_operator.api.observed import Observed, PodView
from spottrain_operator.api.training_job import Job, Status
from spottrain_operator.control.actions import Context, Discard, Plan, Provide, Tell
from spottrain_operator.control.apply import SOON, apply
from spottrain_operator.control.plan import plan
from spottrain_operator.errors import ApiError, Incomplete
from spottrain_operator.names import (
    QUEUE_LABEL,
    Cause,
    Condition,
    Phase,
    Platform,
    Reason,
    object_name,
)

from tests.builders import (
    KEY,
    NOW,
    OWNER,
    POOL,
    after,
    books_of,
    condition,
    deleted,
    ended_pod,
    make_job,
    make_observed,
    make_pod,
    manifests,
    notice,
    preferred_node,
    raw_spec,
    started,
    status_of,
    told,
    word,
)
from tests.unit.controller.fake_cluster import World
from tests.unit.controller.stories import follows

Json = dict[str, Any]
SPOT = Assigned(node_selector={"capacity": "spot"}, tolerations=({"key": "spot", "operator": "Exists"},))


def queued_job(status: Status | None = None, labels: dict[str, str] | None = None, **spec: Any) -> Job:
    return make_job(raw_spec(**spec), status=status, labels={QUEUE_LABEL: "team"} | (labels or {}))


def workload_of(job: Job, **more: Any) -> WorkloadView:
    """As the operator has made it for the job, and nobody has looked at it."""
    assert job.spec is not None
    values: Json = {
        "name": job.workload_name,
        "namespace": KEY.namespace,
        "uid": "w-1",
        "job": KEY,
        "resource_version": 7,
        "made_for": digest(job.spec),
        "pool": nodes_of(POOL),
        "queue": "team",
    }
    return WorkloadView(**(values | more))


ADMITTED = {"reserved": True, "admitted": True, "cluster_queue": "all", "flavors": ("spot",)}
PREEMPTED = ADMITTED | {"evicted": "Preempted", "message": "a more important job needs it"}
REQUEUED = {"evicted": "Preempted", "message": "a more important job needs it"}


def seen(job: Job, *pods: PodView, workload: WorkloadView | None = None, **more: Any) -> Observed:
    flavors = {name: SPOT for name in workload.flavors} if workload is not None else {}
    given: dict[str, Any] = {"workload": workload, "flavors": flavors} | more
    admission = Admission(**given)
    return replace(make_observed(*pods, job=job), admission=admission)


def made(planned: Plan, kind: type) -> list[Any]:
    return [a for a in (*planned.before, *planned.after) if isinstance(a, kind)]


def admitted(job: Job, *pods: PodView, **more: Any) -> Observed:
    """The job's Workload is admitted, but for what is said otherwise."""
    return seen(job, *pods, workload=workload_of(job, **(ADMITTED | more)))


def asked(planned: Plan) -> list[Json]:
    """The Workloads that it creates."""
    return [a.manifest for a in made(planned, Provide) if a.kind == kueue.WORKLOADS]


def running(**more: Any) -> Status:
    return replace(started(), active_since=after(-600), **more)


# --- before the admission -------------------------------------------------------------------------------
def test_a_job_asks_its_queue_for_all_its_workers_and_makes_no_pod() -> None:
    template = {
        "spec": {"containers": [{"name": "trainer", "image": "x", "env": [{"name": "A", "value": "b"}]}]}
    }
    job = queued_job(Status(), template=template, workers=3, gpusPerWorker=2)
    planned = plan(seen(job))
    (workload,) = asked(planned)
    assert not manifests(planned) and status_of(planned).attempt == 0
    assert workload["apiVersion"] == "kueue.x-k8s.io/v1beta2"
    assert workload["metadata"]["name"] == object_name(KEY.name, KEY.uid, suffix="-workload")
    (owner,) = workload["metadata"]["ownerReferences"]
    assert OWNER.items() <= owner.items() and owner["blockOwnerDeletion"]
    assert workload["spec"]["queueName"] == "team"
    (pod_set,) = workload["spec"]["podSets"]
    assert (pod_set["name"], pod_set["count"]) == ("main", 3)
    (container,) = pod_set["template"]["spec"]["containers"]
    assert container["resources"]["requests"] == {"nvidia.com/gpu": "2"}
    assert "env" not in container, "what a job is told is not the queue's"
    waiting = condition(planned, Condition.ADMITTED)
    assert (waiting.status, waiting.reason) == ("False", Reason.WAITING_FOR_QUEUE)
    assert status_of(planned).phase == Phase.WAITING


def test_the_pod_of_the_template_is_checked_first() -> None:
    planned = plan(replace(seen(queued_job()), admitted=False))
    assert not asked(planned) and not manifests(planned)


NOT_ADMITTED: tuple[Json, ...] = (
    {"message": "insufficient quota for nvidia.com/gpu"},
    {},
    {"active": False},
    {"reserved": True, "message": "its quota is reserved; admission checks to come: prov"},
    REQUEUED,
    {"going": True} | ADMITTED,
    {"finished": True} | ADMITTED,
    ADMITTED | {"made_for": "other"},
)


@pytest.mark.parametrize("workload", NOT_ADMITTED)
def test_a_job_that_is_not_admitted_says_why_and_has_no_pod(workload: Json) -> None:
    job = queued_job(Status())
    follows("Admitted=False Scheduled=False !creates", seen(job, workload=workload_of(job, **workload)))


@pytest.mark.parametrize(
    ("change", "labels"),
    [
        ({"queue": "other"}, {}),
        ({"priority_class": "low"}, {}),
        ({"made_for": "other"}, {}),
        ({"finished": True}, {}),
        ({"made_for": "other"} | ADMITTED, {}),
        ({}, {"kueue.x-k8s.io/priority-class": "high"}),
    ],
)
def test_a_workload_that_does_not_fit_the_job_any_more_is_replaced(
    change: Json, labels: dict[str, str]
) -> None:
    job = queued_job(Status(), labels)
    planned = plan(seen(job, workload=workload_of(job, **change)))
    assert made(planned, Discard) and not asked(planned), "the new one comes when the old one is gone"


@pytest.mark.parametrize(
    ("change", "replaced"), [({}, True), ({"active": False}, False), (ADMITTED, False), (PREEMPTED, False)]
)
def test_a_workload_that_waits_follows_the_pools_of_the_spec(change: Json, replaced: bool) -> None:
    pools = {
        name: Pool(name=name, platform=Platform.AWS, node_selector={"gpu": name}) for name in ("a100", "h100")
    }
    before = queued_job(Status(), capacity={"pools": [{"name": "a100"}]})
    o = replace(seen(before), pools=pools)
    (asks,) = asked(plan(o))
    meta = asks["metadata"] | {"uid": "w-1", "resourceVersion": "7", "namespace": KEY.namespace}
    view = workload_view(asks | {"metadata": meta})
    assert view is not None
    same = plan(replace(seen(before, workload=view), pools=pools))
    assert not made(same, Discard) and not asked(same)
    job = queued_job(Status(), capacity={"pools": [{"name": "h100"}]})
    flavors = {"spot": kueue.NOTHING}
    planned = plan(replace(seen(job, workload=replace(view, **change), flavors=flavors), pools=pools))
    assert bool(made(planned, Discard)) is replaced


def test_an_admitted_workload_is_not_replaced_because_another_queue_is_named_now() -> None:
    """Kueue does not let a Workload that holds quota change its queue either."""
    planned = follows("!deletes", admitted(queued_job(running()), make_pod(), queue="other"))
    assert not made(planned, Discard)
    assert not made(plan(admitted(queued_job(_over(Cause.SPOT_NOTICE)), queue="other")), Discard)


def test_the_class_of_the_job_comes_before_that_of_its_pods() -> None:
    pod = {"containers": [{"name": "trainer", "image": "x"}], "priorityClassName": "of-pods"}
    job = queued_job(Status(), {"kueue.x-k8s.io/priority-class": "of-job"}, template={"spec": pod})
    spec = asked(plan(seen(job, priority=9)))[0]["spec"]
    assert (spec["priority"], spec["priorityClassRef"]["name"]) == (9, "of-job")
    plain = queued_job(Status(), template={"spec": pod})
    spec = asked(plan(seen(plain, priority=5)))[0]["spec"]
    assert spec["priorityClassRef"] == {
        "group": "scheduling.k8s.io",
        "kind": "PriorityClass",
        "name": "of-pods",
    }


def test_a_class_that_does_not_exist_is_named_and_waited_for() -> None:
    o = seen(queued_job(Status()), unknown_class="WorkloadPriorityClass high")
    assert not asked(follows("Admitted=False again", o))


# --- admitted -------------------------------------------------------------------------------------------
def test_an_admitted_job_starts_on_the_nodes_of_its_flavor() -> None:
    job = queued_job(Status(), workers=2)
    updates = Assigned(labels={"check": "passed"}, annotations={"provisioning": "p-1"})
    planned = plan(seen(job, workload=workload_of(job, updates=updates, **ADMITTED)))
    pods = manifests(planned)
    assert len(pods) == 2 and status_of(planned).attempt == 1
    for pod in pods:
        assert pod["spec"]["nodeSelector"]["capacity"] == "spot"
        assert {"key": "spot", "operator": "Exists"} in pod["spec"]["tolerations"]
        assert pod["metadata"]["labels"]["check"] == "passed"
        assert pod["metadata"]["annotations"]["provisioning"] == "p-1"
        assert not [k for k in pod["metadata"]["labels"] if k.startswith("kueue.x-k8s.io")], "never both"
    known = condition(planned, Condition.ADMITTED)
    assert (known.status, known.reason) == ("True", Reason.ADMITTED) and "all" in known.message


def test_no_pod_is_made_without_a_flavor_that_was_assigned_or_for_nodes_that_kueue_chose_itself() -> None:
    job = queued_job(Status())
    o = seen(job, workload=workload_of(job, **ADMITTED), flavors={"spot": None})
    made = follows("!creates Scheduled=False again", o)
    follows("!creates", replace(o, job=queued_job(made.status)))
    follows("!creates Scheduled=False", admitted(job, by_topology=True))


def test_a_pool_for_other_nodes_than_the_flavors_asks_for_another_admission() -> None:
    job = queued_job(Status())
    pool = Pool(name="default", platform=Platform.AWS, node_selector={"capacity": "on-demand"})
    o = replace(seen(job, workload=workload_of(job, **ADMITTED)), default_pool=pool)
    planned = plan(o)
    assert not manifests(planned) and made(planned, Discard)
    assert "capacity=spot" in condition(planned, Condition.SCHEDULED).message
    (workload,) = asked(plan(replace(o, admission=Admission())))
    spec = workload["spec"]["podSets"][0]["template"]["spec"]
    assert spec["nodeSelector"]["capacity"] == "on-demand", "so that Kueue assigns a flavor for that"


@pytest.mark.parametrize(
    ("flavor", "kind", "fits"),
    [
        ("spot", "Spot", True),
        ("on-demand", "Spot", False),
        ("spot", "OnDemand", False),
        ("on-demand", "OnDemand", True),
    ],
)
def test_a_flavor_is_compared_with_the_labels_that_the_operator_has_found(
    flavor: str, kind: str, fits: bool
) -> None:
    """As after SpotFirst has moved the job to on-demand, under the admission that it had for spot."""
    label = "karpenter.sh/capacity-type"
    found = of_node({label: "spot"}, "") | of_node({label: "on-demand"}, "")
    job = queued_job(Status(), capacity={"type": kind})
    workload = workload_of(job, **ADMITTED)
    o = seen(job, workload=workload, flavors={"spot": Assigned(node_selector={label: flavor})})
    planned = plan(replace(o, default_pool=Pool(name="default", platform=Platform.AUTO), found=found))
    assert bool(manifests(planned)) is fits
    assert bool(made(planned, Discard)) is not fits


def test_kueue_is_told_when_all_pods_run_and_when_they_do_not_any_more() -> None:
    job = queued_job(running(), workers=2)
    pods = (make_pod(), make_pod(rank=1))
    assert not made(plan(seen(job, pods[0], workload=workload_of(job, **ADMITTED))), Tell)
    (tell,) = made(plan(seen(job, *pods, workload=workload_of(job, **ADMITTED))), Tell)
    assert [(w.type, w.status, w.reason) for w in tell.words] == [("PodsReady", True, "Started")]
    assert not made(plan(seen(job, *pods, workload=workload_of(job, ready=True, **ADMITTED))), Tell)
    lost = (pods[0], ended_pod(code=1, rank=1))
    (tell,) = made(plan(seen(job, *lost, workload=workload_of(job, ready=True, **ADMITTED))), Tell)
    assert [(w.status, w.reason) for w in tell.words] == [(False, "WaitForRecovery")]


def test_a_restart_on_spot_keeps_the_admission_and_does_not_exceed_it() -> None:
    job = queued_job(running())
    noticed = make_pod(notice=notice(), **deleted(grace=90))
    follows("!creates", admitted(job, noticed, ready=True))  # two at once would use twice the quota
    saved = ended_pod(code=75, message=word(Outcome.INTERRUPTED, step=9, durableStep=9), notice=notice())
    planned = plan(admitted(job, saved, ready=True))
    (pod,) = manifests(planned)
    assert pod["spec"]["nodeSelector"]["capacity"] == "spot"
    assert not made(planned, Discard) and not asked(planned)
    assert not [t for t in made(planned, Tell) if t.release]


@pytest.mark.parametrize("ready", [True, False])
def test_a_released_job_waits_for_its_start_so_that_no_earlier_recovery_is_counted(ready: bool) -> None:
    job = queued_job(_over(Cause.SUSPENDED))
    (tell,) = made(plan(seen(job, workload=workload_of(job, ready=ready, **PREEMPTED))), Tell)
    assert tell.release
    assert ("PodsReady", False, "WaitForStart") in [(w.type, w.status, w.reason) for w in tell.words]


# --- eviction -------------------------------------------------------------------------------------------
def test_an_eviction_ends_the_attempt_as_a_suspension_does() -> None:
    job = queued_job(running())
    expected = "deletes=0 stopping1=Suspended Admitted=False/Evicted phase=Stopping"
    planned = follows(expected, admitted(job, make_pod(), **PREEMPTED))
    assert not made(planned, Tell), "the quota is in use until the pod has ended"

    saved = told(Outcome.INTERRUPTED, step=40, durableStep=40, pod=deleted())
    expected = "attempt=1 interruptions=0 failures=0 cause1=Suspended durable=40 !creates phase=Waiting"
    planned = follows(expected, admitted(queued_job(planned.status), saved, **PREEMPTED))
    (tell,) = made(planned, Tell)
    assert tell.release
    kueue_hears = {w.type: (w.status, w.reason) for w in tell.words}
    assert kueue_hears == {
        "Requeued": (True, "Preempted"),
        "QuotaReserved": (False, "Pending"),
        "Admitted": (False, "NoReservation"),
    }

    job = queued_job(planned.status)
    waiting = follows("!creates", seen(job, workload=workload_of(job, **REQUEUED)))
    assert not made(waiting, Tell) and not made(waiting, Discard)
    follows("attempt=2 creates=0", admitted(job))


def test_a_gang_does_not_return_to_the_nodes_that_it_had_before_another_admission() -> None:
    """They may be others' by now, and of another flavor."""
    books = books_of(("node-a",))
    record = replace(running().attempts[0], cause=str(Cause.SUSPENDED), ended=NOW, workers=2)
    for reason in (Reason.EVICTED, Reason.SUSPENDED, Reason.WAITING_FOR_QUEUE):
        status = replace(running(), attempts=(replace(record, reason=str(reason)),))
        job, plain = queued_job(status, workers=2), make_job(raw_spec(workers=2), status=status)
        pods = manifests(plan(replace(seen(job, workload=workload_of(job, **ADMITTED)), books=books)))
        assert len(pods) == 2 and not any(map(preferred_node, pods))
        unqueued = manifests(plan(make_observed(job=plain, books=books)))
        assert reason != Reason.SUSPENDED or any(map(preferred_node, unqueued)), "as without"


def test_an_eviction_is_told_once_by_an_event() -> None:
    job = queued_job(running())
    planned = plan(seen(job, make_pod(), workload=workload_of(job, **PREEMPTED)))
    assert [e.reason for e in planned.events].count(Reason.EVICTED) == 1
    over = queued_job(_over(Cause.SUSPENDED))
    waits = plan(seen(over, workload=workload_of(over, **REQUEUED)))
    told_of = [e.reason for e in waits.events if e.reason in (Reason.EVICTED, Reason.WAITING_FOR_QUEUE)]
    assert told_of == [Reason.EVICTED], "and not for each of its conditions"


@pytest.mark.parametrize(
    "reason", ["Deactivated", "PodsReadyTimeout", "AdmissionCheck", "ClusterQueueStopped"]
)
def test_after_other_evictions_kueue_decides_when_the_job_is_in_the_queue_again(reason: str) -> None:
    job = queued_job(_over(Cause.SUSPENDED))
    (tell,) = made(plan(seen(job, workload=workload_of(job, **(PREEMPTED | {"evicted": reason})))), Tell)
    assert tell.words[0] == Told("Requeued", False, reason, "a more important job needs it")


def test_a_workload_that_was_deleted_under_a_running_job_is_an_eviction_and_made_again() -> None:
    assert not asked(follows("deletes=0", seen(queued_job(running()), make_pod())))
    assert asked(follows("!creates", seen(queued_job(_over(Cause.SUSPENDED)))))


@pytest.mark.parametrize(
    ("workers", "pods"),
    [
        (2, (make_pod(rank=1, **deleted()), told(Outcome.INTERRUPTED, pod=deleted()))),
        (1, (told(Outcome.INTERRUPTED, pod=deleted() | {"others_run": True}),)),
    ],
    ids=["the last pod still saves", "a sidecar still runs"],
)
def test_while_a_container_runs_the_quota_is_kept(workers: int, pods: tuple[PodView, ...]) -> None:
    job = queued_job(running(), workers=workers)
    assert not made(plan(admitted(job, *pods, **PREEMPTED)), Tell)


# --- suspension, end, deletion, other labels ------------------------------------------------------------
def test_a_suspended_job_holds_no_quota_and_asks_again_with_what_it_says_by_then() -> None:
    planned = follows("deletes=0", admitted(queued_job(running(), suspend=True), make_pod()))
    assert not made(planned, Discard), "while its pod saves the quota is in use"
    job = queued_job(_over(Cause.SUSPENDED), suspend=True)
    assert made(follows("phase=Suspended", admitted(job)), Discard)
    assert not asked(plan(seen(job)))
    (workload,) = asked(plan(seen(queued_job(_over(Cause.SUSPENDED), workers=4))))
    assert workload["spec"]["podSets"][0]["count"] == 4


def test_while_a_job_waits_for_its_queue_no_condition_says_that_a_pod_is_being_created() -> None:
    job = queued_job(running())
    known = status_of(plan(seen(job, make_pod(), workload=workload_of(job, **ADMITTED))))
    ended = replace(known.attempts[0], cause=str(Cause.SUSPENDED), ended=NOW)
    for suspend in (True, False):
        job = queued_job(replace(known, attempts=(ended,)), suspend=suspend)
        running_ = condition(plan(seen(job, workload=workload_of(job))), Condition.RUNNING)
        assert running_.status == "False" and "is being created" not in running_.message


@pytest.mark.parametrize(
    ("outcome", "reason"), [(Outcome.DONE, "Succeeded"), (Outcome.BAD_CONFIGURATION, "Failed")]
)
def test_at_the_jobs_end_its_workload_is_finished_which_is_looked_for_until_kueue_knows(
    outcome: Outcome, reason: str
) -> None:
    job = queued_job(running())
    planned = plan(admitted(job, told(outcome)))
    (tell,) = made(planned, Tell)
    assert [(w.type, w.status, w.reason) for w in tell.words] == [("Finished", True, reason)]
    assert not tell.release
    over = queued_job(planned.status)
    held = seen(over, workload=workload_of(over, **ADMITTED), missing="cannot be read")
    assert not made(follows("again", held), Tell)
    assert not made(follows("!again", admitted(over, finished=True)), Tell)


def test_a_job_that_is_being_deleted_gives_its_quota_back_once_its_pods_have_ended() -> None:
    """Its finalizer keeps it while its checkpoints are deleted, and the garbage collector waits for that."""
    job = replace(queued_job(running()), deleted=NOW, holds_checkpoints=True)
    assert not made(plan(admitted(job, make_pod())), Discard)
    assert made(plan(admitted(job)), Discard) and not asked(plan(seen(job)))


def test_a_job_that_names_no_queue_any_more_gives_its_quota_back_and_goes_on() -> None:
    known = status_of(plan(admitted(queued_job(running()), make_pod())))
    planned = follows("!deletes !Admitted", admitted(make_job(status=known), make_pod()))
    assert made(planned, Discard)
    follows("creates=0 !Admitted", make_observed(job=make_job(status=Status())))


# --- without Kueue --------------------------------------------------------------------------------------
def test_without_kueue_a_job_waits_and_says_so_and_a_running_one_goes_on() -> None:
    away: Json = {"missing": "this cluster does not serve kueue.x-k8s.io; install Kueue"}
    planned = follows("!creates Admitted=False again", seen(queued_job(Status()), **away))
    assert not asked(planned) and condition(planned, Condition.ADMITTED).message.endswith(away["missing"])
    job = queued_job(running())
    follows("!deletes", seen(job, make_pod(), **away))
    follows("!creates", seen(job, ended_pod(code=75, message=word(Outcome.INTERRUPTED)), **away))
    half = queued_job(replace(running(), attempts=(replace(running().attempts[0], workers=2),)), workers=2)
    follows("!creates !deletes", seen(half, make_pod(), **away))  # while its flavors are unknown


# --- the operator's process, killed at any write --------------------------------------------------------
async def preempted_and_admitted_again(w: World) -> None:
    await w.settle()
    assert not w.cluster.pods and w.cluster.workload is not None
    w.cluster.admit("spot")
    await w.settle()
    await w.binds(w.pod(1), "node-a")
    w.pass_time(30)
    w.cluster.evict()
    await w.settle()
    assert said_of(w)["QuotaReserved"] == "True", "while the pod saves"
    await w.ends(w.pod(1), 75, word(Outcome.INTERRUPTED, step=9, durableStep=9, startStep=0))
    assert said_of(w)["QuotaReserved"] == "False" and "admission" not in w.cluster.workload["status"]
    assert not w.cluster.live()
    w.cluster.admit("on-demand")
    await w.settle()
    await w.binds(w.pod(2), "node-b")
    await w.ends(w.pod(2), 0, word(Outcome.DONE, step=20, durableStep=20, startStep=9))


async def ready_to_start(w: World) -> None:
    await w.settle()
    w.cluster.admit("spot")


async def test_a_job_that_ends_while_its_flavor_cannot_be_read_gives_its_quota_back() -> None:
    w = World(queue="team")
    await ready_to_start(w)
    await w.settle()
    await w.binds(w.pod(1), "node-a")
    w.pass_time(60)
    w.refuse("get_object", ApiError(503, "no answer"), "spot")
    await w.ends(w.pod(1), 0, word(Outcome.DONE, step=20, durableStep=20, startStep=0))
    assert w.status.phase == Phase.SUCCEEDED and said_of(w)["Finished"] == "True"


async def test_an_ended_job_whose_spec_cannot_be_read_any_more_gives_its_quota_back() -> None:
    w = World(queue="team")
    await ready_to_start(w)
    await w.settle()
    await w.binds(w.pod(1), "node-a")
    patch = w.cluster.patch_object_status
    w.refuse("patch_object_status", ApiError(503, "no answer"))
    w.cluster.end(w.pod(1), 0, word(Outcome.DONE, step=20, durableStep=20, startStep=0))
    for _ in range(3):
        with contextlib.suppress(Incomplete):
            await w.look()
    assert w.status.phase == Phase.SUCCEEDED and "Finished" not in said_of(w)
    w.cluster.jobs[KEY.name]["spec"]["workers"] = "many"
    w.cluster._bump(w.cluster.jobs[KEY.name])
    w.cluster.patch_object_status = patch  # type: ignore[method-assign]
    await w.settle()
    assert said_of(w)["Finished"] == "True"


async def test_no_pod_is_made_while_its_flavor_cannot_be_read() -> None:
    w = World(queue="team")
    await ready_to_start(w)
    w.refuse("get_object", ApiError(503, "no answer"), "spot")
    await w.settle()
    assert not w.cluster.pods
    scheduled = w.status.condition(Condition.SCHEDULED)
    assert scheduled is not None and "an assigned ResourceFlavor cannot be read" in scheduled.message


async def test_a_refused_workload_is_forgotten_once_it_is_made() -> None:
    w = World(queue="team")
    create = w.cluster.create_object
    w.refuse("create_object", ApiError(403, "no such queue"), "workloads")
    await w.settle()
    refused = w.status.condition(Condition.ACCEPTED)
    assert refused is not None and refused.status == "False" and w.cluster.workload is None
    w.cluster.create_object = create  # type: ignore[method-assign]
    await w.after(60)
    assert w.cluster.workload is not None and w.memory.of(KEY).refusal is None
    accepted = w.status.condition(Condition.ACCEPTED)
    assert accepted is not None and accepted.status == "True" and w.status.phase == Phase.WAITING


async def test_an_admission_that_the_watch_has_not_brought_yet_is_not_given_back() -> None:
    w = World(queue="team")
    await ready_to_start(w)
    w.cluster.evict()
    assert w.cluster.workload is not None
    stale = workload_view(w.cluster.workload)
    assert stale is not None
    w.cluster.admit("on-demand")
    words = (Told("QuotaReserved", False, "Pending", "gone"),)
    tell = Tell(workload=stale, words=words)
    job = w.caches.jobs.get(KEY)
    assert job is not None
    context = Context(cluster=w.cluster, caches=w.caches, memory=w.memory, now=w.cluster.now)
    assert await apply(job, Plan(reason="", message="", status=None, before=(tell,)), context) == SOON
    assert said_of(w)["QuotaReserved"] == "True"
    assert w.cluster.workload["status"]["admission"]


def said_of(w: World) -> dict[str, str]:
    assert w.cluster.workload is not None
    return {c["type"]: c["status"] for c in w.cluster.workload["status"]["conditions"]}


def outcome_of(w: World) -> tuple[Any, ...]:
    status = w.status
    flavors = [pod["spec"]["nodeSelector"]["flavor"] for pod in w.cluster.pods.values()]
    counters = (status.phase, status.attempt, status.interruptions, status.failures)
    return counters, said_of(w), w.cluster.posted, flavors


@pytest.mark.parametrize("after_effect", [True, False], ids=["after", "before"])
async def test_a_crash_at_any_write_changes_nothing_in_the_end(after_effect: bool) -> None:
    whole = World(queue="team")
    await preempted_and_admitted_again(whole)
    assert outcome_of(whole)[0] == ("Succeeded", 2, 0, 0)
    assert said_of(whole)["Finished"] == "True" and outcome_of(whole)[3] == ["on-demand"]
    for k in range(1, whole.cluster.writes + 1):
        world = World(queue="team")
        world.cluster.crash_at, world.cluster.crash_after_effect = k, after_effect
        await preempted_and_admitted_again(world)
        assert outcome_of(world) == outcome_of(whole), f"crash at write {k}"


# --- Kueue's objects ------------------------------------------------------------------------------------
def raw_workload(**status: Any) -> Json:
    meta = {"name": "w", "namespace": "ns", "uid": "w-1", "resourceVersion": "7", "generation": 3}
    return {"metadata": meta | {"ownerReferences": [OWNER]}, "spec": {"queueName": "team"}, "status": status}


def a(kind: str, status: str = "True", reason: str = "R", message: str = "") -> Json:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def test_what_an_admission_says_is_read() -> None:
    assignment = {"name": "main", "flavors": {"cpu": "plain", "nvidia.com/gpu": "spot"}, "count": 2}
    update = {"name": "main", "nodeSelector": {"a": "b"}, "labels": {"c": "d"}, "annotations": {"e": "f"}}
    view = workload_view(
        raw_workload(
            conditions=[a("QuotaReserved"), a("Admitted"), a("Evicted", "False"), a("PodsReady", "False")],
            admission={"clusterQueue": "all", "podSetAssignments": [assignment]},
            admissionChecks=[{"name": "prov", "state": "Ready", "podSetUpdates": [update]}],
        )
    )
    assert view is not None and (view.job, view.queue) == (KEY, "team")
    assert view.admitted and view.reserved and not view.evicted and not view.finished
    assert (view.flavors, view.cluster_queue, view.ready) == (("plain", "spot"), "all", False)
    assert view.updates == Assigned(node_selector={"a": "b"}, labels={"c": "d"}, annotations={"e": "f"})


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ({}, ""),
        ({"conditions": [a("QuotaReserved", "False", message="no room")]}, "no room"),
        ({"conditions": [a("Evicted", reason="Preempted", message="more important")]}, "more important"),
        (
            {
                "conditions": [a("QuotaReserved")],
                "admissionChecks": [{"name": "prov", "state": "Pending", "message": "asked the cloud"}],
            },
            "its quota is reserved; admission checks to come: prov (asked the cloud)",
        ),
    ],
)
def test_why_a_workload_waits_is_kueues_own_sentence(status: Json, message: str) -> None:
    view = workload_view(raw_workload(**status))
    assert view is not None and view.message == message and not view.admitted


def test_a_workload_of_another_owner_is_not_the_jobs() -> None:
    raw = raw_workload()
    raw["metadata"]["ownerReferences"] = [{"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "u"}]
    assert workload_view(raw) is None


def test_what_kueue_is_told_keeps_its_other_words_and_fails_after_a_change() -> None:
    old = a("Evicted") | {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    reserved = a("QuotaReserved") | {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    words = (Told("QuotaReserved", False, "Pending", "gone"), Told("Requeued", True, "Preempted", "gone"))
    patch = status_patch(raw_workload(conditions=[old, reserved]), words, NOW, release=True)
    assert patch["metadata"] == {"uid": "w-1", "resourceVersion": "7"}
    assert patch["status"]["admission"] is None
    evicted, released, requeued = patch["status"]["conditions"]
    assert evicted == old
    assert released["status"] == "False" and released["lastTransitionTime"] == "2026-03-01T12:00:00Z"
    assert (requeued["type"], requeued["observedGeneration"]) == ("Requeued", 3)
    assert "admission" not in status_patch(raw_workload(), words, NOW, release=False)["status"]


def test_a_job_keeps_its_admission_whatever_else_of_its_spec_changes() -> None:
    job, other = (
        queued_job(),
        queued_job(failurePolicy={"maxFailures": 9}, checkpoint={"uri": "s3://b/other"}),
    )
    assert job.spec is not None and other.spec is not None
    assert digest(job.spec) == digest(other.spec)
    larger = queued_job(workers=2)
    assert larger.spec is not None and digest(larger.spec) != digest(job.spec)


def _over(cause: Cause) -> Status:
    """The first attempt has ended for this cause."""
    status = running()
    return replace(status, attempts=(replace(status.attempts[0], cause=str(cause), ended=NOW),))


WAITS = queued_job(Status())
TOLD = (
    seen(WAITS),
    *(seen(WAITS, workload=workload_of(WAITS, **words)) for words in NOT_ADMITTED),
    seen(WAITS, workload=workload_of(WAITS, **ADMITTED)),
    seen(WAITS, workload=workload_of(WAITS, **ADMITTED), flavors={"spot": None}),
    seen(WAITS, workload=workload_of(WAITS, by_topology=True, **ADMITTED)),
    seen(WAITS, unknown_class="WorkloadPriorityClass high"),
    seen(WAITS, missing=kueue.OFF),
    seen(queued_job(running()), make_pod(), workload=workload_of(WAITS, **PREEMPTED)),
    replace(
        seen(WAITS, workload=workload_of(WAITS, **ADMITTED)),
        default_pool=Pool(name="p", platform=Platform.AWS, node_selector={"capacity": "on-demand"}),
    ),
)
"""Scenes whose sentences are in tests/unit/sentences.txt."""
