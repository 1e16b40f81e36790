"""From what was seen to findings: a pure rule for each subject, in the order in which a person would look."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from spottrain.core.log_format import counted
from spottrain.errors import BucketNotFound, ConfigurationError, StoreUnsuitable

from spottrain_cli.doctor.findings import Finding, fail, ok, warn
from spottrain_cli.doctor.reading import needed, of_chart
from spottrain_cli.doctor.seen import (
    AGENT,
    OPERATOR,
    Json,
    Seen,
    absent,
    items,
    labels,
    table,
    waiting,
)
from spottrain_cli.errors import CommandError

OLDEST: Final = (1, 30)
NOTICE: Final = {"AWS": 110, "EKS": 110, "GCP": 25, "GKE": 15, "Azure": 25, "AKS": 25}
"""Seconds that a pod has after a notice where nothing else is configured."""
SPOT: Final = {
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("karpenter.sh/capacity-type", "spot"),
    ("cloud.google.com/gke-spot", "true"),
    ("cloud.google.com/gke-preemptible", "true"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
    ("node-role.kubernetes.io/spot-worker", "true"),
}
"""Labels of spot nodes."""
GPU: Final = re.compile(r"(nvidia|amd)\.com/gpu|gpu\.intel\.com/.*|habana\.ai/.*|nvidia\.com/mig-.*")
"""Resources that a device plugin offers."""
HAS_GPU: Final = (
    "nvidia.com/gpu.present",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-count",
    "k8s.amazonaws.com/accelerator",
    "kubernetes.azure.com/accelerator",
)
"""Labels of nodes with a GPU, which are there before a device plugin is."""
CANNOT_PULL: Final = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
TIGHT: Final = 0.8
"""Share of the notice that a save may take."""
INSTALL: Final = (
    "helm upgrade --install spottrain charts/spottrain --namespace spottrain-system --create-namespace "
    "--set image.operator.repository=... (docs/cluster/install.md)"
)
TROUBLE: Final = "docs/cluster/troubleshooting.md"


def judge(seen: Seen) -> list[Finding]:
    """Returns the findings; of a cluster that does not answer, that alone."""
    return (
        [finding for rule in RULES for finding in rule(seen)] if not _silent(seen) else list(_cluster(seen))
    )


def _silent(seen: Seen) -> bool:
    return isinstance(seen.version, CommandError)


# --- the cluster ----------------------------------------------------------------------------------------
def _cluster(seen: Seen) -> Iterator[Finding]:
    if isinstance(seen.version, CommandError):
        yield fail("cluster", str(seen.version), "")
        return
    number = str(seen.version.get("gitVersion", ""))
    found = re.match(r"v(\d+)\.(\d+)", number)
    if found and (int(found[1]), int(found[2])) < OLDEST:
        yield fail("cluster", f"Kubernetes {number} is older than 1.30", "upgrade the cluster")
    else:
        yield ok("cluster", f"Kubernetes {number}, namespace {seen.namespace}")


def _installed(seen: Seen) -> Iterator[Finding]:
    if isinstance(seen.api, CommandError):
        how = f"{INSTALL}; or choose the cluster by --context"
        text = (
            "this cluster has no TrainingJobs"
            if absent(seen.api) or "no TrainingJobs" in str(seen.api)
            else ""
        )
        yield fail("definition", text or str(seen.api), how)
    else:
        yield ok("definition", "TrainingJobs of spottrain.io/v1alpha1 are served")


def _rights(seen: Seen) -> Iterator[Finding]:
    refused = [
        right for right, said in seen.rights.items() if not isinstance(said, CommandError) and not _yes(said)
    ]
    unknown = [right for right, said in seen.rights.items() if isinstance(said, CommandError)]
    ask = "ask for the role edit in that namespace (the chart's aggregateRoles adds TrainingJobs to it)"
    if refused:
        words = f"you may not {', '.join(refused)} in namespace {seen.namespace}"
        yield (fail if "create trainingjobs" in refused else warn)("rights", words, ask)
    elif unknown:
        yield warn("rights", f"nobody could say whether you may {', '.join(unknown)}", "try again")
    else:
        yield ok(
            "rights",
            f"you may submit, stop, interrupt and delete jobs, and read their logs, in {seen.namespace}",
        )


def _yes(said: Json) -> bool:
    return table(said, "status").get("allowed") is True


# --- what the chart installs ----------------------------------------------------------------------------
def _operator(seen: Seen) -> Iterator[Finding]:
    if isinstance(seen.parts, CommandError):
        yield warn(
            "operator", f"you cannot see it: {seen.parts}", "have an administrator run spottrain doctor"
        )
        return
    found = seen.part(OPERATOR)
    if not found:
        yield fail("operator", "there is no Deployment of it", INSTALL)
        return
    deployment, status = found[0], table(found[0], "status")
    place = "/".join(str(table(deployment, "metadata").get(key, "")) for key in ("namespace", "name"))
    wanted, ready = table(deployment, "spec").get("replicas", 1), status.get("availableReplicas", 0)
    version = str(labels(deployment).get("app.kubernetes.io/version", ""))
    namespaces = [each for each in str(seen.setting("NAMESPACES") or "").split(",") if each]
    if len(found) > 1 and not namespaces:
        yield warn(
            "operator", f"{len(found)} operators serve the same namespaces", "uninstall all but one release"
        )
    if not wanted:
        yield fail(
            "operator", f"{place} is paused with 0 replicas: nothing starts", "set operator.replicas to 2"
        )
    elif not ready:
        yield fail(
            "operator",
            f"none of {wanted} replicas of {place} is ready",
            f"kubectl logs -n {place.replace('/', ' deployment/')}",
        )
    elif namespaces and seen.namespace not in namespaces:
        served = ", ".join(namespaces)
        yield fail(
            "operator",
            f"it does not serve namespace {seen.namespace}",
            f"use one of {served}, or add it to watchNamespaces",
        )
    else:
        yield ok("operator", f"{place} {version}: {ready} of {wanted} replicas ready")
    if version and seen.release and version != seen.release:
        text = f"the operator is version {version}, this program {seen.release}"
        yield warn("version", text, f"pip install 'spottrain[cli]=={version}', or upgrade the chart")


def _agents(seen: Seen) -> Iterator[Finding]:
    if isinstance(seen.parts, CommandError):
        return
    spot, found = _spot_nodes(seen), seen.part(AGENT)
    if not found:
        text = "no notice agent is installed: pods learn of a reclaim only by SIGTERM, if something sends it"
        yield warn(
            "agents",
            text,
            "set agent.enabled, unless another program handles notices (docs/cluster/notices.md)",
        )
        return
    status = table(found[0], "status")
    wanted, ready = status.get("desiredNumberScheduled", 0), status.get("numberReady", 0)
    if ready < wanted:
        where = table(found[0], "metadata")
        look = f"kubectl get pods -n {where.get('namespace')} -l app.kubernetes.io/component=agent -o wide"
        yield warn("agents", f"{wanted - ready} of {wanted} notice agents are not ready", look)
    elif spot > wanted:
        text = f"{spot} nodes are spot, and agents run on {wanted}"
        yield warn("agents", text, "agent.nodeSelector or agent.tolerations of the chart leave nodes out")
    else:
        yield ok("agents", f"{counted(ready, 'notice agent')} ready, for {counted(spot, 'spot node')}")


def _spot_nodes(seen: Seen) -> int:
    return sum(bool(SPOT & labels(node).items()) for node in items(seen.nodes))


# --- nodes ----------------------------------------------------------------------------------------------
def _gpus(seen: Seen) -> Iterator[Finding]:
    if isinstance(seen.nodes, CommandError):
        yield warn(
            "GPUs", f"you cannot see the nodes: {seen.nodes}", "have an administrator run spottrain doctor"
        )
        return
    having, lacking, total = 0, [], 0
    for node in items(seen.nodes):
        offered = table(node, "status", "allocatable")
        count = sum(
            int(value) for name, value in offered.items() if GPU.fullmatch(name) and str(value).isdecimal()
        )
        having, total = having + bool(count), total + count
        if not count and any(labels(node).get(name, "false") not in ("false", "0") for name in HAS_GPU):
            lacking.append(str(table(node, "metadata").get("name", "")))
    wanted = seen.spec.get("gpusPerWorker", 1) if seen.job is not None else 1
    if lacking:
        text = f"pods get no GPU of {counted(len(lacking), 'node')} that has some, such as {lacking[0]}"
        yield fail(
            "GPUs", text, "install the device plugin (nvidia-device-plugin or the GPU operator) on them"
        )
    elif total:
        yield ok("GPUs", f"{total}, on {having} of {counted(len(items(seen.nodes)), 'node')}")
    elif wanted:
        text = f"no node offers a GPU now ({counted(len(items(seen.nodes)), 'node')})"
        yield warn("GPUs", text, f"fine where an autoscaler adds nodes with GPUs; else see {TROUBLE}")


def _pools(seen: Seen) -> Iterator[Finding]:
    chosen = [each for each in table(seen.spec, "capacity").get("pools") or [] if isinstance(each, dict)]
    if isinstance(seen.parts, CommandError) or not seen.part(OPERATOR):
        return
    known = {str(each.get("name")): each for each in _json(seen.setting("POOLS"), [])}
    first = _json(seen.setting("DEFAULT_POOL"), {})
    names = [str(each.get("name", "")) for each in chosen] or _default_pools(seen)
    for name in (str(each.get("name")) for each in chosen if not each.get("platform")):
        if name not in known:
            there = ", ".join(known) or "none"
            yield fail(
                "pools",
                f"the chart has no pool {name!r}",
                f"name one of its pools ({there}), or give platform",
            )
            return
    full = {**known, **{str(each["name"]): each for each in chosen if each.get("platform")}}
    used = [full[name] for name in names if name in full] or [first]
    for pool in used:
        yield from _grace(pool)
        yield from _nodes_of(pool, seen)


def _default_pools(seen: Seen) -> list[str]:
    near = table(seen.defaults, "data").get("pools", "") if isinstance(seen.defaults, dict) else ""
    named = [name for part in str(near).split(",") if (name := part.strip())]
    return named or [str(name) for name in of_chart(seen).get("pools") or []]


def _grace(pool: Json) -> Iterator[Finding]:
    platform, seconds = str(pool.get("platform", "Auto")), pool.get("noticeSeconds")
    usual = NOTICE.get(platform)
    if isinstance(seconds, int) and usual is not None and seconds > usual:
        text = (
            f"pool {pool.get('name')} counts on {seconds} s after a notice; {usual} s are usual on {platform}"
        )
        yield warn(
            "notice", text, "see that the kubelet of its nodes has a shutdownGracePeriod of more than that"
        )


def _nodes_of(pool: Json, seen: Seen) -> Iterator[Finding]:
    wanted = pool.get("nodeSelector") or {}
    if not wanted or isinstance(seen.nodes, CommandError):
        return
    count = sum(wanted.items() <= labels(node).items() for node in items(seen.nodes))
    selector = ",".join(f"{key}={value}" for key, value in wanted.items())
    if count:
        yield ok("pools", f"{counted(count, 'node')} in pool {pool.get('name')}")
    else:
        text = f"no node is in pool {pool.get('name')} now ({selector})"
        yield warn("pools", text, "fine where an autoscaler adds them; else correct its nodeSelector")


# --- what the pods need ---------------------------------------------------------------------------------
def _objects(seen: Seen) -> Iterator[Finding]:
    for kind, name in needed(seen):
        said = seen.objects.get((kind, name), {})
        what = f"the {'Secret' if kind == 'secret' else 'ServiceAccount'} {name}"
        if absent(said):
            yield fail(
                "credentials",
                f"{what} is not in namespace {seen.namespace}",
                f"kubectl create {kind} {name} --namespace {seen.namespace}"
                if kind != "secret"
                else f"kubectl create secret generic {name} --namespace {seen.namespace} "
                "--from-literal=AWS_ACCESS_KEY_ID=... --from-literal=AWS_SECRET_ACCESS_KEY=...",
            )
        elif isinstance(said, CommandError):
            yield warn("credentials", f"you cannot see {what}: {said}", "ask whoever made it")
        else:
            yield ok("credentials", f"{what} is there")


def _store(seen: Seen) -> Iterator[Finding]:
    if seen.store is None:
        if table(seen.spec, "checkpoint").get("mode") != "Self":
            text = (
                "no place for checkpoints is named" if seen.job else "the chart names no bucket for all jobs"
            )
            level = fail if seen.job is not None and not seen.status else warn
            yield level(
                "store", text, "set spec.checkpoint.uri, or jobDefaults.checkpointPrefix of the chart"
            )
        return
    uri, error = seen.store.uri, seen.store.error
    if seen.store.elsewhere:
        yield ok("store", f"{uri} is a folder of the pods, which cannot be tried from here")
    elif error is None:
        yield ok("store", f"{uri} can be read and written from here, and keeps conditional writes (If-Match)")
    elif isinstance(error, StoreUnsuitable | BucketNotFound):
        yield fail("store", str(error), "name another bucket or server")
    else:
        library = isinstance(error, ConfigurationError)
        own = "see the log of a pod, which has credentials and a network of its own"
        fix = "install it here" if library else own
        yield warn("store", f"it cannot be used from this machine: {error}", fix)


# --- the job --------------------------------------------------------------------------------------------
def _manifest(seen: Seen) -> Iterator[Finding]:
    if seen.file and seen.dry_run is not None:
        yield fail("manifest", str(seen.dry_run), f"correct {seen.file}")
    elif seen.file:
        yield ok("manifest", f"the API server accepts {seen.file}")


def _job(seen: Seen) -> Iterator[Finding]:
    if seen.job is None or seen.file:
        return
    phase = str(seen.status.get("phase", ""))
    conditions = [each for each in seen.status.get("conditions") or [] if isinstance(each, dict)]
    said = next((str(each.get("message", "")) for each in conditions if each.get("type") == phase), "")
    not_yet = [each for each in conditions if each.get("status") == "False" and each.get("message")]
    if phase in ("Failed", "Invalid"):
        yield fail("job", f"{seen.name} is {phase}{_because(said)}", f"spottrain status {seen.name}")
    elif not phase:
        yield fail("job", f"no operator has looked at {seen.name}", f"see {TROUBLE}")
    elif phase in ("Pending", "Waiting") and not_yet:
        why = _because(str(not_yet[0]["message"]))
        yield warn("job", f"{seen.name} is {phase}{why}", f"see {TROUBLE} for {not_yet[0].get('reason')}")
    else:
        yield ok("job", f"{seen.name} is {phase}")
    yield from _save_time(seen)


def _because(words: str) -> str:
    return f": {words}" if words else ""


def _save_time(seen: Seen) -> Iterator[Finding]:
    progress = table(seen.status, "progress")
    took, has = (_number(progress.get(name)) for name in ("emergencySeconds", "graceSeconds"))
    if not took or not has:
        return
    text = f"a save at a notice takes {took:.3g} s, and the pod has {has:.3g} s"
    shorter = "save less or faster (docs/checkpoints.md), or use nodes with a longer notice"
    if took > has:
        yield fail("notice", text, shorter)
    elif took > TIGHT * has:
        yield warn("notice", text, shorter)
    else:
        yield ok("notice", text)


def _number(value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        return 0.0


def _images(seen: Seen) -> Iterator[Finding]:
    refused: dict[str, str] = {}
    for pod in items(seen.pods):
        for image, reason, message in waiting(pod):
            if reason in CANNOT_PULL:
                refused.setdefault(image, message or reason)
            elif reason == "CreateContainerConfigError":
                name = table(pod, "metadata").get("name")
                yield fail("pods", f"{name} cannot start: {message}", f"see {TROUBLE}")
    for image, message in refused.items():
        yield fail(
            "images", f"nodes cannot pull {image}: {message}", "correct the name, or add imagePullSecrets"
        )


def _json(text: Any, otherwise: Any) -> Any:
    try:
        found = json.loads(text or "null")
    except (TypeError, ValueError):
        return otherwise
    return found if isinstance(found, type(otherwise)) else otherwise


RULES: Final[tuple[Callable[[Seen], Iterator[Finding]], ...]] = (
    _cluster,
    _installed,
    _rights,
    _operator,
    _agents,
    _gpus,
    _pools,
    _objects,
    _store,
    _manifest,
    _job,
    _images,
)
