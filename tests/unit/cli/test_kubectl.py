"""kubectl as we run it: what it is given, what of its messages is shown, and which error its last one is."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from spottrain_cli import app, cluster, kubectl
from spottrain_cli.errors import CommandError, NotFound, Unreachable, UsageError
from spottrain_cli.kubectl import Access, failure

from tests.support.costs import ENDED, document
from tests.support.sentences import Told

Fake = Callable[[str], None]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Puts a shell script on the PATH as kubectl, alone there."""

    def put(body: str) -> None:
        file = tmp_path / "bin" / "kubectl"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)
        monkeypatch.setenv("PATH", str(file.parent))

    return put


def prints(*lines: str) -> str:
    return "".join(f"echo {shlex.quote(line)} >&2\n" for line in lines) + "exit 1"


# --- what it is given -----------------------------------------------------------------------------------
def test_kubectl_gets_the_user_s_context_and_namespace(
    fake: Fake, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "answer").write_text(json.dumps(document(ENDED)))
    fake(f'echo "$@" > {tmp_path}/words; /bin/cat {tmp_path}/answer')
    assert app.main(["cost", "ml/gpt", "--context", "east", "--kubeconfig", "/k"]) == 0
    assert "gpt in namespace ml" in capsys.readouterr().out
    words = (tmp_path / "words").read_text().split()
    assert {"--kubeconfig=/k", "--context=east", "--namespace=ml", "--output=json"} <= set(words)
    assert words[-3:] == ["--", "trainingjobs.spottrain.io", "gpt"]


def test_a_name_that_begins_with_a_dash_is_no_flag_of_kubectl(fake: Fake, tmp_path: Path) -> None:
    fake(f'echo "$@" > {tmp_path}/words; echo "{{}}"')
    kubectl.get(Access(), "--token=x")
    assert (tmp_path / "words").read_text().split()[-3:] == ["--", "trainingjobs.spottrain.io", "--token=x"]


@pytest.mark.parametrize("ref", ["/gpt", "ml/", "a/b/c", "vision/gpt"])
def test_a_reference_that_names_no_job_of_the_namespace_is_refused(ref: str, told: Told) -> None:
    with pytest.raises(UsageError) as refused:
        Access(namespace="ml").named(ref)
    told(str(refused.value))


# --- what is shown of it --------------------------------------------------------------------------------
LOGGED = (
    "E1126 07:57:21.123456   12345 memcache.go:265] couldn't get current server API group list: "
    'Get "http://localhost:8080/api?timeout=30s": dial tcp 127.0.0.1:8080: connect: connection refused'
)
LONG = ('E1126 07:57:21.1   1 memcache.go:265] "Unhandled Error" err=<', "\tcouldn't get it", "\t", " >")
REFUSED = "The connection to the server localhost:8080 was refused - did you specify the right host or port?"
WARNING = "Warning: unknown field spec.wrkers"


@pytest.mark.parametrize(
    ("printed", "passed"),
    [
        ((*[LOGGED] * 5, REFUSED), ()),
        ((*LONG, *LONG, "error: no such plugin", "", "Read about plugins."), ()),
        ((WARNING, "Error from server (Forbidden): jobs are forbidden"), (WARNING,)),
        (("To sign in, open https://example.com/device", "error: no login"), ("To sign in, open https://example.com/device",)),
        ((LOGGED,), ()),
        ((), ()),
    ],
    ids=["its log", "a log of several lines", "a warning", "a login", "nothing else", "nothing"],
)  # fmt: skip
def test_a_failure_is_one_sentence_after_what_was_meant_for_the_person(
    fake: Fake,
    capsys: pytest.CaptureFixture[str],
    printed: tuple[str, ...],
    passed: tuple[str, ...],
    told: Told,
) -> None:
    fake(prints(*printed))
    assert app.main(["status", "gpt"]) in (1, 2, 4)
    out, err = capsys.readouterr()
    *before, ours = err.splitlines()
    assert not out and tuple(before) == passed
    told(ours)


def test_a_login_that_waits_for_an_answer_is_shown_before_the_end_of_its_line(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake('printf \'Enter the code: \' >&2; printf \'{"kind": "List", "items": []}\'')
    assert kubectl.get(Access())["items"] == []
    assert capsys.readouterr().err == "Enter the code: "


def test_without_kubectl_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: Told) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unreachable) as error:
        kubectl.get(Access(), "gpt")
    told(str(error.value))


def test_an_answer_of_kubectl_that_is_no_json(fake: Fake, told: Told) -> None:
    fake("echo NAME PHASE")
    with pytest.raises(UsageError) as error:
        kubectl.get(Access(all_namespaces=True))
    told(str(error.value))


def test_a_kubectl_that_does_not_end_is_given_up(fake: Fake, told: Told) -> None:
    fake("exec /bin/sleep 600")
    with pytest.raises(Unreachable) as error:
        kubectl.get(Access(), "gpt", seconds=0.2)
    told(str(error.value))


# --- which error it is ----------------------------------------------------------------------------------
SAID: list[tuple[str, type[CommandError]]] = [
    ('error: the server doesn\'t have a resource type "trainingjobs"', Unreachable),
    ("Error from server (NotFound): the server could not find the requested resource", Unreachable),
    ('Error from server (NotFound): trainingjobs.spottrain.io "gpt" not found', NotFound),
    ('Error from server (NotFound): namespaces "ml" not found', NotFound),
    (
        "Error from server (Forbidden): trainingjobs.spottrain.io is forbidden: User "
        '"eve" cannot list resource "trainingjobs" in API group "spottrain.io" in the namespace "ml"',
        Unreachable,
    ),
    ("error: You must be logged in to the server (Unauthorized)", Unreachable),
    (
        "error: You must be logged in to the server (the server has asked for the client to provide "
        "credentials)",
        Unreachable,
    ),
    (REFUSED, Unreachable),
    (REFUSED.replace("localhost:8080", "10.0.0.1:6443"), Unreachable),
    ("Unable to connect to the server: dial tcp: lookup east.example.com: no such host", Unreachable),
    (
        "Unable to connect to the server: getting credentials: exec: executable aws not found It looks like "
        "you are trying to use a client-go credential plugin that is not installed.",
        Unreachable,
    ),
    ("Error in configuration: context was not found for specified context: east", UsageError),
    ("error: stat /nowhere: no such file or directory", UsageError),
    ("error: error loading config file \"k\": yaml: line 20: did not find expected ','", UsageError),
    ('The TrainingJob "gpt" is invalid: spec.workers: Invalid value: 0', UsageError),
    ('Error from server (AlreadyExists): trainingjobs.spottrain.io "gpt" already exists', UsageError),
    ("error: something new", CommandError),
]


@pytest.mark.parametrize(("said", "kind"), SAID, ids=[str(number) for number in range(len(SAID))])
def test_kubectl_s_last_message_is_an_error_with_an_exit_code(
    said: str, kind: type[CommandError], told: Told
) -> None:
    error = failure(said, Access())
    assert type(error) is kind
    told(str(error))


def test_a_context_that_was_asked_for_is_named() -> None:
    assert str(failure(REFUSED, Access(context="east"))).startswith("context east: ")


# --- names that do not exist ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "there", [["bert-base", "bert-large", "gpt"], ["gpt"], []], ids=["alike", "others", "none"]
)
def test_a_name_that_is_not_there_is_told_with_those_that_are(
    fake: Fake, there: list[str], tmp_path: Path, told: Told
) -> None:
    (tmp_path / "names").write_text("".join(f"trainingjob.spottrain.io/{name}\n" for name in there))
    said = prints('Error from server (NotFound): trainingjobs.spottrain.io "bert-bse" not found')
    fake(f'case "$*" in *--output=name*) /bin/cat {tmp_path}/names; exit 0;; esac\n{said}')
    with pytest.raises(NotFound) as error:
        cluster.find(Access(), "ml/bert-bse")
    told(str(error.value))
