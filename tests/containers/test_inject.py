"""spec.runtime.inject: an image that cannot import spottrain trains, and goes on after a reclaim."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from demo.kubectl import Kubectl
from demo.target import SECRET, local_pool
from localcluster.api import Cluster
from localcluster.layout import RUNTIME_IMAGE

from tests.support.lab import TRAIN, Lab, Raw, new_lab, paced

SAYS = "import spottrain\nprint(f'trains with {spottrain.__file__}\\n', end='', flush=True)\n"
"""In one write: the image's output is unbuffered, and the log of another thread would come in between."""
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "injected.yaml"


@pytest.fixture
def lab(cluster: Cluster, installed: Kubectl) -> Iterator[Lab]:
    with new_lab(cluster, installed, {"train.py": SAYS + TRAIN}) as lab:
        yield lab


def job(lab: Lab) -> Raw:
    """The example, in the image of ours that has torch, in which an empty folder hides our package."""
    made: Raw = yaml.safe_load(EXAMPLE.read_text())
    store = {"endpoint": lab.cluster.s3_endpoint, "credentialsSecretRef": {"name": SECRET}}
    made["spec"]["checkpoint"] |= {"uri": f"{lab.uri}/injected"} | store
    made["spec"]["capacity"] = {"type": "Spot", "pools": [local_pool()]}
    made["spec"]["training"] = {"maxSteps": 100}
    pod = made["spec"]["template"]["spec"]
    pod["volumes"] = [
        {"name": "scripts", "configMap": {"name": "scripts"}},
        {"name": "hidden", "emptyDir": {}},
    ]
    pod["containers"][0] |= {
        "image": RUNTIME_IMAGE,
        "imagePullPolicy": "Never",
        "workingDir": "/scripts",
        "env": paced(first=0.5, later=0),
        "securityContext": {"readOnlyRootFilesystem": True},
        "volumeMounts": [
            {"name": "scripts", "mountPath": "/scripts"},
            {"name": "hidden", "mountPath": "/opt/spottrain/lib"},
        ],
    }
    return made


def test_an_image_without_our_runtime_goes_on_after_a_reclaim_from_its_last_step(lab: Lab) -> None:
    lab.apply(job(lab))

    def trains() -> bool:
        return bool(lab.status("injected").get("progress", {}).get("step", 0) >= 3)

    lab.wait("step 3", trains, name="injected", seconds=240)
    first = lab.node_of("injected")
    lab.cluster.reclaim(first, 60)
    status = lab.wait_for_phase("Succeeded", name="injected", seconds=300)
    attempts = status["attempts"]
    assert [a["node"] for a in attempts] == [first, next(n for n in lab.cluster.nodes if n != first)]
    assert [(a["cause"], a["exitCode"]) for a in attempts] == [("SpotNotice", 75), ("Done", 0)]
    assert attempts[0]["durableStep"] == attempts[0]["lastStep"] == attempts[1]["startStep"] < 100
    log = lab.log(lab.pods("injected")[-1]["metadata"]["name"]).splitlines()
    said = [line for line in log if line.startswith("trains with")]
    assert said == ["trains with /spottrain/lib/spottrain/__init__.py"], "\n".join(log)
