"""Rank and size of this process in the gang, from the variables of torch's `env://`.

spottrain's launcher, torchrun or `accelerate launch` sets them; without them a run is one process. This
module does not import torch, because it is needed before that import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from spottrain.errors import ConfigurationError

RANK: Final = "RANK"
WORLD_SIZE: Final = "WORLD_SIZE"
LOCAL_RANK: Final = "LOCAL_RANK"
LOCAL_WORLD_SIZE: Final = "LOCAL_WORLD_SIZE"
MASTER_ADDR: Final = "MASTER_ADDR"
MASTER_PORT: Final = "MASTER_PORT"


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Ranks count from 0. `local_*`: within this pod (or machine)."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> World:
        """Reads the variables; one process if RANK and WORLD_SIZE are absent. Raises ConfigurationError.

        LOCAL_RANK and LOCAL_WORLD_SIZE may be absent only if WORLD_SIZE is 1. Otherwise it is unknown whether
        ranks share a pod, and so its port and its termination message.
        """
        if not env.get(RANK) and env.get(WORLD_SIZE, "") in ("", "1"):
            return cls()
        names = (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE)
        required = names if env.get(WORLD_SIZE) != "1" else names[:2]
        if missing := [name for name in required if not env.get(name)]:
            others = " ".join(f"{name}={env[name]}" for name in names if env.get(name))
            raise ConfigurationError(
                f"{missing[0]} is not set, but {others}: spottrain run, torchrun and accelerate launch set "
                f"{RANK}, {WORLD_SIZE}, {LOCAL_RANK} and {LOCAL_WORLD_SIZE}; set all, or none for one process"
            )
        size = whole_number(env, WORLD_SIZE, least=1)
        world = cls(
            rank=whole_number(env, RANK),
            size=size,
            local_rank=whole_number(env, LOCAL_RANK, default=0),
            local_size=whole_number(env, LOCAL_WORLD_SIZE, least=1, default=1),
        )
        world._require_sense()
        return world

    @property
    def distributed(self) -> bool:
        """Whether there are other ranks."""
        return self.size > 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0 of the gang, the owner of HEAD."""
        return self.rank == 0

    @property
    def first_here(self) -> bool:
        """Whether this is its pod's first rank, which serves progress and writes the termination message."""
        return self.local_rank == 0

    def _require_sense(self) -> None:
        rank, size = f"{RANK}={self.rank}", f"{WORLD_SIZE}={self.size}"
        local_rank, local_size = f"{LOCAL_RANK}={self.local_rank}", f"{LOCAL_WORLD_SIZE}={self.local_size}"
        for wrong, what in (
            (self.rank >= self.size, f"{rank} is not below {size}"),
            (self.local_rank >= self.local_size, f"{local_rank} is not below {local_size}"),
            (self.local_size > self.size, f"{local_size} is above {size}"),
            (self.local_rank > self.rank, f"{local_rank} is above {rank}"),
        ):
            if wrong:
                raise ConfigurationError(
                    f"{what}; a launcher sets them, so do not set them by hand in the pod's template"
                )


def whole_number(env: Mapping[str, str], name: str, *, least: int = 0, default: int | None = None) -> int:
    """Returns a variable's number. `default`: of one that is not set. Raises ConfigurationError."""
    text = env.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal() or int(text) < least:
        raise ConfigurationError(f"{name}={text!r} must be a whole number, at least {least}")
    return int(text)
