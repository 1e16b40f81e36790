"""Every bad setting has a sentence that names it, what it holds and what it may hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from spottrain.contract import LOG_FORMAT, Env
from spottrain.core import container
from spottrain.core import device as devices
from spottrain.core.run_config import IN_POD, InitFrom, Interval, RunConfig, grace_seconds
from spottrain.core.training_settings import read_manifest
from spottrain.core.uri import same_place
from spottrain.errors import ConfigurationError

from tests.support.sentences import Told

IN_A_POD: dict[str, str] = {
    Env.JOB_UID: "uid",
    Env.JOB_NAME: "job",
    Env.ATTEMPT: "2",
    Env.CHECKPOINT_URI: "s3://b/p",
}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"warmup": 3}',
        '{"precision": "fp8"}',
        '{"microBatchSize": 0}',
        '{"globalBatchSize": 1.5}',
        '{"maxSteps": true}',
        '{"clipGradNorm": 0}',
        '{"warmupSteps": -1}',
        '{"compile": "yes"}',
        '{"seed": "1"}',
        '{"optimizer": "adamw"}',
        '{"optimizer": {"lr": 1}}',
        '{"optimizer": {"learningRate": 1}}',
        '{"optimizer": {"name": "adamw", "momentum": 0.9}}',
        '{"data": {"numWorkers": "many"}}',
        '{"activationCheckpointing": {"policy": "every"}}',
        '{"deterministic": 1}',
    ],
    ids=str,
)
def test_bad_training_settings(text: str, told: Told) -> None:
    told(lambda: read_manifest(text))


@pytest.mark.parametrize(
    "env",
    [
        {Env.CHECKPOINT_INTERVAL: "10 minutes"},
        {Env.CHECKPOINT_KEEP: "1"},
        {Env.CHECKPOINT_ON_EXISTING: "maybe"},
        {Env.ATTEMPT: "zero"},
        {Env.GATE_UNTIL: "soon"},
        {Env.PROGRESS_PORT: "99999"},
        {Env.KNOWN_DURABLE_STEP: "-1"},
        {Env.LOGS: "yes"},
        {LOG_FORMAT: "xml"},
        {Env.HANG_TIMEOUT: "0"},
        {Env.INIT_FROM: "s3://b/p/"},
        {Env.INIT_IGNORE: "head.*"},
        {Env.HANG_TIMEOUT: "soon"},
        {Env.CHECKPOINT_URI: "   "},
        {Env.CHECKPOINT_URI: "s3://b/a\nb"},
        {Env.CHECKPOINT_URI: "s3://b/${RUN}"},
        {Env.CHECKPOINT_URI: "$(PREFIX)/run"},
        {Env.CHECKPOINT_URI: "s3//b/x"},
        {Env.CHECKPOINT_URI: "~nobody-of-this-name/x"},
        {Env.CHECKPOINT_ENDPOINT: "\t"},
        {Env.INIT_FROM: " "},
        {Env.INIT_FROM: " s3://b/p\n"},
    ],
    ids=lambda env: " ".join(map("=".join, env.items())),
)
def test_bad_variables(env: dict[str, str], told: Told) -> None:
    told(lambda: RunConfig.from_env(IN_A_POD | env, script="train.py"))


def test_the_operator_s_variables_are_read() -> None:
    more: dict[str, str] = {
        Env.CHECKPOINT_INTERVAL: "2h",
        Env.KNOWN_DURABLE_STEP: "7",
        Env.GATE_UNTIL: "12.5",
        Env.HANG_TIMEOUT: "90",
    }
    run = RunConfig.from_env(IN_A_POD | more, script="/opt/train.py")
    assert (run.job, run.job_uid, run.attempt, run.checkpoint_uri) == ("job", "uid", 2, "s3://b/p")
    assert (run.interval.seconds, run.known_durable_step, run.gate_until) == (7200.0, 7, 12.5)
    assert run.hang_timeout == 90.0
    measured = RunConfig.from_env(IN_A_POD | {Env.HANG_TIMEOUT: ""}, script="train.py")
    assert measured.hang_timeout is None


def test_in_a_pod_without_a_uri_nothing_is_saved_and_on_a_laptop_a_folder_is_used() -> None:
    assert RunConfig.from_env({Env.JOB_UID: "u"}, script="a/b.py").checkpoint_uri is None
    laptop = RunConfig.from_env({}, script="a/b.py")
    assert (laptop.checkpoint_uri, laptop.job_uid, laptop.attempt) == ("checkpoints/b", "local-b", None)


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        (" s3://b/x", "s3://b/x"),
        ("s3://b/x\n", "s3://b/x"),
        ("\ts3://b/x\r\n", "s3://b/x"),
        ("\N{NO-BREAK SPACE}s3://b/x", "s3://b/x"),
        ('"s3://b/x"', "s3://b/x"),
        ("' gs://b/x '", "gs://b/x"),
        ("~/x", "/home/me/x"),
        (" ~", "/home/me"),
        ("runs/a b", "runs/a b"),
    ],
)
def test_a_uri_is_read_as_it_was_meant(text: str, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    env: dict[str, str] = {Env.CHECKPOINT_URI: text}
    assert RunConfig.from_env(env, script="train.py").checkpoint_uri == uri
    given = RunConfig.from_env(IN_A_POD | {Env.INIT_FROM: text}, script="train.py").init_from
    assert given is not None and given.source == uri


@pytest.mark.parametrize("uri", ["runs/x", "/data/x", "file:///data/x", "~/x"])
def test_in_a_pod_a_folder_that_dies_with_it_is_refused(
    uri: str, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    pod: dict[str, str] = {IN_POD: "10.0.0.1", Env.CHECKPOINT_URI: uri}
    monkeypatch.setattr(container, "on_volume", lambda folder: False)
    told(lambda: RunConfig.from_env(pod, script="train.py"))
    monkeypatch.setattr(container, "on_volume", lambda folder: True)
    assert RunConfig.from_env(pod, script="train.py").checkpoint_uri


@pytest.mark.parametrize(("text", "seconds"), [("", 30.0), ("nonsense", 30.0), ("0", 30.0), ("15", 15.0)])
def test_the_grace_is_always_a_number(text: str, seconds: float) -> None:
    assert grace_seconds({Env.GRACE_SECONDS: text}) == seconds


def test_an_interval_is_due_by_steps_or_by_time() -> None:
    assert not Interval.parse("5steps").due(steps=4, seconds=1e9)
    assert Interval.parse("5steps").due(steps=5, seconds=0)
    assert Interval.parse("2m").due(steps=1, seconds=120)


@pytest.mark.parametrize(
    ("device", "says"), [("meta", "only cpu and cuda"), ("toaster", "is not a device"), ("cuda:99", "device")]
)
def test_a_device_that_cannot_be_used_is_refused_with_a_sentence(device: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):  # what is said depends on the machine
        devices.choose(device)


def test_logs_are_kept_in_the_pods_of_a_job_with_a_place_for_them_and_elsewhere_where_it_is_wanted() -> None:
    def kept(env: dict[str, str]) -> bool:
        return RunConfig.from_env(env, script="train.py").logs

    assert kept(IN_A_POD) and kept(IN_A_POD | {Env.LOGS: ""}) and not kept(IN_A_POD | {Env.LOGS: "off"})
    assert not kept(IN_A_POD | {Env.LOGS: "keep", Env.CHECKPOINT_URI: ""})
    assert not kept({}) and kept({Env.LOGS: "keep"})


@pytest.mark.parametrize(
    ("own", "other", "endpoint"),
    [
        ("s3://b/p", "s3://c/base", "http://minio:9000"),
        ("s3://b/p", "gs://c/base", None),
        ("gs://b/p", "s3://c/base", None),
        ("s3://b/p", "/models", None),
        ("file:///own", "s3://c/base", "http://minio:9000"),
    ],
)
def test_another_runs_store_has_the_endpoint_of_this_one_unless_that_is_of_another_protocol(
    own: str, other: str, endpoint: str | None
) -> None:
    env = IN_A_POD | {Env.CHECKPOINT_URI: own, Env.CHECKPOINT_ENDPOINT: "http://minio:9000"}
    env |= {Env.CHECKPOINT_KMS_KEY: "key", Env.INIT_FROM: other, Env.INIT_IGNORE: "head.*, norm"}
    run = RunConfig.from_env(env, script="train.py")
    assert run.init_from == InitFrom(source=other, ignore=("head.*", "norm"))
    assert run.where_of_other(other) == {"uri": other, "path_style": None, "endpoint": endpoint}


@pytest.mark.parametrize(
    ("own", "other"), [("runs/a", "file:///here/runs/a/"), ("./a", "a/"), ("s3://b/p", "s3://b/p/")]
)
def test_one_place_may_be_written_in_several_ways(own: str, other: str) -> None:
    assert same_place(own, other, Path("/here"))
    assert not same_place(own, other + "b", Path("/here"))
