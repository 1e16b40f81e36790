"""The Python client: what it waits for, what it returns, and what it raises."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from spottrain_cli import Client, JobFailed, WaitTimeout, client
from spottrain_cli.errors import NotFound

from tests.support.costs import COST, ENDED, document

Json = dict[str, Any]
Cluster = Callable[..., Client]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Returns a client whose kubectl answers each question with the next of these jobs, the last one on."""
    monkeypatch.setattr(client, "POLL_SECONDS", 0.01)

    def of(*answers: Json | None) -> Client:
        for number, answer in enumerate(answers):
            (tmp_path / f"{number}").write_text("" if answer is None else json.dumps(answer))
        kubectl = tmp_path / "bin" / "kubectl"
        kubectl.parent.mkdir()
        kubectl.write_text(
            f"#!/bin/sh\ncd {tmp_path}; n=$(/bin/cat asked 2>/dev/null || echo 0); echo $((n + 1)) > asked\n"
            f"[ $n -lt {len(answers)} ] || n={len(answers) - 1}\n"
            "[ -s $n ] && exec /bin/cat $n\n"
            """echo 'Error from server (NotFound): trainingjobs.spottrain.io "gpt" not found' >&2; exit 1\n"""
        )
        kubectl.chmod(0o755)
        monkeypatch.setenv("PATH", str(kubectl.parent))
        return Client(namespace="ml")

    return of


def a_job(phase: str, **more: Any) -> Json:
    return document(ENDED | {"phase": phase} | more, spec={"checkpoint": {"uri": "s3://bucket/gpt"}})


def test_a_result_is_waited_for_and_has_the_figures(cluster: Cluster) -> None:
    progress = {"step": 5000, "loss": "2.25"}
    output = {"uri": "s3://bucket/gpt/final/"}
    done = a_job("Succeeded", progress=progress, output=output)
    result = cluster(a_job("Pending"), a_job("Running"), done).job("gpt").result(timeout=60)
    assert (result.step, result.loss, result.spent) == (5000, 2.25, Decimal("12.7"))
    assert (result.checkpoint_uri, result.output_uri) == ("s3://bucket/gpt", "s3://bucket/gpt/final/")
    assert result.job.ref == "ml/gpt" and result.interruptions == 1
    said = "ml/gpt: Succeeded, step 5,000, loss 2.25, $12.70, 1 interruption; checkpoints at s3://bucket/gpt"
    assert str(result) == said and "attempts=" not in repr(result)


def test_a_cost_without_all_prices_is_unknown(cluster: Cluster) -> None:
    result = cluster(a_job("Succeeded", cost=COST | {"unknownSeconds": "60"})).job("gpt").result()
    assert result.spent is None and result.step is None


@pytest.mark.parametrize("phase", ["Failed", "Suspended", "Invalid"])
def test_a_job_without_a_result_is_an_error_that_says_why(cluster: Cluster, phase: str) -> None:
    kind = "Accepted" if phase == "Invalid" else phase
    said = [{"type": kind, "status": "True", "reason": "Other", "message": "it cannot"}]
    job = cluster(a_job(phase, conditions=said)).job("vision/gpt")
    with pytest.raises(JobFailed, match=f"ml/gpt is {phase}: it cannot") as error:
        job.result()
    assert error.value.job.phase == phase and error.value.exit_code == 1
    assert job.wait().phase == phase, "which is no error"


def test_a_job_that_takes_longer_is_left_alone(cluster: Cluster) -> None:
    with pytest.raises(WaitTimeout, match="ml/gpt has not ended within 0 s"):
        cluster(a_job("Running")).job("gpt").wait(timeout=0)


def test_a_job_that_is_deleted_meanwhile_is_not_waited_for(cluster: Cluster) -> None:
    with pytest.raises(NotFound, match="ml/gpt was deleted meanwhile"):
        cluster(a_job("Running"), None).job("gpt").wait()
    with pytest.raises(NotFound, match="there is no job 'gpt'"):
        Client(namespace="ml").job("gpt").status()
