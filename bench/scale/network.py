"""A network of this process's own, in which pods have addresses that the API server takes."""

from __future__ import annotations

import os
import sys
from typing import Final

PODS: Final = "10.211.0.0/16"
_MARK: Final = "SPOTTRAIN_BENCH_NETWORK"
_SET_UP: Final = f'ip link set lo up && ip route add local {PODS} dev lo && exec "$@"'


def own() -> None:
    """Starts this program again in a network namespace whose loopback device has all addresses of PODS.

    With addresses of 127.0.0.0/8 the API server refuses each update of a Service's EndpointSlice, and the
    controllers try again: requests that no real cluster has. Needs root.
    """
    if not os.environ.get(_MARK):
        words = ["unshare", "--net", "sh", "-c", _SET_UP, "sh", *sys.orig_argv]
        os.execvpe(words[0], words, os.environ | {_MARK: "yes"})
