"""Mistakes that a person makes: each ends in a condition that names the thing and says what to do.

All wrong jobs run at once in one namespace, since each needs a real pod; then each test reads one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from demo.kubectl import Kubectl
from localcluster.api import Cluster
from processcluster import install

from tests.support.lab import Lab, new_lab

RAISES = "import torch\nraise RuntimeError('the tokenizer file is empty')\n"


def wrong_jobs(lab: Lab) -> list[dict[str, Any]]:
    return [
        lab.job(
            "missing-image", container={"image": "localhost/no-such-image:1", "imagePullPolicy": "Never"}
        ),
        lab.job("missing-bucket", checkpoint={"uri": "s3://no-such-bucket-here/x"}),
        lab.job("denied", checkpoint={"credentialsSecretRef": {"name": "wrong-credentials"}}),
        lab.job("missing-secret", checkpoint={"credentialsSecretRef": {"name": "no-such-secret"}}),
        lab.job("raises", container={"args": ["/scripts/raises.py"]}, failurePolicy={"maxFailures": 0}),
        lab.job("missing-script", container={"args": ["/scripts/nowhere.py"]}),
        lab.job("plain-script", container={"command": ["python3", "-c", "print('trained')"], "args": []}),
        lab.job("untrained", container={"args": ["/scripts/plain.py"]}),
        lab.job("pause", container={"command": ["sleep", "infinity"], "args": []}),
        lab.job("template-typo", container={"imagePullPolice": "Never"}),
        lab.job("unschedulable", gpusPerWorker=64),
    ]


@pytest.fixture(scope="module")
def wrong(cluster: Cluster, installed: Kubectl) -> Iterator[Lab]:
    """The lab in which all the wrong jobs were applied."""
    with new_lab(cluster, installed, {"raises.py": RAISES, "plain.py": "print('trained')\n"}) as lab:
        right = install.credentials(cluster)
        names = {"metadata": {"name": "wrong-credentials"}}
        lab.kubectl.apply(right | names | {"data": dict.fromkeys(right["data"], "bm9ib2R5")})
        lab.apply(*wrong_jobs(lab))
        yield lab


def said(lab: Lab, name: str, kind: str, reason: str) -> str:
    """The condition's sentence once it has that reason; they all import torch at the same time."""

    def found() -> str:
        condition = lab.condition(kind, name)
        return str(condition["message"]) if condition.get("reason") == reason else ""

    return str(lab.wait(f"{kind} with reason {reason} on {name}", found, name=name, seconds=180))


def test_a_field_that_the_template_does_not_have_is_named_by_its_path(wrong: Lab) -> None:
    message = said(wrong, "template-typo", "Accepted", "InvalidTemplate")
    assert "imagePullPolice" in message


def test_a_missing_image_is_a_condition_in_the_kubelets_words_and_no_failure(wrong: Lab) -> None:
    condition = wrong.wait(
        "a condition that names the image",
        lambda: (
            "no-such-image" in (c := wrong.condition("Running", "missing-image")).get("message", "") and c
        ),
        name="missing-image",
    )
    assert condition["status"] == "False"
    assert wrong.status("missing-image").get("failures", 0) == 0


def test_a_missing_secret_is_named_and_no_failure(wrong: Lab) -> None:
    wrong.wait(
        "a condition that names the Secret",
        lambda: any(
            "no-such-secret" in c.get("message", "")
            for c in wrong.status("missing-secret").get("conditions", [])
        ),
        name="missing-secret",
    )
    assert wrong.status("missing-secret").get("failures", 0) == 0


def test_a_bucket_that_does_not_exist_ends_the_job_at_once_and_names_the_bucket(wrong: Lab) -> None:
    assert "no-such-bucket-here" in said(wrong, "missing-bucket", "Failed", "BucketNotFound")
    assert wrong.status("missing-bucket")["attempt"] == 1, "no restart mends it"


def test_credentials_that_the_store_refuses_are_no_fresh_start(wrong: Lab) -> None:
    assert "AWS_ACCESS_KEY_ID" in said(wrong, "denied", "Failed", "StoreDenied")


def test_a_script_that_raises_shows_its_exception(wrong: Lab) -> None:
    message = said(wrong, "raises", "Failed", "TooManyFailures")
    assert "the tokenizer file is empty (" in message and "/scripts/raises.py:2)" in message
    assert wrong.status("raises")["failures"] == 1


def test_a_script_that_is_not_there_is_named(wrong: Lab) -> None:
    assert "/scripts/nowhere.py" in said(wrong, "missing-script", "Failed", "ScriptNotFound")


def test_a_job_that_fits_no_node_waits_with_the_schedulers_words(wrong: Lab) -> None:
    message = said(wrong, "unschedulable", "Scheduled", "Unschedulable")
    assert "nvidia.com/gpu" in message
    assert wrong.status("unschedulable").get("failures", 0) == 0


def test_a_script_without_the_runtime_that_exits_0_has_not_succeeded(wrong: Lab) -> None:
    message = said(wrong, "plain-script", "Failed", "NoRuntime")
    assert "docs/own-image.md" in message
    assert wrong.status("plain-script")["attempt"] == 1, "no restart mends it"


def test_a_script_that_never_trains_under_spottrain_run_has_not_succeeded(wrong: Lab) -> None:
    assert "without beginning a training" in said(wrong, "untrained", "Failed", "NotTrained")


def test_a_container_that_only_sleeps_is_not_said_to_train(wrong: Lab) -> None:
    said(wrong, "pause", "Running", "WaitingForRuntime")
    assert wrong.status("pause")["phase"] == "Starting"
