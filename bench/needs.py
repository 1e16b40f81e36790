"""What a benchmark needs is made before it measures anything, or enters a network without a way out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PEERS: Final = ROOT / "bench" / ".peers"
PODS: Final = "10.211.0.0/16"
"""Addresses of the fake nodes' pods."""
_NETWORK: Final = "SPOTTRAIN_BENCH_NETWORK"
_SET_UP: Final = f'ip link set lo up && ip route add local {PODS} dev lo && exec "$@"'


def programs(*names: str) -> None:
    """Downloads or builds those of the pinned programs that are not there."""
    from localcluster import layout
    from localcluster.apiserver import ensure_programs

    ensure_programs(layout.default_paths(), frozenset(names))


def peers() -> Path:
    """Returns the folder of the packages of bench/peers.txt; installs them once."""
    wanted = ROOT / "bench" / "peers.txt"
    marker = PEERS / wanted.name
    if not marker.is_file() or marker.read_text() != wanted.read_text():
        uv = shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
        print("installing bench/peers.txt into bench/.peers (once, a minute)", flush=True)
        command = [uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
        subprocess.run([*command, "--target", str(PEERS), "--requirement", str(wanted)], check=True)
        marker.write_text(wanted.read_text())
    return PEERS


def network_of_its_own() -> None:
    """Starts this program again in a network namespace whose loopback device has all addresses of PODS.

    With addresses of 127.0.0.0/8 the API server refuses each update of a Service's EndpointSlice, and the
    controllers try again: requests that no real cluster has. Needs root, or user namespaces.
    """
    if not os.environ.get(_NETWORK):
        user = [] if os.geteuid() == 0 else ["--map-root-user"]
        words = ["unshare", "--net", *user, "sh", "-c", _SET_UP, "sh", *sys.orig_argv]
        os.execvpe(words[0], words, os.environ | {_NETWORK: "yes"})
