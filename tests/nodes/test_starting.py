"""Pods that the kubelet cannot start, on a real node: told in its words, and ended after a time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.lab import Lab, Raw

POLICY = {"startTimeoutSeconds": 30, "backoffSeconds": 1}
NOWHERE: Raw = {"name": "nowhere", "configMap": {"name": "nowhere"}}


def warned(lab: Lab, words: str) -> Any:
    """Warning Events on the job that have these words."""
    events = lab.kubectl.items("events", "--field-selector", "involvedObject.kind=TrainingJob,type=Warning")
    return [e for e in events if words in e["message"]]


def with_volume(job: Raw) -> Raw:
    """The job with a volume of a ConfigMap that does not exist."""
    pod = job["spec"]["template"]["spec"]
    pod["volumes"].append(NOWHERE)
    pod["containers"][0]["volumeMounts"].append({"name": "nowhere", "mountPath": "/nowhere"})
    return job


def test_an_image_that_no_registry_gives_is_told_and_tried_again_uncharged(lab: Lab) -> None:
    image = {"image": "127.0.0.1:1/no-such-image:1", "imagePullPolicy": "Always"}
    lab.apply(lab.job(container=image, failurePolicy=POLICY))
    lab.wait("an Event of the job", lambda: warned(lab, "no-such-image"))
    condition = lab.condition("Running")
    assert condition["status"] == "False" and condition["reason"] in ("ErrImagePull", "ImagePullBackOff")
    status = lab.wait(
        "a second attempt", lambda: (s := lab.status()).get("attempt", 0) >= 2 and s, seconds=150
    )
    first = status["attempts"][0]
    assert first["cause"] == "StartFailed" and "no-such-image" in first["evidence"]
    assert (status.get("failures", 0), status.get("interruptions", 0)) == (0, 0)


@pytest.mark.parametrize("kind", ["environment", "volume", "init container"])
def test_a_configmap_that_is_not_there_is_told_and_then_fails_the_job(lab: Lab, kind: str) -> None:
    job = lab.job(failurePolicy=POLICY)
    pod = job["spec"]["template"]["spec"]
    reason, missing = "CreateContainerConfigError", [{"configMapRef": {"name": "nowhere"}}]
    if kind == "environment":
        pod["containers"][0]["envFrom"] = missing
    elif kind == "init container":
        pod["initContainers"] = [pod["containers"][0] | {"name": "fetch", "envFrom": missing}]
    else:
        job, reason = with_volume(job), "FailedMount"
    lab.apply(job)
    lab.wait("an Event of the job", lambda: warned(lab, 'configmap "nowhere" not found'))
    assert lab.condition("Running")["reason"] == reason
    lab.wait_for_phase("Failed", seconds=150)
    failed = lab.condition("Failed")
    assert failed["reason"] == reason and 'configmap "nowhere" not found' in failed["message"]
    assert lab.status()["attempt"] == 1


def test_a_configmap_that_comes_in_time_is_enough(lab: Lab) -> None:
    lab.apply(with_volume(lab.job(failurePolicy=POLICY | {"startTimeoutSeconds": 600})))
    lab.wait("the error", lambda: lab.condition("Running").get("reason") == "FailedMount")
    lab.kubectl.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "nowhere"}, "data": {}})
    lab.wait_for_phase("Succeeded", seconds=240)
    assert "startErrorSince" not in lab.status()["attempts"][0]


def test_a_restricted_namespace_says_what_a_silent_template_lacks_and_takes_one_that_says_it(
    lab: Lab,
) -> None:
    """The restricted Pod Security Standard, by the API server's own admission."""
    namespace = lab.kubectl.namespace
    lab.kubectl.run("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    complete = lab.job("complete", training={"maxSteps": 5})
    complete["spec"]["template"]["spec"]["securityContext"] = {"runAsNonRoot": True}
    lab.apply(lab.job("silent"), complete)
    refused = lab.wait(
        "the refusal",
        lambda: (c := lab.condition("Accepted", "silent")).get("reason") == "RefusedByAdmission" and c,
        name="silent",
    )
    assert refused["status"] == "False"
    assert "set spec.template.spec.securityContext.runAsNonRoot to true" in refused["message"]
    assert lab.pods("silent") == []
    lab.wait_for_phase("Succeeded", name="complete")


def test_a_silent_template_trains_as_root(lab: Lab) -> None:
    """Most published images run as root."""
    job = lab.job(training={"maxSteps": 5}, container={"securityContext": {"runAsUser": 0}})
    lab.apply(job)
    lab.wait_for_phase("Succeeded")
    assert (lab.status().get("failures", 0), lab.status()["attempt"]) == (0, 1)
