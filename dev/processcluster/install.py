"""spottrain on a cluster of process nodes: the chart by Helm, a bucket, and what jobs leave out."""

from __future__ import annotations

import base64
import os
import subprocess
from pathlib import Path
from typing import Any, Final

from localcluster.api import Cluster
from localcluster.shell import ClusterError, write_json

CHART: Final = Path(__file__).resolve().parents[2] / "charts" / "spottrain"
NAMESPACE: Final = "spottrain-system"
BUCKET: Final = "spottrain"
SECRET: Final = "checkpoint-credentials"
FACTS: Final = "cluster.json"
"""Below the run folder."""
DOLLARS_PER_HOUR: Final = 36
"""Made up: a cent a second, so that the cost of a run of a minute can be seen."""
ON_DEMAND_DOLLARS_PER_HOUR: Final = 108
PRICES: Final = (
    "prices[0].instanceType=local.gpu,prices[0].capacityType=Spot",
    f"prices[0].usdPerHour={DOLLARS_PER_HOUR}",
    "prices[1].instanceType=local.gpu,prices[1].capacityType=OnDemand",
    f"prices[1].usdPerHour={ON_DEMAND_DOLLARS_PER_HOUR}",
)
_SECONDS: Final = 120


def install(cluster: Cluster, *more: str) -> None:
    """Installs or upgrades the chart, with more words for helm, and returns when operator and agents are
    ready.
    """
    (cluster.paths.run / "s3" / BUCKET).mkdir(exist_ok=True)
    settings = [word for value in values(cluster) for word in ("--set", value)]
    command = [
        str(cluster.helm),
        *("upgrade", "--install", "spottrain", str(CHART), "--namespace", NAMESPACE, "--create-namespace"),
        *("--wait", "--timeout", f"{_SECONDS}s"),
        *settings,
        *more,
    ]
    done = subprocess.run(
        command,
        env=environment(cluster),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ClusterError(
            f"helm could not install the chart: {done.stderr.strip()[-1500:]}\nThe operator's log ends:\n"
            + _operators_log(cluster)
        )
    write_json(cluster.paths.run / FACTS, facts(cluster), mode=0o600)


def facts(cluster: Cluster) -> dict[str, str]:
    """What `spottrain rehearse` needs to know of it: to run jobs, to take nodes away, to read results."""
    return {
        "kubeconfig": str(cluster.kubeconfig),
        "kubectl_path": str(cluster.kubectl.resolve()),
        "control": str(cluster.paths.socket),
        "endpoint": cluster.s3_endpoint,
        "bucket": BUCKET,
        "access_key": cluster.s3_access_key,
        "secret_key": cluster.s3_secret_key,
        "region": cluster.s3_region,
    }


def _operators_log(cluster: Cluster) -> str:
    words = ["logs", "-n", NAMESPACE, "deployment/spottrain-operator", "--tail=12"]
    done = subprocess.run(
        [str(cluster.kubectl), *words], env=environment(cluster), capture_output=True, text=True, check=False
    )
    return (done.stdout or done.stderr).strip()


def values(cluster: Cluster) -> list[str]:
    """`--set` of the chart: images of this checkout, one operator, prices, and defaults for jobs."""
    images = ("operator", "runtime", "sync")
    return [
        *(f"image.{name}.tag=checkout" for name in images),
        "operator.replicas=1",
        "defaultPool.platform=AWS",
        f"jobDefaults.checkpointPrefix=s3://{BUCKET}",
        f"jobDefaults.checkpointEndpoint={cluster.s3_endpoint}",
        f"jobDefaults.credentialsSecret={SECRET}",
        *PRICES,
    ]


def credentials(cluster: Cluster) -> dict[str, Any]:
    """The Secret that jobs of a namespace need for the bucket."""
    data = {name: base64.b64encode(value.encode()).decode() for name, value in keys(cluster).items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "data": data}


def keys(cluster: Cluster) -> dict[str, str]:
    """Variables that give access to the bucket."""
    return {"AWS_ACCESS_KEY_ID": cluster.s3_access_key, "AWS_SECRET_ACCESS_KEY": cluster.s3_secret_key}


def environment(cluster: Cluster) -> dict[str, str]:
    """For kubectl and helm: this cluster, and nothing in a person's home."""
    homes = {f"HELM_{kind}_HOME": str(cluster.paths.run / "helm") for kind in ("CACHE", "CONFIG", "DATA")}
    return (
        os.environ | {"KUBECONFIG": str(cluster.kubeconfig), "KUBECACHEDIR": str(cluster.paths.run)} | homes
    )
