"""The `spottrain` command: from a script to a model. A distribution of its own; no pod imports it.

app            the verbs; each is a thin function in commands/
kubectl        the cluster, by the user's own kubectl
cluster        TrainingJobs, read and changed by kubectl; jobs: a TrainingJob as read, pure
pods           the pods of a job: labels, and which container trains
figures        how steps, dollars, times and bytes are written
timeline, overview, cost_report, cost_sums
               what status, list and cost say of jobs, pure
output         what is printed: tables for people, JSON and YAML for programs
errors         exit codes
client         the Python client: `from spottrain_cli import Client`
checkpoints/   `spottrain checkpoints VERB URI`
planner/       `spottrain plan`: calculators, and what each question answers; no torch
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spottrain.core.lazy import names

if TYPE_CHECKING:
    from spottrain_cli.client import Client, JobFailed, JobHandle, Result, WaitTimeout

__all__ = ["Client", "JobFailed", "JobHandle", "Result", "WaitTimeout"]

__getattr__ = names("spottrain_cli", dict.fromkeys(__all__, "spottrain_cli.client"))
