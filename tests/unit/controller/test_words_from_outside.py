"""What comes from outside (JSON of the API server, annotations, a trainer's answers) is read without harm."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.aio import client
from spottrain.contract import Outcome, Progress, Stop, TerminationMessage
from spottrain_operator.__main__ import main
from spottrain_operator.api import wire
from spottrain_operator.api.node_pools import Pool
from spottrain_operator.api.observed import PodView, Silence
from spottrain_operator.api.validation import parse_job, parse_status
from spottrain_operator.api.views import cleanup_ended, node_view, pod_view
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import Memory
from spottrain_operator.control.observe import Sources
from spottrain_operator.control.plan import plan
from spottrain_operator.control.progress import Poller
from spottrain_operator.control.work_queue import WorkQueue
from spottrain_operator.errors import ApiError, InvalidSpec
from spottrain_operator.io.cluster import Cluster
from spottrain_operator.names import PLURAL, TRAINER_ANNOTATION, Condition, Platform
from spottrain_operator.policies.pod_end import termination_message_of
from spottrain_operator.rendering import trainer_pod
from spottrain_operator.settings import Settings
from spottrain_operator.status.changes import progress_due

from tests.builders import (
    KEY,
    NOW,
    POOL,
    condition,
    ended_pod,
    make_job,
    make_observed,
    make_pod,
    raw_job,
    raw_spec,
    sample,
    started,
    status_of,
    told,
)
from tests.support.environment import read
from tests.support.loopback import on_loopback
from tests.unit.controller.fake_cluster import FakeCluster, resync
from tests.unit.controller.stories import follows
from tests.unit.controller.test_interruptions import raw_pod


def test_a_status_comes_back_as_it_was_written() -> None:
    for pod in (make_pod(), ended_pod(code=1), told(Outcome.DONE, step=3, outputURI="s3://x/y")):
        written = plan(make_observed(pod, sample=sample(4, durableStep=3, loss=0.5))).status
        assert written is not None
        assert parse_status(json.loads(json.dumps(written.to_json()))) == written


OLD: dict[str, Any] = {
    "checkpoint": {"onExisting": "resume"},
    "capacity": {"type": "spotFirst", "pools": [{"name": "a", "platform": "auto"}]},
}
"""Values that no schema has any more."""


def test_a_null_in_a_pool_of_the_chart_is_no_value() -> None:
    env = {
        "SPOTTRAIN_OPERATOR_DEFAULT_POOL": '{"platform": "AWS", "preset": null}',
        "SPOTTRAIN_OPERATOR_POOLS": '[{"name": "a", "platform": "GCP", "nodeSelector": null}]',
    }
    settings = read(Settings, env)
    assert settings.default_pool == Pool(name="default", platform=Platform.AWS)
    assert settings.pools == (Pool(name="a", platform=Platform.GCP),)


def test_a_spec_with_old_values_is_told_all_the_new_ones_at_once() -> None:
    job = make_job(raw_spec(**OLD))
    assert job.spec is None
    for words in ("onExisting must be 'Fail',", "capacity.type must be 'Spot',", "platform must be 'Auto',"):
        assert words in job.invalid
    accepted = status_of(plan(make_observed(job=job)))
    found = condition(accepted, Condition.ACCEPTED)
    assert (found.status, found.message) == ("False", job.invalid)


def test_a_job_with_old_values_that_has_succeeded_stays_so() -> None:
    succeeded = status_of(plan(make_observed(told(Outcome.DONE, step=3))))
    assert succeeded.terminal
    made = plan(make_observed(job=make_job(raw_spec(**OLD), status=succeeded)))
    assert made.status is None and not made.before and not made.after


META = {
    "name": "n",
    "namespace": "ns",
    "uid": "u",
    "resourceVersion": "5",
    "creationTimestamp": "2026-03-01T12:00:00Z",
}


@pytest.mark.parametrize(
    "text", ["soon", "", "9999-99-99", "0001-01-01T00:00:00+14:00", "2026-03-01T12:00:00"]
)
def test_an_annotation_that_is_no_time_is_no_notice(text: str) -> None:
    raw = {"metadata": META | {"annotations": {"spottrain.io/termination-deadline": text}}}
    assert node_view(raw).notice is None


@pytest.mark.parametrize(
    ("value", "known"), [("1772366400", True), ("9" * 40, False), ("x", False), ("", False)]
)
def test_a_taint_is_a_notice_where_its_value_is_a_time(value: str, known: bool) -> None:
    raw = {"metadata": META, "spec": {"taints": [{"key": "spottrain.io/terminating", "value": value}]}}
    assert (node_view(raw).notice is not None) == known


def _with_a_sidecar_first(trainer: str) -> dict[str, Any]:
    """A pod of ours as a webhook leaves it that puts its container before all others."""
    raw = raw_pod(code=1, said="out of luck")
    raw["metadata"]["annotations"] = {TRAINER_ANNOTATION: trainer}
    raw["spec"]["containers"] = [{"name": "mesh"}, {"name": trainer}]
    raw["status"]["phase"] = "Running"
    raw["status"]["containerStatuses"][0]["name"] = trainer
    mesh = {"name": "mesh", "state": {"running": {"startedAt": rfc3339(NOW)}}}
    raw["status"]["containerStatuses"].insert(0, mesh)
    return raw


def test_the_trainer_is_the_container_that_was_the_trainer_when_the_pod_was_made() -> None:
    pod = pod_view(_with_a_sidecar_first("learner"))
    assert pod is not None and pod.trainer == "learner" and pod.others_run
    assert pod.ended is not None and pod.ended.message == "out of luck", "not the sidecar, which runs"


def test_the_pod_says_which_of_its_containers_is_the_trainer() -> None:
    spec = raw_spec(template={"spec": {"containers": [{"name": "learner", "image": "x"}]}})
    job = make_job(spec, status=started())
    made = trainer_pod.pod(job, job.status, POOL)
    assert made["metadata"]["annotations"][TRAINER_ANNOTATION] == "learner"


def test_a_container_put_before_the_cleanups_does_not_speak_for_it() -> None:
    mesh = {"name": "mesh", "state": {"terminated": {"exitCode": 0}}}
    ours = {"name": "cleanup", "state": {"terminated": {"exitCode": 64, "message": "denied"}}}
    raw = {"status": {"phase": "Failed", "containerStatuses": [mesh, ours]}}
    found = cleanup_ended(raw)
    assert found is not None and (found.exit_code, found.message) == (64, "denied")


def test_a_pod_of_another_controller_is_none_of_ours() -> None:
    owner = {"kind": "Job", "name": "x", "uid": "y", "controller": True}
    labels = {"spottrain.io/attempt": "1", "spottrain.io/job-uid": "u"}
    assert pod_view({"metadata": META | {"labels": labels, "ownerReferences": [owner]}}) is None
    assert pod_view({"metadata": META | {"labels": labels}}) is None


HARMFUL = (
    "[" * 4000,
    '{"outcome":"done","step":1e400}',
    '{"outcome":"done","emergencySeconds":1' + "0" * 400 + "}",
    '{"outcome":"done","warning":{"a":1}}',
    *('{"outcome":"done","step":' + "[" * depth + "]" * depth + "}" for depth in (450, 900, 960, 1900)),
)


@pytest.mark.parametrize("text", HARMFUL, ids=lambda text: text[:24])
def test_a_termination_message_that_cannot_be_read_is_none_and_the_exit_code_counts(text: str) -> None:
    pod = ended_pod(code=1, message=text)
    assert termination_message_of(pod) is None
    follows("cause1=Failed failures=1", make_observed(pod))


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "outcome": st.sampled_from(Outcome) | st.text(max_size=5),
    "step": st.none() | st.integers(-2, 2**64) | st.floats() | st.text(max_size=3),
    "message": st.text(max_size=30) | st.integers(),
    "loss": st.none() | st.floats() | st.text(max_size=3),
    "warning": st.text(max_size=5) | st.lists(st.none(), max_size=1),
    "timeSplit": st.none() | st.dictionaries(st.sampled_from(["productive", "x"]), st.floats(), max_size=2),
}


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=50) | st.fixed_dictionaries({}, optional=FIELDS).map(json.dumps))
def test_any_other_text_counts_only_as_what_it_says(text: str) -> None:
    found = termination_message_of(ended_pod(code=1, message=text))
    if found is not None:
        said = json.loads(text)
        assert (found.outcome, found.step or 0) == (said["outcome"], said.get("step") or 0)
        assert found.message == said.get("message", "") and found.warning == said.get("warning", "")
    else:
        follows("cause1=Failed failures=1", make_observed(ended_pod(code=1, message=text)))


@settings(max_examples=30, deadline=None)
@given(
    outcome=st.sampled_from(Outcome), step=st.none() | st.integers(0, 2**53 - 1), words=st.text(max_size=30)
)
def test_what_a_runtime_writes_is_read_as_it_was(outcome: Outcome, step: int | None, words: str) -> None:
    written = TerminationMessage(outcome=outcome, step=step, message=words)
    assert termination_message_of(ended_pod(code=1, message=written.to_json())) == written


def test_a_message_with_half_a_surrogate_pair_counts() -> None:
    """Python writes it for a byte of a file's name that is not UTF-8."""
    text = '{"outcome":"interrupted","message":"no such file: \\udcff"}'
    found = termination_message_of(ended_pod(code=75, message=text))
    assert found is not None and found.outcome is Outcome.INTERRUPTED


def test_settings_come_from_the_environment() -> None:
    env = {
        "SPOTTRAIN_OPERATOR_NAMESPACES": "a, b",
        "SPOTTRAIN_OPERATOR_DEFAULT_POOL": '{"platform": "GKE", "nodeSelector": {"x": "y"}}',
        "SPOTTRAIN_OPERATOR_WORKERS": "3",
        "SPOTTRAIN_OPERATOR_RESYNC_SECONDS": "",
        "PATH": "/bin",
    }
    settings = read(Settings, env)
    assert settings.namespaces == ("a", "b") and settings.workers == 3 and settings.resync_seconds == 300
    assert settings.default_pool == Pool(name="default", platform=Platform.GKE, node_selector={"x": "y"})


WRONG_SETTINGS = (
    ("DEFAULT_POOL", '{"platform": "OCI"}'),
    ("DEFAULT_POOL", "[]"),
    ("DEFAULT_POOL", "null"),
    ("DEFAULT_POOL", "{"),
    ("DEFAULT_POOL", '{"nodeSelector": 5}'),
    ("POOLS", "5"),
    ("POOLS", '{"name": "a"}'),
    ("POOLS", '["a"]'),
    ("POOLS", '[{"name": "a"}]'),
    ("JOB_DEFAULTS", "[]"),
    ("JOB_DEFAULTS", '{"prefix": "s3://b"}'),
    ("JOB_DEFAULTS", '{"checkpointPrefix": "b"}'),
    ("JOB_DEFAULTS", '{"pools": ["a100"]}'),
    ("WORKERS", "many"),
    ("WORKERS", "0"),
    ("RESYNC_SECONDS", "nan"),
    ("PROGRESS_SECONDS", "0"),
    ("DEAD_SLACK_SECONDS", "-1"),
    ("RENEW_DEADLINE_SECONDS", "12"),
    ("LOG_LEVEL", "chatty"),
    ("RESYNC", "7"),
    ("PORT", "8080"),
)


@pytest.mark.parametrize(("name", "value"), WRONG_SETTINGS)
def test_a_wrong_setting_is_refused_by_the_name_of_its_variable(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^SPOTTRAIN_OPERATOR_{name}"):
        read(Settings, {f"SPOTTRAIN_OPERATOR_{name}": value})


def test_the_operator_does_not_start_with_a_wrong_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPOTTRAIN_OPERATOR_WORKERS", "0")
    assert main() == 2
    assert capsys.readouterr().err == (
        "the operator's environment is invalid: "
        "SPOTTRAIN_OPERATOR_WORKERS=0: Input should be greater than 0\n"
    )


# --- the API server ------------------------------------------------------------------------------------
@pytest.mark.parametrize("body", ["[]", "null", "5", '"no"'])
async def test_a_response_that_is_no_object_counts_as_none(body: str) -> None:
    async with _answering(body) as cluster:
        with pytest.raises(
            ApiError, match=r"GET /apis/.*: ValueError the response is not a JSON object"
        ) as no:
            await cluster.get(PLURAL, "job", "ns")
        assert no.value.status == 0


@pytest.mark.parametrize("body", ["", "{}", '{"kind": "Status", "status": "Success"}', '{"items": 5}', "[]"])
async def test_a_list_without_items_fails_the_resync_with_an_error_of_the_api(body: str) -> None:
    async with _answering(body) as cluster:
        with pytest.raises(ApiError, match="GET /api/v1/nodes: ") as no:
            await resync(cluster, Caches(), WorkQueue(), ())
        assert no.value.status == 0


async def test_a_response_that_is_nested_too_deeply_is_an_error_of_the_api() -> None:
    async with _answering("[" * 200_000) as cluster:
        with pytest.raises(ApiError, match=r"GET /apis/.*: RecursionError") as no:
            await cluster.get(PLURAL, "job", "ns")
        assert no.value.status == 0


@pytest.mark.parametrize("part", ["spec", "status"])
def test_a_job_that_is_nested_too_deeply_does_not_stop_the_others(part: str) -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"x": deep}
    raw = raw_job()
    if part == "spec":
        raw["spec"]["template"]["spec"]["affinity"] = deep
        assert "nested too deeply" in parse_job(raw).invalid
    else:
        raw["status"] = {"phase": deep}
        with pytest.raises(InvalidSpec, match="nested too deeply"):  # which a resync logs
            parse_job(raw)


async def test_an_empty_list_may_be_null() -> None:
    async with _answering('{"metadata": {}, "items": null}') as cluster:
        assert await cluster.list("pods", "ns") == []


@asynccontextmanager
async def _answering(body: str) -> AsyncIterator[Cluster]:
    """An API server that always answers 200 with this body."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=body)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with on_loopback(app) as url:
        cluster = Cluster(client.ApiClient(client.Configuration(host=url)))
        try:
            yield cluster
        finally:
            await cluster.close()


# --- progress -----------------------------------------------------------------------------------------
@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A trainer that answers what the test puts into `ANSWER`."""

    async def answer(_: web.Request) -> web.StreamResponse:
        if ANSWER[0] == "redirect":
            raise web.HTTPFound("http://169.254.169.254/")
        return web.Response(text=ANSWER[0])

    async def stop(request: web.Request) -> web.StreamResponse:
        ORDERS.append(Stop.from_json(await request.text()))
        return web.Response(status=204)

    ORDERS.clear()
    app = web.Application()
    app.add_routes([web.get("/progress", answer), web.post("/stop", stop)])
    async with on_loopback(app) as url:
        yield int(url.rpartition(":")[2])


ANSWER = [""]
ORDERS: list[Stop] = []
"""That were posted to it."""


async def polled(port: int, pod: PodView | None = None, **spec: Any) -> Memory:
    """What is remembered after one question to a pod at this port."""
    caches, memory = Caches(), Memory()
    caches.jobs.put(make_job(raw_spec(**spec), status=started()))
    poller = Poller(
        sources=Sources(cluster=FakeCluster(), default_pool=POOL, caches=caches, memory=memory),
        queue=WorkQueue(),
        interval=0.01,
        now=lambda: NOW,
        port=port,
    )
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0)) as session:
        await poller._ask(session, pod or make_pod(ip="127.0.0.1"))
    return memory


GOOD = Progress(state="Training", attempt=1, jobUID=KEY.uid, step=7, totalSteps=10, loss=0.5).to_json()


@pytest.mark.parametrize(
    ("answer", "known"),
    [
        (GOOD, True),
        (GOOD.replace('"attempt": 1', '"attempt": 2'), False),
        (GOOD.replace(KEY.uid, "uid-of-another-job"), False),
        (GOOD.replace(f'"jobUID": "{KEY.uid}", ', ""), False),
        (GOOD.replace('"worker": 0', '"worker": 1'), False),
        (GOOD.replace("0.5", "-1"), True),
        (GOOD.replace("0.5", "NaN"), False),
        (GOOD.replace("0.5", "1" + "0" * 400), False),
        (GOOD.replace("}", ', "warning": ["x"]}'), False),
        (GOOD.replace("}", ', "emergencySeconds": "long"}'), False),
        (GOOD.replace("}", ', "emergencySeconds": 1e999}'), False),
        (GOOD.replace("}", ', "warning": "raise the grace", "graceSeconds": 25}'), True),
        (GOOD.replace('"step": 7', '"step": -7'), False),
        (GOOD.replace('"step": 7', '"step": "many"'), False),
        (GOOD.replace("0.5", "[" * 900 + "]" * 900), False),
        ("[" * 5000, False),
        ("<html>", False),
        ("[]", False),
        ("redirect", False),
    ],
)
async def test_only_a_sane_answer_of_the_current_attempt_is_progress(
    port: int, answer: str, known: bool
) -> None:
    ANSWER[0] = answer
    assert ((await polled(port)).of(KEY).sample is not None) == known


@pytest.mark.parametrize(("answer", "silent"), [(GOOD, False), ("<html>", True), ("[]", True)])
async def test_a_port_that_answers_something_else_has_no_runtime_behind_it(
    port: int, answer: str, silent: bool
) -> None:
    ANSWER[0] = answer
    silence = Silence(pod_uid=make_pod().uid, refused=True) if silent else None
    assert (await polled(port)).of(KEY).silence == silence


async def test_a_port_on_which_nothing_listens_has_no_runtime_behind_it(unused_tcp_port: int) -> None:
    silence = Silence(pod_uid=make_pod().uid, refused=True)
    assert (await polled(unused_tcp_port)).of(KEY).silence == silence


async def test_a_pod_from_which_nothing_comes_back_may_have_a_runtime() -> None:
    nobody = socket.create_server(("127.0.0.1", 0))  # accepts, by its backlog, and never answers
    try:
        memory = await polled(nobody.getsockname()[1])
    finally:
        nobody.close()
    assert memory.of(KEY).silence == Silence(pod_uid=make_pod().uid, refused=False)


@pytest.mark.parametrize(("uid", "known"), [("", True), (KEY.uid, True), ("uid-of-another-job", False)])
async def test_an_image_without_our_runtime_need_not_name_its_job(port: int, uid: str, known: bool) -> None:
    ANSWER[0] = Progress(state="Training", attempt=1, jobUID=uid, step=7).to_json()
    assert ((await polled(port, checkpoint={"mode": "Self"})).of(KEY).sample is not None) == known


async def test_progress_with_long_words_is_cut_and_is_no_news_each_time(port: int) -> None:
    long: dict[str, Any] = {"state": "S" * 500, "durableTime": "t" * 500, "warning": "w" * 9000}
    ANSWER[0] = Progress(attempt=1, jobUID=KEY.uid, **long).to_json()
    seen = (await polled(port)).of(KEY).sample
    assert seen is not None
    progress = seen.progress
    assert [len(t) for t in (progress.state, progress.durableTime, progress.warning)] == [63, 64, 1024]
    first = status_of(plan(make_observed(make_pod(), sample=seen)))
    assert not progress_due(first, seen, timedelta(seconds=60))


def test_names_in_json_are_camel_case() -> None:
    json_names = [wire.camel(n) for n in ("max_failures", "uri", "checkpoint_uri")]
    assert json_names == ["maxFailures", "uri", "checkpointURI"]


@pytest.mark.parametrize(
    ("deleted", "attempt", "told"),
    [
        (None, 1, False),
        (timedelta(seconds=-4), 1, False),  # the signal may just have come
        (timedelta(seconds=-6), 1, True),
        (timedelta(seconds=-6), 2, False),
    ],
    ids=["not deleted", "deleted just now", "deleted a while ago", "another attempt answers"],
)
async def test_a_trainer_that_goes_on_though_its_pod_was_deleted_is_told_by_its_port(
    port: int, deleted: timedelta | None, attempt: int, told: bool
) -> None:
    ANSWER[0] = Progress(state="Training", attempt=attempt, jobUID=KEY.uid, step=7).to_json()
    ends = None if deleted is None else NOW + deleted + timedelta(seconds=30)
    pod = make_pod(ip="127.0.0.1", deleted=ends, deletion_grace=30)
    await polled(port, pod)
    assert [each.podUID for each in ORDERS] == [pod.uid] * told
    assert all(ends is not None and each.deadline == ends.timestamp() for each in ORDERS)
