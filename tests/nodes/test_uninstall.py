"""helm uninstall while a job trains: nothing is stuck or lost, and an install lets the job go on."""

from __future__ import annotations

from demo.target import SYSTEM_NAMESPACE
from processcluster import install

from tests.support.lab import Lab


def test_an_uninstall_frees_the_pods_and_keeps_the_jobs_and_an_install_takes_them_up_again(lab: Lab) -> None:
    lab.apply(lab.slow_job(training={"maxSteps": 150}))
    lab.wait_for_step(20)
    pod = lab.pods()[0]["metadata"]["name"]
    try:
        lab.kubectl.helm("uninstall", "spottrain", "--namespace", SYSTEM_NAMESPACE, "--wait")
        assert not lab.pods()[0]["metadata"].get("finalizers"), "it can be deleted without an operator"
        lab.kubectl.run("delete", "pod", pod, "--timeout=60s")
        assert lab.kubectl.get("trainingjob", "job"), "the definition and its objects are kept"
    finally:
        install.install(lab.cluster)
    status = lab.wait_for_phase("Succeeded")
    assert (status["attempt"], status.get("failures", 0)) == (2, 0)
    assert status["attempts"][1]["startStep"] >= 20, "the trainer saved when its pod was deleted"
