"""What one attempt has downloaded the next one finds, on another node.

The volume is a folder of this machine (hostPath), which both nodes see: it stands for a shared file system.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.lab import TRAIN, Lab, Raw

DOWNLOADS = """
import os, spottrain

def download(folder):
    (folder / "weights").write_bytes(b"x" * 1_000_000)

folder = spottrain.cached("weights", download)
assert (folder / "weights").stat().st_size == 1_000_000
assert folder.is_relative_to(os.environ["SPOTTRAIN_DATA_CACHE"])
assert os.environ["HF_HOME"].startswith(os.environ["SPOTTRAIN_DATA_CACHE"])
"""
SIZE = "64Mi"


@pytest.fixture
def add_volume(lab: Lab, tmp_path: Path) -> Iterator[Callable[[str], Raw]]:
    """Makes a volume for the claim of that name, in the lab's namespace."""
    folder = tmp_path / "volume"
    folder.mkdir()
    folder.chmod(0o777)  # the kubelet gives no hostPath to a pod's group
    name = f"cache-{lab.kubectl.namespace}"

    def add(claim: str) -> Raw:
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": SIZE},
                "accessModes": ["ReadWriteMany"],
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "",
                "claimRef": {"namespace": lab.kubectl.namespace, "name": claim},
                "hostPath": {"path": str(folder), "type": "Directory"},
            },
        }
        lab.kubectl.apply(volume)
        return volume

    yield add
    lab.kubectl.run("delete", "persistentvolume", name, "--ignore-not-found", "--wait=false")


def _claim(name: str, volume: Raw) -> Raw:
    spec = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "volumeName": volume["metadata"]["name"],
        "resources": {"requests": {"storage": SIZE}},
    }
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def test_the_next_attempt_finds_on_another_node_what_the_first_has_downloaded(
    lab: Lab, add_volume: Callable[[str], Raw]
) -> None:
    lab.scripts["train.py"] = DOWNLOADS + TRAIN
    lab.apply(lab.slow_job(dataCache={"claimRef": {"name": "datasets"}}))
    lab.wait(
        "a sentence that names the claim",
        lambda: "there is no PersistentVolumeClaim datasets" in lab.condition("Scheduled").get("message", ""),
    )
    lab.kubectl.apply(_claim("datasets", add_volume("datasets")))
    lab.wait_for_step(40, seconds=150)
    first = lab.node_of()
    lab.cluster.reclaim(first, 40)
    status = lab.wait_for_phase("Succeeded", seconds=150)
    assert [a["node"] for a in status["attempts"]] == [
        first,
        next(n for n in lab.cluster.nodes if n != first),
    ]
    assert (status["interruptions"], status.get("failures", 0)) == (1, 0)
    before, after = lab.stored_log(attempt=1), lab.stored_log(attempt=2)
    assert "event=data-cache-filled name=weights" in before
    assert "event=data-cache-hit name=weights" in after and "data-cache-filled" not in after


def test_a_claim_made_for_a_job_is_named_while_it_has_no_volume_and_goes_with_the_job(
    lab: Lab, add_volume: Callable[[str], Raw]
) -> None:
    lab.scripts["train.py"] = DOWNLOADS + TRAIN
    lab.apply(lab.job(dataCache={"size": SIZE}))
    (claim,) = lab.wait(
        "the claim", lambda: lab.kubectl.items("persistentvolumeclaims", "-l", "spottrain.io/job=job")
    )
    name = claim["metadata"]["name"]
    lab.wait(
        "a sentence that names the claim",
        lambda: f"no volume yet for {name}" in lab.condition("Scheduled").get("message", ""),
    )
    add_volume(name)
    lab.wait_for_phase("Succeeded", seconds=150)
    assert "event=data-cache-filled name=weights" in lab.stored_log(attempt=1)
    lab.kubectl.run("delete", "trainingjob", "job")
    lab.wait("the claim to go", lambda: lab.kubectl.get("persistentvolumeclaim", name) is None)
