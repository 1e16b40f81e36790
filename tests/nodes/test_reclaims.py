"""A node goes after its notice: nothing is lost, nothing is charged, and the bill says so.

One notice serves several jobs, each of another kind; a job on the other node is left in peace meanwhile.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path

import pytest
import yaml
from demo.kubectl import Kubectl, Watch
from demo.target import SECRET, local_pool
from localcluster.api import Cluster
from processcluster.install import DOLLARS_PER_HOUR, ON_DEMAND_DOLLARS_PER_HOUR

from tests.nodes.bills import CENT, PARTS, SHARE, bound, dollars, now, seconds, times
from tests.support.lab import TRAIN, Lab, Raw, drawn_to, new_lab

NOTICE = 15
ROUNDING = timedelta(seconds=1.5)
"""Deletion deadlines are whole seconds."""
BEGUN = 12
"""Steps before the notice: one checkpoint is stored, and two steps are not in it."""
MOVED = ("job", "cache", "sync")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sync.yaml"
SYNC_STEPS = 400
SIZE = "64Mi"
IGNORES_SIGTERM = """\
[ "$SPOTTRAIN_ATTEMPT" = 1 ] || export SECONDS_PER_STEP=0
trap '' TERM
exec python3 -u -c "$0"
"""
"""What a script as PID 1 of a container does that has no handler."""
DOWNLOADS = """
import os, spottrain

def download(folder):
    (folder / "weights").write_bytes(b"x" * 1_000_000)

folder = spottrain.cached("weights", download)
assert (folder / "weights").stat().st_size == 1_000_000
assert folder.is_relative_to(os.environ["SPOTTRAIN_DATA_CACHE"])
assert os.environ["HF_HOME"].startswith(os.environ["SPOTTRAIN_DATA_CACHE"])
"""


# --- jobs and volumes -----------------------------------------------------------------------------------
def slow_job(lab: Lab, name: str, **more: Raw) -> Raw:
    return lab.slow_job(name, checkpoint={"interval": "10steps"}, **more)


def downloads() -> Raw:
    return {"args": ["/scripts/downloads.py"]}


def sync_job(lab: Lab) -> Raw:
    """The example, in an image that the nodes have; as whichever user runs the cluster."""
    made: Raw = yaml.safe_load(EXAMPLE.read_text())
    store = {"endpoint": lab.cluster.s3_endpoint, "credentialsSecretRef": {"name": SECRET}}
    made["spec"]["checkpoint"] |= {"uri": f"{lab.uri}/sync"} | store
    made["spec"]["capacity"] = {"type": "Spot", "pools": [local_pool()]}
    pod = made["spec"]["template"]["spec"]
    user = os.getuid()
    pod["securityContext"] = {"runAsNonRoot": True, "runAsUser": user} if user else {}
    container = pod["containers"][0]
    container |= {"image": "spottrain-operator:checkout", "imagePullPolicy": "Never"}
    container |= {
        "command": ["sh", "-c", IGNORES_SIGTERM],
        "env": [{"name": "SECONDS_PER_STEP", "value": "0.4"}],
    }
    return made


def add_volume(lab: Lab, folder: Path, claim: str) -> str:
    """A volume for the claim of that name: a folder of this machine, which both nodes see. Returns its name.

    It stands for a shared file system.
    """
    folder.mkdir()
    name = f"{claim}-{lab.kubectl.namespace}"
    spec = {
        "capacity": {"storage": SIZE},
        "accessModes": ["ReadWriteMany"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "claimRef": {"namespace": lab.kubectl.namespace, "name": claim},
        "hostPath": {"path": str(folder), "type": "Directory"},
    }
    lab.kubectl.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}
    )
    return name


def add_claim(lab: Lab, name: str, volume: str) -> None:
    spec = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "volumeName": volume,
        "resources": {"requests": {"storage": SIZE}},
    }
    metadata = {"name": name}
    lab.kubectl.apply(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}
    )


# --- the play -------------------------------------------------------------------------------------------
@dataclass(kw_only=True)
class Played:
    """What was seen of the jobs."""

    lab: Lab
    doomed: str
    peaceful: str
    first_bound: str = ""
    """Of the job `job`."""
    published: float = 0.0
    deadlines: list[datetime] = field(default_factory=list)
    """Deletion timestamps that the first pod of `job` had."""
    ended: dict[str, str] = field(default_factory=dict)
    """When the test saw that a job's first attempt was over, or a peaceful job."""

    def on_pod(self, _kind: str, pod: Raw) -> None:
        labels, deleted = pod["metadata"]["labels"], pod["metadata"].get("deletionTimestamp")
        if deleted and labels["spottrain.io/job"] == "job" and labels["spottrain.io/attempt"] == "1":
            self.deadlines.append(datetime.fromisoformat(deleted))


@pytest.fixture(scope="module")
def played(
    cluster: Cluster, installed: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp("volumes")
    volumes: list[str] = []
    with new_lab(cluster, installed, {"downloads.py": DOWNLOADS + TRAIN}) as lab:
        doomed = lab.expendable_node()
        seen = Played(lab=lab, doomed=doomed, peaceful=next(n for n in cluster.nodes if n != doomed))
        watch = Watch(lab.kubectl, "pods", seen.on_pod)
        try:
            play(seen, folder, volumes)
            yield seen
        finally:
            watch.stop()
            for volume in volumes:
                lab.kubectl.run("delete", "persistentvolume", volume, "--ignore-not-found", "--wait=false")


def play(seen: Played, folder: Path, volumes: list[str]) -> None:
    """Begins all jobs, takes the node away, and waits for their ends."""
    lab, peace = seen.lab, {"pools": [local_pool(seen.peaceful)]}
    slow = slow_job(lab, "cache", dataCache={"claimRef": {"name": "datasets"}})
    slow["spec"]["template"]["spec"]["containers"][0] |= downloads()
    lab.apply(
        *(drawn_to(seen.doomed, job) for job in (slow_job(lab, "job"), sync_job(lab), slow)),
        lab.job("alone", capacity=peace, training={"maxSteps": 60}),
    )
    lab.wait(
        "a sentence that names the claim",
        lambda: (
            'persistentvolumeclaim "datasets" not found'
            in lab.condition("Scheduled", "cache").get("message", "")
        ),
        name="cache",
    )
    volumes.append(add_volume(lab, folder / "datasets", "datasets"))
    add_claim(lab, "datasets", volumes[0])
    for name in ("job", "cache"):
        lab.wait_for_step(BEGUN, name=name, seconds=240)
    lab.wait(
        "two commits", lambda: lab.status("sync").get("knownDurableStep", 0) >= 2, name="sync", seconds=240
    )
    assert {lab.node_of(name) for name in MOVED} == {seen.doomed}, "one notice is to serve all"
    seen.first_bound = bound(lab.pods()[0])
    seen.published = lab.cluster.reclaim(seen.doomed, NOTICE)
    for name in MOVED:
        lab.wait(f"the end of {name}'s first attempt", partial(first_has_ended, lab, name), name=name)
        seen.ended[name] = now()
    for name in ("alone", *MOVED):
        lab.wait_for_phase("Succeeded", name=name, seconds=240)
        seen.ended.setdefault(name, now())


def first_has_ended(lab: Lab, name: str) -> bool:
    attempts = lab.status(name).get("attempts", [])
    return bool(attempts and attempts[0].get("endTime"))


# --- with a notice --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MOVED)
def test_a_reclaimed_job_ends_on_the_other_node_and_is_charged_nothing(played: Played, name: str) -> None:
    status = played.lab.status(name)
    assert [a["node"] for a in status["attempts"]] == [played.doomed, played.peaceful]
    assert [a["cause"] for a in status["attempts"]] == ["SpotNotice", "Done"]
    assert (status["interruptions"], status.get("failures", 0)) == (1, 0)


@pytest.mark.parametrize("name", ["job", "cache"])
def test_no_step_of_a_reclaimed_job_is_lost(played: Played, name: str) -> None:
    status = played.lab.status(name)
    one, two = status["attempts"]
    assert one["exitCode"] == 75 and "spot" in one["evidence"]
    assert BEGUN <= two["startStep"] == one["lastStep"] == one["durableStep"]
    assert status["output"]["uri"].startswith(played.lab.uri)


def test_the_log_of_a_reclaimed_job_outlives_its_node(played: Played) -> None:
    assert "event=end outcome=interrupted" in played.lab.stored_log(attempt=1), "its last line"


def test_a_notice_too_short_for_the_pods_grace_reaches_the_trainer_as_the_deadline_it_is(
    played: Played,
) -> None:
    told = re.search(r"deadline=(\S+)", played.lab.stored_log(attempt=1))
    assert told is not None
    believed = datetime.fromisoformat(told[1])
    assert abs(believed.timestamp() - (played.published + NOTICE)) <= ROUNDING.total_seconds()
    assert played.deadlines and max(played.deadlines) <= believed + ROUNDING


def test_the_next_attempt_finds_on_another_node_what_the_first_has_downloaded(played: Played) -> None:
    before, after = (played.lab.stored_log(attempt=number, name="cache") for number in (1, 2))
    assert "event=data-cache-filled name=weights" in before
    assert "event=data-cache-hit name=weights" in after and "data-cache-filled" not in after


def test_a_plain_script_goes_on_from_its_last_whole_checkpoint(played: Played) -> None:
    """checkpoint.mode Sync: the script knows nothing of us, and its image has nothing of ours."""
    lab, status = played.lab, played.lab.status("sync")
    one, two = status["attempts"]
    log = lab.log(lab.pods("sync")[-1]["metadata"]["name"]).splitlines()
    begun = int(log[0].split()[2])
    assert 20 <= begun < SYNC_STEPS and begun % 10 == 0 and log[0].endswith("resumed true"), log
    assert log[-1] == "done"
    assert two["startStep"] == one["durableStep"], "by the sidecars' own count of commits"
    assert status["knownDurableStep"] > two["startStep"], "what the script wrote last is stored"


def test_the_bill_of_a_reclaimed_job_is_divided_between_its_attempts(played: Played) -> None:
    status, first = played.lab.status(), played.first_bound
    cost, goodput, attempts = status["cost"], status["goodput"], status["attempts"]
    second = times(played.lab.pods()[-1])
    ledger = played.lab.ledger()
    used = [seconds(first, attempts[0]["endTime"]), seconds(second.bound, second.ended)]
    overlap = max(Decimal(0), seconds(second.bound, attempts[0]["endTime"]))
    assert Decimal(goodput["allocated"]) == sum(used)
    assert Decimal(goodput["wanted"]) == seconds(status["startTime"], second.ended) + overlap
    assert sum(Decimal(goodput[name]) for name in PARTS) == Decimal(goodput["wanted"])
    assert Decimal(goodput["productive"]) >= 3, "12 steps of 250 ms and more"
    assert Decimal(goodput["rollback"]) < 1, "it had saved"
    spent = [Decimal(attempt["spent"]) for attempt in attempts]
    assert sum(spent) == Decimal(cost["spent"])
    sums = [attempt["sums"] for attempt in ledger["attempts"]]
    assert spent[1] == Decimal(sums[1]["useSeconds"]) * DOLLARS_PER_HOUR / 3600
    assert spent[0] >= SHARE * Decimal(used[0]) * DOLLARS_PER_HOUR / 3600
    seen = [seconds(first, played.ended["job"]), seconds(second.bound, now())]
    for each, time, most in zip(sums, used, seen, strict=True):
        assert time <= Decimal(each["useSeconds"]) / SHARE <= most + 1, "until its end was seen"
        assert Decimal(each["onDemandUse"]) == 3 * Decimal(each["use"])
    saving = 100 * (1 - Decimal(cost["spent"]) / Decimal(cost["onDemandIdeal"]))
    assert cost["saving"] == f"{saving:.1f}%"


# --- left in peace --------------------------------------------------------------------------------------
def test_a_job_costs_what_its_times_say_to_the_cent(played: Played) -> None:
    status = played.lab.status("alone")
    cost, pod = status["cost"], times(played.lab.pods("alone")[0])
    spent, use, boot = (Decimal(cost[name]) for name in ("spent", "use", "boot"))
    ledger = played.lab.ledger("alone")
    node = ledger["nodes"][0]
    assert (node["instanceType"], node["capacityType"]) == ("local.gpu", "Spot")
    assert spent == use and boot == Decimal(cost["idle"]) == 0, "its node was there before it"
    most = dollars(pod.bound, played.ended["alone"]) + CENT
    assert dollars(pod.bound, pod.ended) <= use / SHARE <= most, "or the seconds until its end was seen"
    assert Decimal(cost["unknownSeconds"]) == 0
    assert [Decimal(attempt["spent"]) for attempt in status["attempts"]] == [spent]
    assert Decimal(ledger["attempts"][0]["sums"]["onDemandUse"]) == 3 * use


def test_the_time_of_a_job_is_what_its_trainer_measured_and_its_saving_follows(played: Played) -> None:
    status = played.lab.status("alone")
    goodput, cost, pod = status["goodput"], status["cost"], times(played.lab.pods("alone")[0])
    parts = {name: Decimal(goodput[name]) for name in PARTS}
    started, ran = seconds(pod.bound, pod.began), seconds(pod.began, pod.ended)
    assert sum(parts.values()) == Decimal(goodput["wanted"]) == seconds(status["startTime"], pod.ended)
    assert Decimal(goodput["allocated"]) == started + ran
    # Times of Kubernetes are whole seconds: if these are fewer than the trainer's, its report is scaled down.
    measured = Decimal(pod.split.total)
    scale = min(Decimal(1), ran / measured)
    assert measured <= ran + 1, "its process is in its container"
    for name, value in {"productive": pod.split.productive, "dataWait": pod.split.dataWait}.items():
        assert abs(parts[name] - Decimal(value) * scale) <= CENT, name
    assert abs(parts["startup"] - started - Decimal(pod.split.startup) * scale) <= CENT
    assert parts["productive"] >= 3 * scale and parts["rollback"] == 0, "60 steps of 50 ms and more"
    ideal = SHARE * (parts["productive"] + parts["dataWait"]) * ON_DEMAND_DOLLARS_PER_HOUR / 3600
    assert abs(Decimal(cost["onDemandIdeal"]) - ideal) <= CENT
    saving = 100 * (1 - Decimal(cost["spent"]) / Decimal(cost["onDemandIdeal"]))
    assert cost["saving"] == f"{saving:.1f}%"


# --- a trainer that behaves badly -----------------------------------------------------------------------
def test_a_trainer_that_exits_0_on_sigterm_is_no_success(lab: Lab) -> None:
    polite = "trap 'exit 0' TERM; echo ready; while true; do sleep 0.2; done"
    lab.apply(lab.job(container={"command": ["sh", "-c", polite], "args": []}))
    lab.wait("the first pod ready", lambda: lab.pods() and "ready" in running_log(lab))
    lab.kubectl.run("delete", "pod", lab.pods()[0]["metadata"]["name"], "--wait=false")
    status = lab.wait("a second attempt", lambda: (s := lab.status()).get("attempt") == 2 and s)
    assert status["phase"] != "Succeeded"
    assert (status["interruptions"], status.get("failures", 0)) == (1, 0)


def running_log(lab: Lab) -> str:
    pod = lab.pods()[0]
    return lab.log(pod["metadata"]["name"]) if pod["status"].get("phase") == "Running" else ""
