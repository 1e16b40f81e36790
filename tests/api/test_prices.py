"""The price CronJob on a real API server, with the chart's objects and account; the cloud is a stub."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from localcluster import layout
from localcluster.apiserver import ApiServer
from spottrain_operator.api.prices import PriceList, parse
from spottrain_operator.environment import Endpoint
from spottrain_operator.io.price_file import PriceFiles
from spottrain_operator.names import SERVICE_ACCOUNT_VARIABLE, Platform
from spottrain_prices import __main__ as program
from spottrain_prices.__main__ import Job
from spottrain_prices.cluster import Cluster
from spottrain_prices.settings import PREFIX, Settings
from spottrain_prices.web import Failed

from tests.api.kube import MERGE, Json, Kube
from tests.support.helm import CHART
from tests.support.pricestub import PriceStub, meter, price_stub, product

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
RELEASE = "spottrain-prices"
"""Not "spottrain": roles of the whole cluster have the release's name, and other tests need those."""
ACCOUNT = f"{RELEASE}-price-job"
CONFIG_MAP = f"{RELEASE}-fetched-prices"
P4D, ZONE = "p4d.24xlarge", "us-east-1b"


def helm(server: ApiServer, *words: str | Path) -> None:
    command = [layout.default_paths().bin / "helm", "--kubeconfig", server.kubeconfig, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def upgrade(server: ApiServer, namespace: str, *settings: str) -> None:
    sets = [word for setting in ("priceJob.enabled=true", *settings) for word in ("--set-json", setting)]
    off = ("--set", "crds.enabled=false", "--set", "agent.enabled=false")
    helm(server, "upgrade", "--install", RELEASE, CHART, "-n", namespace, *off, *sets)


@dataclass
class Release:
    """The chart and its price job."""

    kube: Kube
    server: ApiServer
    namespace: str
    folder: Path
    changed: bool = False
    """Whether it must be upgraded to be what the other tests expect."""

    def upgrade(self, *settings: str) -> None:
        self.changed = bool(settings)
        upgrade(self.server, self.namespace, *settings)

    def empty_config_map(self) -> None:
        """As it is after the installation, whatever a test has made of it."""
        body = {"metadata": {"labels": {"theirs": None}}, "data": None}
        self.kube.call("PATCH", self.path, body, kind=MERGE)

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/configmaps/{CONFIG_MAP}"

    def endpoint(self) -> Endpoint:
        """As the kubelet mounts it: the account's own token, and whom to trust."""
        path = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{ACCOUNT}/token"
        token = self.kube.call("POST", path, {"spec": {"expirationSeconds": 600}})["status"]["token"]
        (self.folder / "token").write_text(token)
        return Endpoint(url=self.server.url, token_file=self.folder / "token", ca_file=self.authority)

    @property
    def authority(self) -> Path:
        return self.server.logs / "pki" / "ca.crt"

    def run(self, *, now: datetime = NOW, cluster: Cluster | None = None, **given: Any) -> list[str]:
        base: dict[str, Any] = {
            "provider": Platform.AWS,
            "namespace": self.namespace,
            "config_map": CONFIG_MAP,
            "regions": ("us-east-1",),
            "instance_types": (P4D,),
        }
        settings = Settings(**(base | given))
        return Job(settings=settings, cluster=cluster or Cluster(self.endpoint()), now=now).run()

    def written(self) -> str:
        found = self.kube.call("GET", self.path)
        return str((found.get("data") or {}).get("prices.json", ""))

    def prices(self) -> PriceList:
        """As the operator reads them."""
        found = parse(self.written())
        assert not found.problems
        return found

    def spot(self, at: datetime = NOW) -> Decimal | None:
        rate = self.prices().rate(P4D, "Spot", ZONE, at)
        return rate.usd_per_hour if rate else None


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[PriceStub]:
    for name, value in {
        "ACCESS_KEY_ID": "test",
        "SECRET_ACCESS_KEY": "test",
        "EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with price_stub() as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
        running.zones = {ZONE: "availability-zone"}
        running.products = {P4D: [product("21.957642")]}
        running.spot = [(P4D, ZONE, "8.19", "2026-11-23T10:00:00Z")]
        yield running


@pytest.fixture(scope="module")
def installed(kube: Kube, server: ApiServer) -> str:
    """The namespace with the chart."""
    kube.make_namespace("prices")
    upgrade(server, "prices")
    return "prices"


@pytest.fixture
def release(kube: Kube, server: ApiServer, installed: str, tmp_path: Path) -> Iterator[Release]:
    """Its ConfigMap is empty."""
    made = Release(kube=kube, server=server, namespace=installed, folder=tmp_path)
    made.empty_config_map()
    yield made
    if made.changed:
        made.upgrade()


@pytest.fixture
def node(kube: Kube) -> Iterator[None]:
    """One of a type and in a zone that have prices."""
    labels = {
        "node.kubernetes.io/instance-type": P4D,
        "topology.kubernetes.io/region": ZONE[:-1],
        "topology.kubernetes.io/zone": ZONE,
    }
    meta, spec = {"name": "priced", "labels": labels}, {"providerID": f"aws:///{ZONE}/i-priced"}
    kube.call("POST", "/api/v1/nodes", {"metadata": meta, "spec": spec})
    yield
    kube.call("DELETE", "/api/v1/nodes/priced")


@pytest.mark.usefixtures("node")
def test_the_prices_of_the_nodes_reach_the_operator_and_own_rates_count_before_them(
    release: Release, stub: PriceStub, tmp_path: Path
) -> None:
    assert release.run(regions=(), instance_types=()) == []
    own, fetched = tmp_path / "prices.json", tmp_path / "fetched.json"
    own.write_text("[]")
    read = PriceFiles(own, fetched)
    assert not read().rates
    fetched.write_text(release.written())
    hour = read().cost(P4D, "Spot", ZONE, NOW - timedelta(hours=1), NOW)
    assert (hour.usd, hour.unknown_seconds) == (Decimal("8.19"), Decimal(0))
    assert read().cost(P4D, "OnDemand", ZONE, NOW, NOW + timedelta(hours=2)).usd == Decimal("43.915284")
    own.write_text(json.dumps([{"instanceType": P4D, "capacityType": "OnDemand", "usdPerHour": 15}]))
    assert read().cost(P4D, "OnDemand", ZONE, NOW, NOW + timedelta(hours=2)).usd == 30
    assert read().cost(P4D, "Spot", ZONE, NOW, NOW + timedelta(hours=1)).usd == Decimal("8.19")


def test_a_run_that_fails_keeps_what_was_written_until_it_is_a_day_old(
    release: Release, stub: PriceStub
) -> None:
    assert release.run() == []
    stub.refuse = {
        "DescribeSpotPriceHistory": (403, "UnauthorizedOperation"),
        "GetProducts": (400, "Throttled"),
    }
    errors = release.run(now=NOW + timedelta(hours=1))
    assert len(errors) == 2 and "the role must allow ec2:DescribeSpotPriceHistory" in errors[0]
    assert release.spot(NOW + timedelta(hours=23)) == Decimal("8.19")
    assert release.spot(NOW + timedelta(hours=25)) is None, "an hour more would be a price that nobody saw"
    stub.refuse = {"GetProducts": (400, "Throttled")}
    stub.spot.insert(0, (P4D, ZONE, "9.5", "2026-11-23T12:30:00Z"))
    assert len(release.run(now=NOW + timedelta(hours=2))) == 1, "what was found is written all the same"
    assert release.spot(NOW + timedelta(hours=25)) == Decimal("9.5") and release.spot() == Decimal("8.19")


class Raced(Cluster):
    """Somebody changes the ConfigMap each time after it was read, so often."""

    def __init__(self, release: Release, times: int) -> None:
        super().__init__(release.endpoint())
        self._release, self._times, self.raced = release, times, 0

    def replace_config_map(self, body: Json) -> None:
        if self.raced < self._times:
            self.raced += 1
            change = {"metadata": {"labels": {"theirs": str(self.raced)}}, "data": {"note": "theirs"}}
            self._release.kube.call("PATCH", self._release.path, change, kind=MERGE)
        super().replace_config_map(body)


def test_a_change_by_somebody_else_is_not_overwritten(release: Release, stub: PriceStub) -> None:
    assert release.run(cluster=Raced(release, 2)) == []
    found = release.kube.call("GET", release.path)
    assert found["metadata"]["labels"]["theirs"] == "2" and found["data"]["note"] == "theirs"
    assert release.spot() == Decimal("8.19")


def test_a_config_map_that_never_stands_still_is_given_up(release: Release, stub: PriceStub) -> None:
    raced = Raced(release, 99)
    (error,) = release.run(cluster=raced)
    assert error.startswith(
        f"failed to write the prices: PUT {release.server.url}{release.path}: replied 409: "
    )
    assert raced.raced == 5 and not release.written()


def test_an_upgrade_of_the_chart_keeps_the_prices(release: Release, stub: PriceStub) -> None:
    assert release.run() == []
    before = release.written()
    release.upgrade("priceJob.historyDays=3", 'podAnnotations={"a":"b"}')
    assert release.written() == before != ""


def test_the_account_reaches_its_own_config_map_alone(release: Release, stub: PriceStub) -> None:
    other = {"metadata": {"name": "theirs"}, "data": {"a": "b"}}
    release.kube.call("POST", f"/api/v1/namespaces/{release.namespace}/configmaps", other)
    (error,) = release.run(config_map="theirs")
    assert error.startswith("failed to write the prices: GET ") and "replied 403: " in error
    assert "the chart's roles allow it with priceJob.enabled" in error
    account = Cluster(release.endpoint())
    for method, path in (
        ("GET", f"/api/v1/namespaces/{release.namespace}/configmaps"),
        ("GET", f"/api/v1/namespaces/{release.namespace}/secrets"),
        ("GET", "/api/v1/pods"),
        ("DELETE", release.path),
        ("POST", f"/api/v1/namespaces/{release.namespace}/configmaps"),
    ):
        with pytest.raises(Failed, match="replied 403"):
            account._call(method, path, other if method == "POST" else None)


def test_without_the_right_to_list_nodes_the_listed_types_are_priced(
    release: Release, stub: PriceStub
) -> None:
    release.upgrade("priceJob.fromNodes=false", 'priceJob.regions=["r"]', 'priceJob.instanceTypes=["t"]')
    (error,) = release.run()
    said, _, why = error.partition(": GET ")
    assert said == "failed to list the nodes, so their instance types have no price"
    assert why.startswith(f"{release.server.url}/api/v1/nodes: replied 403: ")
    assert release.spot() == Decimal("8.19")
    assert release.run(from_nodes=False) == []


def test_a_config_map_that_is_gone_is_a_sentence(release: Release, stub: PriceStub) -> None:
    release.kube.call("DELETE", release.path)
    release.changed = True
    (error,) = release.run()
    assert "replied 404" in error and "`helm upgrade` with priceJob.enabled makes it" in error


def test_a_text_that_is_no_price_list_is_replaced_and_the_rest_of_the_config_map_kept(
    release: Release, stub: PriceStub, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"data": {"prices.json": "{", "note": "theirs"}}
    release.kube.call("PATCH", release.path, body, kind=MERGE)
    assert release.run() == [] and release.spot() == Decimal("8.19")
    assert release.kube.call("GET", release.path)["data"]["note"] == "theirs"
    assert "the price list is not JSON" in capsys.readouterr().out


def test_the_largest_list_that_is_written_fits_into_a_config_map(
    release: Release, stub: PriceStub, capsys: pytest.CaptureFixture[str]
) -> None:
    first = NOW - timedelta(days=6)
    rates = [
        {"instanceType": P4D, "capacityType": "Spot", "zone": ZONE, "usdPerHour": f"{1 + n % 7}.5"}
        | {end: f"{first + timedelta(minutes=n):%Y-%m-%dT%H:%M:%SZ}" for end in ("since", "checked")}
        for n in range(6000)
    ]
    text = json.dumps(rates, separators=(",", ":"))
    release.kube.call("PATCH", release.path, {"data": {"prices.json": text}}, kind=MERGE)
    assert release.run() == []
    assert 800 * 1024 < len(release.written()) <= 900 * 1024
    assert "rates are dropped, those that ended first" in capsys.readouterr().out
    assert release.spot() is not None and release.spot(first) is None
    assert release.run(now=NOW + timedelta(hours=1)) == []


def test_azure_s_prices_are_written_in_the_same_way(release: Release, stub: PriceStub) -> None:
    name = "Standard_NC4as_T4_v3"
    stub.azure = [meter(name, 0.526)]
    errors = release.run(
        provider=Platform.AZURE, regions=("eastus",), instance_types=(name,), azure_endpoint=stub.url
    )
    assert errors == []
    rate = release.prices().rate(name, "OnDemand", "eastus-2", NOW)
    assert rate is not None and rate.usd_per_hour == Decimal("0.526")


def test_the_program_ends_with_the_exit_code_of_its_run(
    release: Release,
    stub: PriceStub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    release.endpoint()
    stub.spot = [(P4D, ZONE, "8.19", "2026-11-01T10:00:00Z")]
    (tmp_path / "ca.crt").write_bytes(release.authority.read_bytes())
    monkeypatch.setenv(SERVICE_ACCOUNT_VARIABLE, str(tmp_path))
    host, _, port = release.server.url.removeprefix("https://").partition(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # for the cloud; the API server is asked directly
    given = {
        "PROVIDER": "AWS",
        "REGIONS": "us-east-1",
        "INSTANCE_TYPES": P4D,
        "NAMESPACE": release.namespace,
        "CONFIG_MAP": CONFIG_MAP,
    }
    for name, value in given.items():
        monkeypatch.setenv(f"{PREFIX}{name}", value)
    assert program.main() == 0
    assert release.spot(datetime.now(UTC)) == Decimal("8.19")
    stub.refuse = {"GetProducts": (400, "AccessDeniedException")}
    assert program.main() == 1
    (tmp_path / "ca.crt").unlink()
    assert program.main() == 1
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert program.main() == 1
    monkeypatch.delenv(f"{PREFIX}NAMESPACE")
    assert program.main() == 1
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    errors = [line["message"] for line in said if line["level"] == "ERROR"]
    assert errors[0].endswith("(AccessDeniedException): the role must allow pricing:GetProducts")
    starts = (
        "the price job cannot start: " + reason
        for reason in (
            f"{tmp_path / 'ca.crt'} does not exist: ",
            "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set",
            "SPOTTRAIN_PRICES_NAMESPACE is missing",
        )
    )
    assert all(error.startswith(start) for error, start in zip(errors[1:], starts, strict=True))
