"""The chart's files as they are: schema and values agree, one version stands everywhere.

What the chart renders is tested in tests/chart, which needs Helm.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from spottrain_operator.api.job_defaults import KEYS

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "spottrain"
CRD = ROOT / "crds" / "trainingjobs.yaml"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def test_package_chart_images_and_examples_have_one_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (about["version"], about["appVersion"]) == (version, version)
    for page in (ROOT / "README.md", *sorted((ROOT / "examples").glob("*.yaml"))):
        tags = re.findall(r"spottrain-(?:operator|runtime):(\S+)", page.read_text())
        local = page.stem.endswith("-local")  # for the cluster of `make cluster-up`, which runs this checkout
        assert set(tags) <= {"checkout" if local else version}, page


def test_the_readmes_install_takes_the_images_that_a_release_pushes() -> None:
    registry = re.findall(r'"REGISTRY" \{ default = "(.+)" \}', (ROOT / "docker-bake.hcl").read_text())[0]
    assert (
        f"--set image.operator.repository={registry}/spottrain-operator" in (ROOT / "README.md").read_text()
    )


def test_nobody_who_writes_a_job_is_answered_with_a_regular_expression() -> None:
    assert "pattern:" not in CRD.read_text(), "a rule with a message says what to write"


def closed_objects(schema: Any, path: str = "") -> Iterator[tuple[str, bool]]:
    if isinstance(schema, dict):
        if "properties" in schema and "type" in schema:
            yield path or "/", schema.get("additionalProperties") is False
        for key, part in schema.items():
            yield from closed_objects(part, f"{path}/{key}")


def test_no_object_of_the_schema_lets_an_unknown_name_through() -> None:
    assert [path for path, closed in closed_objects(SCHEMA) if not closed] == []


def test_the_schema_knows_each_value_and_each_value_is_explained() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)
    for key in (key for key, value in VALUES.items() if isinstance(value, dict) and value):
        assert VALUES[key].keys() == SCHEMA["properties"][key]["properties"].keys()
    assert VALUES.keys() | {"global"} == SCHEMA["properties"].keys()


def test_each_job_default_of_the_chart_is_a_key_of_the_namespaces_config_map() -> None:
    assert set(SCHEMA["properties"]["jobDefaults"]["properties"]) == set(KEYS)
