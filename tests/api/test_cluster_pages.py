"""The pages on EKS, GKE and AKS, pasted into bash from top to bottom.

kubectl, Helm and the API server are real. What belongs to a cloud answers nothing, and Karpenter's
definitions take any object (those are tried in tests/karpenter).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml
from localcluster import layout
from localcluster.apiserver import api_server, ensure_programs
from localcluster.binaries import API_PROGRAMS

from tests.api.kube import Json, Kube, jobs, wait_for
from tests.support import optional
from tests.support.pages import ROOT, blocks

pytestmark = pytest.mark.heavy
CLOUDS = ("aws", "eksctl", "gcloud", "az", "docker", "pip", "spottrain")
ANSWERS = """#!/bin/sh
case "$*" in
  *get-caller-identity*) echo 123456789012;;
  *projectNumber*) echo 987654321;;
  *--password-stdin*) cat > /dev/null;;
esac
"""
KUBECTL = """#!/bin/sh
exec {bin}/kubectl --kubeconfig {config} "$@"
"""
HELM = """#!/bin/sh
case "$*" in
  "upgrade --install spottrain "*) shift 2; exec {bin}/helm template "$@" > rendered.yaml;;
esac
"""
KARPENTER = {
    "karpenter.sh": ("nodepools", "NodePool"),
    "karpenter.k8s.aws": ("ec2nodeclasses", "EC2NodeClass"),
}


@pytest.fixture(scope="module")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """A cluster of its own, because NodePools would be found by the operator of other tests."""
    paths, folder = layout.default_paths(), tmp_path_factory.mktemp("bin")
    with optional.built():
        ensure_programs(paths, API_PROGRAMS | {"helm"})
    with api_server(programs=paths.bin) as server:
        texts = {"kubectl": KUBECTL, "helm": HELM, **dict.fromkeys(CLOUDS, ANSWERS)}
        for name, text in texts.items():
            (folder / name).write_text(text.format(bin=paths.bin, config=server.kubeconfig))
            (folder / name).chmod(0o755)
        found = Kube.from_kubeconfig(server.kubeconfig)
        found.install(ROOT / "crds" / "trainingjobs.yaml")
        for group, (plural, kind) in KARPENTER.items():
            (folder / f"{plural}.yaml").write_text(yaml.safe_dump(definition(group, plural, kind)))
            found.install(folder / f"{plural}.yaml")
            wait_for(kind, partial(found.answers, f"/apis/{group}/v1/{plural}"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", str(folder), prepend=":")
            yield found


def definition(group: str, plural: str, kind: str) -> Json:
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "names": {"plural": plural, "kind": kind},
            "scope": "Cluster",
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }


@pytest.mark.parametrize("cloud", ["eks", "gke", "aks"])
def test_a_page_pastes_from_top_to_bottom(kube: Kube, cloud: str, tmp_path: Path) -> None:
    (tmp_path / "charts").symlink_to(ROOT / "charts")
    page = f"docs/cluster/{cloud}.md"
    text = "".join(block.text for block in blocks() if block.page == page and block.language == "bash")
    script = "set -euo pipefail\n" + text.replace("NAMESPACE=ml\n", f"NAMESPACE={cloud}\n")
    done = subprocess.run(["bash"], input=script, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert kube.get(jobs(cloud, "first"))
    assert "ValidatingAdmissionPolicy" in (tmp_path / "rendered.yaml").read_text()
