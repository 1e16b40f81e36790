"""The CRD's schema and the operator's dataclasses have the same fields; every field is described."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from spottrain.contract import AZURE, NO_AZURE, OnExisting
from spottrain_operator import names
from spottrain_operator.api.node_pools import CapacityType
from spottrain_operator.api.training_job import CheckpointMode, CompileCache, Status, TrainingJobSpec
from spottrain_operator.api.validation import parse_spec
from spottrain_operator.api.volumes import DataCache, KeyRef, ObjectRef
from spottrain_operator.api.wire import camel

ROOT = Path(__file__).resolve().parents[2]
CRD = yaml.safe_load((ROOT / "crds" / "trainingjobs.yaml").read_text())
VERSION = CRD["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]["properties"]
FREE_FORM = {"spec.capacity.pools[].tolerations"}
"""Carried as they are; the runtime and the API server know their fields."""


def _inner(hint: Any) -> Any:
    """The dataclass in `X | None` and `tuple[X, ...]`."""
    if get_origin(hint) in (Union, types.UnionType, tuple):
        return _inner(next(a for a in get_args(hint) if a is not type(None)))
    return hint


def _removed(schema: dict[str, Any]) -> bool:
    """Whether any value of the field is refused, with a sentence."""
    return any(rule["rule"] == "false" for rule in schema.get("x-kubernetes-validations", ()))


def _pairs(cls: type, schema: dict[str, Any], path: str) -> Iterator[tuple[str, set[str], set[str]]]:
    kept = {name for name, sub in schema["properties"].items() if not _removed(sub)}
    yield path, {camel(f.name) for f in fields(cls)}, kept
    for name, hint in get_type_hints(cls).items():
        sub, where = schema["properties"].get(camel(name), {}), f"{path}.{camel(name)}"
        if sub.get("type") == "array":
            sub, where = sub["items"], where + "[]"
        if is_dataclass(inner := _inner(hint)) and where not in FREE_FORM:
            yield from _pairs(inner, sub, where)  # type: ignore[arg-type]


PAIRS = [*_pairs(TrainingJobSpec, SCHEMA["spec"], "spec"), *_pairs(Status, SCHEMA["status"], "status")]


@pytest.mark.parametrize(("ours", "theirs"), [p[1:] for p in PAIRS], ids=[p[0] for p in PAIRS])
def test_the_crd_has_the_fields_of_the_dataclass(ours: set[str], theirs: set[str]) -> None:
    assert ours == theirs


def _enum(*path: str) -> set[str]:
    schema: dict[str, Any] = {"properties": SCHEMA}
    for step in path:
        schema = schema["items"] if step == "[]" else schema["properties"][step]
    return set(schema["enum"])


ENUMS: list[tuple[tuple[str, ...], type[StrEnum]]] = [
    (("spec", "capacity", "type"), CapacityType),
    (("spec", "capacity", "pools", "[]", "platform"), names.Platform),
    (("spec", "checkpoint", "mode"), CheckpointMode),
    (("spec", "checkpoint", "onExisting"), OnExisting),
    (("spec", "checkpoint", "compileCache"), CompileCache),
    (("status", "phase"), names.Phase),
]


@pytest.mark.parametrize(("path", "enum"), ENUMS, ids=[".".join(p) for p, _ in ENUMS])
def test_the_crd_has_the_values_of_the_enum(path: tuple[str, ...], enum: type[StrEnum]) -> None:
    assert _enum(*path) == {str(value) for value in enum}


def test_azures_store_is_refused_by_the_schema_as_by_operator_and_runtime() -> None:
    checkpoint = SCHEMA["spec"]["properties"]["checkpoint"]["properties"]
    uri, endpoint = (checkpoint[name]["x-kubernetes-validations"] for name in ("uri", "endpoint"))
    assert uri[0]["messageExpression"].startswith(f"self.matches('{AZURE.pattern}') ? '{NO_AZURE}' : ")
    assert uri[0]["messageExpression"].endswith(f" : '{uri[0]['message']}'")
    assert {"rule": f"!self.matches('{AZURE.pattern}')", "message": NO_AZURE} in endpoint


def test_names_are_those_of_the_crd() -> None:
    spec = CRD["spec"]
    assert (spec["group"], VERSION["name"]) == (names.GROUP, names.VERSION)
    assert (spec["names"]["kind"], spec["names"]["plural"]) == (names.KIND, names.PLURAL)
    assert spec["names"]["shortNames"] == ["tj"] and spec["names"]["categories"] == ["ml"]


def test_the_defaults_of_the_crd_are_those_of_the_dataclasses() -> None:
    spec = SCHEMA["spec"]["properties"]
    ca_bundle = spec["checkpoint"]["properties"]["caBundle"]["properties"]
    parsed = parse_spec({"template": {"spec": {"containers": [{"name": "trainer"}]}}})
    for group, values in (
        (spec, parsed),
        (spec["checkpoint"]["properties"], parsed.checkpoint),
        (ca_bundle["secretKeyRef"]["properties"], KeyRef(name="x")),
        (spec["dataCache"]["properties"], DataCache(claim_ref=ObjectRef(name="x"))),
        (spec["capacity"]["properties"], parsed.capacity),
        (spec["failurePolicy"]["properties"], parsed.failure_policy),
    ):
        for field in fields(values):
            default = group[camel(field.name)].get("default")
            if default not in (None, {}):
                assert default == getattr(values, field.name), field.name


def _undescribed(schema: dict[str, Any], path: str) -> Iterator[str]:
    for name, sub in schema.get("properties", {}).items():
        where = f"{path}.{name}"
        if "description" not in sub and where != ".metadata":
            yield where
        yield from _undescribed(sub, where)
        yield from _undescribed(sub.get("items", {}), f"{where}[]")


def test_every_field_is_described() -> None:
    assert list(_undescribed({"properties": SCHEMA}, "")) == []


def test_every_invalid_example_says_what_it_breaks() -> None:
    for file in (ROOT / "crds" / "examples" / "invalid").glob("*.yaml"):
        assert file.read_text().startswith("# breaks: "), file.name
