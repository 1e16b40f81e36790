"""The price CronJob in the chart: what it is given, what it may do, and how its prices reach the operator."""

from __future__ import annotations

import importlib.util
import json

import pytest
from spottrain_operator.names import Platform
from spottrain_operator.settings import Settings as OperatorSettings
from spottrain_prices.__main__ import KEY
from spottrain_prices.settings import PREFIX, Settings

from tests.chart.test_rbac import rights_in_docs, rights_of
from tests.support.environment import read
from tests.support.helm import CHART, KUBERNETES, NAMESPACE, Object, find, helm, render, template

ENABLED = "priceJob.enabled=true"
FETCHED = "spottrain-fetched-prices"


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return render(ENABLED)


def pod_of(objects: list[Object], name: str = "spottrain-price-job") -> Object:
    spec: Object = find(objects, "CronJob", name)["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    return spec


def settings_of(objects: list[Object]) -> Settings:
    (container,) = pod_of(objects)["containers"]
    environ = {e["name"]: e.get("value", NAMESPACE) for e in container["env"]}
    return read(Settings, environ)


def test_without_it_nothing_of_it_is_there() -> None:
    assert "price-job" not in json.dumps(render()) and FETCHED not in json.dumps(render())


def test_the_chart_with_it_has_no_fault() -> None:
    done = helm("lint", "--strict", *KUBERNETES, "--set-json", ENABLED, CHART)
    assert done.returncode == 0, done.stdout


def test_its_defaults_are_the_chart_s(objects: list[Object]) -> None:
    expected = Settings(provider="AWS", namespace=NAMESPACE, config_map=FETCHED)
    assert settings_of(objects) == expected
    (container,) = pod_of(objects)["containers"]
    assert {e["name"] for e in container["env"]} == {PREFIX + x.upper() for x in Settings.model_fields}


def test_it_reads_the_environment_that_the_chart_writes() -> None:
    found = settings_of(
        render(
            ENABLED,
            'priceJob.provider="Azure"',
            'priceJob.regions=["eastus","westeurope"]',
            'priceJob.instanceTypes=["Standard_NC24ads_A100_v4"]',
            "priceJob.fromNodes=false",
            "priceJob.historyDays=30",
            'priceJob.pricingRegion="eu-central-1"',
            'priceJob.azureEndpoint="http://proxy:8080"',
        )
    )
    assert (found.provider, found.regions) == (Platform.AZURE, ("eastus", "westeurope"))
    assert (found.instance_types, found.from_nodes) == (("Standard_NC24ads_A100_v4",), False)
    assert (found.history.days, found.pricing_region) == (30, "eu-central-1")
    assert found.azure_endpoint == "http://proxy:8080"


def test_null_is_the_default() -> None:
    changed = render(ENABLED, "priceJob.regions=null", "priceJob.instanceTypes=null", "priceJob.env=null")
    assert settings_of(changed) == settings_of(render(ENABLED))


def test_the_operator_reads_own_prices_and_fetched_ones(objects: list[Object]) -> None:
    pod = find(objects, "Deployment", "spottrain-operator")["spec"]["template"]["spec"]
    (sources,) = [v["projected"]["sources"] for v in pod["volumes"] if v["name"] == "prices"]
    read = {s["configMap"]["name"]: s["configMap"] for s in sources}
    settings = OperatorSettings()
    assert settings.price_file.parent == settings.fetched_price_file.parent
    assert read["spottrain-prices"]["items"] == [{"key": "prices.json", "path": settings.price_file.name}]
    assert read[FETCHED]["items"] == [{"key": KEY, "path": settings.fetched_price_file.name}]
    assert all(source["optional"] for source in read.values()), "the operator starts before the first run"


def test_the_config_map_is_there_and_helm_never_writes_what_is_in_it(objects: list[Object]) -> None:
    assert find(objects, "ConfigMap", FETCHED).keys() == {"apiVersion", "kind", "metadata"}


def test_its_pod_is_restricted_and_starts_a_module_that_exists(objects: list[Object]) -> None:
    pod = pod_of(objects)
    (container,) = pod["containers"]
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "volumes" not in pod and "hostNetwork" not in pod
    assert "memory" in container["resources"]["limits"] and "cpu" in container["resources"]["requests"]
    assert container["command"] == ["python3", "-m", "spottrain_prices"]
    assert importlib.util.find_spec("spottrain_prices.__main__") is not None
    assert container["image"] == "spottrain-prices:0.3.0"


def test_a_role_of_the_cloud_and_credentials_reach_it() -> None:
    role = '{"eks.amazonaws.com/role-arn":"arn:aws:iam::1:role/prices"}'
    secret = {"name": "AWS_ACCESS_KEY_ID", "valueFrom": {"secretKeyRef": {"name": "aws", "key": "id"}}}
    changed = render(
        ENABLED, f"priceJob.serviceAccount.annotations={role}", f"priceJob.env={json.dumps([secret])}"
    )
    account = find(changed, "ServiceAccount", "spottrain-price-job")
    assert account["metadata"]["annotations"] == json.loads(role)
    assert pod_of(changed)["serviceAccountName"] == "spottrain-price-job"
    assert secret in pod_of(changed)["containers"][0]["env"]


def test_it_may_change_its_own_config_map_and_list_nodes_and_nothing_else(objects: list[Object]) -> None:
    rights = {("configmaps", "get"), ("configmaps", "update"), ("nodes", "list")}
    assert rights_of(objects, "spottrain-price-job") == rights == rights_in_docs("price job")
    (rule,) = find(objects, "Role", "spottrain-price-job")["rules"]
    assert rule["resourceNames"] == [FETCHED]
    without = render(
        ENABLED, "priceJob.fromNodes=false", 'priceJob.regions=["r"]', 'priceJob.instanceTypes=["t"]'
    )
    assert rights_of(without, "spottrain-price-job") == rights - {("nodes", "list")}


def test_a_long_release_name_leaves_room_for_the_names_of_its_jobs() -> None:
    names = [o["metadata"]["name"] for o in render(ENABLED, release="r" * 53) if o["kind"] == "CronJob"]
    assert len(names) == 1 and len(names[0]) <= 52


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ('priceJob.provider="GCP"', "don't meet the specifications of the schema"),
        ("priceJob.historyDays=0", "don't meet the specifications of the schema"),
        ("priceJob.interval=5", "don't meet the specifications of the schema"),
        ('priceJob.regions="us-east-1"', "don't meet the specifications of the schema"),
        ("priceJob.fromNodes=false", "priceJob: without fromNodes, name regions and instanceTypes to price"),
        ('priceJob.regions=["a,b"]', "at '/priceJob/regions/0'"),
        ('priceJob.azureEndpoint="prices"', "at '/priceJob/azureEndpoint'"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_a_sentence(setting: str, says: str) -> None:
    done = template(ENABLED, setting)
    assert done.returncode != 0 and says in done.stderr
