"""`spottrain init` and `submit` with the real kubectl, against a real API server with the operator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from localcluster import layout
from localcluster.apiserver import ApiServer
from spottrain_cli import manifests
from spottrain_cli.migrate.convert import Wishes, convert
from spottrain_operator.names import API_VERSION, KIND

from bench import migrate
from tests.api.kube import Kube, jobs
from tests.api.scene import OperatorProcess, Scene, job_body

Ran = subprocess.CompletedProcess[str]
DRY = "fieldValidation=Strict&dryRun=All"


@pytest.fixture
def command(server: ApiServer, tmp_path: Path) -> Any:
    path = f"{layout.default_paths().bin}{os.pathsep}{os.environ['PATH']}"

    def run(*words: str, kubeconfig: str = str(server.kubeconfig)) -> Ran:
        line = [sys.executable, "-m", "spottrain", *words, "--kubeconfig", kubeconfig]
        env = os.environ | {"PATH": path}
        return subprocess.run(
            line, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )

    return run


def write(folder: Path, body: dict[str, Any]) -> str:
    kind = {"apiVersion": API_VERSION, "kind": KIND}
    (folder / "job.yaml").write_text(yaml.safe_dump(kind | body))
    return "job.yaml"


@pytest.mark.heavy
def test_what_init_makes_of_each_upstream_shape_is_accepted(kube: Kube) -> None:
    for shape in migrate.files():
        made = convert(manifests.read(str(shape)), Wishes()).manifest
        made["metadata"].pop("namespace", None)
        kube.create_job("default", made, query=DRY)


def test_a_manifest_is_checked_said_and_sent_once(
    scene: Scene, command: Any, tmp_path: Path, kube: Kube
) -> None:
    file, where = write(tmp_path, job_body(scene.job)), ("-n", scene.namespace)
    dry: Ran = command("submit", file, *where, "--dry-run", "-o", "json")
    assert json.loads(dry.stdout)["spec"]["capacity"]["type"] == "Spot", "with the API server's defaults"
    assert kube.get(jobs(scene.namespace, scene.job)) is None
    refused: Ran = command("submit", file, *where)
    assert refused.returncode == 2 and "nobody could be asked; --yes confirms it" in refused.stderr
    sent: Ran = command("submit", file, *where, "--yes")
    ref = f"{scene.namespace}/{scene.job}"
    assert (sent.returncode, sent.stdout.split("; ")[0]) == (0, f"{ref} is sent"), sent.stderr
    assert "  checkpoints  s3://bucket/run, every 10m" in sent.stderr.splitlines()
    again: Ran = command("submit", file, *where, "--yes")
    assert again.returncode == 1
    assert again.stderr.startswith(f"spottrain: there is a job {ref} already (`spottrain status {ref}`)")


def test_a_manifest_that_the_api_server_refuses_is_one_sentence(
    namespace: str, command: Any, tmp_path: Path
) -> None:
    body = job_body("bad")
    body["spec"]["checkpoint"]["uri"] = "az://bucket"
    ran: Ran = command("submit", write(tmp_path, body), "-n", namespace, "--yes")
    assert ran.returncode == 2 and "spec.checkpoint.uri: Azure Blob Storage" in ran.stderr
    assert ran.stderr.count("\n") == 1
    ran = command("submit", write(tmp_path, job_body("bad") | {"specs": {}}), "-n", namespace, "--yes")
    assert ran.returncode == 2 and 'unknown field "specs"' in ran.stderr


def test_a_manifest_that_the_operator_refuses_says_why(
    operator: OperatorProcess, command: Any, tmp_path: Path
) -> None:
    body = job_body("refused")
    body["spec"]["template"]["spec"]["nodeName"] = "mine"
    ran: Ran = command("submit", write(tmp_path, body), "-n", operator.namespace, "--yes")
    assert ran.returncode == 2
    assert "does not accept it: spec.template.spec.nodeName must be absent" in ran.stderr
