"""What spec.checkpoint makes of the pod, and which folders and templates it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from spottrain.contract import Env
from spottrain_operator.api.training_job import AttemptRecord, Status
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Condition, Phase
from spottrain_operator.rendering import trainer_pod

from tests.builders import POOL, condition, ended_pod, make_job, make_observed, raw_spec
from tests.unit.controller.test_trainer_pod import Json, rendered, trainer_of

CA = {"uri": "s3://b/p", "caBundle": {"configMapKeyRef": {"name": "authority", "key": "ca.pem"}}}


def _values(manifest: Json) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in trainer_of(manifest)["env"]}


# --- certificates -------------------------------------------------------------------------------------
def test_a_ca_bundle_is_mounted_read_only_and_named_to_the_store_client() -> None:
    manifest = rendered(checkpoint=CA)
    mount = next(m for m in trainer_of(manifest)["volumeMounts"] if m["name"] == "spottrain-ca")
    volume = next(v for v in manifest["spec"]["volumes"] if v["name"] == "spottrain-ca")
    assert mount == {"name": "spottrain-ca", "mountPath": "/etc/spottrain-ca", "readOnly": True}
    assert volume["configMap"] == {"name": "authority", "items": [{"key": "ca.pem", "path": "ca.crt"}]}
    assert _values(manifest)["AWS_CA_BUNDLE"] == "/etc/spottrain-ca/ca.crt"


def test_a_ca_bundle_may_come_from_a_secret() -> None:
    manifest = rendered(checkpoint=CA | {"caBundle": {"secretKeyRef": {"name": "authority"}}})
    volume = next(v for v in manifest["spec"]["volumes"] if v["name"] == "spottrain-ca")
    assert volume["secret"] == {"secretName": "authority", "items": [{"key": "ca.crt", "path": "ca.crt"}]}


def test_without_a_ca_bundle_the_templates_own_stands() -> None:
    manifest = rendered(trainer={"env": [{"name": "AWS_CA_BUNDLE", "value": "/own.pem"}]})
    assert _values(manifest)["AWS_CA_BUNDLE"] == "/own.pem"
    assert "spottrain-ca" not in {v["name"] for v in manifest["spec"]["volumes"]}


IN_THE_WAY: list[tuple[Json, Json, str]] = [
    (
        {"env": [{"name": "AWS_CA_BUNDLE", "value": "/x"}]},
        {},
        "containers[0].env must not have AWS_CA_BUNDLE",
    ),
    ({"volumeMounts": [{"name": "a", "mountPath": "/etc/spottrain-ca/"}]}, {}, "volumeMounts must not have"),
    ({"volumeMounts": [{"name": "a", "mountPath": "/etc/spottrain-ca/x"}]}, {}, "volumeMounts must not have"),
    ({}, {"volumes": [{"name": "spottrain-ca"}]}, "spec.template.spec.volumes must not have spottrain-ca"),
]


@pytest.mark.parametrize(("trainer", "pod", "words"), IN_THE_WAY)
def test_what_is_in_the_way_of_a_ca_bundle_is_refused_by_its_path(
    trainer: Json, pod: Json, words: str
) -> None:
    template = {"spec": {"containers": [{"name": "trainer"} | trainer]} | pod}
    job = make_job(raw_spec(template=template, checkpoint=CA))
    assert job.spec is None and words in job.invalid and "caBundle" in job.invalid
    assert make_job(raw_spec(template=template)).spec is not None, "without caBundle it may have that"


# --- folders ------------------------------------------------------------------------------------------
CLAIM = {"persistentVolumeClaim": {"claimName": "data"}}


def _with_folder(uri: str, volume: Json | None, *, at: str = "/data", kind: str = "Spot", **more: Any) -> str:
    """Why it is refused; "" where it is not."""
    mounts = [{"name": "data", "mountPath": at}, *more.pop("mounts", ())]
    trainer = {"name": "trainer", "volumeMounts": mounts if volume is not None else []}
    volumes = [{"name": "data"} | volume, *more.pop("volumes", ())] if volume is not None else []
    template = {"spec": {"containers": [trainer], "volumes": volumes}}
    checkpoint = {"uri": uri}
    return make_job(raw_spec(template=template, checkpoint=checkpoint, capacity={"type": kind})).invalid


@pytest.mark.parametrize(
    "volume",
    [CLAIM, {"nfs": {"server": "s", "path": "/"}}, {"cephfs": {}}, {"azureFile": {}}, {"iscsi": {}}],
    ids=lambda v: next(iter(v)),
)
def test_a_folder_that_outlives_its_node_will_do_for_spot(volume: Json) -> None:
    assert _with_folder("file:///data/run", volume) == ""


@pytest.mark.parametrize(
    "volume",
    [
        {"emptyDir": {}},
        {},
        {"hostPath": {"path": "/mnt"}},
        {"ephemeral": {"volumeClaimTemplate": {}}},
        {"csi": {"driver": "d"}},
        {"configMap": {"name": "x"}},
    ],
    ids=lambda v: next(iter(v), "no source"),
)
def test_a_folder_that_is_lost_with_its_node_is_refused_for_spot(volume: Json) -> None:
    words = _with_folder("file:///data/run", volume)
    kind = next(iter(volume), "emptyDir")
    assert words.startswith(
        f"spec.checkpoint.uri file:///data/run is on volume data ({kind}), which does not"
    )
    assert "persistentVolumeClaim" in words
    assert _with_folder("file:///data/run", volume, kind="OnDemand") == "", "that is the user's choice"


def test_a_folder_on_no_volume_is_refused_for_spot() -> None:
    assert "is on no volume of spec.template.spec.containers[0]" in _with_folder("file:///data/run", None)
    assert "is on no volume" in _with_folder("file:///database/run", CLAIM), "/data is not above it"
    assert "is on no volume" in _with_folder("file:///data/../var/run", CLAIM)
    assert "volumes does not have" in _with_folder(
        "file:///data/x/run", CLAIM, mounts=[{"name": "other", "mountPath": "/data/x"}]
    )


@pytest.mark.parametrize(
    "uri", ["file:///data", "file:///data/a%20b/run", "file:////data//run", "file:///data/"]
)
def test_a_folder_is_found_however_it_is_written(uri: str) -> None:
    assert _with_folder(uri, CLAIM) == "" and _with_folder(uri, CLAIM, at="/data/") == ""
    assert _with_folder(uri, CLAIM, at="/") == ""


def test_the_escapes_of_a_uri_are_the_characters_of_its_path() -> None:
    assert _with_folder("file:///my%20data/run", CLAIM, at="/my data") == ""
    assert "is on no volume" in _with_folder("file:///my%20data/run", CLAIM, at="/my%20data")


def test_the_mount_nearest_to_the_folder_decides() -> None:
    scratch: Json = {"volumes": [{"name": "fast", "emptyDir": {}}]}
    scratch |= {"mounts": [{"name": "fast", "mountPath": "/data/fast"}]}
    assert "volume fast (emptyDir)" in _with_folder("file:///data/fast/run", CLAIM, **scratch)
    scratch = {"volumes": [{"name": "fast", "emptyDir": {}}]}
    scratch |= {"mounts": [{"name": "fast", "mountPath": "/data/fast"}]}
    assert _with_folder("file:///data/run", CLAIM, **scratch) == ""


def test_a_place_that_the_operator_adds_covers_what_lies_below() -> None:
    words = _with_folder("file:///dev/shm/run", CLAIM, at="/dev")
    assert "volume spottrain-shm (emptyDir)" in words
    assert "spottrain-cache" in _with_folder("file:///cache/run", None)
    assert _with_folder("file:///cache/run", CLAIM, at="/cache") == "", (
        "a mount of the template's own there stands"
    )


def test_a_refused_folder_is_told_in_the_condition_and_starts_nothing() -> None:
    job = make_job(raw_spec(checkpoint={"uri": "file:///data/run"}), status=Status())
    made = plan(make_observed(job=job, admitted=False))
    assert made.status is not None and not made.after
    accepted = condition(made, Condition.ACCEPTED)
    assert (accepted.status, accepted.reason) == ("False", "InvalidSpec")
    assert "is on no volume" in accepted.message and made.status.phase == Phase.INVALID


# --- the compile cache --------------------------------------------------------------------------------
def _cache_after(*codes: int | None, wanted: str = "Keep") -> str:
    """What the attempt after these exit codes is told."""
    records = tuple(AttemptRecord(number=n, exit_code=code) for n, code in enumerate(codes, start=1))
    current = AttemptRecord(number=len(codes) + 1)
    job = make_job(raw_spec(checkpoint={"uri": "s3://b/p", "compileCache": wanted}))
    status = Status(attempt=current.number, attempts=(*records, current))
    return trainer_pod.environment(job, status, 110)[Env.COMPILE_CACHE]


def test_an_illegal_instruction_drops_the_compile_cache_for_one_attempt() -> None:
    assert [_cache_after(), _cache_after(1), _cache_after(75)] == ["keep"] * 3
    assert _cache_after(132) == "drop" and _cache_after(132, 75) == "keep"
    assert _cache_after(132, None) == "drop", "that one may never have run"
    assert _cache_after(132, wanted="None") == "off"


def test_the_attempt_after_an_illegal_instruction_is_made_without_the_compile_cache() -> None:
    first = plan(make_observed(ended_pod(code=132))).status
    assert first is not None and first.attempt == 2 and first.failures == 1
    assert "SIGILL" in first.attempts[0].evidence
    again = make_job(status=replace(first, next_start=None))
    manifest = trainer_pod.pod(again, again.status, POOL)
    assert _values(manifest)["SPOTTRAIN_COMPILE_CACHE"] == "drop"


# --- the image ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("image", "digest"),
    [("r.example.com:5000/a/b:1@sha256:" + "0" * 64, "sha256:" + "0" * 64), ("a/b:1", None), ("a", None)],
)
def test_only_an_image_that_is_pinned_has_a_digest(image: str, digest: str | None) -> None:
    assert _values(rendered(trainer={"image": image})).get("SPOTTRAIN_IMAGE_DIGEST") == digest


def test_a_bucket_of_google_cloud_storage_needs_nothing_else() -> None:
    values = _values(rendered(checkpoint={"uri": "gs://my_bucket/run", "interval": "auto"}))
    assert values["SPOTTRAIN_CHECKPOINT_URI"] == "gs://my_bucket/run"
    assert values["SPOTTRAIN_CHECKPOINT_INTERVAL"] == "auto"
