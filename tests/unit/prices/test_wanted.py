"""Which types are priced where, and the settings that say so."""

from __future__ import annotations

from typing import Any

import pytest
from spottrain_operator.names import Platform
from spottrain_prices.__main__ import wanted
from spottrain_prices.settings import PREFIX, Settings

from tests.support.environment import read

REQUIRED = {
    "SPOTTRAIN_PRICES_PROVIDER": "AWS",
    "SPOTTRAIN_PRICES_NAMESPACE": "spottrain-system",
    "SPOTTRAIN_PRICES_CONFIG_MAP": "spottrain-fetched-prices",
}


def settings(**given: Any) -> Settings:
    base = {"provider": Platform.AWS, "namespace": "n", "config_map": "c"}
    return Settings(**(base | given))


def node(kind: str, region: str, provider: str = "aws:///us-east-1a/i-0abc") -> dict[str, Any]:
    labels = {"node.kubernetes.io/instance-type": kind, "topology.kubernetes.io/region": region}
    labels = {name: value for name, value in labels.items() if value}
    return {"metadata": {"labels": labels}, "spec": {"providerID": provider}}


NODES = [
    node("p4d.24xlarge", "us-east-1"),
    node("g5.xlarge", "us-east-1"),
    node("g5.xlarge", "us-west-2"),
    node("p4d.24xlarge", "us-east-1"),
]


def test_the_types_of_the_nodes_are_priced_in_their_regions() -> None:
    found = wanted(settings(), NODES)
    assert found == {"us-east-1": ("g5.xlarge", "p4d.24xlarge"), "us-west-2": ("g5.xlarge",)}


def test_listed_types_are_priced_in_the_listed_regions_beside_the_nodes() -> None:
    found = wanted(settings(regions=("eu-west-1",), instance_types=("p5.48xlarge",)), NODES[:1])
    assert found == {"eu-west-1": ("p5.48xlarge",), "us-east-1": ("p4d.24xlarge",)}


def test_without_a_listed_region_those_of_the_nodes_count() -> None:
    found = wanted(settings(instance_types=("p5.48xlarge",)), NODES[1:3])
    assert found == {"us-east-1": ("g5.xlarge", "p5.48xlarge"), "us-west-2": ("g5.xlarge", "p5.48xlarge")}


def test_nodes_of_another_cloud_or_without_labels_are_left_out() -> None:
    azure = node("Standard_NC4as_T4_v3", "eastus", "azure:///subscriptions/s/virtualMachines/0")
    bare: dict[str, Any] = {"metadata": {"name": "x"}}
    others = [azure, bare, node("", "us-east-1"), node("g5.xlarge", ""), node("kind", "r", "kind://docker/x")]
    assert wanted(settings(), others) == {}
    assert wanted(settings(provider=Platform.AZURE), others) == {"eastus": ("Standard_NC4as_T4_v3",)}


def test_a_region_without_types_is_not_asked() -> None:
    assert wanted(settings(regions=("us-east-1",)), []) == {}


def test_the_environment_is_read() -> None:
    given = {
        "SPOTTRAIN_PRICES_REGIONS": "us-east-1, us-west-2,",
        "SPOTTRAIN_PRICES_INSTANCE_TYPES": "p5.48xlarge,p5.48xlarge",
        "SPOTTRAIN_PRICES_FROM_NODES": "false",
        "SPOTTRAIN_PRICES_HISTORY_DAYS": "30",
        "SPOTTRAIN_PRICES_PRICING_REGION": "eu-central-1",
        "SPOTTRAIN_PRICES_AZURE_ENDPOINT": "http://127.0.0.1:1/",
    }
    assert read(Settings, REQUIRED | given) == Settings(
        provider="AWS",
        namespace="spottrain-system",
        config_map="spottrain-fetched-prices",
        regions=("us-east-1", "us-west-2"),
        instance_types=("p5.48xlarge",),
        from_nodes=False,
        history_days=30,
        pricing_region="eu-central-1",
        azure_endpoint="http://127.0.0.1:1",
    )


WRONG_SETTINGS = (
    ("PROVIDER", "GCP"),
    ("PROVIDER", ""),
    ("NAMESPACE", ""),
    ("CONFIG_MAP", " "),
    ("FROM_NODES", "perhaps"),
    ("HISTORY_DAYS", "0"),
    ("HISTORY_DAYS", "1.5"),
    ("PRICING_REGION", "us-west-2"),
    ("REGION", "us-west-2"),
)


@pytest.mark.parametrize(("name", "value"), WRONG_SETTINGS)
def test_what_cannot_be_read_is_refused_by_the_name_of_its_variable(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^{PREFIX}{name}[ =]"):
        read(Settings, REQUIRED | {f"{PREFIX}{name}": value})
