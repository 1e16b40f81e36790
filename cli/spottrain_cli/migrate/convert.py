"""A Job, PyTorchJob or TrainJob becomes a TrainingJob; every field of it is carried, or named in a note."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from spottrain_cli.errors import UsageError
from spottrain_cli.migrate import job, pod, pytorchjob, trainjob
from spottrain_cli.migrate.source import Json, Note, Source, put, shown

API_VERSION: Final = "spottrain.io/v1alpha1"
KINDS: Final = {
    "Job": ("batch/v1",),
    "PyTorchJob": ("kubeflow.org/v1",),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1",),
}
RUNTIME: Final = "ClusterTrainingRuntime"
"""Kind of a runtime, where a TrainJob names none."""
SERVER_METADATA: Final = (
    "creationTimestamp",
    "generation",
    "managedFields",
    "resourceVersion",
    "selfLink",
    "uid",
)
LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What the user says beside the file."""

    name: str = ""
    image: str = ""
    checkpoints: str = ""
    """URI below which the checkpoints go; empty: the image saves and restores by itself."""
    sync_path: str = ""
    """Folder to which the script writes checkpoints; a sidecar uploads it."""
    capacity: str = ""
    """Spot or OnDemand; empty: as the file's node selector says, else Spot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    origin: str
    """What it was, such as `Job mnist (batch/v1)`."""
    manifest: Json
    others: tuple[Json, ...] = ()
    """Further objects of the file, as they were."""
    notes: tuple[Note, ...] = field(default=())

    @property
    def losses(self) -> tuple[Note, ...]:
        return tuple(note for note in self.notes if note.lost)


def convert(documents: Sequence[Mapping[str, Any]], wishes: Wishes) -> Converted:
    """Returns the TrainingJob that the one job among `documents` becomes.

    Raises:
        UsageError: there is no such job, or several, or it cannot be read.
    """
    found = _single(documents)
    kind, version = str(found["kind"]), str(found["apiVersion"])
    source = Source(found)
    for word in ("apiVersion", "kind", "status"):
        source.take(word)
    metadata, name = _metadata(source.part("metadata"), wishes)
    spec: Json = {}
    gang, template, used = _gang_of(kind, source, documents, spec, name, wishes)
    made = pod.carried(template, gang)
    for host in sorted(set(pod.hosts_left(made, gang))):
        template.lose(
            "spec", f"{host}: pods have other names here; rank 0 is $MASTER_ADDR, the others have none"
        )
    metadata["labels"] = metadata.get("labels", {}) | made.labels
    if not metadata["labels"]:
        del metadata["labels"]
    _queue(source, metadata, spec)
    manifest = {"apiVersion": API_VERSION, "kind": "TrainingJob", "metadata": metadata}
    manifest["spec"] = _spec(source, spec, gang, made, metadata, wishes)
    source.lose_left()
    others = _others(documents, [found, *used], source, name)
    return Converted(
        origin=f"{kind} {name} ({version})", manifest=manifest, others=others, notes=tuple(source.notes)
    )


def _single(documents: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    found = [each for each in documents if each.get("apiVersion") in KINDS.get(str(each.get("kind")), ())]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{each['kind']} {(each.get('metadata') or {}).get('name', '')}" for each in found)
        raise UsageError(f"the file has {len(found)} jobs ({names}); give init one at a time")
    kinds = (
        ", ".join(dict.fromkeys(f"{each.get('kind')} ({each.get('apiVersion')})" for each in documents))
        or "nothing"
    )
    raise UsageError(
        f"the file has {kinds}; init reads a Job (batch/v1), a PyTorchJob (kubeflow.org/v1) and a TrainJob "
        "(trainer.kubeflow.org/v1alpha1), or a Python script"
    )


def _metadata(source: Source, wishes: Wishes) -> tuple[Json, str]:
    for word in SERVER_METADATA:
        source.take(word)
    annotations = source.mapping("annotations")
    annotations.pop(LAST_APPLIED, None)
    labels = pod.without_controllers(source.mapping("labels"))
    source.keep("labels", labels)
    source.keep("annotations", annotations)
    for word in ("ownerReferences", "finalizers"):
        if (value := source.take(word)) is not None:
            source.lose(
                word, f"{shown(value)}: set it on the TrainingJob once it exists, if it shall hold there too"
            )
    name, prefix = source.take("name"), source.take("generateName")
    kept = {"name": wishes.name or name} if wishes.name or name else {"generateName": prefix}
    if not (wishes.name or name or prefix):
        raise UsageError("metadata.name is absent; give --name")
    namespace = source.take("namespace")
    found = kept | ({"namespace": namespace} if namespace else {})
    for kind in ("labels", "annotations"):
        if value := source.mapping(kind):
            found[kind] = value
    return found, str(name or prefix or wishes.name)


def _gang_of(
    kind: str, source: Source, documents: Sequence[Mapping[str, Any]], spec: Json, name: str, wishes: Wishes
) -> tuple[pod.Gang, Source, list[Mapping[str, Any]]]:
    """Takes the fields of one kind. Returns its pods, their template, and further documents that it used."""
    fields = source.part("spec")
    if kind == "Job":
        gang = job.gang_of(fields, spec, name)
        return gang, fields.part("template"), []
    if kind == "PyTorchJob":
        launched = bool(wishes.checkpoints and not wishes.sync_path)
        gang, template = pytorchjob.gang_of(fields, spec, name, launched=launched)
        return gang, template, []
    reference = fields.look("runtimeRef") or {}
    wanted = (reference.get("kind", RUNTIME), reference.get("name"))
    used = [
        each
        for each in documents
        if each.get("apiVersion") in KINDS["TrainJob"]
        and (each.get("kind"), (each.get("metadata") or {}).get("name")) == wanted
    ]
    runtime = _runtime(source.added(dict(used[0]), str(used[0]["kind"]))) if used else None
    gang, template = trainjob.gang_of(fields, runtime, spec, name, wishes.image)
    return gang, template, used[:1]


def _runtime(document: Source) -> Source:
    """Takes what tells a training runtime from others; returns its spec."""
    for word in ("apiVersion", "kind", "metadata.name", "metadata.labels", "metadata.annotations"):
        document.take(word)
    for word in SERVER_METADATA:
        document.take(f"metadata.{word}")
    return document.part("spec")


def _queue(source: Source, metadata: Json, spec: Json) -> None:
    """With a queue Kueue takes the suspension away, from a TrainingJob only the user does."""
    if spec.get("suspend") and pod.QUEUE_LABEL in metadata.get("labels", {}):
        del spec["suspend"]
        source.note(
            "spec.suspend", "true: left out, because the operator asks the queue before it makes pods"
        )


def _spec(source: Source, spec: Json, gang: pod.Gang, made: pod.Pod, metadata: Json, wishes: Wishes) -> Json:
    if spec.get("suspend") is False:
        del spec["suspend"]
    if wishes.image:
        pod.trainer_of(made.template["spec"]["containers"])["image"] = wishes.image
    head: Json = {"workers": gang.workers} if gang.workers > 1 else {}
    if not made.has_gpus:
        head["gpusPerWorker"] = 0
    _checkpoint(source, head, gang, metadata, wishes)
    put(head, "capacity.type", _capacity(source, made, wishes))
    head["capacity"] |= spec.pop("capacity", {})
    return head | spec | {"template": made.template}


def _checkpoint(source: Source, spec: Json, gang: pod.Gang, metadata: Json, wishes: Wishes) -> None:
    uri = checkpoint_uri(wishes.checkpoints, metadata)
    if wishes.sync_path:
        if gang.workers > 1:
            raise UsageError(
                f"--sync-path is for one worker, and this job has {gang.workers}: a sidecar uploads the "
                "folder of one pod (docs/sync.md)"
            )
        spec["checkpoint"] = {"mode": "Sync", "uri": uri, "syncPath": wishes.sync_path}
    elif uri:
        spec["runtime"] = {"inject": True}
        spec["checkpoint"] = {"uri": uri}
        source.note(
            "spec.checkpoint",
            "the runtime saves and restores: by itself for the Trainer of Hugging Face and "
            "Lightning, else the loop needs three to six lines (docs/own-loop.md)",
        )
    else:
        spec["checkpoint"] = {"mode": "Self"}
        source.note(
            "spec.checkpoint",
            "mode Self: after a reclaim the command starts again and nothing is restored "
            "unless the image does it; with --bucket spottrain saves and restores (--sync-path: a folder)",
        )


def checkpoint_uri(prefix: str, metadata: Mapping[str, Any]) -> str:
    """Returns where a job's checkpoints go below a prefix: at its own namespace and name."""
    if not prefix:
        return ""
    name = metadata.get("name") or str(metadata.get("generateName", "")).rstrip("-")
    return "/".join(filter(None, [prefix.rstrip("/"), metadata.get("namespace"), name]))


def _capacity(source: Source, made: pod.Pod, wishes: Wishes) -> str:
    if wishes.capacity and made.capacity and made.capacity != wishes.capacity:
        raise UsageError(
            f"the file's node selector asks for {made.capacity} nodes, and the option for {wishes.capacity}; "
            "leave one of the two out"
        )
    if not (wishes.capacity or made.capacity):
        source.note(
            "spec.capacity", "the file does not say which nodes: Spot; --on-demand for nodes that stay"
        )
    return wishes.capacity or made.capacity or "Spot"


def _others(
    documents: Sequence[Mapping[str, Any]], used: Sequence[Mapping[str, Any]], source: Source, name: str
) -> tuple[Json, ...]:
    kept = []
    for each in documents:
        if any(each is one for one in used):
            continue
        if _serves_pods(each, name):
            named = (each.get("metadata") or {}).get("name")
            source.notes.append(
                Note(path=f"Service {named}", text="left out: the operator makes the gang's Service")
            )
        else:
            kept.append(dict(each))
    return tuple(kept)


def _serves_pods(document: Mapping[str, Any], name: str) -> bool:
    spec = document.get("spec") or {}
    selector = spec.get("selector") or {} if isinstance(spec, dict) else {}
    names = [value for key, value in selector.items() if pod.JOB_NAME_KEYS.fullmatch(str(key))]
    is_service = (document.get("apiVersion"), document.get("kind")) == ("v1", "Service")
    return is_service and spec.get("clusterIP") == "None" and names == [name]
