"""Reads what the doctor judges: by kubectl, in parallel and in bounded time, and one probe of the store."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Final

from spottrain.core.uri import folder_of
from spottrain.errors import RunError
from spottrain.storage.open import open_store

from spottrain_cli import cluster, kubectl, manifests, pods
from spottrain_cli.doctor.seen import Answer, Json, Seen, Store, table
from spottrain_cli.errors import CommandError, NotFound, Unreachable, UsageError
from spottrain_cli.jobs import KIND
from spottrain_cli.kubectl import RESOURCE, Access

SECONDS: Final = 20.0
"""Patience with each question."""
LOGIN_SECONDS: Final = 300.0
"""Patience with the first one, during which a person may have to log in."""
AT_ONCE: Final = 6
RIGHTS: Final = (
    "create trainingjobs",
    "patch trainingjobs",
    "delete trainingjobs",
    "get pods",
    "get pods/log",
)
"""What `submit`, `stop` and `interrupt`, `delete`, and `logs` need."""
PARTS: Final = "app.kubernetes.io/name=spottrain,app.kubernetes.io/component in (operator,agent)"


def read(access: Access, given: str) -> Seen:
    """Returns what there is of the cluster, and of the job: a name, or a file with its manifest.

    Raises:
        NotFound: There is no such job.
        UsageError: The file cannot be used.
    """
    job = _of_file(given) if is_file(given) else None
    if job is not None:
        access = _beside(access, table(job, "metadata").get("namespace", ""), given)
    elif given:
        access, _ = access.named(given)
    first = _answer(lambda: _raw(access, "/version", seconds=LOGIN_SECONDS))
    here = cluster.namespace(access)
    found = Seen(
        namespace=here, version=first, job=job, file=given if job else "", release=version("spottrain")
    )
    if isinstance(first, CommandError):
        return found
    if given and job is None:
        name = access.named(given)[1]
        found = replace(found, job=_job(access, name))
    return _with_objects(access, _with_cluster(replace(access, namespace=here), found))


def is_file(given: str) -> bool:
    return given == manifests.STDIN or given.endswith((".yaml", ".yml", ".json"))


def _of_file(name: str) -> Json:
    """Returns the TrainingJob of a file. Raises UsageError."""
    found = [each for each in manifests.read(name) if each.get("kind") == KIND]
    if len(found) != 1:
        raise UsageError(f"{name} holds {len(found)} TrainingJobs, and must hold one")
    return found[0]


def _beside(access: Access, namespace: Any, file: str) -> Access:
    if not namespace:
        return access
    if access.namespace not in ("", namespace):
        raise UsageError(
            f"the job in {file} is in namespace {namespace}: leave out --namespace {access.namespace}"
        )
    return replace(access, namespace=str(namespace))


def _job(access: Access, name: str) -> Json:
    try:
        found = kubectl.get(access, name, seconds=SECONDS)
    except NotFound as error:
        raise cluster.no_such(access, name) if f'"{name}"' in str(error) else error from None
    return found if isinstance(found, dict) else {}


# --- the cluster ----------------------------------------------------------------------------------------
def _with_cluster(access: Access, found: Seen) -> Seen:
    everywhere = replace(access, namespace="")
    of_job = f",{pods.JOB_LABEL}={found.name}" if found.name and not found.file else ""
    asked: dict[str, Callable[[], Answer]] = {
        "api": lambda: _raw(access, cluster.PATH),
        "parts": lambda: _list(everywhere, "deployments,daemonsets", "-A", f"-l{PARTS}"),
        "nodes": lambda: _list(everywhere, "nodes"),
        "defaults": lambda: _list(access, "configmap", "spottrain-defaults"),
        "pods": lambda: _list(access, "pods", f"-l{pods.TRAINERS}{of_job}"),
        **{right: lambda right=right: _may(access, right) for right in RIGHTS},  # type: ignore[misc]
    }
    if found.file:
        asked["dry run"] = lambda: _dry_run(access, found.job or {})
    answers = _all(asked)
    rights = {right: answers.pop(right) for right in RIGHTS}
    refused = answers.pop("dry run", None)
    dry_run = refused if isinstance(refused, CommandError) else None
    return replace(found, rights=rights, dry_run=dry_run, **answers)


def _with_objects(access: Access, found: Seen) -> Seen:
    """Reads what the job's pods need, whose names are known only now."""
    probe = _Probe(found)
    asked: dict[str, Callable[[], Answer]] = {
        f"{kind} {name}": lambda kind=kind, name=name: _exists(access, kind, name)  # type: ignore[misc]
        for kind, name in needed(found)
    }
    answers = _all(asked)
    objects = {(kind, name): answers[f"{kind} {name}"] for kind, name in needed(found)}
    return replace(found, objects=objects, store=probe.result())


def needed(found: Seen) -> list[tuple[str, str]]:
    """Returns kind and name of what pods of the job, or of any job, take from their namespace. Pure."""
    secret, account = (default(found, name) for name in ("credentialsSecret", "serviceAccountName"))
    if found.job is not None:
        applied = table(found.status, "defaults")
        own = table(found.spec, "checkpoint", "credentialsSecretRef").get("name", "")
        filled = table(applied, "checkpoint", "credentialsSecretRef").get("name", "") or secret
        secret = own or ("" if table(found.spec, "checkpoint").get("uri") else filled)
        template = table(found.spec, "template", "spec")
        account = template.get("serviceAccountName") or applied.get("serviceAccountName") or account
    both = (("secret", secret), ("serviceaccount", account))
    return [(kind, str(name)) for kind, name in both if name]


def default(found: Seen, name: str) -> str:
    """Returns a default of the namespace's ConfigMap, or of the chart. Pure."""
    near = table(found.defaults, "data") if isinstance(found.defaults, dict) else {}
    if near.get("checkpointPrefix") and name in ("checkpointEndpoint", "credentialsSecret"):
        return str(near.get(name, ""))  # they belong to the prefix
    return str(near.get(name) or of_chart(found).get(name) or "")


def of_chart(found: Seen) -> Json:
    try:
        defaults = json.loads(found.setting("JOB_DEFAULTS") or "{}")
    except ValueError:
        return {}
    return defaults if isinstance(defaults, dict) else {}


# --- the store ------------------------------------------------------------------------------------------
class _Probe:
    """Writes and deletes a small object at the checkpoint URI, as a trainer does at its start.

    A client library may wait for minutes; its thread is left behind then.
    """

    def __init__(self, found: Seen) -> None:
        self._where = place(found)
        self._error: RunError | CommandError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        uri = self._where.get("uri")
        if not uri or folder_of(uri) is not None:
            return
        try:
            open_store(**self._where).probe()
        except RunError as error:
            self._error = error

    def result(self) -> Store | None:
        uri = self._where.get("uri")
        if not uri:
            return None
        self._thread.join(SECONDS)
        late = Unreachable(f"{uri} did not answer within {SECONDS:g} s") if self._thread.is_alive() else None
        return Store(uri=uri, error=late or self._error, elsewhere=folder_of(uri) is not None)


def place(found: Seen) -> dict[str, Any]:
    """Returns the arguments of `open_store` for the job's checkpoints, or for those of jobs here. Pure."""
    own, filled = table(found.spec, "checkpoint"), table(found.status, "defaults", "checkpoint")
    if own.get("uri"):
        style = own.get("pathStyle")
        key = table(own, "encryption").get("kmsKey")
        return {"uri": own["uri"], "endpoint": own.get("endpoint"), "path_style": style, "kms_key": key}
    if filled.get("uri"):
        return {"uri": filled["uri"], "endpoint": filled.get("endpoint")}
    prefix, mode = default(found, "checkpointPrefix").rstrip("/"), own.get("mode")
    if not prefix or mode == "Self":
        return {}
    uri = "/".join(filter(None, (prefix, found.namespace, found.name)))
    return {"uri": uri, "endpoint": own.get("endpoint") or default(found, "checkpointEndpoint") or None}


# --- questions ------------------------------------------------------------------------------------------
def _all(asked: Mapping[str, Callable[[], Answer]]) -> dict[str, Any]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = {name: pool.submit(_answer, ask) for name, ask in asked.items()}
        return {name: each.result() for name, each in running.items()}


def _answer(ask: Callable[[], Answer]) -> Answer:
    try:
        return ask()
    except CommandError as error:
        return error


def _raw(access: Access, path: str, *, seconds: float = SECONDS) -> Json:
    said = kubectl.run(replace(access, namespace=""), "get", "--raw", path, seconds=seconds)
    found = kubectl.decoded(said, "the API server's answer")
    return found if isinstance(found, dict) else {}


def _list(access: Access, *words: str) -> Json:
    said = kubectl.run(access, "get", *words, "--output=json", seconds=SECONDS)
    found = kubectl.decoded(said, "kubectl's answer")
    return found if isinstance(found, dict) else {}


def _exists(access: Access, kind: str, name: str) -> Json:
    kubectl.run(access, "get", kind, "--output=name", "--", name, seconds=SECONDS)
    return {}


def _may(access: Access, right: str) -> Json:
    verb, resource = right.split(" ")
    resource, _, part = resource.partition("/")
    group = RESOURCE.partition(".")[2] if resource == "trainingjobs" else ""
    where = {"namespace": access.namespace, "group": group, "resource": resource, "subresource": part}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": where | {"verb": verb}},
    }
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    said = kubectl.run(
        replace(access, namespace=""),
        "create", "--raw", path, "-f", "-",
        given=json.dumps(review), shown="kubectl auth can-i", seconds=SECONDS,
    )  # fmt: skip
    found = kubectl.decoded(said, "the API server's answer")
    return found if isinstance(found, dict) else {}


def _dry_run(access: Access, job: Json) -> Json:
    words = (
        "apply",
        "--server-side",
        "--force-conflicts",
        "--dry-run=server",
        "--field-manager=doctor",
        "-f",
        "-",
    )
    kubectl.run(access, *words, given=json.dumps(job), shown="kubectl apply --dry-run", seconds=SECONDS)
    return {}
