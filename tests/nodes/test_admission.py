"""The restricted Pod Security Standard, by the API server's own admission."""

from __future__ import annotations

from tests.support.lab import Lab


def test_a_restricted_namespace_says_what_a_silent_template_lacks_and_takes_one_that_says_it(
    lab: Lab,
) -> None:
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
    lab.wait_for_phase("Succeeded", name="complete", seconds=240)
