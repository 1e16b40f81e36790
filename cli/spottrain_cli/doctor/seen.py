"""What the doctor has read, as it came: the JSON of the API server, or the error that came in its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spottrain.errors import RunError

from spottrain_cli.errors import CommandError, NotFound

Json = dict[str, Any]
Answer = Json | CommandError
OPERATOR = "operator"
AGENT = "agent"


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """What came of a probe of the store from this machine."""

    uri: str
    error: RunError | CommandError | None = None
    elsewhere: bool = False
    """Whether it is a folder of the pods, which this machine does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    namespace: str
    version: Answer
    """/version"""
    api: Answer = field(default_factory=dict)
    """Discovery of the TrainingJob API."""
    rights: Mapping[str, Answer] = field(default_factory=dict)
    """A SelfSubjectAccessReview for each `verb resource`."""
    parts: Answer = field(default_factory=dict)
    """Deployments and DaemonSets of the chart."""
    nodes: Answer = field(default_factory=dict)
    defaults: Answer = field(default_factory=dict)
    """ConfigMap of the namespace."""
    pods: Answer = field(default_factory=dict)
    """Trainer pods of the job, or of the namespace."""
    job: Json | None = None
    file: str = ""
    """Where the job comes from, if it is not the cluster."""
    dry_run: CommandError | None = None
    """Why the API server would refuse the file's job."""
    objects: Mapping[tuple[str, str], Answer] = field(default_factory=dict)
    """Secrets and ServiceAccounts that pods use, by kind and name."""
    store: Store | None = None
    release: str = ""
    """Version of this program."""

    # --- the chart's parts ------------------------------------------------------------------------------
    def part(self, component: str) -> list[Json]:
        return [
            each for each in items(self.parts) if labels(each).get("app.kubernetes.io/component") == component
        ]

    def setting(self, name: str) -> Any:
        """A setting of the operator that the chart gives it as JSON or as text; None where it is not seen."""
        for container in (c for each in self.part(OPERATOR) for c in pod_spec(each).get("containers") or []):
            for variable in container.get("env") or []:
                if variable.get("name") == f"SPOTTRAIN_OPERATOR_{name}":
                    return variable.get("value", "")
        return None

    # --- the job ----------------------------------------------------------------------------------------
    @property
    def spec(self) -> Json:
        return table(self.job or {}, "spec")

    @property
    def status(self) -> Json:
        return table(self.job or {}, "status")

    @property
    def name(self) -> str:
        return str(table(self.job or {}, "metadata").get("name", ""))


def items(answer: Answer) -> list[Json]:
    return [] if isinstance(answer, CommandError) else [each for each in answer.get("items") or []]


def absent(answer: Answer) -> bool:
    return isinstance(answer, NotFound)


def table(document: Json, *path: str) -> Json:
    """Returns the object at a path of fields, empty where there is none."""
    found: Any = document
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def labels(document: Json) -> Json:
    return table(document, "metadata", "labels")


def pod_spec(workload: Json) -> Json:
    return table(workload, "spec", "template", "spec")


def waiting(pod: Json) -> Iterator[tuple[str, str, str]]:
    """Yields image, reason and message of each container of a pod that cannot start."""
    status = table(pod, "status")
    for each in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        if why := table(each, "state", "waiting"):
            yield str(each.get("image", "")), str(why.get("reason", "")), str(why.get("message", ""))
