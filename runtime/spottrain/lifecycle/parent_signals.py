"""What the process that started this one does with SIGTERM: read once by `session` at the start.

torchrun's agent (also under `accelerate launch`) passes it on and kills after a time of its own; a shell, or
any other program without a handler, passes nothing on.
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
"""Programs that pass no signal on, `accelerate launch` where it starts one process. Names are needed: of one
that waits for signals (tini, our launcher) /proc says neither that it catches nor that it blocks them."""
PROC: Final = Path("/proc")


def agent_limit(env: Mapping[str, str], command: list[str]) -> float | None:
    """Seconds that torchrun leaves its children; None where it did not start this process.

    `command`: of the parent. In torch's own order: the flag, PET_SHUTDOWN_TIMEOUT, the environment, 30.
    """
    if AGENT_MARK not in env:
        return None
    texts = [*_flag(command), env.get("PET_SHUTDOWN_TIMEOUT", ""), env.get(AGENT_TIMEOUT, "")]
    return next((float(text) for text in texts if text.isdecimal()), AGENT_DEFAULT)


def _flag(command: list[str]) -> list[str]:
    """Values of torchrun's flag in a command line, spelt in any of its four ways."""
    found: list[str] = []
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("--") and name.replace("_", "-") == AGENT_FLAG:
            found.append(value if equals else following)
    return found


def command_of(pid: int, proc: Path = PROC) -> list[str]:
    """Empty where it cannot be read."""
    try:
        return (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def grace_within(grace: float, env: Mapping[str, str], command: list[str]) -> float:
    """The grace, or what torchrun leaves of it."""
    limit = agent_limit(env, command)
    return grace if limit is None else min(grace, limit)


def grace_warning(grace: float, env: Mapping[str, str], command: list[str]) -> str:
    """What to change where torchrun leaves less than the grace; else nothing."""
    left = grace_within(grace, env, command)
    if left == grace:
        return ""
    return (
        f"torchrun kills its processes {left:g} s after SIGTERM, although the grace is {grace:g} s: set "
        f"{AGENT_TIMEOUT}={grace:.0f}, or start torchrun with --{AGENT_FLAG} {grace:.0f}"
    )


def warn_if_init_is_deaf(proc: Path = PROC) -> None:
    """SIGTERM goes to PID 1 of the container. Without a handler there it is lost, and none is passed on."""
    name = deaf_init(os.getpid(), proc)
    if name:
        log.event(
            "sigterm-will-not-arrive",
            pid1=name,
            why="PID 1 of this container has no handler for SIGTERM and passes none on; "
            "only the deadline file can tell of an end",
            remedy="make the container's command 'spottrain run SCRIPT', or write exec before python",
        )


def deaf_init(pid: int, proc: Path = PROC) -> str:
    """The name of PID 1 where it is an ancestor, is one of DEAF and has no handler (trap); else nothing."""
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
