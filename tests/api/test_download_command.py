"""`spottrain checkpoints download JOB` with the real kubectl: a job's name leads to its model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from localcluster import layout
from localcluster.apiserver import ApiServer
from spottrain.checkpoint.head.owner import HeadOwner, Identity
from spottrain.storage.local import FolderStore

from tests.api.kube import Json, Kube
from tests.api.scene import job_body
from tests.support.command import checkpoints
from tests.support.headcheckpoints import save

Download = Callable[..., tuple[int, str, str]]


@pytest.fixture
def download(
    server: ApiServer,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Download:
    monkeypatch.setenv("PATH", f"{layout.default_paths().bin}{os.pathsep}{os.environ['PATH']}")

    def run(job: str) -> tuple[int, str, str]:
        words = ["download", f"{namespace}/{job}", "--to", str(tmp_path / "got")]
        code = checkpoints([*words, "--kubeconfig", str(server.kubeconfig)])
        return code, *capsys.readouterr()

    return run


def create(kube: Kube, namespace: str, name: str, **checkpoint: Any) -> Json:
    return kube.create_job(namespace, job_body(name, checkpoint=checkpoint))


def saves(folder: Path, uid: str, step: int) -> None:
    store = FolderStore(folder)
    store.delete(store.list(""))
    owner = HeadOwner(store, Identity(job_uid=uid, job="ml/gpt", attempt=1))
    owner.claim()
    save(store, owner, step)
    owner.release()


def test_a_job_s_name_leads_to_its_model(
    kube: Kube, namespace: str, download: Download, tmp_path: Path
) -> None:
    job = create(kube, namespace, "gpt", uri=(tmp_path / "run").as_uri())
    saves(tmp_path / "run", "of another job", 5)
    code, _, err = download("gpt")
    assert code == 3 and "has saved nothing yet" in err and "give the URI" in err
    saves(tmp_path / "run", job["metadata"]["uid"], 9)
    code, out, err = download("gpt")
    assert (code, err) == (0, "") and "step 9" in out
    assert (tmp_path / "got" / "model.safetensors").exists()


def test_what_leads_to_no_model_is_one_sentence(kube: Kube, namespace: str, download: Download) -> None:
    create(kube, namespace, "volume", uri="file:///of/the/pods")
    create(kube, namespace, "inside", uri="s3://bucket/run", endpoint="http://minio.nowhere.svc:9000")
    for job, code, says in (
        ("volumes", 3, "did you mean volume?"),
        ("volume", 2, "keeps its checkpoints in /of/the/pods, a volume of its pods"),
        ("inside", 4, "kubectl -n nowhere port-forward service/minio 9000:9000"),
    ):
        found, _, err = download(job)
        assert found == code and says in err and err.count("\n") == 1, err
