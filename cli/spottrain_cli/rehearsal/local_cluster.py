"""The cluster of `make cluster-up`: real control plane, nodes whose containers are processes of this machine.

Its nodes are taken away here, so no other cluster is ever used: it is found by a file of its own folder, and
each of its nodes must say that it runs processes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from spottrain_cli.errors import CommandError, Unreachable, UsageError

Json = dict[str, Any]
FILE: Final = Path("cluster") / "run" / "cluster.json"
"""Written by dev/processcluster once spottrain is installed."""
FOLDER_VARIABLE: Final = "SPOTTRAIN_DEV_DIR"
START_IT: Final = "start it with `make cluster-up` in a checkout of spottrain"
PROCESSES: Final = "process://"
"""Begin of the container runtime's version of a process node."""
_SECONDS: Final = 60.0
_RESTORE_SECONDS: Final = 150.0


@dataclass(frozen=True, kw_only=True)
class LocalCluster:
    kubeconfig: str
    kubectl_path: str
    control: str
    """Socket of its supervisor."""
    endpoint: str
    bucket: str
    access_key: str
    secret_key: str
    region: str

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> LocalCluster:
        """The one that runs. Raises Unreachable where none does."""
        file = state_folder(environment) / FILE
        try:
            known = json.loads(file.read_text())
            found = cls(**{name: str(known[name]) for name in cls.__dataclass_fields__})
        except FileNotFoundError:
            raise Unreachable(f"no local cluster is up ({file} is not there); {START_IT}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Unreachable(f"{file} cannot be used ({error}); {START_IT}") from error
        found.ask("status")
        return found

    # --- its nodes ---
    def reclaim(self, node: str, seconds: float) -> float:
        """Publishes the notice and returns when (Unix seconds); the node ends `seconds` later."""
        return float(self.ask("reclaim", node=node, seconds=seconds)["published_at"])

    def restore(self, node: str) -> None:
        """Returns when a node of this name is Ready and has no notice."""
        self.ask("restore", node=node)

    def nodes(self) -> list[str]:
        return list(self.ask("status"))

    def ask(self, what: str, **more: Any) -> Any:
        """One call to the supervisor, a line of JSON each way. Raises Unreachable, or CommandError."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_RESTORE_SECONDS)
                connection.connect(self.control)
                connection.sendall(json.dumps({"do": what, **more}).encode() + b"\n")
                reply = json.loads(connection.makefile("rb").readline() or b"null")
        except (OSError, ValueError) as error:
            raise Unreachable(f"the local cluster does not respond ({error}); {START_IT}") from error
        if reply is None or "error" in reply:
            why = reply["error"] if reply else "it ended meanwhile"
            raise CommandError(f"the local cluster refused `{what}`: {why}")
        return reply["result"]

    # --- kubectl ---
    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "KUBECONFIG": self.kubeconfig, "NO_PROXY": "*"}

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """Raises UsageError where an object is refused, else CommandError, with kubectl's message."""
        try:
            done = subprocess.run(
                [self.kubectl_path, *words],
                input=stdin,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unreachable(f"`kubectl {words[0]}` failed on the local cluster: {error}") from error
        if done.returncode:
            refusal = " ".join(done.stderr.split())[-1500:]
            if stdin:
                raise UsageError(f"the local cluster refuses the manifest: {refusal}")
            raise CommandError(f"`kubectl {' '.join(words)}` on the local cluster: {refusal}")
        return done.stdout

    def items(self, *words: str) -> list[Json]:
        found: list[Json] = json.loads(self.kubectl("get", *words, "-o", "json"))["items"]
        return found

    def apply(self, namespace: str, objects: Sequence[Json]) -> None:
        body = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("-n", namespace, "create", "-f", "-", stdin=json.dumps(body))

    # --- its store ---
    @contextmanager
    def credentials(self) -> Iterator[None]:
        """With what the S3 client looks for in the environment, and nothing of the person's own."""
        ours = {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "NO_PROXY": "*",
        }
        theirs = ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_ENDPOINT_URL_S3")
        before = {name: os.environ.get(name) for name in (*ours, *theirs)}
        os.environ.update(ours)
        for name in theirs:
            os.environ.pop(name, None)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def state_folder(environment: Mapping[str, str]) -> Path:
    """Where dev/localcluster keeps programs and clusters."""
    if given := environment.get(FOLDER_VARIABLE):
        return Path(given)
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spottrain" / "dev"


def require_process_nodes(nodes: Sequence[Json]) -> None:
    """Raises UsageError where one is a real node."""
    for node in nodes:
        runtime = str(node.get("status", {}).get("nodeInfo", {}).get("containerRuntimeVersion", ""))
        if not runtime.startswith(PROCESSES):
            raise UsageError(
                f"node {node['metadata']['name']} runs {runtime or 'unknown containers'}: a rehearsal takes "
                f"nodes away, so it uses none but the local cluster's; {START_IT}"
            )


def require_idle(jobs: Sequence[Json]) -> None:
    """Raises UsageError where somebody else's job would lose its node."""
    for job in jobs:
        if job.get("status", {}).get("phase") not in ("Succeeded", "Failed", "Suspended"):
            namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
            raise UsageError(
                f"the job {namespace}/{name} is on the local cluster, and a rehearsal would take its nodes "
                f"away; wait for its end, or: spottrain delete {namespace}/{name}"
            )


class Watch:
    """Follows `kubectl get KIND --watch` in a thread and hands each object to `on_object`."""

    def __init__(
        self, cluster: LocalCluster, words: Sequence[str], on_object: Callable[[Json], None]
    ) -> None:
        self._process = subprocess.Popen(
            [cluster.kubectl_path, "get", *words, "--watch", "--output-watch-events", "-o", "json"],
            env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._on_object = on_object
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    @property
    def broken(self) -> bool:
        return self._process.poll() is not None

    def _follow(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:  # an event a line
                event = json.loads(line)
                if event["type"] in ("ADDED", "MODIFIED"):
                    self._on_object(event["object"])

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join(5)
