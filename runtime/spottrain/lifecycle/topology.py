"""The gang: which processes a pod starts, and the rendezvous of all its pods.

It does not import torch: each rank does so itself. In the launcher the import would take seconds in which
nothing watches the signals.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from spottrain.contract import BIND_ADDRESS, Env
from spottrain.core import log, run_config
from spottrain.core.preemption import told_to_stop
from spottrain.distributed.channel import Meeting, join
from spottrain.distributed.world import (
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    RANK,
    WORLD_SIZE,
    whole_number,
)
from spottrain.errors import ConfigurationError

ASK_SECONDS: Final = 60.0
"""Seconds for `import torch` in the process that counts GPUs."""
LOOPBACK: Final = "127.0.0.1"
RETRY_SECONDS: Final = 0.5
"""Seconds between two attempts to reach pod 0, whose DNS name may not exist yet."""
TELL_SECONDS: Final = 60.0
"""Seconds of waiting between two log lines about missing pods."""
DIAL_SECONDS: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Gang:
    """`nproc` processes in each of `workers` pods; this pod has number `index`."""

    nproc: int = 1
    workers: int = 1
    index: int = 0
    host: str = ""
    port: int = 0
    """0: the launcher chooses a free port (one pod only)."""
    bind: str = ""
    """IP address on which this pod listens; "" for all."""

    @classmethod
    def from_env(cls, env: Mapping[str, str], nproc: str, count: Callable[[], int]) -> Gang:
        """Reads the gang from the environment. Raises ConfigurationError.

        `nproc`: the value of the flag, `auto` or a number. `count`: returns the number of GPUs. If RANK is
        set, another launcher has made this process a rank, and there is nothing to start.
        """
        if env.get(RANK):
            if nproc not in ("auto", "1"):
                raise ConfigurationError(
                    f"--nproc {nproc}: {RANK}={env[RANK]} is set, so another launcher has started this "
                    "process; leave --nproc out, or start it without that launcher"
                )
            return cls(index=whole_number(env, RANK))  # so that the single rank here has its number
        if nproc != "auto" and (not nproc.isdecimal() or int(nproc) < 1):
            raise ConfigurationError(f"--nproc {nproc} must be auto or a whole number, at least 1")
        workers = whole_number(env, Env.WORKERS, least=1, default=1)
        if nproc != "auto":
            here = int(nproc)
        else:  # as many as GPUs were requested: a container may see GPUs that are not its own
            here = max(1, whole_number(env, Env.GPUS)) if env.get(Env.GPUS) else count()
        bind = run_config.bind_address_of(env)
        if workers == 1:
            return cls(nproc=here, host=bind or LOOPBACK, bind=bind)
        index = whole_number(env, Env.WORKER_INDEX)
        if index >= workers:
            raise ConfigurationError(f"{Env.WORKER_INDEX}={index} is not below {Env.WORKERS}={workers}")
        host, port = _rendezvous(env)
        return cls(nproc=here, workers=workers, index=index, host=host, port=port, bind=bind)

    @property
    def size(self) -> int:
        return self.nproc * self.workers

    def rank(self, local_rank: int) -> int:
        return self.index * self.nproc + local_rank

    def env_of(self, local_rank: int, port: int) -> dict[str, str]:
        """Returns the variables of torch's `env://` rendezvous; empty if there is one process in all."""
        if self.size == 1:
            return {}
        return {
            RANK: str(self.rank(local_rank)),
            WORLD_SIZE: str(self.size),
            LOCAL_RANK: str(local_rank),
            LOCAL_WORLD_SIZE: str(self.nproc),
            MASTER_ADDR: self.host,
            MASTER_PORT: str(port),
        }


def _rendezvous(env: Mapping[str, str]) -> tuple[str, int]:
    text = env.get(Env.RENDEZVOUS, "")
    found = re.fullmatch(r"\[?([^\s\[\]]+)\]?:([0-9]{1,5})", text)
    if found is None or not 0 < int(found[2]) < 65536:
        raise ConfigurationError(
            f"{Env.RENDEZVOUS}={text!r} must be host:port of pod 0, because {Env.WORKERS}={env[Env.WORKERS]}"
        )
    return found[1], int(found[2])


def reserve_port(host: str = LOOPBACK) -> socket.socket:
    """Returns a bound socket that never listens: it reserves a port on which rank 0 can listen."""
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


# --- how many -----------------------------------------------------------------------------------------
def count_gpus(env: Mapping[str, str], dev: Path = Path("/dev"), ask: Callable[[], int] | None = None) -> int:
    """Returns the number of processes to start: one per CUDA device visible to torch, at least 1.

    The device files show what the container may use. Where something restricts them (CUDA_VISIBLE_DEVICES,
    MIG) and for ROCm torch is asked, in a process of its own.
    """
    files = len([path for path in dev.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()])
    # Two capability files, for configuring and monitoring MIG, exist without MIG too.
    partitioned = len(list((dev / "nvidia-caps").glob("nvidia-cap*"))) > 2
    restricted = files and ("CUDA_VISIBLE_DEVICES" in env or partitioned)
    return max(1, (ask or ask_torch)() if restricted or (dev / "kfd").exists() else files)


def ask_torch() -> int:
    """Counts GPUs with torch in a child process. Raises ConfigurationError."""
    counting = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    with contextlib.suppress(subprocess.SubprocessError, ValueError):
        return int(subprocess.check_output(counting, timeout=ASK_SECONDS))
    raise ConfigurationError(
        "--nproc auto: torch could not count the GPUs (see its output above); give the number: --nproc N"
    )


# --- rendezvous of the pods -----------------------------------------------------------------------------
def meet(gang: Gang, env: Mapping[str, str], stopping: Callable[[], bool] | None = None) -> bool:
    """Waits for the other pods. Returns True if all pods of this attempt are connected, False on a stop.

    Nodes, and the DNS name of pod 0, may appear minutes apart. A torch rendezvous would time out meanwhile
    and cannot be left on SIGTERM. So pod 0 listens on the port after the rendezvous port, and the other pods
    connect. When all are connected, pod 0 tells them to go. A pod that must stop continues at once: the code
    that follows ends it with exit code 75, and no work is lost.

    Raises ConfigurationError if this is pod 0 and it cannot listen.
    """
    stopping = stopping or partial(told_to_stop, run_config.deadline_file(env))
    began = time.monotonic()
    # It keeps other attempts and strangers out; anyone who may read the pods can know it.
    key = f"spottrain {env.get(Env.JOB_UID, '')} {env.get(Env.ATTEMPT, '')}".encode()
    met = _lead(gang, key, stopping) if gang.index == 0 else _follow(gang, key, stopping)
    log.event(
        "rendezvous-complete" if met else "rendezvous-left",
        pods=gang.workers,
        seconds=time.monotonic() - began,
    )
    return met


def _lead(gang: Gang, key: bytes, stopping: Callable[[], bool]) -> bool:
    port = gang.port + 1
    try:
        meeting = Meeting(gang.workers, key, port, gang.bind)
    except OSError as error:
        where = f"{gang.bind}, port {port}" if gang.bind else f"port {port}"
        raise ConfigurationError(
            f"pod 0 cannot listen on {where} for the rendezvous ({error}): another program of this pod uses "
            f"the port, or {BIND_ADDRESS} is not an address of this pod"
        ) from error
    met = meeting.wait(_waiting(gang, stopping, lambda: {"missing": ",".join(map(str, meeting.missing))}))
    if not met:
        meeting.close(members=True)
        return False
    meeting.welcome()
    # It runs until the process ends: a pod that lost its connection before the welcome connects again.
    threading.Thread(target=_serve, args=[meeting], name="spottrain-rendezvous", daemon=True).start()
    return True


def _serve(meeting: Meeting) -> None:
    while True:
        meeting.turn(TELL_SECONDS)


def _follow(gang: Gang, key: bytes, stopping: Callable[[], bool]) -> bool:
    first = (gang.host, gang.port + 1)
    go_on = _waiting(gang, stopping, lambda: {"first": f"{gang.host}:{gang.port + 1}"})
    while go_on():
        with (
            contextlib.suppress(OSError),
            socket.create_connection(first, timeout=DIAL_SECONDS) as connection,
        ):
            if join(connection, key, gang.index, go_on) is not None:
                return True
        time.sleep(RETRY_SECONDS)
    return False


def _waiting(
    gang: Gang, stopping: Callable[[], bool], facts: Callable[[], dict[str, str]]
) -> Callable[[], bool]:
    """Returns a function: whether to wait on. It logs the wait from time to time."""
    told = time.monotonic()

    def go_on() -> bool:
        nonlocal told
        if time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            log.event("rendezvous-waiting", pods=gang.workers, **facts())
        return not stopping()

    return go_on
