"""What Prometheus has after a real run with a reclaim is what docs/reference/metrics.md says."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from demo.kubectl import Kubectl
from demo.target import SYSTEM_NAMESPACE

from tests.prometheus.conftest import ALERTS, DASHBOARD, ROOT, Prometheus
from tests.support.lab import Lab, paced

ROW = re.compile(r"^\| `(spottrain_\w+)` \| (\w+) \|", re.MULTILINE)
ONLY_IN_TROUBLE = frozenset({"spottrain_ghosts_dropped_total"})
"""Counters with labels, or of what this run does not have: no series before the first event."""
NOT_ON_A_CPU = {"GPU utilisation", "Model FLOP utilisation"}
"""Panels of what this run does not have."""
MEASURED = (
    "notice_to_signal",
    "signal_to_durable",
    "interruption_to_running",
    "interruption_to_training",
    "start_to_first_step",
)


def documented() -> set[str]:
    """Of the operator."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text().partition("## Each trainer")[0]
    rows = ROW.findall(page)
    return {name + ("_count" if kind == "histogram" else "") for name, kind in rows}


def panels() -> dict[str, list[str]]:
    """The dashboard's queries by the panel's title, as Grafana would ask them."""
    found = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        queries = [target["expr"] for target in panel.get("targets", ())]
        found[panel["title"]] = [
            q.replace("$namespace", ".*").replace("$__rate_interval", "1m") for q in queries
        ]
    return {title: queries for title, queries in found.items() if queries}


def test_a_reclaim_is_told_to_prometheus_and_each_panel_of_the_dashboard_shows_it(
    lab: Lab, prometheus: Prometheus
) -> None:
    began = time.time()

    def counted(name: str) -> float:
        return prometheus.value(f"sum(spottrain_{name}_seconds_count)")

    before = {name: counted(name) for name in MEASURED}
    env = paced(first=0.25, later=0.1)  # so that a poll sees the second attempt train
    lab.apply(lab.slow_job(container={"env": env}))
    lab.wait_for_step(40)
    lab.wait(
        "the trainer's own metrics", lambda: prometheus.value('max(spottrain_step{job="trainers"})') >= 40
    )
    lab.cluster.reclaim(lab.node_of(), 40)
    lab.wait_for_phase("Succeeded", seconds=180)
    lab.wait(
        "both first steps, and the reclaim from end to end",
        lambda: (
            {name: counted(name) - before[name] for name in MEASURED}
            == dict.fromkeys(MEASURED, 1) | {"start_to_first_step": 2}
        ),
    )
    assert prometheus.value("spottrain_notice_to_signal_seconds_sum") < 40
    source = 'spottrain_interruptions_total{cause="SpotNotice",source=~".*spot.*",capacity_type="Spot"}'
    assert prometheus.value(source) >= 1
    wanted = documented() - ONLY_IN_TROUBLE
    lab.wait("every metric, the last with the next resync", lambda: wanted <= prometheus.names(), seconds=400)
    empty = {
        title for title, queries in panels().items() if not all(prometheus.had(q, began) for q in queries)
    }
    assert empty <= NOT_ON_A_CPU


def test_the_alert_rules_are_loaded_and_evaluate(lab: Lab, prometheus: Prometheus) -> None:
    lab.wait(
        "all rules evaluated",
        lambda: (rules := prometheus.rules()) and all(r["health"] != "unknown" for r in rules),
    )
    assert {rule["name"]: rule["health"] for rule in prometheus.rules()} == {
        name: "ok" for name in re.findall(r"- alert: (\w+)", ALERTS.read_text())
    }


@pytest.mark.parametrize("whose", ["operator", "trainer"])
def test_promtool_accepts_the_exposition(whose: str, lab: Lab, installed: Kubectl, programs: Path) -> None:
    if whose == "operator":
        pods = installed.items("pods", "-n", SYSTEM_NAMESPACE, "-l", "app.kubernetes.io/component=operator")
        url = f"http://{pods[0]['status']['podIP']}:8080/metrics"
    else:
        lab.apply(lab.slow_job())
        lab.wait_for_step(2)
        url = f"http://{lab.pods()[-1]['status']['podIP']}:9477/metrics"
    with urllib.request.urlopen(url, timeout=10) as reply:
        exposition = reply.read()
    made = subprocess.run(
        [programs / "promtool", "check", "metrics"], input=exposition, capture_output=True, timeout=60
    )
    assert made.returncode == 0, made.stderr.decode()


def test_the_alert_that_nobody_leads_fires_when_it_should(programs: Path) -> None:
    cases = Path(__file__).with_name("alerts_test.yaml")
    made = subprocess.run([programs / "promtool", "test", "rules", cases], capture_output=True, timeout=60)
    assert made.returncode == 0, (made.stdout + made.stderr).decode()


def test_promtool_accepts_the_alert_rules(programs: Path) -> None:
    made = subprocess.run([programs / "promtool", "check", "rules", ALERTS], capture_output=True, timeout=60)
    assert made.returncode == 0, made.stderr.decode()
