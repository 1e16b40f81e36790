"""Runs the user's own kubectl, which knows the cluster and its login plugins, and reads what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from spottrain_cli.errors import CommandError, NotFound, Unreachable, UsageError

RESOURCE: Final = "trainingjobs.spottrain.io"
STDIN: Final = "-"
REQUEST_SECONDS: Final = 30
TOTAL_SECONDS: Final = 600.0
"""A login plugin may wait for the user to sign in."""
REST_SECONDS: Final = 1.0
"""For the last messages; a process that a login plugin has left may keep them open."""
LOG_LINE: Final = re.compile(rb"[EWIF]\d{4} |\t| >$")
"""Begin of a line of klog, such as `E1126 07:57:21.123456   12345 memcache.go:265] ...`, or of its rest."""
MAYBE_LOG: Final = re.compile(rb"|\t.*| >?|[EWIF](\d{0,4}|\d{4} .*)")
"""What may become such a line."""
VERDICT: Final = re.compile(
    rb"error: |Error from server|Error in configuration|The connection to the server |The TrainingJob "
    rb"|Unable to connect to the server"
)
"""Begin of kubectl's last message; what follows belongs to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Which cluster and namespace; empty: those of kubectl's current context."""

    context: str = ""
    kubeconfig: str = ""
    namespace: str = ""
    all_namespaces: bool = False

    @property
    def flags(self) -> list[str]:
        given = {"kubeconfig": self.kubeconfig, "context": self.context, "namespace": self.namespace}
        flags = [f"--{name}={value}" for name, value in given.items() if value]
        return [*flags, "--all-namespaces"] if self.all_namespaces else flags

    def named(self, job: str) -> tuple[Access, str]:
        """Returns access to the namespace of `NAMESPACE/NAME`, and NAME. Raises UsageError."""
        namespace, slash, name = job.rpartition("/")
        if not slash:
            return self, job
        if not namespace or not name or "/" in namespace:
            raise UsageError(f"{job!r} names no job: write NAME or NAMESPACE/NAME")
        if self.namespace not in ("", namespace):
            raise UsageError(f"{job} is in namespace {namespace}: leave out --namespace {self.namespace}")
        return replace(self, namespace=namespace), name

    @property
    def place(self) -> str:
        if self.all_namespaces:
            return "any namespace"
        return f"namespace {self.namespace}" if self.namespace else "the current namespace"


def get(access: Access, job: str = "", *, seconds: float = TOTAL_SECONDS) -> Any:
    """Returns the decoded JSON of a TrainingJob, or of a list of them. Raises CommandError."""
    # The double dash keeps a name that begins with a dash from being a flag.
    words = ["get", "--output=json", "--", RESOURCE, *([job] if job else [])]
    shown = f"kubectl get {RESOURCE}" + (f" {job}" if job else "")
    return decoded(run(access, *words, shown=shown, seconds=seconds), f"the output of `{shown}`")


def run(
    access: Access, *words: str, given: str = "", shown: str = "", seconds: float = TOTAL_SECONDS
) -> bytes:
    """Returns what kubectl prints. Its questions and warnings go to stderr at once; its log does not.

    Args:
        access: The cluster and namespace.
        words: Arguments, without those of `access`.
        given: What kubectl reads from its standard input.
        shown: The command in messages; by default with all its words.
        seconds: Patience, in which a person may have to log in.

    Raises:
        NotFound: There is no such object or namespace.
        Unreachable: The cluster does not respond, refuses, or does not have spottrain.
        UsageError: kubectl's configuration or the given object is not valid.
        CommandError: kubectl failed for another reason.
    """
    command = ["kubectl", *access.flags, f"--request-timeout={REQUEST_SECONDS}s", *words]
    shown = shown or " ".join(["kubectl", *words])
    messages = Messages()
    try:
        with messages as descriptor:
            done = subprocess.run(
                command,
                input=given.encode(),
                stdout=subprocess.PIPE,
                stderr=descriptor,
                check=False,
                timeout=seconds,
            )
    except OSError as error:
        raise unrunnable(error) from error
    except subprocess.TimeoutExpired as error:
        raise Unreachable(
            f"`{shown}` did not end within {seconds:g} s: is a login waiting for you?"
        ) from error
    messages.wait()
    if done.returncode:
        said = messages.verdict
        raise (
            failure(said, access)
            if said
            else CommandError(f"`{shown}` ended with exit code {done.returncode}")
        )
    return done.stdout


def stream(access: Access, *words: str) -> Iterator[bytes]:
    """Yields the lines that kubectl prints, as they come, with their ends. Raises as `run`, at the end."""
    messages = Messages()
    try:
        with messages as descriptor:
            process = subprocess.Popen(
                ["kubectl", *access.flags, *words], stdout=subprocess.PIPE, stderr=descriptor
            )
    except OSError as error:
        raise unrunnable(error) from error
    with process:
        assert process.stdout is not None
        try:
            yield from process.stdout
        finally:
            process.kill()
    messages.wait()
    if process.returncode and (said := messages.verdict):
        raise failure(said, access)


def unrunnable(error: OSError) -> CommandError:
    if isinstance(error, FileNotFoundError):
        return Unreachable("kubectl is not on the PATH: install it, and log in to your cluster with it")
    return Unreachable(f"kubectl cannot be run: {error}")


# --- what kubectl says --------------------------------------------------------------------------------
class Messages:
    """Copies kubectl's standard error to ours at once, but for its log and its last message."""

    def __init__(self) -> None:
        self.verdict = ""
        """kubectl's last message, in one line; else the last line of its log where there is nothing else."""
        self._ends = os.pipe()
        self._passing = threading.Thread(target=self._pass_on, daemon=True)

    def __enter__(self) -> int:
        """Returns the descriptor for kubectl's standard error."""
        self._passing.start()
        return self._ends[1]

    def __exit__(self, *_: object) -> None:
        os.close(self._ends[1])

    def wait(self) -> None:
        """Waits for the last message of a kubectl that has ended."""
        self._passing.join(REST_SECONDS)

    def _pass_on(self) -> None:
        begun, logged, last, passed = b"", b"", list[bytes](), False
        with open(self._ends[0], "rb", buffering=0) as source:
            while chunk := source.read(65536):
                *lines, begun = (begun + chunk).split(b"\n")
                for line in lines:
                    if last or VERDICT.match(line):
                        last.append(line)
                    elif LOG_LINE.match(line):
                        logged = line
                    else:
                        passed = _write(line + b"\n")
                if not last and not MAYBE_LOG.fullmatch(begun) and not _may_be_verdict(begun):
                    passed, begun = _write(begun), b""  # such as a question, which has no line break
        rest = [*last, begun] if last or VERDICT.match(begun) else [begun] if begun else []
        found = rest or ([] if passed else [logged])
        self.verdict = " ".join(b" ".join(found).decode(errors="replace").split())


def _may_be_verdict(begun: bytes) -> bool:
    starts = (b"error: ", b"Error ", b"The ", b"Unable ")
    return VERDICT.match(begun) is not None or any(start.startswith(begun) for start in starts)


def _write(text: bytes) -> bool:
    sys.stderr.write(text.decode(errors="replace"))
    sys.stderr.flush()
    return True


NO_CLUSTER: Final = (
    "kubectl knows no cluster: log in to one, or name its configuration by --kubeconfig or KUBECONFIG"
)
NOT_INSTALLED: Final = (
    "this cluster has no TrainingJobs: spottrain is not installed in it, or kubectl's context is that "
    "of another cluster; install the chart, or choose by --context"
)
RULES: Final[Sequence[tuple[str, type[CommandError], str]]] = (
    (r"doesn't have a resource type|could not find the requested resource", Unreachable, NOT_INSTALLED),
    (r'\(NotFound\): namespaces "(?P<it>[^"]*)" not found', NotFound, "there is no namespace {it}"),
    (r"\(NotFound\): (?P<it>.*)", NotFound, "{it}"),
    (
        r"\(Forbidden\): (?P<it>.*)",
        Unreachable,
        "the cluster refuses it: {it}; ask its administrator for that right",
    ),
    (
        r"\(Unauthorized\)|asked for the client to provide credentials",
        Unreachable,
        "the cluster does not accept your credentials: log in again, for they may have expired",
    ),
    (r"connection to the server localhost:8080 was refused", Unreachable, NO_CLUSTER),
    (
        r"connection to the server (?P<it>\S+) was refused",
        Unreachable,
        "the cluster at {it} refuses connections: does it run, and is it the one you mean (--context)?",
    ),
    (
        r"Unable to connect to the server: (?P<it>.*?)( It looks like you are trying.*)?$",
        Unreachable,
        "the cluster could not be reached: {it}",
    ),
    (
        r"Error in configuration: (?P<it>.*)|error: (?P<file>stat .*|error loading config file.*)",
        UsageError,
        "kubectl's configuration cannot be used: {it}",
    ),
    (r"Error from server \(\w+\): (?P<it>.*)|(?P<file>The TrainingJob .*)", UsageError, "{it}"),
    (r"(error: )?(?P<it>.*)", CommandError, "kubectl: {it}"),
)
"""What kubectl says, what kind of an error it is, and our sentence."""


def failure(said: str, access: Access) -> CommandError:
    """Returns the error that kubectl's last message is. Pure."""
    for pattern, kind, sentence in RULES:
        if found := re.search(pattern, said):
            groups = found.groupdict()
            it = next((each for name in ("it", "file") if (each := groups.get(name))), "")
            if access.context and kind is Unreachable:
                sentence = f"context {access.context}: {sentence}"
            return kind(sentence.replace("{it}", it.rstrip(".")))
    raise AssertionError(said)  # the last rule matches everything


# --- JSON -----------------------------------------------------------------------------------------------
def read_file(name: str, source: str) -> Any:
    """Returns the decoded JSON of a file, - for stdin. Raises UsageError."""
    try:
        text = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}") from error
    return decoded(text, source)


def decoded(text: bytes, source: str) -> Any:
    """Raises UsageError where the text is not JSON, or is nested too deeply to be read."""
    try:
        return json.loads(text)
    except ValueError as error:  # UnicodeDecodeError too
        raise UsageError(f"{source} is not JSON: {error}") from error
    except RecursionError:
        raise UsageError(f"{source} is no TrainingJob: its JSON is nested too deeply") from None
