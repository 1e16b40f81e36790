"""The steps of a submission: ask the API server, say what will happen, ask the person, send, create, look."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from spottrain_cli import cluster, kubectl, manifests
from spottrain_cli.errors import CommandError, UsageError
from spottrain_cli.jobs import Job
from spottrain_cli.kubectl import Access
from spottrain_cli.submit import outline, pack, survival
from spottrain_cli.submit.outline import Price
from spottrain_cli.submit.pack import Packed
from spottrain_cli.submit.script import Script
from spottrain_cli.submit.script import manifest as of_options
from spottrain_cli.submit.survival import Keeper, Survival

Json = dict[str, Any]

KIND: Final = "TrainingJob"
OTHER_KINDS: Final = ("Job", "PyTorchJob", "TrainJob")
ACCEPTED: Final = "Accepted"
TYPED: Final = re.compile(r'Invalid value: "(string|object|integer|boolean|number|array)": ')
"""What the API server writes before the sentence of a rule: a type in place of the value."""
LOOKED_AT_SECONDS: Final = 15.0
"""How long an operator may take to look at a new job."""
POLL_SECONDS: Final = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    manifest: Json
    survival: Survival
    packed: Packed | None = None
    bucket: str = ""
    """Where the packed folder is sent."""
    endpoint: str = ""


def of_file(name: str) -> Submission:
    """Reads a manifest. Raises UsageError where it is none of a TrainingJob."""
    documents = manifests.read(name)
    found = [each for each in documents if each.get("kind") == KIND]
    others = [each for each in documents if each.get("kind") != KIND]
    if not found and any(each.get("kind") in OTHER_KINDS for each in others):
        raise UsageError(
            f"{name} holds a {others[0]['kind']}; `spottrain init {name}` makes a TrainingJob of it"
        )
    if len(found) != 1:
        named = dict.fromkeys(str(each.get("kind") or "an object without kind") for each in documents)
        kinds = ", ".join(named) or "nothing"
        raise UsageError(f"{name} holds {kinds}, and submit takes one TrainingJob")
    if others:
        names = ", ".join(f"{each.get('kind')} {(each.get('metadata') or {}).get('name')}" for each in others)
        raise UsageError(
            f"{name} holds more than the TrainingJob ({names}); create those first, by kubectl apply"
        )
    _check_shape(found[0], name)
    return Submission(manifest=found[0], survival=outline.of_manifest(found[0]))


def of_script(access: Access, script: Script, wants_pack: bool | None) -> Submission:
    """Packs a script that is here, and makes its manifest.

    Args:
        access: The cluster, for the namespace.
        script: What the user asks for.
        wants_pack: None: a script that is here is packed.

    Raises:
        UsageError: Something is missing, or cannot be packed.
    """
    path, here = Path(script.path), Path.cwd()
    packs = path.is_file() if wants_pack is None else wants_pack
    if not packs:
        if not script.path.startswith("/") and wants_pack is None:
            raise UsageError(
                f"there is no file {script.path} here; give the path of a script, or with --no-pack its "
                "path in the image"
            )
        unseen = Survival(keeper=Keeper.UNSEEN, evidence="the script is in the image")
        return Submission(manifest=script_manifest(access, script), survival=_with_mode(unseen, script))
    if not path.is_file():
        raise UsageError(f"there is no file {script.path} here to be packed")
    if not script.bucket:
        raise UsageError(
            "--bucket is needed, such as s3://my-bucket/runs: the pod gets the script from there; or "
            "--no-pack with the script's path in the image"
        )
    folder = here if path.resolve().is_relative_to(here.resolve()) else path.resolve().parent
    packed = pack.pack(folder.resolve())
    inside = str(path.resolve().relative_to(folder.resolve()))
    if inside not in packed.names:
        raise UsageError(f"{script.path} is not packed, because .gitignore or {pack.IGNORE} names it")
    code = f"{script.bucket.rstrip('/')}/{packed.key}"
    texts = {
        name: (folder / name).read_text(errors="replace") for name in packed.names if name.endswith(".py")
    }
    return Submission(
        manifest=script_manifest(access, replace(script, path=inside, code=code)),
        survival=survival.of(inside, texts),
        packed=packed,
        bucket=script.bucket,
        endpoint=script.endpoint,
    )


def script_manifest(access: Access, script: Script) -> Json:
    """Returns the script's manifest, in the namespace of kubectl's context where none is given."""
    return of_options(replace(script, namespace=script.namespace or cluster.namespace(access)))


def _with_mode(unseen: Survival, script: Script) -> Survival:
    if not script.sync_path:
        return unseen
    return Survival(keeper=Keeper.SYNC, evidence=f"checkpoint.mode Sync of {script.sync_path}")


def _check_shape(manifest: Json, name: str) -> None:
    """Raises UsageError where what is read here is not there; all else is the API server's to say."""
    try:
        containers = manifest["spec"]["template"]["spec"]["containers"]
        good = (
            isinstance(manifest["metadata"], dict)
            and bool(containers)
            and all(isinstance(each, dict) for each in containers)
        )
    except (KeyError, TypeError):
        good = False
    if not good:
        raise UsageError(f"{name} needs metadata, and spec.template.spec.containers with a container")


def checked(access: Access, manifest: Json) -> Json:
    """Returns the TrainingJob as the API server would create it, with its defaults.

    Raises:
        UsageError: The API server does not take it.
        CommandError: There is a job of this name, or as `kubectl.run`.
    """
    return _create(access, manifest, "&dryRun=All")


def create(access: Access, manifest: Json) -> Json:
    """Creates the TrainingJob. Raises as `checked`."""
    return _create(access, manifest, "")


def _create(access: Access, manifest: Json, query: str) -> Json:
    """POSTs it: `kubectl create` asks the cluster for all of its definitions first."""
    given = manifest["metadata"].get("namespace")
    if given and access.namespace and access.namespace != given:
        raise UsageError(
            f"metadata.namespace is {given}, and --namespace {access.namespace}: leave one of them out"
        )
    namespace = given or cluster.namespace(access)
    path = f"{cluster.PATH}/namespaces/{namespace}/trainingjobs?fieldValidation=Strict{query}"
    words = ("create", f"--raw={path}", "--filename=-")
    try:
        said = kubectl.run(
            replace(access, namespace=""), *words, given=json.dumps(manifest), shown="kubectl create"
        )
    except CommandError as error:
        if "already exists" not in str(error):
            raise type(error)(TYPED.sub("", str(error))) from None
        ref = f"{namespace}/{manifest['metadata'].get('name')}"
        raise CommandError(
            f"there is a job {ref} already (`spottrain status {ref}`): take another name or delete it"
        ) from None
    found: Json = kubectl.decoded(said, "the output of kubectl create")
    return found


def said(submission: Submission, as_created: Json) -> list[str]:
    """Returns what will happen, line by line."""
    return outline.lines(as_created, submission.survival, submission.packed, price_of(as_created["spec"]))


def price_of(spec: Mapping[str, Any]) -> Price | None:
    kind = outline.instance_type(spec)
    if not kind:
        return None
    from spottrain_cli.planner.instances import instances

    found = next((each for each in instances() if each.name == kind), None)
    workers = spec.get("workers", 1)
    if found is None or found.on_demand is None:
        return None
    return Price(
        instance=kind,
        spot=None if found.spot is None else workers * found.spot.usd_per_hour,
        on_demand=workers * found.on_demand.usd_per_hour,
        date=found.on_demand.date,
    )


def send(submission: Submission) -> None:
    """Sends the packed folder, unless it is there. Raises StoreError."""
    if submission.packed is not None:
        pack.send(submission.packed, submission.bucket, submission.endpoint)


def looked_at(
    access: Access,
    ref: str,
    *,
    seconds: float = LOOKED_AT_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> Job | None:
    """Waits until the operator has looked at a new job; None where it does not.

    Raises:
        UsageError: The operator refuses it.
    """
    give_up = time.monotonic() + seconds
    while True:
        job = cluster.find(access, ref)
        verdict = job.condition(ACCEPTED)
        if verdict is not None and verdict.status == "False":
            raise UsageError(
                f"{job.ref} was created, and the operator does not accept it: {verdict.message}. Change "
                f"it (kubectl edit), or `spottrain delete {job.ref}`"
            )
        if verdict is not None:
            return job
        if time.monotonic() > give_up:
            return None
        sleep(POLL_SECONDS)
