"""Jobs of several workers: they start, stop and restart whole, and only lost nodes are asked for again."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import pytest
from spottrain.contract import Outcome
from spottrain.contract import Reason as TrainerReason
from spottrain_operator.api.observed import Ended, NodeView, Observed, PodView, Refusal
from spottrain_operator.api.training_job import Job, Status
from spottrain_operator.api.views import node_view
from spottrain_operator.control.actions import Create, Delete, Plan, Provide, Release
from spottrain_operator.control.plan import plan, stopped
from spottrain_operator.names import AVOIDS_ANNOTATION, Cause, Reason, pod_name
from spottrain_operator.policies import placement

from tests.builders import (
    KEY,
    NOW,
    after,
    books_of,
    deleted,
    ended_pod,
    make_job,
    make_node,
    make_observed,
    make_pod,
    manifests,
    notice,
    preferred_node,
    raw_spec,
    started,
    status_of,
    told,
)
from tests.unit.controller.stories import Story

SIZE = 3
NODES = tuple(make_node(f"node-{rank}") for rank in range(SIZE))


def gang_job(status: Status | None = None, **more: Any) -> Job:
    return make_job(raw_spec(workers=SIZE, **more), status=status or begun())


def begun(attempt: int = 1, **more: Any) -> Status:
    """Every rank was seen on its node."""
    status = started(attempt, **more)
    complete = (replace(record, workers=SIZE, created_workers=SIZE) for record in status.attempts)
    return replace(status, attempts=tuple(complete))


ALL: Final = tuple(f"node-{rank}" for rank in range(SIZE))
"""The nodes of an attempt, by rank."""


def member(rank: int, attempt: int = 1, **more: Any) -> PodView:
    fields: dict[str, Any] = {"node": f"node-{rank}"} | more
    return make_pod(attempt, rank, **fields)


def over(rank: int, code: int, attempt: int = 1, **more: Any) -> PodView:
    return ended_pod(attempt, code, rank=rank, node=f"node-{rank}", **more)


def observed(*pods: PodView, status: Status | None = None, nodes: Any = NODES, **more: Any) -> Observed:
    spec = more.pop("spec", {})
    more = {"books": books_of(ALL, ALL, ALL)} | more
    return make_observed(*pods, job=gang_job(status, **spec), nodes=nodes, **more)


class Gang(Story):
    """A story of a gang whose ranks were seen on their nodes."""

    def __init__(self, status: Status | None = None, **spec: Any) -> None:
        super().__init__(status or begun(), **{"workers": SIZE} | spec)
        self.books = books_of(*[ALL] * self.status.attempt)

    def look(self, expected: str, *pods: PodView, **more: Any) -> Plan:
        return super().look(expected, *pods, **{"nodes": NODES} | more)


HALF_MADE = replace(begun(), attempts=(replace(begun().attempts[0], created_workers=0, started=None),))
"""The status of a start whose pods are still being made."""
SELF: dict[str, Any] = {"checkpoint": {"mode": "Self"}}
PENDING: dict[str, Any] = {"node": "", "phase": "Pending"}


def created(made: Plan) -> list[str]:
    return [pod["metadata"]["name"] for pod in manifests(made)]


# --- starting -------------------------------------------------------------------------------------------
def test_all_pods_of_a_start_are_made_at_once_and_a_headless_service_names_rank_0() -> None:
    made = plan(observed(status=Status(), nodes=()))
    assert created(made) == [pod_name(KEY.name, KEY.uid, 1, rank) for rank in range(SIZE)]
    service = next(a.manifest for a in made.after if isinstance(a, Provide))
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    pods = [a.manifest for a in made.after if isinstance(a, Create)]
    first, *others = ({name: p["spec"].get(name) for name in ("hostname", "subdomain")} for p in pods)
    assert first == {"hostname": created(made)[0], "subdomain": service["metadata"]["name"]}
    assert others == [{"hostname": None, "subdomain": None}] * (SIZE - 1), "their host names are their pods'"
    wanted = service["spec"]["selector"].items()
    assert [wanted <= p["metadata"]["labels"].items() for p in pods] == [True] + [False] * (SIZE - 1)


def test_a_start_that_has_begun_is_finished_also_after_a_crash_and_though_the_clock_went_back() -> None:
    Gang(HALF_MADE).look("creates=1,2", member(0))
    Gang(replace(HALF_MADE, next_start=after(200))).look("creates=1", member(0), member(2))


@pytest.mark.parametrize(("spec", "zoned", "together"), [({}, True, True), ({}, False, False)])
def test_a_gang_is_kept_in_one_zone_where_nodes_have_zones(
    spec: dict[str, Any], zoned: bool, together: bool
) -> None:
    o = replace(observed(status=Status(), nodes=(), spec=spec), zoned=zoned)
    affinity = next(a for a in plan(o).after if isinstance(a, Create)).manifest["spec"].get("affinity", {})
    terms = affinity.get("podAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", [])
    assert bool(terms) == together
    if together:
        assert terms[0]["topologyKey"] == "topology.kubernetes.io/zone"
        assert terms[0]["labelSelector"]["matchLabels"]["spottrain.io/attempt"] == "1", "not that of its past"


def test_the_zone_can_be_left_open() -> None:
    o = observed(status=Status(), nodes=(), spec={"capacity": {"sameZone": False}})
    assert all("affinity" not in a.manifest["spec"] for a in plan(o).after if isinstance(a, Create))


def test_a_gang_runs_when_all_of_it_runs() -> None:
    job = Gang()
    job.look("Running=False Scheduled=False", member(0), member(1), member(2, **PENDING, unschedulable="0/3"))
    assert (job.status.ready_workers, job.status.workers) == (2, 3)
    job.look("Running=True", *map(member, range(SIZE)))


# --- stopping -------------------------------------------------------------------------------------------
def test_when_one_pod_fails_the_others_are_stopped_and_only_then_the_attempt_is_judged() -> None:
    job, bad = Gang(), over(1, 1, message="boom")
    job.look("stopping1=Failed !cause1 deletes=0,2 phase=Stopping !creates", member(0), bad, member(2))
    job.look("!creates attempt=1", over(0, 75, **deleted()), bad, member(2, **deleted()))
    ends = (over(0, 75, **deleted()), bad, over(2, 75, **deleted()))
    job.look("cause1=Failed attempt=2 failures=1", *ends)
    evidence = job.status.attempts[0].evidence
    assert "rank 1" in evidence and "boom" in evidence


@pytest.mark.parametrize("code", [75, 1, 137])
def test_a_lost_node_explains_how_the_other_ranks_ended(code: int) -> None:
    expected = "cause1=NodeLost failures=0 interruptions=1"
    Gang().look(expected, over(0, code), member(1), over(2, code), nodes=(NODES[0], NODES[2]))


def test_a_pod_deleted_by_hand_explains_the_crash_of_its_peers_and_what_we_delete_explains_nothing() -> None:
    job = Gang()
    job.look("stopping1=PodDeleted", over(0, 1), member(1, **deleted()), over(2, 1))
    job.look("cause1=PodDeleted failures=0", over(0, 1), over(1, 75, **deleted()), over(2, 1))
    job, killed = Gang(), over(1, 137, reason="OOMKilled")
    job.look("deletes=0,2", member(0), killed, member(2))
    ends = (over(0, 143, **deleted()), killed, over(2, 143, **deleted()))
    job.look("cause1=OutOfMemory failures=1", *ends)


def test_bad_configuration_of_any_rank_ends_the_job() -> None:
    word = told(Outcome.BAD_CONFIGURATION, pod={"rank": 1, "node": "node-1"}, message="no such file")
    Gang().look("phase=Failed", over(0, 75), word, over(2, 75))


def test_a_notice_that_comes_later_excuses_no_crash() -> None:
    job = Gang()
    job.look("deletes=0,2", member(0), over(1, 1), member(2))
    later = (NODES[0], NODES[1], replace(NODES[2], notice=notice(60)))
    ends = (over(0, 75, **deleted()), over(1, 1), over(2, 75, **deleted()))
    job.look("cause1=Failed failures=1", *ends, nodes=later)


def test_a_rank_whose_pod_vanished_stops_the_others_and_its_name_is_never_used_twice() -> None:
    Gang().look("stopping1=PodDeleted deletes=0,2 !creates", member(0), member(2))


# --- done -----------------------------------------------------------------------------------------------
def test_rank_0_alone_says_that_it_is_done() -> None:
    """It may still be storing the weights, and does not look as if it were starting."""
    others = told(Outcome.DONE, pod={"rank": 1, "node": "node-1"}, step=9)
    Gang().look("!Succeeded Running=True", member(0), others, member(2))
    Gang().look("phase=Succeeded", told(Outcome.DONE, step=9), others, member(2))


def test_without_our_runtime_all_ranks_must_end_well() -> None:
    Gang(**SELF).look("!Succeeded !Failed", over(0, 0), over(1, 0), member(2))
    Gang(**SELF).look("phase=Succeeded", over(0, 0), over(1, 0), over(2, 0))
    Gang(**SELF).look("failures=1", over(0, 0), over(1, 0), over(2, 1))


# --- notices --------------------------------------------------------------------------------------------
DOOMED = (NODES[0], replace(NODES[1], notice=notice(100)), NODES[2])


def test_the_pod_on_the_doomed_node_is_told_and_deleted_and_the_others_stop_with_it_by_themselves() -> None:
    job, pods = Gang(), tuple(map(member, range(SIZE)))
    job.look("annotates=1 !deletes", *pods, nodes=DOOMED)
    noticed = (pods[0], replace(pods[1], notice=notice(100)), pods[2])
    job.look("deletes=1 !creates", *noticed, nodes=DOOMED, annotated_at=after(-2))
    ends = (over(0, 75), over(1, 75, **deleted()), over(2, 75))
    job.look("cause1=SpotNotice interruptions=1 failures=0", *ends, nodes=DOOMED)


def test_ranks_of_another_runtime_are_all_told_to_stop_for_they_do_not_tell_each_other() -> None:
    pods = (member(0), member(1, notice=notice(100), **deleted()), member(2))
    Gang(**SELF).look("stopping1=SpotNotice deletes=0,2", *pods, nodes=DOOMED)


def test_a_peer_with_a_nearer_deadline_is_told_it_while_the_gang_stops() -> None:
    job = Gang()
    job.look("", over(0, 75), member(1), member(2))
    nodes = (NODES[0], NODES[1], replace(NODES[2], notice=notice(20)))
    job.look("annotates=2", over(0, 75), member(1), member(2), nodes=nodes)
    told_it = (over(0, 75), member(1), member(2, notice=notice(20)))
    made = job.look("", *told_it, nodes=nodes, annotated_at=after(-2))
    assert [a.grace for a in made.before if isinstance(a, Delete)] == [18]


# --- coming back ----------------------------------------------------------------------------------------
def test_each_rank_prefers_the_node_that_it_had_and_none_may_have_the_lost_one() -> None:
    """So no more nodes are asked for than were lost, wherever the ranks come to be."""
    ends = (over(0, 75), over(1, 75, **deleted()), over(2, 75))
    nodes = (NODES[0], replace(NODES[1], notice=notice(60)), NODES[2])
    made = plan(observed(*ends, nodes=nodes))
    assert preferred_nodes(made) == ["node-0", "", "node-2"]
    off = [{"key": HOST, "operator": "NotIn", "values": ["node-1"]}]
    assert [required(pod, HOST) for pod in manifests(made)] == [off] * SIZE


def test_no_rank_comes_back_to_a_cordoned_node() -> None:
    """As a drain begins; what it evicts ends the attempt."""
    cordoned = (node_view(raw_node("node-0", unschedulable=True)), *NODES[1:])
    ends = (over(0, 75, **deleted(), disruption="EvictionByEvictionAPI"), over(1, 75), over(2, 75))
    assert preferred_nodes(plan(observed(*ends, nodes=cordoned))) == ["", "node-1", "node-2"]


def raw_node(name: str, **spec: Any) -> Json:
    labels = {HOST: name, "topology.kubernetes.io/zone": "z1"}
    return {"metadata": {"name": name, "resourceVersion": "1", "labels": labels}, "spec": spec}


def test_the_nodes_of_the_attempt_and_of_the_one_before_are_observed() -> None:
    books = books_of(ALL, ("", "", "node-9"))
    assert placement.known_nodes(begun(2), books) == {"node-0", "node-1", "node-2", "node-9"}


# --- one zone -------------------------------------------------------------------------------------------
ZONE = "topology.kubernetes.io/zone"


def zones_of(made: Plan) -> list[list[str]]:
    """The zones that each new pod requires, by rank."""
    return [[zone for rule in required(pod, ZONE) for zone in rule["values"]] for pod in manifests(made)]


def preferred_nodes(made: Plan) -> list[str]:
    """The node that each new pod prefers, by rank."""
    return [preferred_node(pod) for pod in manifests(made)]


def in_zones(*zones: str, lost: int = 1) -> tuple[NodeView, ...]:
    """Nodes of the ranks, of which one has a notice."""
    return tuple(
        make_node(f"node-{rank}", zone=zone, notice=notice(60) if rank == lost else None)
        for rank, zone in enumerate(zones)
    )


def reclaimed(nodes: tuple[NodeView, ...], *pods: PodView, **more: Any) -> Observed:
    """At attempt 2, whose pods are yet to be made but for these."""
    one, two = begun(2).attempts
    status = replace(begun(2), attempts=(one, replace(two, created_workers=0, started=None)))
    more = {"books": books_of(ALL)} | more
    return observed(*pods, nodes=nodes, status=status, **more)


ELSEWHERE: dict[str, Any] = {"spec": {"capacity": {"sameZone": False}}}
PLACES: dict[str, tuple[Observed, list[str], str]] = {
    "all are in the zone of the nodes that are left": (
        reclaimed(in_zones("a", "a", "a")), ["node-0", "", "node-2"], "a",
    ),
    "without zones there is none": (
        replace(reclaimed(in_zones("a", "b", "b")), zoned=False), ["node-0", "", "node-2"], "",
    ),
    "nor where the gang may be in several": (
        reclaimed(in_zones("a", "b", "b"), **ELSEWHERE), ["node-0", "", "node-2"], "",
    ),
    "of several the zone of most nodes": (
        reclaimed(in_zones("a", "b", "b", lost=9)), ["node-0", "node-1", "node-2"], "b",
    ),
    "of equals the first": (
        reclaimed(in_zones("b", "a", "a", lost=2)), ["node-0", "node-1", ""], "a",
    ),
    "nodes without a zone are no reason for one": (
        reclaimed(in_zones("", "", "")), ["node-0", "", "node-2"], "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_a_gang_returns_to_one_zone(name: str) -> None:
    """Otherwise a rank that is scheduled first chooses the zone, and all must have new nodes there."""
    observed, nodes, zone = PLACES[name]
    made = plan(observed)
    assert (preferred_nodes(made), zones_of(made)) == (nodes, [[zone] if zone else []] * SIZE)


def test_ranks_that_are_made_later_go_to_the_zone_of_those_that_are_there() -> None:
    """The operator was killed between two POSTs, and since then a node is usable again."""
    there = member(0, 2, phase="Pending", created=NOW, node="node-0")
    assert zones_of(plan(reclaimed(in_zones("b", "a", "a", lost=9), there))) == [["b"], ["b"]]


@pytest.mark.parametrize("there", [(0, 2), ()])
def test_a_full_zone_is_given_up_after_the_time_for_half_a_gang(there: tuple[int, ...]) -> None:
    job, nodes = Gang(begun(2)), in_zones("a", "a", "a")
    waits: dict[str, Any] = PENDING | {"unschedulable": "3 Insufficient nvidia.com/gpu"}
    pods = [member(rank, 2, **({} if rank in there else waits)) for rank in range(SIZE)]
    job.look("!stopping", *pods, nodes=nodes)
    job.look("stopping2=SchedulingTimeout", *pods, nodes=nodes, at=360)
    ends = [
        replace(pod, **deleted()) if pod.rank not in there else over(pod.rank, 75, 2, **deleted())
        for pod in pods
    ]
    job.look("attempt=3", *ends, nodes=nodes, at=360)
    again = job.look("creates=0,1,2", nodes=nodes, at=720)
    assert preferred_nodes(again) == ["", "", ""] and zones_of(again) == [[], [], []]


def test_a_gang_that_follows_none_waits_in_its_only_pool_where_it_blocks_nobody() -> None:
    pods = [member(rank, **PENDING, unschedulable="minCount", grouped=True) for rank in range(SIZE)]
    Gang().look("!deletes", *pods, at=360)


def test_the_nodes_are_looked_through_no_more_often_for_more_pods() -> None:
    """In a gang of 512 pods that each avoid 20 nodes, this would block the event loop for seconds."""

    class Counted(dict[str, NodeView]):
        reads = 0

        def values(self) -> Any:
            self.reads += 1
            return super().values()

    counts = []
    for pods in (1, SIZE):
        avoided = tuple(f"node-{i}" for i in range(pods * 4))
        waiting = [
            member(rank, node="", phase="Pending", avoids=avoided, unschedulable="0/12 nodes available")
            for rank in range(pods)
        ]
        nodes = Counted({name: make_node(name, leaving="x") for name in avoided})
        o = replace(observed(*waiting), nodes=nodes)
        assert stopped(o) is None
        counts.append(nodes.reads)
    assert counts[0] == counts[1] > 0


def test_a_group_that_can_not_be_completed_is_given_up_uncharged() -> None:
    """The native API was switched off between two of its pods."""
    half = [member(rank, **PENDING, grouped=True) for rank in (0, 1)]
    Gang(HALF_MADE).look("stopping1=Replaced !creates", *half)


def test_a_half_gang_lets_go_after_its_time_and_comes_back_later_than_others() -> None:
    job, waiting = Gang(), member(2, **PENDING, unschedulable="Insufficient nvidia.com/gpu")
    job.look("!deletes", member(0), member(1), waiting)
    job.look("stopping1=SchedulingTimeout deletes=0,1,2", member(0), member(1), waiting, at=360)
    assert "2 of 3 pods have a node" in job.status.attempts[-1].evidence
    ends = [over(0, 75, **deleted()), over(1, 75, **deleted()), member(2, **PENDING, **deleted())]
    job.look("attempt=2 interruptions=0 failures=0", *ends, at=360)
    start = job.status.next_start
    assert start is not None and start > after(370)
    again = job.look("creates=0,1,2", *ends, at=(start - NOW).total_seconds() + 1)
    assert preferred_nodes(again) == ["", "", ""], "all look again"


def test_a_lone_pod_in_the_only_pool_waits_for_ever() -> None:
    Story().look("!deletes", make_pod(**PENDING, unschedulable="no nodes"), at=2 * 86400)


# --- what is written ------------------------------------------------------------------------------------
def test_a_rank_that_ended_otherwise_than_rank_0_is_in_the_record_before_its_pod_is_released() -> None:
    ends = (over(0, 75), over(1, 79), over(2, 75))
    made = plan(observed(*ends))
    record = status_of(made).attempts[0]
    assert record.exit_code == 75
    assert [(r.rank, r.node, r.exit_code) for r in record.ranks] == [(1, "node-1", 79)]
    assert {a.pod.rank for a in made.after if isinstance(a, Release)} == {0, 1, 2}


# --- quotas and gates that hold pods up ---------------------------------------------------------
def test_a_part_of_a_gang_that_a_quota_holds_up_lets_go_too() -> None:
    quota = Reason.QUOTA_EXCEEDED
    no = Refusal(generation=1, reason=quota, message="gpus", at=NOW, retry=timedelta(seconds=20))
    first = begun().attempts[0]
    job = Gang(replace(begun(), attempts=(replace(first, created_workers=2),)))
    job.look("stopping1=SchedulingTimeout deletes=0,1", member(0), member(1), at=360, refusal=no)
    assert "gpus" in job.status.attempts[0].evidence


def test_pods_that_are_gated_are_not_given_up() -> None:
    gated = [member(rank, 2, **PENDING, queued=True, unschedulable="gated") for rank in range(SIZE)]
    Gang(begun(2)).look("!deletes", *gated, at=9999)


def test_a_gang_stays_in_its_pool_while_survivors_keep_their_nodes_there() -> None:
    pools = {"pools": [{"name": "default", "platform": "AWS"}, {"name": "b", "platform": "AWS"}]}
    ends = (over(0, 75), over(1, 75, **deleted()), over(2, 75))
    nodes = (NODES[0], replace(NODES[1], notice=notice(60)), NODES[2])
    last = status_of(plan(observed(*ends, nodes=nodes, spec={"capacity": pools})))
    assert last.attempts[-1].pool == "default"


@pytest.mark.parametrize(
    ("code", "reason", "seconds", "failures"),
    [
        (1, "", 0, 1),
        (1, "", 3, 0),
        (137, "", 0, 0),
        (137, "OOMKilled", 0, 1),
        (137, "", 30, 0),
        (143, "", 0, 0),
    ],
)
def test_a_crash_that_is_seen_late_is_no_deletion_of_ours(
    code: int, reason: str, seconds: float, failures: int
) -> None:
    """`python -m tests.chaosop.random_faults` found it: rank 0 said so before rank 1's end was seen."""
    word, stopping = _peer_lost()
    asked = deleted()
    finished = asked["deleted"] - timedelta(seconds=asked["deletion_grace"]) + timedelta(seconds=seconds)
    end = Ended(exit_code=code, reason=reason, message="boom", finished=finished)
    crashed = over(1, code, **asked | {"ended": end})
    expected = f"failures={failures} interruptions={1 - failures}"  # SIGTERM may end it so, if later
    Gang(stopping).look(expected, word, crashed, over(2, 143, **asked))


def test_a_limit_of_its_own_that_is_seen_late_is_charged() -> None:
    word, stopping = _peer_lost()
    evicted = replace(over(1, 137, **deleted()), reason="Evicted")
    Gang(stopping).look("cause1=Failed failures=1", word, evicted, over(2, 143, **deleted()))


def _peer_lost() -> tuple[PodView, Status]:
    """Rank 0, which says that another is gone; and the status of the attempt, being stopped for it."""
    word = told(Outcome.INTERRUPTED_LOST, pod={"rank": 0, "node": "node-0"}, reason=TrainerReason.PEER_LOST)
    status = status_of(plan(observed(word, member(1), member(2))))
    assert status.attempts[0].stopping == Cause.INTERRUPTED
    return word, status


Json = dict[str, Any]
# --- where Karpenter adds the nodes ---------------------------------------------------------------------
HOST = "kubernetes.io/hostname"
ON_NODE_A = {
    "requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [
            {"matchExpressions": [{"key": HOST, "operator": "In", "values": ["node-a"]}]},
        ]
    }
}
KARPENTER = {"pools": [{"name": "default", "platform": "Karpenter"}]}


def rules(pod: Json) -> tuple[list[Json], list[Json]]:
    """By host name: hard ones, and wishes."""
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    wished = affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
    soft = [rule for wish in wished for rule in wish["preference"]["matchExpressions"]]
    return required(pod, HOST), [r for r in soft if r["key"] == HOST]


def required(pod: Json, key: str) -> list[Json]:
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get(
        "nodeSelectorTerms", ()
    )
    return [rule for term in terms for rule in term["matchExpressions"] if rule["key"] == key]


def after_a_reclaim(**more: Any) -> Observed:
    """Rank 1's node is doomed, and all have ended."""
    ends = (over(0, 75), over(1, 75, **deleted()), over(2, 75))
    return replace(observed(*ends, nodes=DOOMED, spec=more.pop("spec", {})), **more)


@pytest.mark.parametrize(
    ("more", "soft"),
    [
        ({}, False),
        ({"karpenter": True}, True),
        ({"spec": {"capacity": KARPENTER}}, True),
        (
            {"spec": {"template": {"spec": {"nodeSelector": {"karpenter.k8s.aws/instance-family": "p4d"}}}}},
            True,
        ),
        ({"karpenter": True, "spec": {"template": {"spec": {"nodeSelector": {HOST: "node-a"}}}}}, False),
        (
            {"karpenter": True, "spec": {"template": {"spec": {"affinity": {"nodeAffinity": ON_NODE_A}}}}},
            False,
        ),
    ],
)
def test_a_lone_replacement_is_kept_off_the_doomed_node_by_a_wish_where_a_rule_would_leave_it_without_one(
    more: Json, soft: bool
) -> None:
    spec = raw_spec()
    for key, value in more.get("spec", {}).items():
        spec[key] = value if key != "template" else {"spec": spec["template"]["spec"] | value["spec"]}
    nodes = (make_node(notice=notice(60)),)
    o = make_observed(make_pod(**deleted()), job=make_job(spec, status=started()), nodes=nodes)
    (pod,) = manifests(plan(replace(o, karpenter=more.get("karpenter", False))))
    hard, wished = rules(pod)
    rule = {"key": HOST, "operator": "NotIn", "values": ["node-a"]}
    assert (rule in hard, wished) == ((False, [rule]) if soft else (True, []))
    assert (AVOIDS_ANNOTATION in pod["metadata"]["annotations"]) == (not soft), "a wish is never in vain"


@pytest.mark.parametrize("karpenter", [True, False])
def test_all_ranks_are_made_at_once_and_kept_off_the_lost_node(karpenter: bool) -> None:
    pods = manifests(plan(after_a_reclaim(karpenter=karpenter)))
    off = {"key": HOST, "operator": "NotIn", "values": ["node-1"]}
    assert len(pods) == SIZE
    for pod in pods:
        hard, wished = rules(pod)
        assert (off in hard, off in wished) == (not karpenter, karpenter)


def test_karpenters_nodes_are_known_by_its_label() -> None:
    raw = {"metadata": {"name": "n", "resourceVersion": "1", "labels": {"karpenter.sh/nodepool": "p"}}}
    assert node_view(raw).karpenter
    assert not node_view({"metadata": {"name": "n", "resourceVersion": "1"}}).karpenter


# --- many nodes -----------------------------------------------------------------------------------------
def _large(lost: range, **spec: Any) -> Observed:
    """A gang of 240 has ended, and the nodes of these ranks have a notice."""
    size = 240
    status = begun()
    record = replace(status.attempts[0], created_workers=size, workers=size)
    nodes = tuple(
        make_node(f"node-{rank}", notice=notice(60 + rank) if rank in lost else None) for rank in range(size)
    )
    ends = [over(rank, 75, **(deleted() if rank in lost else {})) for rank in range(size)]
    job = make_job(raw_spec(workers=size, **spec), status=replace(status, attempts=(record,)))
    books = books_of([node.name for node in nodes])
    return make_observed(*ends, job=job, nodes=nodes, books=books)


def test_a_pod_avoids_a_hundred_nodes_at_most_of_those_that_are_there_longest() -> None:
    made = manifests(plan(_large(range(150))))
    avoided = {name for pod in made for name in pod["metadata"]["annotations"][AVOIDS_ANNOTATION].split(",")}
    assert avoided == {f"node-{rank}" for rank in range(50, 150)}
    assert len(made) == 240 and placement.MOST_AVOIDED == 100


TOLD = (
    observed(member(0), member(1), member(2, **PENDING, unschedulable="0/3 nodes are available")),
    observed(member(0), member(1), member(2, **PENDING, unschedulable="0/3 nodes"), now=after(360)),
    observed(member(0), over(1, 1, message="boom"), member(2)),
    observed(member(0), member(2)),
)
"""Scenes whose sentences are in tests/unit/sentences.txt."""
