"""The pure parts of a process node: words and paths, what it refuses, names, quantities, addresses."""

from __future__ import annotations

import os
from typing import Any

import pytest
from processcluster.images import Image, known_images, repository
from processcluster.marks import quantity
from processcluster.names import Names, with_port_of_its_own
from processcluster.probes import READINESS, STARTUP, Probe, failure
from processcluster.refusals import why_not
from processcluster.volumes import NotYet
from processcluster.words import expanded, translated

IMAGES = {
    "ours": Image(entrypoint=("true",), user=1000),
    "files": Image(entrypoint=("true",), user=1000, roots_files=True),
}


def pod(container: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    body = {"name": "main", "image": "registry:5000/team/ours:1"} | (container or {})
    return {"metadata": {"namespace": "here"}, "spec": {"containers": [body]} | spec}


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("ours", "ours"),
        ("ours:1.2", "ours"),
        ("localhost:5000/a/ours", "ours"),
        ("r/ours:1@sha256:abcd", "ours"),
    ],
)
def test_an_image_is_known_by_the_last_part_of_its_repository(image: str, name: str) -> None:
    assert repository(image) == name


def test_all_images_of_the_dockerfile_with_a_program_of_ours_are_known() -> None:
    assert set(known_images()) == {f"spottrain-{name}" for name in ("operator", "prices", "runtime", "sync")}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("/data", "/tmp/v"),
        ("--to=/data/x", "--to=/tmp/v/x"),
        ("file:///data/x", "file:///tmp/v/x"),
        ("http://host/data/x", "http://host/data/x"),
        ("/data:/data/sub", "/tmp/v:/tmp/s"),
        ("/database and x/data", "/database and x/data"),
        ('{"path": "/data"}', '{"path": "/tmp/v"}'),
        ("/data/subway", "/tmp/v/subway"),
    ],
)
def test_a_mount_path_becomes_the_folder_that_stands_for_it(text: str, result: str) -> None:
    assert translated(text, {"/data": "/tmp/v", "/data/sub": "/tmp/s"}) == result


def test_what_one_path_brings_in_is_not_translated_again() -> None:
    assert translated("/a /b", {"/a": "/b", "/b": "/a"}) == "/b /a"


@pytest.mark.parametrize(
    ("text", "result"),
    [("$(A)-$(B)", "1-$(B)"), ("$$(A)", "$(A)"), ("$A", "$A"), ("$(A)$(A)", "11")],
)
def test_variables_are_expanded_as_a_kubelet_does(text: str, result: str) -> None:
    assert expanded(text, {"A": "1"}) == result


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (pod({"securityContext": {"runAsUser": 12345}}), "runAsUser 12345"),
        (pod(securityContext={"runAsUser": 12345}), "runAsUser 12345"),
        (pod({"securityContext": {"privileged": True}}), "privileged"),
        (pod({"securityContext": {"capabilities": {"add": ["NET_ADMIN"]}}}), "NET_ADMIN"),
        (pod({"resources": {"limits": {"hugepages-2Mi": "4Mi"}}}), "hugepages-2Mi"),
        (pod({"lifecycle": {"preStop": {}}}), "lifecycle"),
        (pod({"livenessProbe": {"grpc": {"port": 1}}}), "livenessProbe.grpc"),
        (pod(hostPID=True), "hostPID"),
        (pod(volumes=[{"name": "v", "nfs": {}}]), "'v' is of the kind nfs"),
    ],
)
def test_what_needs_a_container_is_refused_by_name(wanted: dict[str, Any], says: str) -> None:
    assert says in str(why_not(wanted, IMAGES))


@pytest.mark.parametrize(
    "wanted",
    [
        pod(),
        pod({"securityContext": {"runAsUser": 1000}}),  # the image's own user
        pod({"securityContext": {"runAsUser": os.getuid()}}),
        pod({"image": "files", "securityContext": {"runAsUser": 0, "capabilities": {"add": ["CHOWN"]}}}),
        pod({"securityContext": {"runAsNonRoot": True, "capabilities": {"drop": ["ALL"]}}}),
        pod({"resources": {"limits": {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "1"}}}),
        pod(volumes=[{"name": "v", "emptyDir": {}}, {"name": "w", "secret": {"secretName": "s"}}]),
    ],
)
def test_what_a_process_can_have_is_not_refused(wanted: dict[str, Any]) -> None:
    assert why_not(wanted, IMAGES) is None


@pytest.mark.parametrize(
    ("text", "value"), [("512Mi", 512 * 2**20), ("250m", 0.25), ("2", 2), ("1.5G", 1.5e9), ("3k", 3000)]
)
def test_quantities(text: str, value: float) -> None:
    assert quantity(text) == value


def test_a_pod_is_called_by_the_name_that_its_service_gives_it() -> None:
    names = Names()
    names.add(pod(hostname="gpt-1-0", subdomain="gpt"), "127.101.0.7")
    assert names.resolved("gpt-1-0.gpt.here.svc:29500") == "127.101.0.7:29500"
    assert names.resolved("http://s3.example.com/gpt") == "http://s3.example.com/gpt"
    with pytest.raises(NotYet, match="gpt-1-1"):
        names.resolved("gpt-1-1.gpt.here.svc.cluster.local")


def test_two_gangs_have_two_ports_and_the_pods_of_one_have_the_same() -> None:
    def given(host: str) -> dict[str, str]:
        ports = {"MASTER_PORT": "29500", "PET_MASTER_PORT": "29500"}
        return {"SPOTTRAIN_RENDEZVOUS": f"{host}:29500", "MASTER_ADDR": host} | ports

    one, two, elsewhere = (
        with_port_of_its_own(given(h)) for h in ("127.101.0.7", "127.101.0.8", "127.102.0.7")
    )
    port = one["MASTER_PORT"]
    assert one == with_port_of_its_own(given("127.101.0.7"))
    assert one["SPOTTRAIN_RENDEZVOUS"] == f"127.101.0.7:{port}" and one["PET_MASTER_PORT"] == port
    assert len({int(e["MASTER_PORT"]) + more for e in (one, two, elsewhere) for more in (0, 1)}) == 6
    assert with_port_of_its_own({"A": "1"}) == {"A": "1"}


def test_a_probe_fails_for_good_when_it_has_failed_as_often_in_a_row_as_it_may() -> None:
    probe = Probe(kind=STARTUP, raw={"failureThreshold": 2})
    assert [probe.note(failed) for failed in ("no", "", "no", "no")] == [False, False, False, True]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"exec": {"command": ["true"]}}, "exited with 7"),
        ({"tcpSocket": {"port": 1}}, "refused"),
        ({"httpGet": {"port": 1, "host": "localhost"}}, "refused"),
    ],
)
def test_a_probe_says_why_it_fails(raw: dict[str, Any], says: str) -> None:
    assert says in failure(raw, "127.0.0.1", int, lambda _command, _seconds: 7)


def test_a_probe_of_a_container_is_named_in_the_kubelets_words() -> None:
    assert Probe(kind=READINESS, raw={}).event("no") == "Readiness probe failed: no"
    assert Probe(kind=STARTUP, raw={}).end("main") == "Container main failed startup probe"
