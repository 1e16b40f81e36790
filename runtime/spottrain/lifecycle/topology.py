"""Determines which processes a pod starts, and the rendezvous address of the gang.

It does not import torch: each rank does so itself. In the launcher the import would take seconds in which
nothing watches the signals.
"""

from __future__ import annotations

import math
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from spottrain.contract import Env
from spottrain.core import run_config
from spottrain.core.container import CGROUPS, cores
from spottrain.core.preemption import told_to_stop
from spottrain.distributed.world import (
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    RANK,
    WORLD_SIZE,
)
from spottrain.errors import ConfigurationError

ASK_SECONDS: Final = 60.0
"""Seconds for `import torch` in the process that counts GPUs."""
LOOPBACK: Final = "127.0.0.1"


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
            return cls(index=_whole(env, RANK, least=0))  # so that the single rank here has its number
        if nproc != "auto" and (not nproc.isdecimal() or int(nproc) < 1):
            raise ConfigurationError(f"--nproc {nproc} must be auto or a whole number, at least 1")
        workers = _whole(env, Env.WORKERS, least=1, default=1)
        here = _of_each(env, count) if nproc == "auto" else int(nproc)
        bind = run_config.bind_address_of(env)
        if workers == 1:
            return cls(nproc=here, host=bind or LOOPBACK, bind=bind)
        index = _whole(env, Env.WORKER_INDEX, least=0)
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


def _of_each(env: Mapping[str, str], count: Callable[[], int]) -> int:
    """Returns as many processes as GPUs were requested: a container may see GPUs that are not its own."""
    return max(1, _whole(env, Env.GPUS, least=0)) if env.get(Env.GPUS) else count()


def _rendezvous(env: Mapping[str, str]) -> tuple[str, int]:
    text = env.get(Env.RENDEZVOUS, "")
    found = re.fullmatch(r"\[?([^\s\[\]]+)\]?:([0-9]{1,5})", text)
    if found is None or not 0 < int(found[2]) < 65536:
        raise ConfigurationError(
            f"{Env.RENDEZVOUS}={text!r} must be host:port of pod 0, because {Env.WORKERS}={env[Env.WORKERS]}"
        )
    return found[1], int(found[2])


def _whole(env: Mapping[str, str], name: str, *, least: int, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal() or int(text) < least:
        raise ConfigurationError(f"{name}={text!r} must be a whole number, at least {least}")
    return int(text)


def reserve_port(host: str = LOOPBACK) -> socket.socket:
    """Returns a bound socket that never listens: it reserves a port on which rank 0 can listen."""
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


# --- how many -----------------------------------------------------------------------------------------
def count_gpus(env: Mapping[str, str], dev: Path = Path("/dev"), ask: Callable[[], int] | None = None) -> int:
    """Returns the number of processes to start: one per CUDA device visible to torch, at least 1.

    The device files show what the container may use. Names in CUDA_VISIBLE_DEVICES other than plain numbers,
    MIG and ROCm are left to torch, in a process of its own.
    """
    ask = ask or partial(ask_torch, run_config.deadline_file(env))
    files = len([path for path in dev.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()])
    if (dev / "kfd").exists():
        return max(1, ask())
    if not files:
        return 1
    visible = env.get("CUDA_VISIBLE_DEVICES")
    # Two capability files, for configuring and monitoring MIG, exist without MIG too.
    partitioned = len(list((dev / "nvidia-caps").glob("nvidia-cap*"))) > 2
    if visible is None and not partitioned:
        return files
    named = [word.strip() for word in (visible or "").split(",")]
    plain = all(word.isdecimal() and int(word) < files for word in named) and len(set(named)) == len(named)
    return len(named) if plain and not partitioned else max(1, ask())


def ask_torch(deadline_file: Path | None) -> int:
    """Counts GPUs with torch in a child process. Returns 1 on timeout or when this process must stop."""
    counting = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    with subprocess.Popen(counting, stdout=subprocess.PIPE, text=True) as child:
        give_up = time.monotonic() + ASK_SECONDS
        while child.poll() is None:
            if time.monotonic() > give_up or told_to_stop(deadline_file):
                child.kill()
                return 1
            time.sleep(0.05)
        text = child.stdout.read().strip() if child.stdout else ""
    if not text.isdecimal():
        raise ConfigurationError(
            "--nproc auto: torch could not count the GPUs (see its output above); give the number: --nproc N"
        )
    return int(text)


# --- threads ------------------------------------------------------------------------------------------
def threads_of_each(nproc: int, cgroups: Path = CGROUPS) -> int:
    """Returns the cores per process: otherwise every rank uses all of the node's cores and they contend."""
    return max(1, math.floor(cores(cgroups) / nproc))
