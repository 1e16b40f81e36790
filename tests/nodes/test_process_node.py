"""What a process node promises: what it refuses and enforces, its logs, and that nothing of it is left."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from demo.kubectl import Kubectl
from localcluster.api import Cluster
from localcluster.layout import repository
from processcluster import lifecycle, marks

from tests.support.lab import Lab, Raw, new_lab

SECONDS: Final = 180.0
"""For each wait for a program on a busy machine."""
UNFIT: Final = {
    "another-user": ({"securityContext": {"runAsUser": 12345}}, "securityContext.runAsUser 12345"),
    "privileged": ({"securityContext": {"privileged": True}}, "securityContext.privileged"),
    "unknown-image": ({"image": "nginx:1", "imagePullPolicy": "Never"}, 'image "nginx:1"'),
}
COUNTS: Final = """
import pathlib, sys, time
again = pathlib.Path("/state/again")
for number in range(6):
    print(("again" if again.exists() else "first"), number, flush=True)
    time.sleep(0.1)
if not again.exists():
    again.touch()
    sys.exit(3)
"""
GROWS: Final = "import time; held = bytearray(b'x') * 200_000_000; time.sleep(600)"


def pod(name: str, script: str, **container: Any) -> Raw:
    body = {"name": "main", "image": "spottrain-operator:checkout", "command": ["python3", "-c", script]}
    body |= {"volumeMounts": [{"name": "state", "mountPath": "/state"}]} | container
    spec = {
        "containers": [body],
        "volumes": [{"name": "state", "emptyDir": {}}],
        "restartPolicy": "OnFailure" if name == "counts" else "Never",
        "terminationGracePeriodSeconds": 1,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


@pytest.fixture(scope="module")
def pods(cluster: Cluster, installed: Kubectl) -> Iterator[Lab]:
    """Pods and jobs of all kinds, applied at once."""
    with new_lab(cluster, installed, {}) as lab:
        lab.kubectl.apply(
            pod("counts", COUNTS), pod("grows", GROWS, resources={"limits": {"memory": "100Mi"}})
        )
        lab.apply(
            *(lab.job(name, gpusPerWorker=0, container=container) for name, (container, _) in UNFIT.items())
        )
        yield lab


def container_of(lab: Lab, name: str) -> Raw:
    """The status of a plain pod's one container."""
    found = lab.client.get(f"{lab.path}/pods/{name}") or {}
    statuses = found.get("status", {}).get("containerStatuses") or [{}]
    return dict(statuses[0])


# --- what it refuses and enforces ------------------------------------------------------------------------
@pytest.mark.parametrize("name", UNFIT)
def test_what_needs_a_container_is_refused_by_a_condition_of_the_pod_that_its_job_repeats(
    pods: Lab, name: str
) -> None:
    _, words = UNFIT[name]
    said = pods.wait(
        "a condition of the pod",
        lambda: [
            c
            for p in pods.pods(name)
            for c in p["status"].get("conditions", [])
            if (c["type"], c["status"]) == ("spottrain.dev/ProcessNode", "False")
        ],
        name=name,
    )
    assert words in said[0]["message"] and said[0]["reason"] == "NotOnAProcessNode"
    running = pods.wait(
        "a condition of the job",
        lambda: words in (c := pods.condition("Running", name)).get("message", "") and c,
        name=name,
    )
    assert running["status"] == "False"


def test_a_container_over_its_memory_limit_is_killed_as_out_of_memory(pods: Lab) -> None:
    ended = pods.wait(
        "the end of the container", lambda: container_of(pods, "grows").get("state", {}).get("terminated")
    )
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)


def test_kubectl_logs_follows_and_has_the_last_lines_and_those_of_the_container_before(pods: Lab) -> None:
    pods.wait("its second run", lambda: container_of(pods, "counts").get("restartCount") == 1)
    pods.wait("its start", lambda: container_of(pods, "counts").get("containerID"))
    again, first = ([f"{word} {number}" for number in range(6)] for word in ("again", "first"))
    assert pods.kubectl.run("logs", "-f", "counts").splitlines() == again, "until it ends"
    assert pods.kubectl.run("logs", "counts", "--tail=2").splitlines() == again[-2:]
    assert pods.kubectl.run("logs", "counts", "--previous").splitlines() == first


# --- two at the same time, and what a killed one leaves -----------------------------------------------------
HOLDER: Final = """
import time
from processcluster import lifecycle
with lifecycle.temporary_cluster() as running:
    print(running.cluster.kubeconfig, running.process.pid, flush=True)
    time.sleep(3600)
"""


@dataclass(kw_only=True)
class Program:
    """A Python program with a folder of its own for temporary files, by which its clusters are found."""

    words: list[str]
    folder: Path
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        paths = f"{repository() / 'dev'}:{repository() / 'operator'}:{repository() / 'runtime'}"
        with self.said.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-u", *self.words],
                env=os.environ | {"PYTHONPATH": paths, "TMPDIR": str(self.folder)},
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=out, text=True,
            )  # fmt: skip

    @property
    def said(self) -> Path:
        return self.folder / "stderr"

    def wait_for(self, what: str, found: Callable[[], Any]) -> Any:
        end = time.monotonic() + SECONDS
        while not (value := found()):
            assert time.monotonic() < end, (
                f"{what} did not come within {SECONDS:.0f} s:\n{self.said.read_text()}"
            )
            time.sleep(0.1)
        return value

    def says(self, words: str) -> None:
        self.wait_for(repr(words), lambda: words in self.said.read_text())

    def ends(self) -> tuple[int, list[str]]:
        """Its exit code, and what it said on standard error."""
        self.process.communicate(timeout=SECONDS)
        return self.process.returncode, self.said.read_text().splitlines()

    def left(self) -> list[int]:
        """Processes of its clusters."""
        mark = f"{marks.CLUSTER}={self.folder}/".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state != "Z" and any(variable.startswith(mark) for variable in variables):
                found.append(int(entry.name))
        return found


@pytest.fixture
def program() -> Iterator[Callable[..., Program]]:
    """Starts programs, and ends those that a test has left."""
    started: list[Program] = []

    def start(*words: str) -> Program:
        folder = Path(tempfile.mkdtemp(prefix="left-"))  # pytest's own is too long for a socket's path
        started.append(Program(words=list(words), folder=folder))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()
        for pid in one.left():
            marks.kill(pid)
        shutil.rmtree(one.folder, ignore_errors=True)


def _swept(holder: Program) -> bool:
    lifecycle.sweep()
    return not holder.left()


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.heavy
def test_two_clusters_do_not_meet_and_a_killed_one_is_gone_with_the_next_start(
    cluster: Cluster, installed: Kubectl, program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = program("-c", HOLDER)
    assert holder.process.stdout is not None
    kubeconfig, supervisor = holder.process.stdout.readline().split()
    other = Kubectl(
        binary=installed.binary, helm_binary="", kubeconfig=kubeconfig, namespace=installed.namespace
    )
    installed.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine"}})
    assert other.get("configmap", "mine") is None and installed.get("configmap", "mine")
    addresses = [
        {n["status"]["addresses"][0]["address"] for n in k.items("nodes")} for k in (installed, other)
    ]
    assert len(addresses[0]) == len(addresses[1]) == 2 and not addresses[0] & addresses[1]
    # A process of a pod that its cluster's programs do not bring down with them:
    escaped = {"command": ["sh", "-c", "setsid sleep 3600 & echo begun; wait"]}
    other.apply(pod("escapes", "", **escaped))
    holder.wait_for("the pod's line", lambda: "begun" in _log_of(other, "escapes"))

    kept = holder.folder / "kubeconfig"
    shutil.copy(kubeconfig, kept)
    other = dataclasses.replace(other, kubeconfig=str(kept))
    assert other.items("nodes")
    os.kill(int(supervisor), signal.SIGKILL)
    holder.process.kill()
    holder.process.wait()
    holder.wait_for("the supervisor's end, which frees the folder", lambda: _has_ended(int(supervisor)))
    monkeypatch.setattr(tempfile, "tempdir", str(holder.folder))
    assert list(holder.folder.glob("spottrain-*"))
    # A start that comes while its last processes are being killed leaves them to the one after it.
    holder.wait_for("the end of all that it left", lambda: _swept(holder))
    assert not list(holder.folder.glob("spottrain-*"))
    with pytest.raises(RuntimeError):  # its network may be another cluster's by now, which does not know us
        other.items("nodes")
    assert cluster.status()["spot-a"]["up"], "the first one goes on"


def _log_of(kubectl: Kubectl, name: str) -> str:
    try:
        return kubectl.run("logs", name)
    except RuntimeError:  # it has not started
        return ""


# --- Ctrl-C and SIGTERM of the demo ------------------------------------------------------------
def stopped(demo: Program) -> list[str]:
    """What it said, after checking how it ended."""
    code, lines = demo.ends()
    assert code == 130, "\n".join(lines)
    assert "Traceback" not in "\n".join(lines)
    assert lines[-1].startswith("demo: stopped.") and sum("stopped." in line for line in lines) == 1
    return lines


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_the_demos_cluster_starts_leaves_nothing(
    program: Callable[..., Program], times: int
) -> None:
    demo = program("-m", "demo")
    demo.says("Starting etcd")
    demo.wait_for("a process of its cluster", demo.left)
    for _ in range(times):
        demo.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    stopped(demo)
    demo.wait_for("the end of its cluster", lambda: not demo.left())
    assert not list(demo.folder.glob("spottrain-*"))


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_demo_that_is_ended_midway_leaves_nothing(
    program: Callable[..., Program], number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = program("-m", "demo")
    demo.wait_for("a trainer", lambda: _trains(demo))
    demo.process.send_signal(number)
    if number != signal.SIGKILL:
        stopped(demo)
        assert demo.left() == []
    else:
        demo.process.wait()
        demo.wait_for("the end of its cluster", lambda: not demo.left())
        monkeypatch.setattr(tempfile, "tempdir", str(demo.folder))
        lifecycle.sweep()
    assert not list(demo.folder.glob("spottrain-*"))


def _trains(demo: Program) -> bool:
    for pid in demo.left():
        try:
            if b"/gpt" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False


@pytest.mark.parametrize("kind", ["nonsense"])
def test_a_demo_that_cannot_run_says_so_in_one_sentence(program: Callable[..., Program], kind: str) -> None:
    demo = program(
        "-c",
        f"import os, sys; os.environ['CLUSTER'] = '{kind}'; from demo.__main__ import main; sys.exit(main())",
    )
    code, lines = demo.ends()
    assert code == 2 and len(lines) == 1 and kind in lines[0], lines
