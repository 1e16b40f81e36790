"""Reads TrainingJobs with the user's own kubectl, which knows the cluster and its login plugins."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from spottrain.errors import RunError

RESOURCE: Final = "trainingjobs.spottrain.io"
STDIN: Final = "-"
REQUEST_SECONDS: Final = 30
TOTAL_SECONDS: Final = 600.0
"""A login plugin may wait for the user to sign in."""
REST_SECONDS: Final = 1.0
"""For the last messages; a process that a login plugin has left may keep them open."""
LOG_LINE: Final = re.compile(rb"[EWIF]\d{4} ")
"""Begin of a line of klog, such as `E1126 07:57:21.123456   12345 memcache.go:265] ...`."""
MAYBE_LOG: Final = re.compile(rb"|[EWIF](\d{0,4}|\d{4} .*)")
"""What may become such a line."""


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


def get(access: Access, job: str = "", *, seconds: float = TOTAL_SECONDS) -> Any:
    """Returns the decoded JSON of a TrainingJob, or of a list of them. kubectl's messages go to stderr.

    The lines of its log do not: where no cluster answers, several come before the message that says so.

    Raises:
        RunError: there is no kubectl, it failed, or what it printed is not JSON.
    """
    # The double dash keeps a name that begins with a dash from being a flag.
    words = ["kubectl", *access.flags, f"--request-timeout={REQUEST_SECONDS}s", "get", "--output=json"]
    command = [*words, "--", RESOURCE, *([job] if job else [])]
    shown = f"kubectl get {RESOURCE}" + (f" {job}" if job else "")
    try:
        done = _run(command, seconds)
    except FileNotFoundError as error:
        raise RunError(
            "kubectl is not on the PATH: install it, or run `kubectl get tj JOB -o json > job.json` where it "
            "is, and give --file job.json"
        ) from error
    except OSError as error:
        raise RunError(f"kubectl cannot be run: {error}; --file reads the job's JSON without it") from error
    except subprocess.TimeoutExpired as error:
        raise RunError(f"`{shown}` did not end within {seconds:g} s: is a login waiting for you?") from error
    if done.returncode:
        raise RunError(f"`{shown}` ended with exit code {done.returncode}; its own message is above")
    return decoded(done.stdout, f"the output of `{shown}`")


def _run(command: list[str], seconds: float) -> subprocess.CompletedProcess[bytes]:
    ours, theirs = os.pipe()
    passing = threading.Thread(target=_pass_on, args=[ours], daemon=True)
    passing.start()
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, check=False, timeout=seconds)
    finally:
        os.close(theirs)
        passing.join(REST_SECONDS)


def _pass_on(descriptor: int) -> None:
    """Copies kubectl's standard error to ours at once, without the lines of its log, unless that is all."""
    begun, logged, passed = b"", b"", False
    with open(descriptor, "rb", buffering=0) as source:
        while chunk := source.read(65536):
            *lines, begun = (begun + chunk).split(b"\n")
            for line in lines:
                if LOG_LINE.match(line):
                    logged = line
                else:
                    passed = _write(line + b"\n")
            if not MAYBE_LOG.fullmatch(begun):  # such as a question, which has no line break
                passed, begun = _write(begun), b""
    if rest := begun or (b"" if passed else logged):
        _write(rest + b"\n")


def _write(text: bytes) -> bool:
    sys.stderr.write(text.decode(errors="replace"))
    sys.stderr.flush()
    return True


def read_file(name: str, source: str) -> Any:
    """Returns the decoded JSON of a file, - for stdin. Raises RunError."""
    try:
        text = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except OSError as error:
        raise RunError(f"{source} cannot be read: {error.strerror}") from error
    return decoded(text, source)


def decoded(text: bytes, source: str) -> Any:
    """Raises RunError where the text is not JSON, or is nested too deeply to be read."""
    try:
        return json.loads(text)
    except ValueError as error:  # UnicodeDecodeError too
        raise RunError(f"{source} is not JSON: {error}") from error
    except RecursionError:
        raise RunError(f"{source} is no TrainingJob: its JSON is nested too deeply") from None
