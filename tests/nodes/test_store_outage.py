"""A checkpoint store that is cut off, on real nodes: waited for, said, and charged to nobody.

The job reaches the S3 server by a Service without a selector: without its EndpointSlice it is cut off.
"""

from __future__ import annotations

from localcluster import layout

from tests.support.lab import Lab, Raw

PORT = 7070
NAME = "store"


def attach(lab: Lab) -> str:
    """Connects the Service with the S3 server. Returns the endpoint."""
    labels = {"kubernetes.io/service-name": NAME}
    port = {"name": "s3", "port": layout.S3_PORT}
    service: Raw = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME},
        "spec": {"ports": [{"name": "s3", "port": PORT, "targetPort": layout.S3_PORT}]},
    }
    endpoints: Raw = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": NAME, "labels": labels},
        "addressType": "IPv4",
        "ports": [port],
        "endpoints": [{"addresses": [layout.CONTROL_ADDRESS]}],
    }
    lab.kubectl.apply(service, endpoints)
    return f"http://{NAME}.{lab.kubectl.namespace}.svc:{PORT}"


def cut(lab: Lab) -> None:
    lab.kubectl.run("delete", "endpointslice", NAME)


def test_a_store_that_is_cut_off_while_an_attempt_starts_costs_nothing(lab: Lab) -> None:
    endpoint = attach(lab)
    policy = {"maxFailures": 0, "maxInterruptions": 5, "storeOutageSeconds": 200}
    lab.apply(lab.slow_job(checkpoint={"endpoint": endpoint}, failurePolicy=policy, grace=20))
    lab.wait_for_step(40)
    lab.wait("a durable step", lambda: lab.status().get("knownDurableStep"), seconds=120)
    cut(lab)
    lab.kubectl.run("delete", "pod", lab.pods()[-1]["metadata"]["name"], "--wait=false")
    waits = lab.wait(
        "an attempt that waits for its store",
        lambda: (c := lab.condition("StoreReachable")).get("status") == "False" and c,
        seconds=240,
    )
    assert waits["reason"] == "StoreUnreachable" and endpoint in waits["message"]
    running = lab.wait(
        "the same of its pod",
        lambda: (c := lab.condition("Running")).get("reason") == "WaitingForStore" and c,
    )
    assert endpoint in running["message"]
    attach(lab)
    lab.wait_for_phase("Succeeded", seconds=240)
    status = lab.status()
    assert status.get("failures", 0) == 0 and status["interruptions"] == 1
    assert lab.condition("StoreReachable")["status"] == "True"
    assert status["attempts"][-1]["startStep"] > 0, "it went on from what was durable"


def test_a_store_that_does_not_come_back_fails_the_job_at_its_own_bound(lab: Lab) -> None:
    endpoint = attach(lab)
    cut(lab)
    policy = {"maxFailures": 0, "backoffSeconds": 1, "storeOutageSeconds": 20}
    lab.apply(lab.job(checkpoint={"endpoint": endpoint}, failurePolicy=policy))
    lab.wait_for_phase("Failed", seconds=300)
    failed = lab.condition("Failed")
    assert failed["reason"] == "StoreUnreachable" and endpoint in failed["message"]
    status = lab.status()
    assert status.get("failures", 0) == 0
    assert {a["cause"] for a in status["attempts"]} == {"StoreUnreachable"}
    assert {a["exitCode"] for a in status["attempts"]} == {69}
