"""Outside of Kubernetes a sentence names flags, where a job has fields of a manifest."""

from __future__ import annotations

import pytest
from spottrain.core.text import without_manifest


@pytest.mark.parametrize(
    ("words", "on_a_laptop"),
    [
        (
            "Set checkpoint.onExisting (spottrain run --on-existing) to Resume or to Fresh",
            "Set --on-existing to Resume or to Fresh",
        ),
        ("SPOTTRAIN_CHECKPOINT_URI (checkpoint.uri, --checkpoint) is /x", "--checkpoint is /x"),
        ("by checkpoint.initFrom.ignore (--init-ignore), such as", "by --init-ignore, such as"),
        ("checkpoint.initFrom s3://b/p: it", "--init-from s3://b/p: it"),
        ("Make checkpoint.interval 4 times as long.", "Make --interval 4 times as long."),
        ("Set training.data.numWorkers to 2", "Set data.numWorkers in --training to 2"),
        ("or spec.training.maxSteps", "or maxSteps in --training"),
        (
            "set checkpoint.credentialsSecretRef, AWS_ACCESS_KEY_ID, or give the service account a role",
            "set AWS_ACCESS_KEY_ID, or run aws configure",
        ),
        ("spec.training sets these", "--training sets these"),
        (
            "if none of its pods is left (kubectl get pods -A -l a/b=c), spottrain",
            "if its process is gone, spottrain",
        ),
        (
            "spottrain.training.loop and a checkpoint of step 3",
            "spottrain.training.loop and a checkpoint of step 3",
        ),
    ],
)
def test_a_laptop_has_flags_and_no_manifest(words: str, on_a_laptop: str) -> None:
    assert without_manifest(words) == on_a_laptop
