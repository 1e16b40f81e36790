"""The pod that a template and spec.checkpoint become: what is added, what is left, what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from spottrain.contract import DEFAULTS, Env
from spottrain_operator.api.node_pools import NOTHING, chosen
from spottrain_operator.api.observed import Placement
from spottrain_operator.api.template import admission_words
from spottrain_operator.api.training_job import AttemptRecord, Status
from spottrain_operator.api.validation import pools_of
from spottrain_operator.control.plan import plan
from spottrain_operator.names import pod_name
from spottrain_operator.rendering import trainer_pod, variables

from tests.builders import POOL, ended_pod, make_job, make_observed, raw_spec, status_of

Json = dict[str, Any]


def rendered(
    pod: Json | None = None, *, avoid: tuple[str, ...] = (), trainer: Json | None = None, **spec: Any
) -> Json:
    container = {"name": "trainer", "image": "x"} | (trainer or {})
    template = {"spec": {"containers": [container]} | (pod or {})}
    job = make_job(raw_spec(template=template, **spec))
    assert job.spec is not None, job.invalid
    before = copy.deepcopy(job.spec.template)
    place = Placement(avoid=avoid)
    manifest = trainer_pod.pod(
        job, Status(attempt=1), chosen(pools_of(job.spec, POOL, {})[0], NOTHING), place
    )
    assert job.spec.template == before, "the template was changed"
    return manifest


def env_of(manifest: Json) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in trainer_of(manifest)["env"]}


def trainer_of(manifest: Json) -> Json:
    found: Json = next(c for c in manifest["spec"]["containers"] if c["name"] == "trainer")
    return found


def test_labels_and_annotations_of_the_template_stay_and_ours_are_added() -> None:
    template = {
        "metadata": {"labels": {"team": "a"}, "annotations": {"karpenter.sh/do-not-disrupt": "false"}},
        "spec": {"containers": [{"name": "trainer", "image": "x"}]},
    }
    meta = trainer_pod.pod(make_job(raw_spec(template=template)), Status(attempt=3), POOL)["metadata"]
    assert meta["labels"]["team"] == "a" and meta["labels"]["spottrain.io/attempt"] == "3"
    assert meta["annotations"]["karpenter.sh/do-not-disrupt"] == "false"
    assert meta["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert meta["name"] == pod_name("job", "uid-1", 3) and meta["ownerReferences"][0]["controller"]


def test_a_pod_carries_the_names_of_the_nodes_it_is_kept_off() -> None:
    meta = trainer_pod.pod(make_job(), Status(attempt=1), POOL, Placement(avoid=("n2", "n1")))["metadata"]
    assert meta["annotations"]["spottrain.io/avoids"] == "n1,n2"


def test_the_pool_says_where() -> None:
    pool = {
        "name": "a100",
        "platform": "GKE",
        "nodeSelector": {"cloud.google.com/gke-spot": "true"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    }
    own = {"key": "node.kubernetes.io/not-ready", "operator": "Exists"}
    spec = rendered({"nodeSelector": {"disk": "ssd"}, "tolerations": [own]}, capacity={"pools": [pool]})[
        "spec"
    ]
    assert spec["nodeSelector"] == {"disk": "ssd", "cloud.google.com/gke-spot": "true"}
    assert spec["terminationGracePeriodSeconds"] == 15
    assert {"key": "gpu", "operator": "Exists"} in spec["tolerations"]
    assert [t["key"] for t in spec["tolerations"][:2]] == [
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    ]
    silent = [t for t in spec["tolerations"] if t["key"] == "node.kubernetes.io/not-ready"]
    assert [t["tolerationSeconds"] for t in silent] == [30]


def test_no_toleration_of_template_or_pool_keeps_a_pod_on_a_silent_node() -> None:
    """Of the tolerations that fit a taint the first one counts."""
    everything = {"operator": "Exists"}
    own = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}
    pool = {"name": "p", "platform": "AWS", "tolerations": [own, everything]}
    found = rendered({"tolerations": [everything]}, capacity={"pools": [pool]})["spec"]["tolerations"]
    for state in ("not-ready", "unreachable"):
        fits = [
            t for t in found if t.get("key", f"node.kubernetes.io/{state}") == f"node.kubernetes.io/{state}"
        ]
        assert fits[0]["tolerationSeconds"] == 30 and fits[1:] == [everything, everything]


@pytest.mark.parametrize(
    ("kind", "asked", "grace", "note"),
    [
        ("Spot", None, 110, ""),
        ("Spot", 60, 60, "60, the notice window of this capacity 110"),
        ("Spot", 300, 110, "300, the notice window of this capacity 110"),
        ("OnDemand", None, 110, ""),
        ("OnDemand", 300, 300, ""),
        ("OnDemand", 60, 60, ""),
    ],
)
def test_the_grace_is_at_most_what_a_notice_leaves(
    kind: str, asked: int | None, grace: int, note: str
) -> None:
    pod = {} if asked is None else {"terminationGracePeriodSeconds": asked}
    assert rendered(pod, capacity={"type": kind})["spec"]["terminationGracePeriodSeconds"] == grace
    template = {"spec": {"containers": [{"name": "trainer"}]} | pod}
    job = make_job(raw_spec(template=template, capacity={"type": kind}))
    assert job.spec is not None
    said = trainer_pod.grace_note(job.spec, chosen(pools_of(job.spec, POOL, {})[0], NOTHING))
    assert note in said and bool(note) == bool(said)


def test_doomed_nodes_are_avoided_in_every_alternative() -> None:
    terms = [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {"matchFields": []}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    spec = rendered({"affinity": {"nodeAffinity": required, "podAffinity": {}}}, avoid=("n2", "n1"))["spec"]
    found = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n1", "n2"]}
    assert [t["matchExpressions"][-1] for t in found] == [rule, rule]
    assert "podAffinity" in spec["affinity"] and "affinity" not in rendered()["spec"]


def test_a_sidecar_may_have_what_the_trainer_may_not() -> None:
    sidecar = {"name": "logs", "image": "x", "lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}
    manifest = rendered({"containers": [sidecar, {"name": "trainer", "image": "x"}]})
    assert "env" not in manifest["spec"]["containers"][0] and trainer_of(manifest)["env"]


def test_a_restricted_namespaces_refusal_says_which_field_to_set() -> None:
    words = (
        'violates PodSecurity "restricted:latest": runAsNonRoot != true (pod or container "x" must set it)'
    )
    assert "set spec.template.spec.securityContext.runAsNonRoot to true" in admission_words(words)
    for other in ('violates PodSecurity "baseline:latest": privileged', "exceeded quota"):
        assert admission_words(other) == other


# --- certificates -------------------------------------------------------------------------------------


# --- the compile cache --------------------------------------------------------------------------------
def _cache_after(*codes: int | None, wanted: str = "Keep") -> str:
    """What the attempt after these exit codes is told."""
    records = tuple(AttemptRecord(number=n, exit_code=code) for n, code in enumerate(codes, start=1))
    current = AttemptRecord(number=len(codes) + 1)
    job = make_job(raw_spec(checkpoint={"uri": "s3://b/p", "compileCache": wanted}))
    status = Status(attempt=current.number, attempts=(*records, current))
    return variables.of_trainer(job, status, 110).get(Env.COMPILE_CACHE, DEFAULTS[Env.COMPILE_CACHE])


def test_an_illegal_instruction_drops_the_compile_cache_for_one_attempt() -> None:
    assert [_cache_after(), _cache_after(1), _cache_after(75)] == ["keep"] * 3
    assert _cache_after(132) == "drop" and _cache_after(132, 75) == "keep"
    assert _cache_after(132, None) == "drop", "that one may never have run"
    assert _cache_after(132, wanted="None") == "off"


def test_the_attempt_after_an_illegal_instruction_is_made_without_the_compile_cache() -> None:
    first = status_of(plan(make_observed(ended_pod(code=132))))
    assert first.attempt == 2 and first.failures == 1
    assert "SIGILL" in first.attempts[0].evidence
    again = make_job(status=replace(first, next_start=None))
    manifest = trainer_pod.pod(again, again.status, POOL)
    assert env_of(manifest)["SPOTTRAIN_COMPILE_CACHE"] == "drop"
