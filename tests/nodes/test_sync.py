"""checkpoint.mode Sync: a script that knows nothing of us, in a foreign image, outlives its node."""

from __future__ import annotations

from pathlib import Path

import yaml
from demo.target import SECRET, local_pool
from localcluster.layout import OPERATOR_IMAGE

from tests.support.lab import Lab, Raw

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sync.yaml"
STEPS = 400


def job(lab: Lab) -> Raw:
    """The example, in an image that the nodes have. As PID 1 without a handler its script ignores SIGTERM."""
    made: Raw = yaml.safe_load(EXAMPLE.read_text())
    store = {"endpoint": lab.cluster.s3_endpoint, "credentialsSecretRef": {"name": SECRET}}
    made["spec"]["checkpoint"] |= {"uri": f"{lab.uri}/sync"} | store
    made["spec"]["capacity"] = {"type": "Spot", "pools": [local_pool()]}
    container = made["spec"]["template"]["spec"]["containers"][0]
    container |= {"image": OPERATOR_IMAGE, "imagePullPolicy": "Never"}
    container["env"] = [{"name": "SECONDS_PER_STEP", "value": "0.2"}]
    return made


def test_a_plain_script_goes_on_from_its_last_whole_checkpoint_on_another_node(lab: Lab) -> None:
    lab.apply(job(lab))

    def durable() -> bool:
        return bool(lab.status("sync").get("knownDurableStep", 0) >= 2)

    lab.wait("two commits", durable, name="sync", seconds=120)
    first = lab.node_of("sync")
    lab.cluster.reclaim(first, 40)
    status = lab.wait_for_phase("Succeeded", name="sync", seconds=240)
    attempts = status["attempts"]
    assert [a["node"] for a in attempts] == [first, next(n for n in lab.cluster.nodes if n != first)]
    assert (attempts[0]["cause"], attempts[1]["cause"]) == ("SpotNotice", "Done")
    assert (status["interruptions"], status.get("failures", 0)) == (1, 0)
    log = lab.log(lab.pods("sync")[-1]["metadata"]["name"]).splitlines()
    begun = int(log[0].split()[2])
    assert 20 <= begun < STEPS and begun % 10 == 0 and log[0].endswith("resumed true"), log
    assert log[-1] == "done"
    assert attempts[1]["startStep"] == attempts[0]["durableStep"], "by the sidecars' own count of commits"
    assert status["knownDurableStep"] > attempts[1]["startStep"], "what the script wrote last is stored"
