"""Determines what the parent process does with SIGTERM.

torchrun's agent (also under `accelerate launch`) forwards it and kills after a timeout of its own. A shell,
or any other program without a handler, does not forward it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from spottrain.core import log

AGENT_MARK: Final = "TORCHELASTIC_RUN_ID"
AGENT_TIMEOUT: Final = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
AGENT_DEFAULT: Final = 30.0
"""Seconds from torchrun's SIGTERM to its SIGKILL (torch 2.15, torch/distributed/launcher/api.py)."""
DEAF: Final = ("sh", "bash", "dash", "ash", "busybox", "ksh", "zsh", "accelerate")
"""Programs that do not forward signals, such as `accelerate launch` with one process. The check needs names:
for a program that waits for signals (tini, our launcher), /proc shows neither handler nor blocked signal.
"""
PROC: Final = Path("/proc")


def agent_limit(env: Mapping[str, str], command: str | None = None) -> float:
    """Seconds that torchrun gives its children to end; infinite if it did not start this process.

    `command`: of the parent. Precedence as in torch: the flag, PET_SHUTDOWN_TIMEOUT, the environment, 30.
    """
    if AGENT_MARK not in env:
        return float("inf")
    if command is None:
        with contextlib.suppress(OSError):
            found = (PROC / str(os.getppid()) / "cmdline").read_bytes()
            command = found.decode(errors="replace").replace("\0", " ").strip()
    flags = re.findall(r"(?<= --)shutdown[-_]timeout[= ](\d+)(?= |$)", command or "")
    texts = [*flags, env.get("PET_SHUTDOWN_TIMEOUT", ""), env.get(AGENT_TIMEOUT, "")]
    return next((float(text) for text in texts if text.isdecimal()), AGENT_DEFAULT)


def grace_warning(grace: float, env: Mapping[str, str]) -> str:
    """Returns what to change if torchrun's timeout is shorter than the grace period; else ""."""
    limit = agent_limit(env)
    if limit >= grace:
        return ""
    return (
        f"torchrun kills its processes {limit:g} s after SIGTERM, although the grace is {grace:g} s: set "
        f"{AGENT_TIMEOUT}={grace:.0f}, or start torchrun with --shutdown-timeout {grace:.0f}"
    )


def warn_if_init_is_deaf() -> None:
    """Logs a warning if PID 1 of the container has no handler for SIGTERM: then the signal is lost."""
    if name := deaf_init(os.getpid()):
        log.event(
            "sigterm-will-not-arrive",
            pid1=name,
            why="PID 1 of this container has no handler for SIGTERM and does not forward it; "
            "only the deadline file can tell of an end",
            remedy="make the container's command 'spottrain run SCRIPT', or write exec before python",
        )


def deaf_init(pid: int, proc: Path = PROC) -> str:
    """Returns the name of PID 1 if it is an ancestor, is in DEAF and has no handler (trap); else ""."""
    try:
        ancestor = pid
        while ancestor > 1:
            ancestor = int(_status(ancestor, proc)["PPid"])
        if ancestor != 1 or pid == 1:
            return ""  # its ancestors are outside of this container (kubectl exec)
        init = _status(1, proc)
        caught = int(init["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1
        return init["Name"] if init["Name"] in DEAF and not caught else ""
    except (OSError, KeyError, ValueError):
        return ""


def _status(pid: int, proc: Path) -> dict[str, str]:
    lines = (proc / str(pid) / "status").read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
