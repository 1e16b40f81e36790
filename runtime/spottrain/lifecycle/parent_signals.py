"""Determines what the parent process does with SIGTERM.

torchrun's agent (also under `accelerate launch`) forwards it and kills after a timeout of its own. A shell,
or any other program without a handler, does not forward it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from spottrain.core import log

AGENT_MARK: Final = "TORCHELASTIC_RUN_ID"
AGENT_TIMEOUT: Final = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
AGENT_FLAG: Final = "shutdown-timeout"
AGENT_DEFAULT: Final = 30.0
"""Seconds from torchrun's SIGTERM to its SIGKILL (torch 2.15, torch/distributed/launcher/api.py)."""
DEAF: Final = ("sh", "bash", "dash", "ash", "busybox", "ksh", "zsh", "accelerate")
"""Programs that do not forward signals, such as `accelerate launch` with one process. The check needs names:
for a program that waits for signals (tini, our launcher), /proc shows neither handler nor blocked signal.
"""
PROC: Final = Path("/proc")


def agent_limit(env: Mapping[str, str], command: list[str]) -> float | None:
    """Seconds that torchrun gives its children to end; None if it did not start this process.

    `command`: of the parent. Precedence as in torch: the flag, PET_SHUTDOWN_TIMEOUT, the environment, 30.
    """
    if AGENT_MARK not in env:
        return None
    texts = [*_flag(command), env.get("PET_SHUTDOWN_TIMEOUT", ""), env.get(AGENT_TIMEOUT, "")]
    return next((float(text) for text in texts if text.isdecimal()), AGENT_DEFAULT)


def _flag(command: list[str]) -> list[str]:
    """Values of torchrun's flag in a command line, in any of its four spellings."""
    found: list[str] = []
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("--") and name.replace("_", "-") == AGENT_FLAG:
            found.append(value if equals else following)
    return found


def command_of(pid: int, proc: Path = PROC) -> list[str]:
    """Returns the command line of a process; empty if it cannot be read."""
    try:
        return (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def grace_within(grace: float, env: Mapping[str, str], command: list[str]) -> float:
    """Returns the grace period in seconds, limited by torchrun's timeout."""
    limit = agent_limit(env, command)
    return grace if limit is None else min(grace, limit)


def grace_warning(grace: float, env: Mapping[str, str], command: list[str]) -> str:
    """Returns what to change if torchrun's timeout is shorter than the grace period; else ""."""
    left = grace_within(grace, env, command)
    if left == grace:
        return ""
    return (
        f"torchrun kills its processes {left:g} s after SIGTERM, although the grace is {grace:g} s: set "
        f"{AGENT_TIMEOUT}={grace:.0f}, or start torchrun with --{AGENT_FLAG} {grace:.0f}"
    )


def warn_if_init_is_deaf(proc: Path = PROC) -> None:
    """Logs a warning if PID 1 of the container has no handler for SIGTERM: then the signal is lost."""
    name = deaf_init(os.getpid(), proc)
    if name:
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
    lines = (proc / str(pid) / "status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
