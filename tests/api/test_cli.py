"""The command line with the real kubectl: a person's mistakes, and changes that the API server keeps."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from localcluster import layout
from localcluster.apiserver import ApiServer, api_server
from spottrain.contract import INTERRUPT_ANNOTATION
from spottrain_cli import app
from spottrain_cli.jobs import Job
from spottrain_cli.jobs import job as job_of

from tests.api.kube import MERGE, Kube, jobs, wait_for
from tests.api.scene import Scene, job_body
from tests.support.costs import ENDED
from tests.support.ports import free_port

PATHS = layout.default_paths()


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Ran]


@pytest.fixture
def spottrain(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """The command with a kubeconfig; without one, nothing names a cluster."""
    monkeypatch.setenv("PATH", f"{PATHS.bin}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO())

    def run(*words: str, kubeconfig: Path | None = None) -> Ran:
        code = app.main([*words, *([f"--kubeconfig={kubeconfig}"] if kubeconfig else [])])
        return Ran(code, *capfd.readouterr())

    return run


@pytest.fixture
def command(server: ApiServer, spottrain: Command) -> Command:
    return partial(spottrain, kubeconfig=server.kubeconfig)


def read(kube: Kube, namespace: str, name: str) -> Job:
    raw = kube.get(jobs(namespace, name))
    assert raw is not None
    return job_of(raw, "it")


def refusal(ran: Ran) -> str:
    """The one sentence of a command that was refused."""
    assert not ran.out and ran.err.startswith("spottrain: ") and ran.err.count("\n") == 1, ran.err
    return ran.err.removeprefix("spottrain: ").rstrip("\n")


# --- mistakes -------------------------------------------------------------------------------------------
def test_a_name_that_does_not_exist_is_told_with_those_that_are_alike(
    kube: Kube, namespace: str, command: Command
) -> None:
    kube.create_job(namespace, job_body("bert-large"))
    ran = command("status", f"{namespace}/bert-lrge")
    assert ran.code == 3
    assert refusal(ran) == f"there is no job 'bert-lrge' in namespace {namespace}; did you mean bert-large?"


@pytest.mark.parametrize("words", [["list"], ["status", "gpt"], ["stop", "gpt"], ["cost"]], ids=" ".join)
def test_a_namespace_that_does_not_exist_is_told(kube: Kube, command: Command, words: list[str]) -> None:
    ran = command(*words, "-n", "nowhere")
    assert (ran.code, refusal(ran)) == (3, "there is no namespace nowhere")


def changed(server: ApiServer, folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Path:
    """A kubeconfig whose cluster and user are changed."""
    given = copy.deepcopy(yaml.safe_load(Path(server.kubeconfig).read_text()))
    change(given["clusters"][0]["cluster"], given["users"][0]["user"])
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(given))
    return path


def test_credentials_that_are_not_accepted_are_told(
    server: ApiServer, spottrain: Command, tmp_path: Path
) -> None:
    def expire(cluster: dict[str, Any], user: dict[str, Any]) -> None:
        user.clear()
        user["token"] = "expired"

    for words in (["list"], ["status", "gpt"]):
        ran = spottrain(*words, "-n", "default", kubeconfig=changed(server, tmp_path, expire))
        assert ran.code == 4 and "log in again" in refusal(ran)


def test_a_cluster_that_cannot_be_reached_is_told(
    server: ApiServer, spottrain: Command, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    config = changed(server, tmp_path, lambda cluster, user: cluster.update(server=f"https://{address}"))
    for words in (["list"], ["status", "gpt"], ["watch", "gpt"], ["logs", "-f", "gpt"]):
        ran = spottrain(*words, kubeconfig=config)
        assert ran.code == 4 and f"the cluster at {address} refuses connections" in refusal(ran)


def test_without_a_cluster_it_says_how_to_choose_one(spottrain: Command, tmp_path: Path) -> None:
    ran = spottrain("list")
    assert ran.code == 4 and refusal(ran).startswith("kubectl knows no cluster: log in to one")
    ran = spottrain("list", kubeconfig=tmp_path / "none")
    assert ran.code == 2 and "none: no such file" in refusal(ran)


def test_a_person_without_the_right_is_told_which_one(
    kube: Kube, server: ApiServer, spottrain: Command, tmp_path: Path
) -> None:
    given = yaml.safe_load(Path(server.kubeconfig).read_text())
    given["users"][0]["user"]["as"] = "eve"
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(given))
    ran = spottrain("list", "-n", "default", kubeconfig=path)
    assert ran.code == 4 and 'User "eve" cannot list resource "trainingjobs"' in refusal(ran)


@pytest.mark.heavy
def test_a_cluster_without_spottrain_is_told(spottrain: Command, programs: Path) -> None:
    with api_server(PATHS, programs=programs) as bare:
        for words in (["list"], ["status", "gpt"]):
            ran = spottrain(*words, kubeconfig=bare.kubeconfig)
            assert ran.code == 4 and "spottrain is not installed in it" in refusal(ran)


# --- what is shown, and changed -------------------------------------------------------------------------
def test_the_jobs_of_a_namespace_are_listed_the_newest_first(
    kube: Kube, namespace: str, command: Command
) -> None:
    assert command("list", "-n", namespace).out == f"There is no TrainingJob in namespace {namespace}.\n"
    for name in ("first", "second"):
        kube.create_job(namespace, job_body(name))
        kube.call("PATCH", f"{jobs(namespace, name)}/status", {"status": ENDED}, kind=MERGE)
    head, *rows = command("list", "-n", namespace).out.splitlines()
    assert head.split()[:2] == ["NAME", "PHASE"] and "$12.70" in rows[0]
    assert {row.split()[0] for row in rows} == {"first", "second"}
    everywhere = yaml.safe_load(command("list", "-A", "-o", "yaml").out)["jobs"]
    assert {"first", "second"} <= {job["name"] for job in everywhere if job["namespace"] == namespace}


def test_a_job_is_stopped_and_resumed(kube: Kube, namespace: str, command: Command) -> None:
    kube.create_job(namespace, job_body("gpt"))
    said = command("stop", f"{namespace}/gpt")
    assert said.code == 0 and f"`spottrain resume {namespace}/gpt`" in said.out
    assert read(kube, namespace, "gpt").suspend
    assert "is stopped already" in command("stop", "gpt", "-n", namespace).out
    assert command("resume", "gpt", "-n", namespace).code == 0
    assert not read(kube, namespace, "gpt").suspend
    kube.call("PATCH", f"{jobs(namespace, 'gpt')}/status", {"status": {"phase": "Failed"}}, kind=MERGE)
    ran = command("stop", f"{namespace}/gpt")
    assert (ran.code, refusal(ran)) == (1, f"{namespace}/gpt cannot be stopped: it has ended, Failed")


def test_a_deletion_is_asked_for_and_says_what_stays(kube: Kube, namespace: str, command: Command) -> None:
    kube.create_job(namespace, job_body("gpt"))
    ran = command("delete", f"{namespace}/gpt")
    assert ran.code == 2 and "--yes confirms it" in refusal(ran)
    assert kube.get(jobs(namespace, "gpt")) is not None
    ran = command("delete", f"{namespace}/gpt", "--yes")
    assert ran.code == 0 and "Its checkpoints stay at s3://bucket/run" in ran.out
    wait_for("the job to be gone", lambda: kube.get(jobs(namespace, "gpt")) is None)


def test_a_watch_ends_with_the_job_and_its_exit_code_says_how(
    kube: Kube, namespace: str, command: Command
) -> None:
    for phase, code in (("Succeeded", 0), ("Failed", 1)):
        name = phase.lower()
        kube.create_job(namespace, job_body(name))
        kube.call(
            "PATCH", f"{jobs(namespace, name)}/status", {"status": ENDED | {"phase": phase}}, kind=MERGE
        )
        ran = command("watch", f"{namespace}/{name}")
        assert ran.code == code and f"{namespace}/{name}: {phase}, attempt 2" in ran.out


def test_an_interruption_of_a_job_that_does_not_train_is_refused_by_the_operator(
    scene: Scene, command: Command
) -> None:
    scene.create()
    scene.wait_attempt(1)
    ran = command("interrupt", f"{scene.namespace}/{scene.job}")
    assert ran.code == 1 and "the job does not train" in refusal(ran)
    assert INTERRUPT_ANNOTATION in scene.raw()["metadata"]["annotations"] and scene.pod(1) is not None
    ran = command("logs", f"{scene.namespace}/{scene.job}")
    assert ran.code in (3, 4) and refusal(ran), "no pod has run, and nobody has credentials of the store"
