"""What a TrainingJob becomes on the process nodes of this machine, with a list of all that was changed. Pure.

Nothing is changed without a line in that list: a rehearsal shows what the unchanged rest of the job does.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

from spottrain_cli.errors import UsageError

Json = dict[str, Any]
KIND: Final = "TrainingJob"
RUNTIME_IMAGE: Final = "spottrain-runtime"
EXAMPLES: Final = "/opt/spottrain/examples"
"""Folder of our runtime image that the process nodes have too."""
INJECTED: Final = "/spottrain"
"""Folder of the injected runtime (spec.runtime.inject)."""
CODE_FOLDER: Final = "/rehearsal/code"
SOURCE_FOLDER: Final = "/rehearsal/source"
CODE: Final = "rehearsal-code"
SOURCE: Final = "rehearsal-source"
MOST_WORKERS: Final = 8
"""Trainers that a machine of a person can start at once."""
SCRIPT: Final = re.compile(r"(?<![\w./-])([\w./-]+\.py)(?![\w.])")
SLOWER: Final = "a CPU is slower"
SPEC_LEFT_OUT: Final = {
    "suspend": "a rehearsal starts at once",
    "activeDeadlineSeconds": SLOWER,
    "ttlSecondsAfterFinished": "the job is read after its end",
    "deletionPolicy": "a rehearsal deletes all that it makes",
    "dataCache": "the volume is not here",
}
AT_FIRST_FAILURE: Final = {"maxFailures": 0, "startTimeoutSeconds": 60}
"""Fields of failurePolicy: nobody waits for an image or a volume that will never be here."""
CHECKPOINT_KEPT: Final = frozenset(
    {"mode", "syncPath", "syncWhen", "resumeArgs", "interval", "keep", "keepBest", "compileCache", "logs"}
)
TRAINING_LEFT_OUT: Final = {
    "compileMode": "nothing is compiled",
    "profile": "not needed to see what survives",
    "trackers": "nothing leaves this machine",
}
POD_KEPT: Final = frozenset(
    {"containers", "initContainers", "volumes", "terminationGracePeriodSeconds", "restartPolicy"}
)
CONTAINER_KEPT: Final = frozenset(
    {
        "name",
        "image",
        "command",
        "args",
        "workingDir",
        "env",
        "envFrom",
        "volumeMounts",
        "terminationMessagePolicy",
    }
)
OWN_VOLUMES: Final = frozenset({"emptyDir", "downwardAPI", "projected"})


@dataclass(frozen=True, kw_only=True)
class Here:
    """What this machine has in place of the job's cluster."""

    name: str
    """Of the file, for messages."""
    uri: str
    endpoint: str
    secret: str
    beside: Callable[[str], bool]
    """Whether there is such a path relative to the manifest's folder."""
    on_machine: Callable[[str], bool]
    """Whether there is such an absolute path."""
    source: str = ""
    """Folder with a copy of what is beside the manifest."""
    python: str = ""
    """Python that stands for the image; empty: the cluster's own, for our image alone."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Adapted:
    job: Json
    others: tuple[Json, ...]
    """ConfigMaps and Secrets of the same file."""
    changes: tuple[str, ...]
    mode: str
    notice_seconds: int
    needs_source: bool


@dataclass
class _Changes:
    lines: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def leave_out(self, part: Json, key: str, path: str, why: str) -> None:
        if key in part:
            del part[key]
            self.say(f"{path}.{key}: left out, {why}")


def the_job(objects: Sequence[Json], name: str) -> tuple[Json, list[Json]]:
    """The one TrainingJob of a file, and its other objects. Raises UsageError."""
    jobs = [each for each in objects if each.get("kind") == KIND]
    if len(jobs) != 1:
        kinds = ", ".join(sorted({str(each.get("kind")) for each in objects})) or "none"
        raise UsageError(
            f"{name} must hold one {KIND}, and it holds {len(jobs)} (kinds: {kinds}); `spottrain init` makes "
            "one of a script or of another kind of job"
        )
    spec = jobs[0].get("spec")
    pod = spec.get("template", {}).get("spec") if isinstance(spec, dict) else None
    containers = pod.get("containers") if isinstance(pod, dict) else None
    if (
        not isinstance(containers, list)
        or not all(isinstance(each, dict) for each in containers)
        or not containers
    ):
        raise UsageError(f"{name}: spec.template.spec.containers must name the container that trains")
    return jobs[0], [each for each in objects if each is not jobs[0]]


def adapted(job: Json, others: Sequence[Json], here: Here) -> Adapted:
    """The job as it can run here. Raises UsageError where it cannot, with what to do."""
    changes, spec = _Changes(), copy.deepcopy(job["spec"])
    mode = str((spec.get("checkpoint") or {}).get("mode", "Runtime"))
    notice = _notice_seconds(spec)
    kept = [each for each in others if each.get("kind") in ("ConfigMap", "Secret")]
    for each in others:
        if each not in kept:
            changes.say(f"{each.get('kind')} {_name(each)}: not created, a rehearsal needs the job alone")
    known = {(each["kind"], _name(each)) for each in kept}
    for key, why in SPEC_LEFT_OUT.items():
        changes.leave_out(spec, key, "spec", why)
    policy = spec["failurePolicy"] = dict(spec.get("failurePolicy") or {})
    changes.leave_out(policy, "hangTimeoutSeconds", "failurePolicy", SLOWER)
    policy |= AT_FIRST_FAILURE
    said = ", ".join(f"{key} {value}" for key, value in AT_FIRST_FAILURE.items())
    changes.say(f"failurePolicy: {said}, a rehearsal ends at the first failure")
    _size(spec, changes)
    _capacity(spec, notice, changes)
    _checkpoint(spec, mode, here, changes)
    if mode == "Runtime":
        _training(spec, here, changes)
    needs_source = _pod(spec["template"]["spec"], known, here, changes)
    made = {
        "apiVersion": job.get("apiVersion", "spottrain.io/v1alpha1"),
        "kind": KIND,
        "metadata": {"name": _name(job), "labels": _labels(job, changes)},
        "spec": spec,
    }
    return Adapted(
        job=made,
        others=tuple(_bare(each) for each in kept),
        changes=tuple(changes.lines),
        mode=mode,
        notice_seconds=notice,
        needs_source=needs_source,
    )


def named(job: Json, name: str, uri: str) -> Json:
    """The same job under another name, with checkpoints of its own."""
    made = copy.deepcopy(job)
    made["metadata"]["name"] = name
    if made["spec"]["checkpoint"].get("mode") != "Self":
        made["spec"]["checkpoint"]["uri"] = f"{uri}/{name}"
    return made


def with_steps(job: Json, steps: int) -> Json:
    """With a warm-up of a tenth, because that of the job may be longer than these steps."""
    made = copy.deepcopy(job)
    training = made["spec"].setdefault("training", {})
    for other in ("warmupEpochs", "warmupFraction"):
        training.pop(other, None)
    training |= {"maxSteps": steps, "warmupSteps": max(1, steps // 10)}
    return made


def _bare(thing: Json) -> Json:
    """Without its namespace and what a cluster has written to it."""
    metadata = thing.get("metadata") or {}
    return thing | {"metadata": {"name": metadata.get("name"), "labels": metadata.get("labels") or {}}}


def _name(thing: Json) -> str:
    return str((thing.get("metadata") or {}).get("name") or "job")


def _labels(job: Json, changes: _Changes) -> Json:
    labels = dict((job.get("metadata") or {}).get("labels") or {})
    for label in [each for each in labels if each.startswith("kueue.x-k8s.io/")]:
        del labels[label]
        changes.say(f"metadata.labels[{label}]: left out, Kueue is not here")
    return labels


# --- size, nodes, store -----------------------------------------------------------------------------
def _size(spec: Json, changes: _Changes) -> None:
    if int(spec.get("workers") or 1) > MOST_WORKERS:
        changes.say(f"workers: {MOST_WORKERS} of {spec['workers']}, each is a process of this machine")
        spec["workers"] = MOST_WORKERS
    if spec.get("gpusPerWorker") != 0:
        before = spec.get("gpusPerWorker", "by the template")
        changes.say(f"gpusPerWorker: 0 in place of {before}, one process a worker on the CPU")
        spec["gpusPerWorker"] = 0


WARNING_SECONDS: Final = {"AWS": 120, "EKS": 120, "Karpenter": 120, "GKE": 15}
"""Between a cloud's notice and the end of a node."""
OTHER_WARNING: Final = 30


def _notice_seconds(spec: Json) -> int:
    """The shortest warning of the job's pools."""
    pools = (spec.get("capacity") or {}).get("pools") or []
    platforms = [each.get("platform", "Auto") for each in pools if isinstance(each, dict)]
    return min((WARNING_SECONDS.get(each, OTHER_WARNING) for each in platforms), default=OTHER_WARNING)


def _capacity(spec: Json, notice: int, changes: _Changes) -> None:
    changes.say(f"capacity: the spot nodes of this machine, which end {notice} s after their notice")
    spec["capacity"] = {"type": "Spot"}


def _checkpoint(spec: Json, mode: str, here: Here, changes: _Changes) -> None:
    given = spec.get("checkpoint") or {}
    made = {key: value for key, value in given.items() if key in CHECKPOINT_KEPT}
    if "initFrom" in given:
        changes.say("checkpoint.initFrom: left out, the weights begin as the script makes them")
    if mode != "Self":
        made |= {"endpoint": here.endpoint, "credentialsSecretRef": {"name": here.secret}}
        changes.say(f"checkpoint.uri: {here.uri}, on the S3 server of this machine")
    spec["checkpoint"] = made


def _training(spec: Json, here: Here, changes: _Changes) -> None:
    training = spec["training"] = dict(spec.get("training") or {})
    for key, why in TRAINING_LEFT_OUT.items():
        changes.leave_out(training, key, "training", why)
    if training.get("compile"):
        changes.say("training.compile: false, compilation takes longer than a rehearsal")
        training["compile"] = False
    if training.get("precision", "fp32") not in ("fp32", "auto"):
        changes.say(f"training.precision: fp32 in place of {training['precision']}, as a CPU computes")
        training["precision"] = "fp32"
    if not training.get("deterministic"):
        changes.say("training.deterministic: true, so that results can be compared")
        training["deterministic"] = True
    if "seed" not in training:
        changes.say(f"training.seed: {here.seed}, so that results can be compared")
        training["seed"] = here.seed


# --- the pod ----------------------------------------------------------------------------------------
def _pod(pod: Json, known: set[tuple[str, str]], here: Here, changes: _Changes) -> bool:
    """Whether it needs what is beside the manifest."""
    _leave_rest_out(pod, POD_KEPT, "template.spec", changes)
    trainer = _trainer(pod["containers"])
    for part in ("initContainers", "containers"):
        others = [each for each in pod.get(part) or [] if each is not trainer]
        for each in others:
            changes.say(f"container {each.get('name')}: left out, its image {each.get('image')} is not here")
        pod[part] = [trainer] if part == "containers" else []
    _leave_rest_out(trainer, CONTAINER_KEPT, f"container {trainer.get('name', 'trainer')}", changes)
    _volumes(pod, known, here, changes)
    _environment(trainer, known, changes)
    _image(trainer, here, changes)
    return _code(pod, trainer, here, changes)


def _trainer(containers: Sequence[Json]) -> Json:
    return next((each for each in containers if each.get("name") == "trainer"), containers[0])


def _leave_rest_out(part: Json, kept: frozenset[str], path: str, changes: _Changes) -> None:
    rest = sorted(set(part) - kept - {"imagePullPolicy"})
    part.pop("imagePullPolicy", None)
    for key in rest:
        del part[key]
    if rest:
        changes.say(f"{path}: left out: {', '.join(rest)}")


def _volumes(pod: Json, known: set[tuple[str, str]], here: Here, changes: _Changes) -> None:
    for volume in pod.get("volumes") or []:
        kind = next((key for key in volume if key != "name"), "emptyDir")
        source = volume.get(kind) or {}
        name = (
            source.get("secretName")
            or source.get("claimName")
            or source.get("name")
            or source.get("path")
            or ""
        )
        wanted = {"configMap": "ConfigMap", "secret": "Secret"}.get(kind)
        if kind in OWN_VOLUMES or (wanted, name) in known or (kind == "hostPath" and here.on_machine(name)):
            continue
        del volume[kind]
        volume["emptyDir"] = {}
        changes.say(
            f"volume {volume['name']}: empty, because {kind} {name} is not here; a hostPath volume may give "
            "it data"
        )


def _environment(trainer: Json, known: set[tuple[str, str]], changes: _Changes) -> None:
    kept, gone = [], []
    for item in trainer.get("env") or []:
        source = item.get("valueFrom") or {}
        missing = _missing(source, {"secretKeyRef": "Secret", "configMapKeyRef": "ConfigMap"}, known)
        if missing:
            gone.append(f"{item['name']} (of {missing})")
        elif "resourceFieldRef" in source:
            gone.append(f"{item['name']} (of resources)")
        else:
            kept.append(item)
    if gone:
        changes.say(f"env: without {', '.join(gone)}, which is not here")
    trainer["env"] = [*kept, {"name": "CUDA_VISIBLE_DEVICES", "value": ""}]
    froms = []
    for item in trainer.get("envFrom") or []:
        if missing := _missing(item, {"secretRef": "Secret", "configMapRef": "ConfigMap"}, known):
            changes.say(f"envFrom: without {missing}, which is not here")
        else:
            froms.append(item)
    trainer["envFrom"] = froms


def _missing(source: Mapping[str, Any], kinds: Mapping[str, str], known: set[tuple[str, str]]) -> str:
    for key, kind in kinds.items():
        name = (source.get(key) or {}).get("name")
        if key in source and (kind, name) not in known:
            return f"{kind} {name}"
    return ""


def repository(image: str) -> str:
    """`spottrain-runtime` of `registry:5000/team/spottrain-runtime:0.3.0@sha256:...`."""
    return image.partition("@")[0].rpartition("/")[2].partition(":")[0]


def _image(trainer: Json, here: Here, changes: _Changes) -> None:
    image = str(trainer.get("image", ""))
    if not here.python:
        if repository(image) != RUNTIME_IMAGE:
            raise UsageError(
                f"{here.name}: the image {image} cannot run here, because its nodes run programs of "
                "this machine; name a Python that has what the image has: --python PATH"
            )
        return
    trainer["image"] = f"{RUNTIME_IMAGE}:rehearsal"
    folder = str(PurePosixPath(here.python).parent)
    path = {"name": "PATH", "value": f"{folder}:/usr/local/bin:/usr/bin:/bin"}
    trainer["env"] = [*(item for item in trainer["env"] if item["name"] != "PATH"), path]
    command = list(trainer.get("command") or [])
    if command[:1] == ["spottrain"]:
        trainer["command"] = [here.python, "-m", *command]
    elif not command:
        trainer["command"] = [here.python, "-m", "spottrain", "run"]
    changes.say(f"image {image}: {here.python} of this machine")


# --- the script -------------------------------------------------------------------------------------
def _code(pod: Json, trainer: Json, here: Here, changes: _Changes) -> bool:
    """Puts a copy of the manifest's folder where the container looks for its script; whether it must.

    A copy for each pod: on a real node, too, what a script writes beside itself goes with the pod.
    """
    _without_packed_code(trainer, changes)
    place = _place(pod, trainer, here)
    if place is None:
        return False
    trainer["workingDir"] = trainer.get("workingDir") or place
    mounts = trainer.setdefault("volumeMounts", [])
    mounts.append({"name": CODE, "mountPath": place})
    pod["volumes"] = [
        *(pod.get("volumes") or []),
        {"name": CODE, "emptyDir": {}},
        {"name": SOURCE, "hostPath": {"path": here.source, "type": "Directory"}},
    ]
    copying = ["cp", "-R", f"{SOURCE_FOLDER}/.", CODE_FOLDER]
    pod["initContainers"] = [
        {
            "name": CODE,
            "image": f"{RUNTIME_IMAGE}:rehearsal",
            "command": copying,
            "volumeMounts": [
                {"name": SOURCE, "mountPath": SOURCE_FOLDER},
                {"name": CODE, "mountPath": CODE_FOLDER},
            ],
        }
    ]
    changes.say(f"{place}: a copy of the folder of {here.name} for each pod")
    return True


def _without_packed_code(trainer: Json, changes: _Changes) -> None:
    """`spottrain run --code URI` fetches what `submit` has packed: here the folder itself is taken."""
    for part in ("args", "command"):
        words = list(trainer.get(part) or [])
        if "--code" in words and words.index("--code") + 1 < len(words):
            at = words.index("--code")
            changes.say(f"--code {words[at + 1]}: the folder of this machine instead")
            trainer[part] = words[:at] + words[at + 2 :]


def _place(pod: Json, trainer: Json, here: Here) -> str | None:
    """The folder of the container in which the script must be; None: it is there already."""
    words = [str(word) for part in ("command", "args") for word in trainer.get(part) or []]
    filled = [EXAMPLES, *_filled_mounts(pod, trainer)]
    for at, word in enumerate(words):
        if word == "-m" and at + 1 < len(words) and _is_module(words[at + 1], here):
            return _working_folder(trainer)
        for script in SCRIPT.findall(word):
            if script.startswith(f"{INJECTED}/"):
                continue  # the launcher; the script follows
            if any(script.startswith(f"{folder}/") for folder in filled):
                return None
            if not script.startswith("/"):
                return _folder_of_relative(script, trainer, here)
            if here.on_machine(script):
                return None
            return _folder_of_absolute(script, here)
    return None


def _filled_mounts(pod: Json, trainer: Json) -> list[str]:
    """Mount paths of volumes that bring something."""
    empty = {volume["name"] for volume in pod.get("volumes") or [] if "emptyDir" in volume}
    mounts = trainer.get("volumeMounts") or []
    return [str(mount["mountPath"]).rstrip("/") for mount in mounts if mount["name"] not in empty]


def _is_module(name: str, here: Here) -> bool:
    path = name.replace(".", "/")
    return here.beside(f"{path}.py") or here.beside(f"{path}/__main__.py")


def _working_folder(trainer: Json) -> str:
    return str(trainer.get("workingDir") or CODE_FOLDER).rstrip("/") or CODE_FOLDER


def _folder_of_relative(script: str, trainer: Json, here: Here) -> str:
    if not here.beside(script):
        raise UsageError(
            f"{here.name}: the script {script} is not beside it; rehearse a manifest that lies there"
        )
    return _working_folder(trainer)


def _folder_of_absolute(script: str, here: Here) -> str:
    """`/app` of `/app/src/train.py` where `src/train.py` is beside the manifest."""
    parts = script.strip("/").split("/")
    for cut in range(1, len(parts)):
        if here.beside("/".join(parts[cut:])):
            return "/" + "/".join(parts[:cut])
    raise UsageError(
        f"{here.name}: the script {script} is in the image alone; put the manifest beside a copy of "
        f"{parts[-1]}, in the same subfolder"
    )
