"""`spottrain rehearse` takes nodes away, and tells a script that survives from one that saves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from localcluster.api import Cluster

from tests.support.lab import TRAIN, Raw

pytestmark = pytest.mark.heavy

FORGETFUL = "import time\nfor _ in range(220):\n    time.sleep(0.1)\n"


def manifest(container: Raw, **spec: Any) -> Raw:
    pod = {"spec": {"containers": [{"name": "trainer", **container}], "nodeSelector": {"cloud": "yes"}}}
    api = {"apiVersion": "spottrain.io/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "mine"}}
    return {**api, "spec": {"gpusPerWorker": 1, "template": pod, **spec}}


def rehearse(cluster: Cluster, folder: Path, job: Raw, *words: str) -> tuple[int, Raw]:
    """Its exit code and its JSON; the cluster of this test stands where that of `make cluster-up` would."""
    (folder / "dev").mkdir()
    (folder / "dev" / "cluster").symlink_to(cluster.paths.state)
    (folder / "job.yaml").write_text(json.dumps(job))
    command = [sys.executable, "-m", "spottrain", "rehearse", str(folder / "job.yaml"), "--output", "json"]
    done = subprocess.run(
        [*command, "--reclaims", "1", "--seed", "3", *words],
        env=os.environ | {"SPOTTRAIN_DEV_DIR": str(folder / "dev")},
        stdout=subprocess.PIPE, text=True, check=False, timeout=400,
    )  # fmt: skip
    found: Raw = json.loads(done.stdout)
    return done.returncode, found


def test_a_script_beside_its_manifest_survives_with_equal_weights(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    job = manifest(
        {
            "image": "team/spottrain-runtime:1",
            "args": ["train.py"],
            "env": [{"name": "PACE", "value": "0.1"}],
        },
        training={"globalBatchSize": 8, "maxSteps": 9000},
        checkpoint={"uri": "s3://team/run"},
    )
    code, found = rehearse(cluster, tmp_path, job, "--max-steps", "120")
    assert (code, found["survived"], found["resultsEqual"]) == (0, True, True), found
    (reclaim,) = found["reclaims"]
    assert (found["steps"], reclaim["cause"], reclaim["stepsLost"]) == (120, "SpotNotice", 0)
    assert 0 < reclaim["noticeToDurableSeconds"] < 30


def test_a_script_that_saves_nothing_is_found_out(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FORGETFUL)
    job = manifest({"image": "team/mine:1", "command": ["python", "train.py"]}, checkpoint={"mode": "Self"})
    code, found = rehearse(cluster, tmp_path, job, "--python", sys.executable)
    assert (code, found["survived"]) == (1, False)
    assert "nothing was saved" in found["verdict"]
