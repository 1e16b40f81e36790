"""Links, anchors and code blocks of the documentation, without the tool that builds the site."""

from __future__ import annotations

import json
import pkgutil
import re
import subprocess
from pathlib import Path
from typing import Any

import botocore.session
import docsite
import jsonschema
import pytest
import spottrain
import spottrain_cli
import yaml
from botocore import xform_name

from tests.support.pages import NOT_RUN, PAGES, ROOT, RUN, blocks, documents, manifests

CRD = yaml.safe_load((ROOT / "crds" / "trainingjobs.yaml").read_text())
CHART = ROOT / "charts" / "spottrain"
ACTIONS = {
    "HeadObject": "s3:GetObject",
    "ListObjectsV2": "s3:ListBucket",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "DeleteObjects": "s3:DeleteObject",
    **dict.fromkeys(("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"), "s3:PutObject"),
}
"""What IAM calls the operations that have another name there."""
COMMAND = re.compile(r"(?:^|[|&;$(] *)(?:[\w./-]+/|kubectl )?(spottrain [a-z][^`\n|&;#]*)", re.MULTILINE)
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]


@pytest.mark.parametrize("name", NAMES)
def test_each_link_of_a_page_leads_to_a_file_and_a_heading(name: str) -> None:
    broken = []
    for link in docsite.links_of(name, (ROOT / name).read_text()):
        target = ROOT / link.path
        if not target.is_file() or (
            link.anchor and link.anchor not in docsite.anchors_of(target.read_text())
        ):
            broken.append(f"{link.path}#{link.anchor}".rstrip("#"))
    assert not broken


def test_each_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if f" {page}\n" not in navigation} == set()


def test_the_python_reference_has_each_public_name_or_something_in_it() -> None:
    shown = re.findall(r"^::: (\S+)$", (ROOT / "docs/reference/python.md").read_text(), re.MULTILINE)
    for package in (spottrain, spottrain_cli):
        public = [f"{package.__name__}.{name}" for name in package.__all__]
        assert [name for name in public if not any(f"{each}.".startswith(f"{name}.") for each in shown)] == []
    for name in shown:
        if ".integrations." not in name:  # to import their libraries takes long
            assert pkgutil.resolve_name(name), "each of them is there"


def test_bash_parses_each_block_of_its_own() -> None:
    for block in blocks():
        if block.language == "bash":
            done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
            assert not done.stderr, f"{block.place}: {done.stderr}"


def test_a_block_that_is_titled_with_a_file_is_that_file() -> None:
    named = [
        (block, found[1]) for block in blocks() if (found := re.search(r'"(examples/[^"]+)"', block.title))
    ]
    assert named
    assert {name for block, name in named if block.text != (ROOT / name).read_text()} == set()


def test_each_block_is_run_by_a_test_or_there_is_a_reason_why_not() -> None:
    found = {(block.page, block.language) for block in blocks()}
    assert {language for _, language in found - set(RUN)} <= set(NOT_RUN)
    for (page, language), test in RUN.items():
        assert (page, language) in found and re.search(rf"\b{Path(page).stem}\b", (ROOT / test).read_text())


def test_python_compiles_each_block_of_its_own() -> None:
    for block in blocks():
        if block.language == "python":
            compile(block.text.replace(", ...)", ")"), block.place, "exec")


def test_each_command_of_a_page_has_a_verb_and_options_that_there_are() -> None:
    shown = (ROOT / "docs" / "reference" / "commands.md").read_text()
    helps = dict(re.findall(r"^## (spottrain [^\n]+)\n\n```text\n(.*?)^```", shown, re.MULTILINE | re.DOTALL))
    typed = [(block.place, block.text) for block in blocks() if block.language in ("bash", "console")]
    inline = [(name, found[0].strip("`")) for name in NAMES for found in docsite.CODE.finditer(prose(name))]
    commands = [(place, found) for place, text in typed + inline for found in COMMAND.findall(joined(text))]
    assert len(commands) > 100
    for place, command in commands:
        words = command.partition(" -- ")[0].split()
        verb = next((name for n in (3, 2) if (name := " ".join(words[:n])) in helps), "")
        group = any(name.startswith(" ".join([*words[:2], ""])) for name in helps)
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert verb or group, f"{place}: {command}"
        assert {each for each in options if each not in helps.get(verb, "")} == set(), f"{place}: {command}"


def prose(name: str) -> str:
    return docsite.FENCE.sub("", (ROOT / name).read_text())


def joined(text: str) -> str:
    return text.replace("\\\n", " ")


def strict(schema: Any) -> Any:
    """The definition's schema as JSON schema, in which a field that it does not name is an error."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(part) for key, part in schema.items()}
    if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made


def test_each_job_is_one_that_the_definition_knows() -> None:
    schema = strict(CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"])
    check = jsonschema.Draft7Validator(schema)
    found = manifests("TrainingJob")
    assert found
    for place, job in found:
        errors = [error.message for error in check.iter_errors(job["spec"])]
        assert not errors, f"{place}: {errors}"


def test_each_part_of_a_spec_is_one_that_the_definition_knows() -> None:
    spec = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    check = jsonschema.Draft7Validator(strict({"properties": spec["properties"]}))
    found = [(block.place, part) for block, name, part in documents() if "a part of spec" in name]
    assert found
    for place, part in found:
        errors = [error.message for error in check.iter_errors(part)]
        assert not errors, f"{place}: {errors}"


def test_the_policy_for_a_bucket_on_aws_allows_what_the_runtime_asks_and_no_more() -> None:
    model = botocore.session.get_session().get_service_model("s3")
    called = set(re.findall(r'"([a-z0-9_]+)"', (ROOT / "runtime/spottrain/storage/s3.py").read_text()))
    asked = {name for name in model.operation_names if xform_name(name) in called}
    policies = [doc for block, name, doc in documents() if "policy.json" in name]
    allowed = {action for policy in policies for rule in policy["Statement"] for action in rule["Action"]}
    assert allowed == {ACTIONS.get(name, f"s3:{name}") for name in asked}


def merged(below: Any, above: Any) -> Any:
    """As Helm does with the chart's values and a person's."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: merged(below.get(key), value) for key, value in above.items()}


def test_values_are_the_charts() -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    check = jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text()))
    for block, values in [(block, found) for block, name, found in documents() if "values.yaml" in name]:
        errors = [error.message for error in check.iter_errors(merged(defaults, values))]
        assert not errors, f"{block.place}: {errors}"
