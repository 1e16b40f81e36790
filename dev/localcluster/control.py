"""Calls to the supervisor over its socket, one JSON line each way.

Both ends: `serve` there, `ask` in api.py.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localcluster.machines import Machine
from localcluster.shell import ClusterError


def serve(path: Path, machines: Mapping[str, Machine]) -> None:
    """Answers from now on, in a thread of its own."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            request = json.loads(self.rfile.readline())
            self.wfile.write(json.dumps(_answer(machines, request)).encode() + b"\n")

    path.unlink(missing_ok=True)
    server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="control", daemon=True).start()


def _answer(machines: Mapping[str, Machine], request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": _do(machines, request)}
    except Exception as error:
        traceback.print_exc()
        return {"error": str(error)}


def _do(machines: Mapping[str, Machine], request: dict[str, Any]) -> Any:
    if request["do"] == "status":
        return {name: machine.status() for name, machine in machines.items()}
    machine = machines[request["node"]]
    match request["do"]:
        case "reclaim":
            return machine.reclaim(float(request["seconds"]))
        case "vanish":
            return machine.vanish(delete_node=bool(request.get("delete_node", True)))
        case "cancel":
            return machine.cancel()
        case "restore":
            return machine.restore()
        case other:
            raise ValueError(f"no such call: {other}")


def ask(path: Path, *, timeout: float = 150, **request: Any) -> Any:
    """One call and its result; raises with the supervisor's own words when it failed."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            raise ClusterError(
                "the local cluster is not up; `python3 dev/cluster.py up` brings it up"
            ) from None
        connection.sendall(json.dumps(request).encode() + b"\n")
        line = connection.makefile("rb").readline()
    answer = json.loads(line) if line else {"error": "the supervisor ended during the call"}
    if "error" in answer:
        raise ClusterError(f"{request['do']} failed: {answer['error']}")
    return answer["result"]
