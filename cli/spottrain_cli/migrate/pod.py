"""The pod template: carried as it is, but for what the operator or the source's controller sets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from spottrain_cli.migrate.source import Json, Rule, Source, apply, shown
from spottrain_cli.pods import JOB_LABEL, RANK_LABEL

TRAINER: Final = "trainer"
GANG_VARIABLES: Final = frozenset(
    f"{prefix}{name}"
    for name in ("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK")
    for prefix in ("", "PET_")
)
"""Set by the operator in each pod of a gang; refused in a template."""
RANK_FIELD: Final = {"fieldRef": {"fieldPath": f"metadata.labels['{RANK_LABEL}']"}}
"""Number of the pod in its gang, by the downward API."""
GPUS: Final = re.compile(
    r"nvidia\.com/(gpu|gpu[.-].+|mig-.+)|amd\.com/(gpu|.+_nps[0-9]+)|gpu\.intel\.com/(i915|xe)|habana\.ai/.+"
    r"|aws\.amazon\.com/neuron.*|google\.com/tpu"
)
"""Resources that are GPUs, as the operator counts them (api/gpus.py)."""
OTHER_DEVICES: Final = re.compile(
    r"gpu\.intel\.com/.*|.*(rdma|hca|efa|sriov|roce|hostdev|network|fuse|kvm|qat|sgx).*"
)
CONTROLLER_KEYS: Final = re.compile(
    r"(controller-uid|job-name|job-role|replica-(index|type)|batch\.kubernetes\.io/.*"
    r"|training\.kubeflow\.org/.*|jobset\.sigs\.k8s\.io/.*|trainer\.kubeflow\.org/.*)"
)
"""Labels that the controller of the source sets on its pods."""
JOB_NAME_KEYS: Final = re.compile(
    r"(job-name|batch\.kubernetes\.io/job-name|training\.kubeflow\.org/job-name"
    r"|jobset\.sigs\.k8s\.io/jobset-name|trainer\.kubeflow\.org/job-name)"
)
INDEX_FIELDS: Final = re.compile(
    r"metadata\.(annotations|labels)\['(batch\.kubernetes\.io/job-completion-index"
    r"|jobset\.sigs\.k8s\.io/(job-)?global-replica-index)'\]"
)
JOB_NAME_FIELDS: Final = re.compile(rf"metadata\.labels\['{JOB_NAME_KEYS.pattern}'\]")
ENDPOINT: Final = "--rdzv_endpoint=$(MASTER_ADDR):$(MASTER_PORT)"
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
CAPACITY: Final = {
    ("karpenter.sh/capacity-type", "spot"): "Spot",
    ("karpenter.sh/capacity-type", "on-demand"): "OnDemand",
    ("karpenter.sh/capacity-type", "reserved"): "Reserved",
    ("eks.amazonaws.com/capacityType", "SPOT"): "Spot",
    ("eks.amazonaws.com/capacityType", "ON_DEMAND"): "OnDemand",
    ("eks.amazonaws.com/capacityType", "CAPACITY_BLOCK"): "Reserved",
    ("cloud.google.com/gke-spot", "true"): "Spot",
    ("cloud.google.com/gke-preemptible", "true"): "Spot",
    ("kubernetes.azure.com/scalesetpriority", "spot"): "Spot",
}
"""What labels of nodes say of their capacity."""

POD: Final = (
    Rule("hostname", lost="the operator names the pods; rank 0 is $MASTER_ADDR"),
    Rule("nodeName", lost="it places the pod past the scheduler; name the node in nodeSelector"),
    Rule("subdomain", note="left out, because the operator makes the gang's Service"),
)
TRAINER_RULES: Final = (
    Rule("terminationMessagePath", note="left out: the outcome is written to the default path"),
    Rule("lifecycle.preStop", lost="it would shorten the time to save; the script gets SIGTERM at once"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gang:
    """The pods of the source, and how they name each other."""

    workers: int
    job: str = ""
    trainer: str = ""
    """Name of the container that trains; empty: the first one."""
    first: str = ""
    """Regular expression of rank 0's host name."""
    others: str = ""
    """The same of any rank's."""
    variables: tuple[Json, ...] = ()
    """What the controller of the source sets in each pod, where the operator sets no such thing."""
    endpoint: bool = False
    """Whether the source's controller sets the endpoint of torchrun's rendezvous."""
    replaced: frozenset[str] = frozenset()
    """Variables that the template sets by hand, and that `variables` replace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """What became of a pod template."""

    template: Json
    labels: Json
    """Labels that belong on the TrainingJob."""
    has_gpus: bool
    capacity: str
    """Type of the nodes that it asks for; empty: it does not say."""

    @property
    def command(self) -> list[str]:
        trainer = trainer_of(self.template["spec"]["containers"])
        return [str(word) for kind in ("command", "args") for word in trainer.get(kind) or ()]


def carried(source: Source, gang: Gang) -> Pod:
    """Takes a whole pod template."""
    metadata, labels = _metadata(source.part("metadata"))
    pod = source.part("spec")
    _of_operator(pod)
    spec = {**_containers(pod, gang), **pod.rest()}
    spec = _renamed(spec, gang)
    template: Json = ({"metadata": metadata} if metadata else {}) | {"spec": spec}
    return Pod(
        template=template, labels=labels, has_gpus=_has_gpus(spec["containers"]), capacity=_capacity(spec)
    )


def trainer_of(containers: Sequence[Json]) -> Json:
    return next((c for c in containers if c.get("name") == TRAINER), containers[0])


def _metadata(source: Source) -> tuple[Json, Json]:
    """Returns the metadata of the pods, and labels for the job."""
    source.take("creationTimestamp")
    for name in ("name", "generateName", "namespace"):
        if source.take(name):
            source.note(name, "left out: pods are named after the job, in its namespace")
    labels, annotations = source.mapping("labels"), source.mapping("annotations")
    of_job = {QUEUE_LABEL: labels.pop(QUEUE_LABEL)} if QUEUE_LABEL in labels else {}
    if of_job:
        source.note(f"labels.{QUEUE_LABEL}", "now on the TrainingJob, which asks the queue for all its pods")
    for kind, found in (("labels", labels), ("annotations", annotations)):
        for key in [key for key in found if f".{key.partition('/')[0]}".endswith(".spottrain.io")]:
            source.lose(f"{kind}.{key}", f"{shown(found.pop(key))}: keys of spottrain.io are the operator's")
    labels = without_controllers(labels)
    kept = {"labels": labels, "annotations": annotations}
    return {kind: found for kind, found in kept.items() if found}, of_job


def without_controllers(labels: Json) -> Json:
    """Returns labels without those that the source's controller has set on a live object."""
    return {key: value for key, value in labels.items() if not CONTROLLER_KEYS.fullmatch(key)}


def _of_operator(pod: Source) -> None:
    """Takes what the operator owns."""
    policy = pod.take("restartPolicy")
    if policy not in (None, "Never"):
        pod.note(
            "restartPolicy",
            f"{policy}: here a container is not started again in its pod; a failed pod is a "
            "new attempt, which failurePolicy.maxFailures counts",
        )
    apply(POD, pod, {})
    grace = pod.whole("terminationGracePeriodSeconds")
    if grace is not None and grace >= 2:
        pod.keep("terminationGracePeriodSeconds", grace)
    elif grace is not None:
        pod.note(
            "terminationGracePeriodSeconds", f"{grace}: left out; the default is the notice of the nodes"
        )


def _containers(pod: Source, gang: Gang) -> Json:
    found = pod.parts("containers")
    names = [str(each.take("name") or "") for each in found]
    wanted = names.index(gang.trainer) if gang.trainer in names else 0
    main = names[wanted] if names else ""
    containers = []
    for at, (each, name) in enumerate(zip(found, names, strict=True)):
        if at == wanted:
            if len(found) > 1 and name != TRAINER:
                each.note("name", f"{name}: now {TRAINER}, whose end is the end of the pod")
                name = TRAINER
            _trainer(each, gang)
        containers.append({"name": name, **each.rest()})
    if not containers:
        pod.lose("containers", "there is none; write one with an image")
        containers = [{"name": TRAINER}]
    spec = {"containers": containers}
    return _container_names(spec, main) if main and len(found) > 1 else spec


def _trainer(container: Source, gang: Gang) -> None:
    """Takes of the trainer's container what the operator sets itself."""
    apply(TRAINER_RULES, container, {})
    if lifecycle := container.mapping("lifecycle"):
        container.keep("lifecycle", lifecycle)
    env = list(container.take("env") or ())
    kept = [entry for entry in env if not _is_replaced(entry, container, gang)]
    named = {entry.get("name") for entry in kept if isinstance(entry, dict)}
    kept += [entry for entry in gang.variables if entry["name"] not in named]
    if kept:
        container.keep("env", kept)


def _is_replaced(entry: Any, container: Source, gang: Gang) -> bool:
    name = entry.get("name") if isinstance(entry, dict) else None
    if isinstance(name, str) and name.startswith("SPOTTRAIN_"):
        container.lose(f"env.{name}", "variables of this name are the operator's")
        return True
    ours = gang.workers > 1 and name in GANG_VARIABLES
    if ours or (name in gang.replaced):
        container.note(
            f"env.{name}",
            f"{shown(entry.get('value', ''))}: left out, because "
            + ("the operator sets it in each pod" if ours else "each pod gets its own"),
        )
        return True
    return False


# --- host names, labels and names of containers in texts ---------------------------------------------------
def _renamed(spec: Json, gang: Gang) -> Json:
    """Returns the pod's spec with what refers to the source's controller made to refer to ours."""

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: _selector(of(inner)) if key == "matchLabels" else of(inner)
                for key, inner in value.items()
            }
        if isinstance(value, list):
            return [of(inner) for inner in value]
        if isinstance(value, str):
            value = INDEX_FIELDS.sub(RANK_FIELD["fieldRef"]["fieldPath"], value)
            return JOB_NAME_FIELDS.sub(f"metadata.labels['{JOB_LABEL}']", value)
        return value

    spec = of(spec)
    if gang.first:
        address = "$(MASTER_ADDR)" if gang.workers > 1 else "localhost"
        for container in spec["containers"]:
            for kind in ("command", "args"):
                if container.get(kind):
                    container[kind] = [re.sub(gang.first, address, str(word)) for word in container[kind]]
    if gang.endpoint:
        _with_endpoint(trainer_of(spec["containers"]))
    return spec


def _with_endpoint(trainer: Json) -> None:
    """Gives torchrun its endpoint where the command names a rendezvous backend."""
    words = [str(word) for kind in ("command", "args") for word in trainer.get(kind) or ()]
    if any(re.match("--rdzv[-_]endpoint", word) for word in words):
        return
    for kind in ("command", "args"):
        for at, word in enumerate(trainer.get(kind) or ()):
            if re.match("--rdzv[-_]backend", str(word)):
                trainer[kind] = [*trainer[kind][:at], ENDPOINT, *trainer[kind][at:]]
                return


def hosts_left(pod: Pod, gang: Gang) -> Iterator[str]:
    """Yields the host names of the source's pods that are still in texts of the template."""
    if gang.others:
        for text in _texts(pod.template):
            yield from (match.group() for match in re.finditer(gang.others, text))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value


def _selector(labels: Any) -> Any:
    if not isinstance(labels, dict):
        return labels
    return {(JOB_LABEL if JOB_NAME_KEYS.fullmatch(key) else key): value for key, value in labels.items()}


def _container_names(spec: Json, main: str) -> Json:
    """Returns the spec with `resourceFieldRef.containerName` of the trainer under its new name."""

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: TRAINER if k == "containerName" and v == main else of(v) for k, v in value.items()}
        return [of(inner) for inner in value] if isinstance(value, list) else value

    renamed: Json = of(spec)
    return renamed


# --- what the template asks for -------------------------------------------------------------------------
def _has_gpus(containers: Sequence[Json]) -> bool:
    """Returns whether the trainer has GPUs, or a device that may be one."""
    resources = trainer_of(containers).get("resources") or {}
    limits = resources.get("limits") or {}
    return bool(resources.get("claims")) or any(map(_maybe_gpu, limits))


def _maybe_gpu(resource: str) -> bool:
    domain, slash, _ = resource.partition("/")
    extended = bool(slash) and not f".{domain}".endswith(".kubernetes.io")
    return bool(GPUS.fullmatch(resource)) or (extended and not OTHER_DEVICES.fullmatch(resource))


def _capacity(spec: Json) -> str:
    asked = dict(spec.get("nodeSelector") or {})
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    terms = affinity.get("nodeSelectorTerms") or []
    for expression in (terms[0].get("matchExpressions") or ()) if len(terms) == 1 else ():
        if expression.get("operator") == "In" and len(expression.get("values") or ()) == 1:
            asked.setdefault(expression.get("key"), expression["values"][0])
    found = [kind for (key, value), kind in CAPACITY.items() if str(asked.get(key)) == value]
    return found[0] if found else ""
