"""TrainJob of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1), with the training runtime that it refers to.

A runtime is the template of a JobSet: its job with the step `trainer` is what trains; the initializers before
it become init containers of each pod.
"""

from __future__ import annotations

import re
from typing import Any, Final

from spottrain_cli.errors import UsageError
from spottrain_cli.migrate import job
from spottrain_cli.migrate.pod import Gang
from spottrain_cli.migrate.source import Json, Rule, Source, apply, shown

STEP: Final = "trainer.kubeflow.org/trainjob-ancestor-step"
CONTROLLER: Final = "trainer.kubeflow.org/trainjob-controller"
BARE_RUNTIMES: Final = frozenset({"torch-distributed", "torch-rocm-distributed"})
"""Runtimes that Kubeflow ships with nothing in them but an image and torchrun's variables."""
WORKSPACE: Final = "/workspace"
TRAIN_JOB: Final = (
    Rule("activeDeadlineSeconds", to="activeDeadlineSeconds"),
    Rule("suspend", to="suspend"),
    Rule(
        "managedBy",
        only=(CONTROLLER,),
        note="spottrain's operator runs it now",
        lost="only spottrain's operator runs a TrainingJob",
    ),
)
REFERENCE: Final = (
    Rule(
        "apiGroup",
        only=("trainer.kubeflow.org",),
        note="its own group",
        lost="runtimes of another group are not known",
    ),
)
ONCE: Final = (
    Rule("replicas", only=(1,), note="once in each pod", lost="an initializer runs once in each pod"),
)
RUNTIME: Final = (
    Rule("podGroupPolicy.coscheduling.scheduleTimeoutSeconds", to="capacity.pendingTimeoutSeconds"),
    Rule(
        "mlPolicy.torch.elasticPolicy", lost="the number of workers changes only while the job is suspended"
    ),
    Rule("mlPolicy.mpi", lost="spottrain starts no MPI; start the ranks by torchrun"),
    Rule("template.spec.network", note="left out: the operator makes the gang's Service"),
    Rule("template.spec.failurePolicy.maxRestarts", to="failurePolicy.maxFailures"),
    Rule("template.spec.startupPolicy", note="left out: initializers come first, then all pods together"),
    Rule("template.spec.ttlSecondsAfterFinished", to="ttlSecondsAfterFinished"),
)


def gang_of(source: Source, runtime: Source | None, spec: Json, name: str, image: str) -> tuple[Gang, Source]:
    """Takes the spec of a TrainJob, and that of its runtime. Returns its pods as a gang, and their template.

    Raises:
        UsageError: no image is known.
    """
    apply(TRAIN_JOB, source, spec)
    reference, trainer = source.part("runtimeRef"), source.part("trainer")
    named = str(reference.take("name") or "")
    apply(REFERENCE, reference, {})
    named = " ".join(filter(None, [str(reference.take("kind") or ""), named]))
    if runtime is None:
        jobs = [_bare(source, reference, named)]
        nodes, processes = 1, None
        volumes: list[Json] = []
    else:
        jobs, nodes, processes, volumes = _of_runtime(runtime, spec)
    main = _trainer_of(jobs, runtime)
    step = str(main.take("name") or "node")
    template, path = _pod_template(main, spec)
    if volumes:
        template = merged(template, {"spec": {"volumes": volumes}})
    template = _initialized(template, source.part("initializer"), [each for each in jobs if each is not main])
    template = merged(template, _metadata(source, main))
    for patch in _patches(source, step):
        template = merged(template, patch)
    template = _overridden(template, trainer, image)
    if not _container(template).get("image"):
        raise UsageError(
            f"spec.trainer has no image, and the runtime {named!r} is not in the file: add it, as printed by "
            f"`kubectl get clustertrainingruntime -o yaml`, after a line of ---, or give --image"
        )
    count = trainer.take("numProcPerNode")
    processes = processes if count is None else count
    end = rf"(\.{re.escape(name)})?(\.[a-z0-9-]+(\.svc(\.cluster\.local)?)?)?\b"
    wanted = trainer.whole("numNodes", least=1)
    if runtime is not None and wanted is not None:
        runtime.note("mlPolicy.numNodes", f"{nodes}: the TrainJob says {wanted}")
    gang = Gang(
        workers=wanted or nodes,
        job=name,
        trainer=_container(template)["name"],
        first=rf"\b{re.escape(name)}-{re.escape(step)}-0-0{end}",
        others=rf"\b{re.escape(name)}-{re.escape(step)}-[0-9]+-[0-9]+{end}",
        variables=() if processes is None else ({"name": "PET_NPROC_PER_NODE", "value": str(processes)},),
    )
    return gang, source.added(template, path)


def merged(base: Any, patch: Any) -> Any:
    """Returns `base` with `patch` merged into it: named items by name, other lists one after the other."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {
            key: merged(base[key], value) if key in base else value for key, value in patch.items()
        }
    if isinstance(base, list) and isinstance(patch, list):
        if not all(isinstance(each, dict) and "name" in each for each in [*base, *patch]):
            return [*base, *(each for each in patch if each not in base)]
        by_name = {each["name"]: each for each in base}
        for each in patch:
            by_name[each["name"]] = merged(by_name.get(each["name"], {}), each)
        return list(by_name.values())
    return patch


# --- the runtime ------------------------------------------------------------------------------------------
def _bare(source: Source, reference: Source, name: str) -> Source:
    if name.rpartition(" ")[2] in BARE_RUNTIMES:
        reference.note(
            "name",
            f"{name}: taken as Kubeflow ships it, with torchrun's variables and nothing else; if yours "
            "has more, add it to the file",
        )
    else:
        reference.lose(
            "name",
            f"{name}: the runtime is not in the file, so what it adds to the pods is not known; add it, "
            f"as printed by `kubectl get clustertrainingruntime -o yaml`, after a line of ---",
        )
    pod = {"spec": {"containers": [{"name": "node"}]}}
    return Source({"name": "node", "template": {"spec": {"template": pod}}}, "spec.runtimeRef", source.notes)


def _of_runtime(runtime: Source, spec: Json) -> tuple[list[Source], int, Any, list[Json]]:
    """Returns its jobs, its number of nodes, its processes on each, and volumes of its claims."""
    apply(RUNTIME, runtime, spec)
    volcano = runtime.part("podGroupPolicy.volcano")
    nodes, processes = runtime.whole("mlPolicy.numNodes"), runtime.take("mlPolicy.torch.numProcPerNode")
    volumes = []
    for policy in runtime.parts("template.spec.volumeClaimPolicies"):
        for claim in policy.parts("templates"):
            name = str(claim.take("metadata.name") or "")
            claim.note(
                "metadata.name", f"{name}: now an ephemeral volume of each pod, filled anew by each attempt"
            )
            volumes.append(
                {"name": name, "ephemeral": {"volumeClaimTemplate": {"spec": claim.mapping("spec")}}}
            )
    del volcano  # empty, or its fields are lost
    return runtime.parts("template.spec.replicatedJobs"), nodes or 1, processes, volumes


def _step_of(replicated: Source) -> str:
    labels = replicated.look("template.metadata.labels")
    return str(labels.get(STEP) or "") if isinstance(labels, dict) else ""


def _trainer_of(jobs: list[Source], runtime: Source | None) -> Source:
    steps = {_step_of(each): each for each in jobs}
    if "trainer" in steps:
        return steps["trainer"]
    if runtime is not None and len(jobs) != 1:
        raise UsageError(
            f"{runtime.name('template.spec.replicatedJobs')} has no job with the label {STEP}: trainer"
        )
    return jobs[0]


def _pod_template(main: Source, spec: Json) -> tuple[Json, str]:
    """Takes the fields of the runtime's job. Returns its pod template, and where that is."""
    for name in ("replicas", "groupName"):
        value = main.take(name)
        if value not in (None, 1, "default"):
            main.lose(
                name, f"{shown(value)}: the pods of a TrainingJob are alike; spec.workers says how many"
            )
    for dependency in main.parts("dependsOn"):
        name, status = dependency.take("name"), dependency.take("status")
        if status not in (None, "Complete"):
            dependency.lose(
                "status", f"{status} of {name}: only what is complete can come first, as an init container"
            )
    fields = main.part("template.spec")
    for name in ("parallelism", "completions"):
        if fields.take(name) is not None:
            fields.note(name, "left out: numNodes says how many pods there are")
    fields.take("completionMode")
    template = fields.mapping("template")
    restarts = spec.get("failurePolicy", {}).get("maxFailures")
    if restarts is not None and (limit := fields.take("backoffLimit")) is not None:
        fields.note("backoffLimit", f"{limit}: failurePolicy.maxFailures has the JobSet's {restarts}")
    job.gang_of(fields, spec, "")
    return template, fields.name("template")


# --- what the TrainJob says of it ---------------------------------------------------------------------------
def _metadata(source: Source, main: Source) -> Json:
    """Returns labels and annotations for the pods: of the TrainJob, and of the runtime's job."""
    found: Json = {}
    for kind in ("labels", "annotations"):
        both = main.mapping(f"template.metadata.{kind}") | source.mapping(kind)
        both.pop(STEP, None)
        if both:
            found[kind] = both
            source.note(
                kind, f"{shown(both)}: now on the pods, for there is no JobSet between the job and them"
            )
    return {"metadata": found} if found else {}


def _patches(source: Source, step: str) -> list[Json]:
    """Returns patches of the pod template: of runtimePatches, and of the older podTemplateOverrides."""
    found = []
    for patch in source.parts("runtimePatches"):
        patch.take("manager"), patch.take("time")
        template = patch.part("trainingRuntimeSpec.template")
        if metadata := template.mapping("metadata"):
            found.append({"metadata": metadata})
        for replicated in template.parts("spec.replicatedJobs"):
            if _is_for(replicated, {str(replicated.take("name"))}, step):
                found.append({"metadata": replicated.mapping("template.metadata")})
                found.append(replicated.mapping("template.spec.template"))
    for old in ("podTemplateOverrides", "podSpecOverrides"):
        for override in source.parts(old):
            targets = {str(each.take("name")) for each in override.parts("targetJobs")}
            if _is_for(override, targets, step):
                found.append({"metadata": override.mapping("metadata"), "spec": override.mapping("spec")})
    return [{key: value for key, value in patch.items() if value} for patch in found]


def _is_for(patch: Source, targets: set[str], step: str) -> bool:
    if step in targets:
        return True
    patch.lose(
        "name", f"{', '.join(sorted(targets))}: only the pods that train are there; set it on them by hand"
    )
    patch.rest()
    return False


def _overridden(template: Json, trainer: Source, image: str) -> Json:
    """Returns the template with what the TrainJob says of the trainer's container."""
    container = _container(template)
    own: Json = {
        key: value for key in ("image", "command", "args") if (value := trainer.take(key)) is not None
    }
    if image:
        own["image"] = image
    resources = trainer.take("resourcesPerNode")
    if resources is not None:
        own["resources"] = resources
    changed = merged({"env": container.get("env") or []}, {"env": trainer.take("env") or []})
    replaced = container | own | ({"env": changed["env"]} if changed["env"] else {})
    containers = [replaced if each is container else each for each in template["spec"]["containers"]]
    return template | {"spec": template["spec"] | {"containers": containers}}


def _container(template: Json) -> Json:
    """Returns the container that trains: the one named node, as Kubeflow asks, else the first."""
    containers: list[Json] = template.get("spec", {}).get("containers") or [{"name": "node"}]
    return next((each for each in containers if each.get("name") == "node"), containers[0])


# --- initializers -----------------------------------------------------------------------------------------
def _initialized(template: Json, wanted: Source, jobs: list[Source]) -> Json:
    """Returns the template with the runtime's initializers as init containers."""
    steps = {_step_of(each): each for each in jobs}
    for kind in ("dataset", "model"):
        given, replicated = wanted.part(kind), steps.get(f"{kind}-initializer")
        if replicated is not None:
            template = _with_initializer(template, given, replicated)
    return template


def _with_initializer(template: Json, given: Source, replicated: Source) -> Json:
    step, name = _step_of(replicated), str(replicated.take("name"))
    for word in ("template.metadata.labels", "dependsOn"):
        replicated.take(word)
    apply(ONCE, replicated, {})
    pod = replicated.part("template.spec.template.spec")
    containers: list[Json] = pod.take("containers") or []
    if not containers:
        return template
    first = next((each for each in containers if each.get("name") == step), containers[0])
    uri, secret = given.take("storageUri"), given.take("secretRef")
    env = [{"name": "STORAGE_URI", "value": uri}] if uri else []
    if uri and (
        old := [each.get("value") for each in first.get("env") or () if each.get("name") == "STORAGE_URI"]
    ):
        pod.note("containers", f"STORAGE_URI {old[0]}: the TrainJob says {uri}")
    first["env"] = merged(merged(first.get("env") or [], env), given.take("env") or [])
    if secret:
        first["envFrom"] = [*(first.get("envFrom") or ()), {"secretRef": secret}]
    if not first.get("volumeMounts"):
        template, first["volumeMounts"] = _workspace(template)
    replicated.note("name", f"{name}: now an init container of each pod; each attempt runs it again")
    spec = template["spec"] | {
        "initContainers": [*(template["spec"].get("initContainers") or ()), *containers]
    }
    volumes = merged(spec.get("volumes") or [], pod.take("volumes") or [])
    return template | {"spec": spec | ({"volumes": volumes} if volumes else {})}


def _workspace(template: Json) -> tuple[Json, list[Json]]:
    """Adds a volume on which the trainer finds what an initializer writes to /workspace."""
    mounts = [{"name": "workspace", "mountPath": WORKSPACE}]
    container = _container(template)
    patch = {
        "volumes": [{"name": "workspace", "emptyDir": {}}],
        "containers": [{"name": container["name"], "volumeMounts": mounts}],
    }
    return merged(template, {"spec": patch}), mounts
