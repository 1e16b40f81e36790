"""The chart's NetworkPolicies let through what spottrain needs, and its metrics are where the switches say.

The policies are judged here by the rules of the Kubernetes documentation: no network plugin is involved.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from spottrain.contract import PROGRESS_PORT
from spottrain_operator.api.template import PROGRESS_NAME
from spottrain_operator.names import (
    MANAGED_BY,
    MANAGED_BY_LABEL,
    POD_SELECTOR,
    RENDEZVOUS_PORT,
    ROLE_LABEL,
    ROLE_TRAINER,
)
from spottrain_operator.settings import Settings

from tests.support.helm import NAMESPACE, Object, find, render, template

TRAINERS = ("networkPolicy.trainers.enabled=true", 'networkPolicy.trainers.namespaces=["ml","other"]')
PROMETHEUS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
READABLE = f"metrics.from={json.dumps([PROMETHEUS])}"
METRICS_PORT = Settings().health_port
ANY_PORT = 34567
"""NCCL and Gloo choose their ports."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A pod, or with namespace "" an address outside the cluster's pods."""

    namespace: str
    labels: dict[str, str] = field(default_factory=dict)


def component(name: str) -> Place:
    labels = {"app.kubernetes.io/name": "spottrain", "app.kubernetes.io/instance": "spottrain"}
    return Place(namespace=NAMESPACE, labels=labels | {"app.kubernetes.io/component": name})


def trainer(namespace: str = "ml") -> Place:
    return Place(
        namespace=namespace, labels={MANAGED_BY_LABEL: MANAGED_BY, ROLE_LABEL: ROLE_TRAINER, "x": "y"}
    )


OUTSIDE = Place(namespace="")
STRANGER = Place(namespace="ml", labels={"app": "web"})
MONITORING = Place(namespace="monitoring")


def selects(selector: Object, labels: dict[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}, "this judge knows no expressions"
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def is_peer(peer: Object, other: Place, home: str) -> bool:
    assert peer.keys() <= {"podSelector", "namespaceSelector"}
    if not other.namespace:
        return False
    if "namespaceSelector" in peer:
        named = {"kubernetes.io/metadata.name": other.namespace}
        if not selects(peer["namespaceSelector"], named):
            return False
    elif other.namespace != home:
        return False
    return selects(peer.get("podSelector", {}), other.labels)


def is_port(rule: Object, port: int, protocol: str) -> bool:
    ports = rule.get("ports")
    return not ports or any(p["port"] == port and p.get("protocol", "TCP") == protocol for p in ports)


def one_way(policies: list[Object], kind: str, own: Place, other: Place, port: int, protocol: str) -> bool:
    """Whether the policies of one side, "Ingress" or "Egress", admit a connection; without any, they do."""
    peers = {"Ingress": "from", "Egress": "to"}[kind]
    governing = [
        p["spec"]
        for p in policies
        if p["metadata"].get("namespace", NAMESPACE) == own.namespace
        and selects(p["spec"]["podSelector"], own.labels)
        and kind in p["spec"]["policyTypes"]
    ]
    rules = [rule for spec in governing for rule in spec.get(kind.lower()) or []]
    return not governing or any(
        is_port(rule, port, protocol)
        and (peers not in rule or any(is_peer(peer, other, own.namespace) for peer in rule[peers]))
        for rule in rules
    )


@dataclass(frozen=True)
class Network:
    policies: list[Object]

    def admits(self, source: Place, target: Place, port: int, protocol: str = "TCP") -> bool:
        out = one_way(self.policies, "Egress", source, target, port, protocol)
        return out and one_way(self.policies, "Ingress", target, source, port, protocol)


def network(*settings: str) -> Network:
    return Network([o for o in render(*settings) if o["kind"] == "NetworkPolicy"])


# --- the operator ---------------------------------------------------------------------------------------
def test_nobody_reads_the_operators_metrics_unless_named() -> None:
    assert not network().admits(MONITORING, component("operator"), METRICS_PORT)
    named = network(f"metrics.from={json.dumps([PROMETHEUS])}")
    assert named.admits(MONITORING, component("operator"), METRICS_PORT)
    assert not named.admits(MONITORING, component("operator"), 22)
    assert not named.admits(STRANGER, component("operator"), METRICS_PORT)
    assert network("networkPolicy.operator.enabled=false").policies == []


def test_by_default_the_operator_connects_to_anything() -> None:
    assert network().admits(component("operator"), OUTSIDE, 12345)


def test_a_restricted_operator_reaches_what_it_needs() -> None:
    narrow = network("networkPolicy.operator.restrictEgress=true", *TRAINERS)
    for port in (443, 6443):
        assert narrow.admits(component("operator"), OUTSIDE, port)
    for protocol in ("UDP", "TCP"):
        assert narrow.admits(component("operator"), Place(namespace="kube-system"), 53, protocol)
    assert narrow.admits(component("operator"), trainer(), PROGRESS_PORT)
    assert not narrow.admits(component("operator"), STRANGER, PROGRESS_PORT)
    assert not narrow.admits(component("operator"), OUTSIDE, 12345)
    other = network(
        "networkPolicy.operator.restrictEgress=true", "networkPolicy.operator.apiServerPorts=[16443]"
    )
    assert other.admits(component("operator"), OUTSIDE, 16443)
    assert not other.admits(component("operator"), OUTSIDE, 6443)


def test_nobody_connects_to_the_price_job_which_asks_the_cloud() -> None:
    priced = network("priceJob.enabled=true", "networkPolicy.operator.restrictEgress=true")
    assert not priced.admits(MONITORING, component("price-job"), 80)
    assert priced.admits(component("price-job"), OUTSIDE, 443)


# --- trainers -------------------------------------------------------------------------------------------
def test_a_job_of_two_ranks_trains_under_the_policy() -> None:
    closed = network(*TRAINERS)
    for port in (RENDEZVOUS_PORT, ANY_PORT):
        assert closed.admits(trainer(), trainer(), port), "rendezvous, then NCCL or Gloo"
    assert closed.admits(component("operator"), trainer(), PROGRESS_PORT)
    assert closed.admits(trainer(), Place(namespace="kube-system"), 53, "UDP")
    assert closed.admits(trainer(), OUTSIDE, 443), "its store, and its data"


def test_others_do_not_reach_a_trainer_nor_it_them() -> None:
    closed = network(*TRAINERS)
    for port in (PROGRESS_PORT, RENDEZVOUS_PORT, ANY_PORT):
        assert not closed.admits(STRANGER, trainer(), port)
        assert not closed.admits(trainer("other"), trainer(), port), "another namespace's job"
        assert not closed.admits(trainer(), STRANGER, port)
    assert not closed.admits(component("operator"), trainer(), ANY_PORT)
    assert not closed.admits(MONITORING, trainer(), PROGRESS_PORT)
    assert not closed.admits(trainer(), OUTSIDE, 6443), "the API server, behind its Service"
    assert not closed.admits(trainer(), OUTSIDE, 80), "the instance metadata service"


def test_what_a_team_adds_is_reached() -> None:
    store = {"to": [{"namespaceSelector": {}}], "ports": [{"port": 9000}]}
    added = network(
        *TRAINERS,
        f"networkPolicy.trainers.extraEgress={json.dumps([store])}",
        f"metrics.from={json.dumps([PROMETHEUS])}",
    )
    assert added.admits(trainer(), STRANGER, 9000)
    assert added.admits(MONITORING, trainer(), PROGRESS_PORT)
    assert network(*TRAINERS, "networkPolicy.trainers.restrictEgress=false").admits(trainer(), OUTSIDE, 6443)


def test_the_trainers_policy_follows_the_watched_namespaces() -> None:
    watched = network('watchNamespaces=["ml"]', "networkPolicy.trainers.enabled=true")
    places = {p["metadata"].get("namespace", NAMESPACE) for p in watched.policies}
    assert places == {"ml", NAMESPACE}


# --- metrics --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def monitored() -> list[Object]:
    return render(
        "metrics.service.enabled=true",
        "metrics.podMonitor.enabled=true",
        "metrics.podMonitor.trainers=true",
        'metrics.podMonitor.labels={"release":"prometheus"}',
        READABLE,
    )


def test_without_the_switches_there_is_neither_service_nor_pod_monitor() -> None:
    assert not {"Service", "PodMonitor"} & {o["kind"] for o in render()}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("metrics.service.enabled=true",), "networkPolicy.operator lets nobody read metrics"),
        (("metrics.podMonitor.enabled=true",), "networkPolicy.operator lets nobody read metrics"),
        (
            (
                "metrics.podMonitor.enabled=true",
                "metrics.podMonitor.trainers=true",
                "networkPolicy.operator.enabled=false",
                *TRAINERS,
            ),
            "networkPolicy.trainers lets only the operator read metrics",
        ),
    ],
    ids=["service", "pod monitor", "trainers"],
)
def test_a_prometheus_that_our_own_policy_would_cut_off_is_refused_with_a_sentence(
    settings: tuple[str, ...], says: str
) -> None:
    done = template(*settings)
    assert done.returncode and says in done.stderr
    assert template(*settings, READABLE).returncode == 0
    open_to_all = ("networkPolicy.operator.enabled=false", "networkPolicy.trainers.enabled=false")
    assert template(*settings, *open_to_all).returncode == 0


def test_service_and_pod_monitor_select_the_operator(monitored: list[Object]) -> None:
    pod = find(monitored, "Deployment", "spottrain-operator")["spec"]["template"]
    (port,) = pod["spec"]["containers"][0]["ports"]
    service = find(monitored, "Service", "spottrain-operator-metrics")["spec"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["ports"] == [{"name": "http", "port": METRICS_PORT, "targetPort": port["name"]}]
    monitor = find(monitored, "PodMonitor", "spottrain-operator")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert [e["port"] for e in monitor["spec"]["podMetricsEndpoints"]] == [port["name"]]


def test_the_trainers_pod_monitor_selects_trainers_by_the_port_that_they_serve(
    monitored: list[Object],
) -> None:
    spec = find(monitored, "PodMonitor", "spottrain-trainers")["spec"]
    labels = spec["selector"]["matchLabels"]
    assert ",".join(f"{k}={v}" for k, v in labels.items()) == POD_SELECTOR
    assert [e["port"] for e in spec["podMetricsEndpoints"]] == [PROGRESS_NAME]
    assert spec["namespaceSelector"] == {"any": True}
    narrow = render(
        "metrics.podMonitor={'enabled':true}".replace("'", '"'),
        "metrics.podMonitor.trainers=true",
        'watchNamespaces=["ml"]',
        READABLE,
    )
    found = find(narrow, "PodMonitor", "spottrain-trainers")["spec"]["namespaceSelector"]
    assert found == {"matchNames": ["ml"]}
