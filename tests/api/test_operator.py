"""The operator's process against a real API server: one job's life at a time, the test being the kubelet."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api.validation import parse_status
from spottrain_operator.names import DEADLINE_ANNOTATION, INTERRUPT_ANNOTATION, OUTCOME_FINALIZER

from tests.api.kube import MERGE, Json, Refused, jobs, wait_for
from tests.api.scene import Scene
from tests.builders import word


def _env(pod: Json) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in pod["spec"]["containers"][0]["env"]}


def test_a_job_gets_one_pod_that_carries_the_contract(scene: Scene) -> None:
    job = scene.create(training={"maxSteps": 10})
    pod = scene.wait_attempt(1)
    assert pod["metadata"]["finalizers"] == [OUTCOME_FINALIZER]
    assert pod["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    assert pod["spec"]["restartPolicy"] == "Never" and pod["spec"]["terminationGracePeriodSeconds"] == 110
    env = _env(pod)
    assert env["SPOTTRAIN_TRAINING"] == '{"maxSteps": 10}' and env["SPOTTRAIN_ATTEMPT"] == "1"
    assert scene.wait_condition("Accepted", "True")["observedGeneration"] == 1


def test_a_done_message_is_success_and_the_pod_is_left_for_its_logs(scene: Scene) -> None:
    scene.create()
    pod = scene.wait_attempt(1)
    node = scene.bind(pod)
    scene.wait_condition("Running", "True")
    scene.end(pod, 0, word(Outcome.DONE, step=10, durableStep=10, outputURI="s3://bucket/run/final/"))
    scene.wait_condition("Succeeded", "True", "Completed")
    wait_for("the finalizer to go", lambda: not (scene.pod(1) or {})["metadata"].get("finalizers"))
    status = scene.status()
    assert status["output"] == {"uri": "s3://bucket/run/final/"} and status["knownDurableStep"] == 10
    assert status["attempts"][0]["node"] == node and status["phase"] == "Succeeded"
    assert [p["status"]["phase"] for p in scene.pods()] == ["Succeeded"]
    assert parse_status(status).to_json() == status, "a reply with what was sent is not parsed"


def test_a_finished_job_stays_finished_whatever_is_deleted_around_it(scene: Scene) -> None:
    pod = scene.run()
    scene.end(pod, 0, word(Outcome.DONE))
    scene.wait_condition("Succeeded", "True")
    wait_for("the finalizer to go", lambda: not (scene.pod(1) or {})["metadata"].get("finalizers"))
    scene.delete(pod, 0)
    scene.kube.call(
        "PATCH", jobs(scene.namespace, scene.job), {"spec": {"failurePolicy": {"maxFailures": 9}}}, kind=MERGE
    )
    wait_for("the new spec to be looked at", lambda: scene.status()["observedGeneration"] == 2)
    assert scene.pods() == [] and scene.counters() == (1, 0, 0)


def test_exit_0_without_a_word_of_the_runtime_is_no_success_and_names_the_ways_out(scene: Scene) -> None:
    pod = scene.run()
    assert scene.wait_condition("Running", "True")["reason"] == "WaitingForRuntime"
    scene.end(pod, 0)
    failed = scene.wait_condition("Failed", "True", "NoRuntime")
    assert "docs/own-image.md" in failed["message"]
    assert scene.counters() == (1, 1, 0)


def test_exit_0_of_a_pod_that_was_deleted_is_no_success(scene: Scene) -> None:
    pod = scene.run()
    scene.delete(pod)
    scene.end(pod, 0)
    scene.wait_attempt(2)
    assert scene.counters() == (2, 0, 1)
    assert scene.status()["attempts"][0]["cause"] == "PodDeleted"
    assert "interruptionTime" in scene.status()


def test_failures_are_charged_back_off_and_end_the_job(scene: Scene) -> None:
    scene.create(failurePolicy={"maxFailures": 1, "backoffSeconds": 1})
    for attempt in (1, 2):
        pod = scene.wait_attempt(attempt)
        scene.bind(pod)
        scene.end(pod, 1, "Traceback: boom")
    failed = scene.wait_condition("Failed", "True", "TooManyFailures")
    assert "boom" in failed["message"]
    assert scene.counters() == (2, 2, 0)
    first, second = scene.status()["attempts"]
    assert first["charged"] and second["startTime"] > first["endTime"]
    wait_for(
        "an event",
        lambda: [
            e for e in scene.kube.events(scene.namespace, scene.job) if e["reason"] == "TooManyFailures"
        ],
    )


def test_a_notice_is_passed_on_and_the_successor_waits_behind_its_gate(scene: Scene) -> None:
    scene.create()
    old = scene.wait_attempt(1)
    node = scene.bind(old)
    scene.wait_condition("Running", "True")
    scene.see_runtime()
    scene.give_notice(node, 60)
    new = scene.wait_attempt(2)
    told = (scene.pod(1) or {})["metadata"]
    deadline = datetime.fromisoformat(told["annotations"][DEADLINE_ANNOTATION])
    killed = datetime.fromisoformat(told["deletionTimestamp"])
    assert killed > deadline - timedelta(seconds=4), "2 of margin; both times are cut to whole seconds"
    assert told["deletionGracePeriodSeconds"] <= 58, "of the notice's 60, less the margin"
    assert int(_env(new)["SPOTTRAIN_GATE_UNTIL"]) > 0 and node in str(new["spec"]["affinity"])
    assert scene.counters() == (2, 0, 1)
    scene.end(old, 75, word(Outcome.INTERRUPTED, step=9, durableStep=9, startStep=0))
    wait_for("the old pod to go", lambda: scene.pod(1) is None)
    scene.bind(new)
    scene.wait_condition("Running", "True")
    assert "interruptionTime" in scene.status(), "no trainer has said yet that it trains"
    first = scene.status()["attempts"][0]
    assert (first["cause"], first["exitCode"], first["durableStep"]) == ("SpotNotice", 75, 9)
    scene.end(new, 0, word(Outcome.DONE, startStep=9))
    scene.wait_condition("Succeeded", "True")
    assert "interruptionTime" not in scene.status()
    assert scene.counters() == (2, 0, 1)


def test_an_annotation_of_the_job_interrupts_it_once_and_only_while_it_trains(scene: Scene) -> None:
    scene.create()
    pod = scene.wait_attempt(1)
    scene.annotate(INTERRUPT_ANNOTATION, "early")
    asked = wait_for("the answer", lambda: scene.status().get("interrupt"))
    assert asked["request"] == "early" and "does not train" in asked["message"] and "attempt" not in asked
    scene.bind(pod)
    scene.see_runtime()
    scene.wait_condition("Running", "True", "Training")
    scene.annotate(INTERRUPT_ANNOTATION, "drill")
    gone = wait_for(
        "its deletion", lambda: (scene.pod(1) or {})["metadata"].get("deletionGracePeriodSeconds")
    )
    assert gone == pod["spec"]["terminationGracePeriodSeconds"], "that of a notice"
    scene.end(pod, 75, word(Outcome.INTERRUPTED, step=9, durableStep=9, startStep=0, durableSeconds=0.5))
    new = scene.wait_attempt(2)
    status = scene.status()
    assert status["interrupt"] == {"request": "drill", "attempt": 1} and scene.counters() == (2, 0, 0)
    first = status["attempts"][0]
    assert (first["cause"], first["signalToDurableSeconds"]) == ("InterruptRequested", "0.5")
    scene.bind(new)
    scene.end(new, 0, word(Outcome.DONE, startStep=9))
    scene.wait_condition("Succeeded", "True")
    assert scene.counters() == (2, 0, 0), "once"


def test_a_deleted_node_takes_its_pod_with_it_at_once(scene: Scene) -> None:
    scene.create()
    pod = scene.wait_attempt(1)
    node = scene.bind(pod)
    scene.wait_condition("Running", "True")
    scene.kube.call("DELETE", f"/api/v1/nodes/{node}")
    new = scene.wait_attempt(2)
    assert "SPOTTRAIN_GATE_UNTIL" not in _env(new)
    wait_for("the lost pod to go", lambda: scene.pod(1) is None)
    assert scene.status()["attempts"][0]["cause"] == "NodeLost" and scene.counters() == (2, 0, 1)


def test_refused_credentials_end_the_job_with_the_runtimes_words(scene: Scene) -> None:
    pod = scene.run()
    scene.end(
        pod, 64, word(Outcome.BAD_CONFIGURATION, reason="StoreDenied", message="S3 refuses the credentials")
    )
    failed = scene.wait_condition("Failed", "True", "StoreDenied")
    assert failed["message"] == "S3 refuses the credentials" and len(scene.pods()) == 1


def test_the_kubelets_words_reach_the_job(scene: Scene) -> None:
    scene.create()
    pod = scene.wait_attempt(1)
    scene.report_waiting(pod, "CreateContainerConfigError", 'secret "s3-credentials" not found')
    found = scene.wait_condition("Running", "False", "CreateContainerConfigError")
    assert "s3-credentials" in found["message"] and scene.counters() == (1, 0, 0)


@pytest.fixture
def restricted(scene: Scene) -> Iterator[Scene]:
    """Its namespace enforces more than those of the other tests."""

    def enforce(level: str) -> None:
        label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": level}}}
        scene.kube.call("PATCH", f"/api/v1/namespaces/{scene.namespace}", label, kind=MERGE)

    enforce("restricted")
    yield scene
    enforce("baseline")


def test_a_restricted_namespace_refuses_a_silent_template_with_the_field_to_set(restricted: Scene) -> None:
    silent: Json = {"containers": [{"name": "trainer", "image": "x"}]}
    restricted.create(template={"spec": silent})
    refused = restricted.wait_condition("Accepted", "False", "RefusedByAdmission")
    assert "set spec.template.spec.securityContext.runAsNonRoot to true" in refused["message"]
    said = Scene(kube=restricted.kube, namespace=restricted.namespace, job=f"{restricted.job}-said")
    said.create(template={"spec": silent | {"securityContext": {"runAsNonRoot": True}}})
    said.wait_attempt(1)


BAD_TEMPLATES: list[tuple[Json, str]] = [
    (
        {"containers": [{"name": "trainer", "image": "x"}], "hostNetwork": True},
        "host namespaces (hostNetwork=true)",
    ),
    (
        {"containers": [{"name": "trainer", "image": "x", "imagee": "y"}]},
        'unknown field "spec.containers[0].imagee"',
    ),
    (
        {"containers": [{"name": "trainer", "image": "x", "resources": {"limits": {"cpu": "much"}}}]},
        "quantities must match",
    ),
    (
        {"containers": [{"name": "trainer", "image": "x"}], "serviceAccountName": "nobody"},
        'serviceaccount "nobody" not found',
    ),
    ({"containers": [{"name": "trainer", "image": "x"}], "priorityClassName": "most"}, "most"),
    (
        {"containers": [{"name": "trainer", "image": "x"}], "restartPolicy": "Always"},
        "spec.template.spec.restartPolicy",
    ),
    ({"containers": [{"name": "a", "image": "x"}, {"name": "b", "image": "x"}]}, "one named trainer"),
]


@pytest.mark.parametrize(("spec", "words"), BAD_TEMPLATES, ids=[w for _, w in BAD_TEMPLATES])
def test_a_bad_template_is_a_sentence_and_no_attempt(scene: Scene, spec: Json, words: str) -> None:
    scene.create(template={"spec": spec})
    accepted = scene.wait_condition("Accepted", "False")
    assert words in accepted["message"], accepted
    assert scene.status().get("attempt", 0) == 0 and scene.pods() == []


def test_a_service_account_that_comes_later_lets_the_job_start(scene: Scene) -> None:
    """It is asked for again every half minute; here a change of the job brings the question forward."""
    scene.create(
        template={"spec": {"serviceAccountName": "late", "containers": [{"name": "trainer", "image": "x"}]}}
    )
    scene.wait_condition("Accepted", "False")
    scene.kube.call(
        "POST", f"/api/v1/namespaces/{scene.namespace}/serviceaccounts", {"metadata": {"name": "late"}}
    )
    scene.kube.call(
        "PATCH", jobs(scene.namespace, scene.job), {"spec": {"failurePolicy": {"maxFailures": 9}}}, kind=MERGE
    )
    scene.wait_attempt(1)
    scene.wait_condition("Accepted", "True")


def test_a_webhook_that_does_not_answer_is_a_condition(scene: Scene) -> None:
    path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    rule = {
        "operations": ["CREATE"],
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "resources": ["pods", "configmaps"],
    }
    hook = {
        "name": "nobody.example.com",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [rule],
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 1,
        "objectSelector": {"matchLabels": {"spottrain.io/job": scene.job}},
    }
    scene.kube.call("POST", path, {"metadata": {"name": scene.job}, "webhooks": [hook]})
    try:
        wait_for("the webhook to be asked", lambda: _asked(scene))
        scene.create()
        found = scene.wait_condition("Accepted", "False", "RefusedByAdmission")
        assert "nobody.example.com" in found["message"] and scene.pods() == []
    finally:
        scene.kube.call("DELETE", f"{path}/{scene.job}")


def _asked(scene: Scene) -> bool:
    """A webhook's configuration takes a moment to act."""
    meta = {"metadata": {"generateName": "x-", "labels": {"spottrain.io/job": scene.job}}}
    try:
        scene.kube.call("POST", f"/api/v1/namespaces/{scene.namespace}/configmaps?dryRun=All", meta)
    except Refused as refused:
        return "nobody.example.com" in str(refused)
    return False


def test_a_full_quota_is_waiting(scene: Scene) -> None:
    quotas = f"/api/v1/namespaces/{scene.namespace}/resourcequotas"
    pod = scene.run()
    hard = {"hard": {"requests.nvidia.com/gpu": "0"}}
    scene.kube.call("POST", quotas, {"metadata": {"name": "none"}, "spec": hard})
    scene.kube.call(
        "PATCH",
        f"{quotas}/none/status",
        {"status": hard | {"used": {"requests.nvidia.com/gpu": "0"}}},
        kind=MERGE,
    )
    scene.delete(pod)
    scene.end(pod, 75)
    found = scene.wait_condition("Scheduled", "False", "QuotaExceeded")
    assert "exceeded quota" in found["message"] and scene.counters() == (2, 0, 1)
    scene.kube.call("DELETE", f"{quotas}/none")
    scene.change(failurePolicy={"maxFailures": 9})  # else it is tried again within 20 seconds
    scene.wait_attempt(2)


def test_a_name_that_a_stranger_has_is_a_condition(scene: Scene) -> None:
    pod = scene.run()
    name = pod["metadata"]["name"].replace("-1-0", "-2-0")
    labels = {k: v for k, v in pod["metadata"]["labels"].items() if "attempt" not in k}
    spec = {k: v for k, v in pod["spec"].items() if k != "nodeName"}
    stranger = {"metadata": {"name": name, "labels": labels}, "spec": spec}
    scene.kube.call("POST", f"/api/v1/namespaces/{scene.namespace}/pods", stranger)
    scene.delete(pod)
    scene.end(pod, 75)
    found = scene.wait_condition("Accepted", "False", "PodNameTaken")
    assert name in found["message"] and scene.counters()[1] == 0


def test_a_job_made_again_under_the_same_name_waits_for_the_old_pod_and_is_another_job(scene: Scene) -> None:
    first = scene.create()
    old = scene.wait_attempt(1)
    scene.bind(old)
    scene.wait_condition("Running", "True")
    scene.kube.call("DELETE", jobs(scene.namespace, scene.job))
    again = scene.create()
    found = scene.wait_condition("Scheduled", "False", "DeletedJobStillSaving")
    assert old["metadata"]["name"] in found["message"] and "is still saving" in found["message"]
    wait_for(
        "the orphan to be let go",
        lambda: not (scene.kube.get(scene.path(old)) or {})["metadata"].get("finalizers"),
    )
    assert [p["metadata"]["name"] for p in scene.pods()] == [old["metadata"]["name"]]
    scene.end(old, 75)
    wait_for("the new job's pod", lambda: len(scene.pods()) == 2)
    names = {p["metadata"]["ownerReferences"][0]["uid"] for p in scene.pods()}
    assert names == {first["metadata"]["uid"], again["metadata"]["uid"]}
    scene.wait_condition("Accepted", "True")
    assert scene.counters() == (1, 0, 0)
