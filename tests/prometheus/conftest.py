"""A real Prometheus beside the real cluster: it finds the operator and the trainers and scrapes them.

A level of its own, because Prometheus is built for it: `make test-with X=prometheus`.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from demo.kubectl import Kubectl
from demo.target import SYSTEM_NAMESPACE
from localcluster import layout
from localcluster.api import Cluster
from localcluster.apiserver import ensure_programs, running
from localcluster.binaries import PROMETHEUS_PROGRAMS

from tests.nodes.conftest import cluster, installed, lab
from tests.support import optional
from tests.support.lab import Lab
from tests.support.ports import free_port

__all__ = ["cluster", "installed", "lab"]
ROOT: Final = Path(__file__).resolve().parents[2]
DASHBOARD: Final = ROOT / "charts" / "spottrain" / "files" / "dashboard.json"
ALERTS: Final = ROOT / "charts" / "spottrain" / "files" / "alerts.yaml"


def missing(platform: str) -> str:
    """What this machine lacks; empty if nothing."""
    return "" if platform == "linux" else "tests/prometheus needs Linux, for its cluster of process nodes"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    optional.require(config, items, Path(__file__).parent, missing(sys.platform))


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of `prometheus` and `promtool`."""
    paths = layout.default_paths()
    with optional.built():
        ensure_programs(paths, PROMETHEUS_PROGRAMS)
    return paths.bin


@dataclass(frozen=True, kw_only=True)
class Prometheus:
    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that the expression has now."""
        answer = self._get("/api/v1/query", query=expression)
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def value(self, expression: str) -> float:
        """The one value; 0.0 where there is no series yet."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else 0.0

    def had(self, expression: str, since: float) -> bool:
        """Whether the expression has had a value since then (Unix seconds)."""
        answer = self._get(
            "/api/v1/query_range", query=expression, start=f"{since}", end=f"{time.time()}", step="2"
        )
        return bool(answer["data"]["result"])

    def names(self) -> set[str]:
        """Of all metrics that were scraped."""
        return set(self._get("/api/v1/label/__name__/values")["data"])

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("/api/v1/rules")["data"]["groups"] for rule in group["rules"]]

    def _get(self, path: str, **query: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=10) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer


@pytest.fixture
def prometheus(
    lab: Lab, installed: Kubectl, cluster: Cluster, programs: Path, tmp_path: Path
) -> Iterator[Prometheus]:
    """Scrapes each second, and evaluates the chart's alert rules."""
    config = tmp_path / "prometheus.yml"
    config.write_text(yaml.safe_dump(_config(cluster, lab.kubectl.namespace)))
    port = free_port()
    command: list[str | Path] = [
        programs / "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with running(command, tmp_path / "prometheus.log"):
        found = Prometheus(url=f"http://127.0.0.1:{port}")
        lab.wait("Prometheus to scrape the operator", lambda: _scraped(found))
        yield found


def _scraped(prometheus: Prometheus) -> bool:
    try:
        return prometheus.value('up{job="operator"}') == 1
    except OSError:  # it does not listen yet
        return False


def _config(cluster: Cluster, namespace: str) -> dict[str, Any]:
    """Finds pods as the chart's PodMonitors do: the operator, and rank 0 of each attempt, by their labels."""

    def pods(of: str) -> list[dict[str, Any]]:
        names = {"names": [of]}
        return [{"role": "pod", "kubeconfig_file": str(cluster.kubeconfig), "namespaces": names}]

    def keep(label: str, value: str) -> dict[str, Any]:
        return {"source_labels": [label], "regex": value, "action": "keep"}

    operator = [
        keep("__meta_kubernetes_pod_label_app_kubernetes_io_component", "operator"),
        keep("__meta_kubernetes_pod_container_port_name", "http"),
    ]
    trainers = [
        keep("__meta_kubernetes_pod_label_spottrain_io_rank", "0"),
        keep("__meta_kubernetes_pod_phase", "Running"),
        {
            "source_labels": ["__meta_kubernetes_pod_ip"],
            "replacement": "$1:9477",
            "target_label": "__address__",
        },
    ]
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {
                "job_name": "operator",
                "kubernetes_sd_configs": pods(SYSTEM_NAMESPACE),
                "relabel_configs": operator,
            },
            {
                "job_name": "trainers",
                "kubernetes_sd_configs": pods(namespace),
                "relabel_configs": trainers,
            },
        ],
    }
