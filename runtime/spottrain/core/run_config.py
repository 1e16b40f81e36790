"""Configuration of a run: environment variables of the operator, or flags and defaults on a laptop.

Every bad value raises a `ConfigurationError` that names the variable or field, its value and what is allowed.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from spottrain.contract import (
    LOG_FORMAT,
    STORE_WAIT_SECONDS,
    CompileCacheMode,
    Env,
    OnExisting,
    bind_address,
    library_homes,
)
from spottrain.core import container, log
from spottrain.core.log_format import AUTO, FORMATS
from spottrain.core.training_settings import Manifest, read_manifest
from spottrain.core.uri import folder_of, given, is_path, same_place
from spottrain.errors import ConfigurationError

T = TypeVar("T")

DEFAULT_INTERVAL: Final = "10m"
DEFAULT_KEEP: Final = 3
LOG_FORMATS: Final = (AUTO, *FORMATS)
DEFAULT_GRACE: Final = 30.0
"""Kubernetes' default of terminationGracePeriodSeconds."""
TRUTH: Final = {"true": True, "false": False}
IN_POD: Final = "KUBERNETES_SERVICE_HOST"
"""Kubernetes sets this environment variable in every container."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Interval of periodic saves: `steps`, or `seconds`, or neither (`auto`: chosen from measurements)."""

    steps: int | None = None
    seconds: float | None = None

    @property
    def auto(self) -> bool:
        return self.steps is None and self.seconds is None

    @classmethod
    def parse(cls, text: str) -> Interval:
        if text == "auto":
            return cls()
        match = re.fullmatch(r"([1-9][0-9]*)(steps|s|m|h)", text)
        if match is None:
            raise ConfigurationError(
                f"checkpoint interval {text!r} is not valid: use auto, 500steps, 90s, 10m or 1h"
            )
        number, unit = int(match[1]), match[2]
        if unit == "steps":
            return cls(steps=number)
        return cls(seconds=float(number * {"s": 1, "m": 60, "h": 3600}[unit]))

    def due(self, *, steps: int, seconds: float) -> bool:
        """Whether a save is due this many steps and seconds after the last one."""
        if self.steps is not None:
            return steps >= self.steps
        return self.seconds is not None and seconds >= self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class InitFrom:
    """Weights that a training begins from, at its first start only."""

    source: str
    """Checkpoint URI of another run, or a path: of such a folder, of a folder with weights, or of a file."""
    ignore: tuple[str, ...] = ()
    """Patterns (fnmatch) of the names of parameters and buffers that are not loaded."""


def name_of(script: str) -> str:
    """Returns the name of a local run: that of the script, or of the package of a `__main__.py`."""
    path = Path(script)
    return (path.resolve().parent.name if path.stem == "__main__" else path.stem) or "run"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Configuration of one attempt of one job: identity, checkpoints, limits."""

    job: str
    job_uid: str
    attempt: int | None = None
    """None on a laptop: one more than the attempt in HEAD."""
    checkpoint_uri: str | None = None
    """None: nothing is saved, and an interruption loses the run."""
    endpoint: str | None = None
    interval: Interval = field(default_factory=lambda: Interval.parse(DEFAULT_INTERVAL))
    keep: int = DEFAULT_KEEP
    keep_best: bool = True
    path_style: bool | None = None
    kms_key: str | None = None
    on_existing: OnExisting = OnExisting.FAIL
    known_durable_step: int | None = None
    init_from: InitFrom | None = None
    gate_until: float = 0.0
    """Unix seconds."""
    training: Manifest = field(default_factory=dict)
    progress_port: int | None = None
    bind_address: str = ""
    """IP address on which this process listens; "" for all."""
    cache_dir: Path | None = None
    compile_cache: CompileCacheMode = CompileCacheMode.KEEP
    image_digest: str = ""
    hang_timeout: float | None = None
    """Seconds without a step that count as a hang; None: derived from the measured step time."""
    store_wait: float = STORE_WAIT_SECONDS
    """Seconds to wait for an unreachable store, at a start and at the end of a training."""
    log_format: str = AUTO
    """One of `LOG_FORMATS`. The log reads the environment itself: it is needed before this is checked."""
    logs: bool = False
    """Whether the ranks' output is stored beside the checkpoints (log capture)."""
    auto_attach: bool = True
    """Whether `spottrain run` attaches to known libraries (`integrations.attach`)."""
    folder: Path = field(default_factory=Path.cwd)
    """Working directory at the start. A relative URI refers to it, even if the script changes directory."""

    @property
    def where(self) -> dict[str, Any]:
        """Arguments of `open_store`, also in another process."""
        return self._where(self.checkpoint_uri) | {"endpoint": self.endpoint, "kms_key": self.kms_key}

    def where_of_other(self, uri: str) -> dict[str, Any]:
        """Arguments of `open_store` for another run's URI. The endpoint may be that of the other protocol."""
        own, other = (urlsplit(each or "").scheme for each in (self.checkpoint_uri, uri))
        foreign = own in ("s3", "gs") and own != other
        return self._where(uri) | {"endpoint": None if foreign else self.endpoint}

    def _where(self, uri: str | None) -> dict[str, Any]:
        path = str(self.folder / uri) if uri and is_path(uri) else uri
        return {"uri": path, "path_style": self.path_style}

    @classmethod
    def from_env(cls, env: Mapping[str, str], *, script: str) -> RunConfig:
        """Reads the operator's variables. Without a job UID this is a local run of `script`."""
        local = Env.JOB_UID not in env
        name = name_of(script)
        uri = _uri(env, Env.CHECKPOINT_URI)
        if uri is not None:
            _require_durable(env, uri)
        elif local:
            uri = f"checkpoints/{name}"
        return cls(
            job=env.get(Env.JOB_NAME) or name,
            job_uid=env.get(Env.JOB_UID) or f"local-{name}",
            attempt=read(env, Env.ATTEMPT, _count(1), None if local else 1),
            checkpoint_uri=uri,
            endpoint=_uri(env, Env.CHECKPOINT_ENDPOINT),
            interval=Interval.parse(env.get(Env.CHECKPOINT_INTERVAL) or DEFAULT_INTERVAL),
            keep=read(env, Env.CHECKPOINT_KEEP, _count(2), DEFAULT_KEEP),
            keep_best=read(env, Env.CHECKPOINT_KEEP_BEST, _one_of(TRUTH), True),
            path_style=read(env, Env.CHECKPOINT_PATH_STYLE, _one_of(TRUTH), None),
            kms_key=env.get(Env.CHECKPOINT_KMS_KEY) or None,
            on_existing=read(env, Env.CHECKPOINT_ON_EXISTING, _on_existing, OnExisting.FAIL),
            init_from=_init_from(env, uri),
            known_durable_step=read(env, Env.KNOWN_DURABLE_STEP, _count(0), None),
            gate_until=read(env, Env.GATE_UNTIL, _seconds, 0.0),
            training=read_manifest(env.get(Env.TRAINING, "")),
            progress_port=read(env, Env.PROGRESS_PORT, _port, None),
            bind_address=bind_address_of(env),
            cache_dir=read(env, Env.CACHE_DIR, Path, None),
            compile_cache=read(
                env,
                Env.COMPILE_CACHE,
                _one_of({str(each): each for each in CompileCacheMode}),
                CompileCacheMode.KEEP,
            ),
            image_digest=env.get(Env.IMAGE_DIGEST, ""),
            hang_timeout=read(env, Env.HANG_TIMEOUT, _limit, None),
            store_wait=read(env, Env.STORE_WAIT, _limit, float(STORE_WAIT_SECONDS)),
            log_format=read(env, LOG_FORMAT, _one_of({each: each for each in LOG_FORMATS}), AUTO),
            auto_attach=read(env, Env.AUTO_ATTACH, _one_of(TRUTH), True),
            logs=read(env, Env.LOGS, _one_of({"keep": True, "off": False}), not local) and uri is not None,
        )


def bind_address_of(env: Mapping[str, str]) -> str:
    """Returns the IP address on which to listen, "" for all. Raises ConfigurationError."""
    try:
        return bind_address(env)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _uri(env: Mapping[str, str], name: str) -> str | None:
    text = env.get(name, "")
    return given(text, name) if text else None


def _require_durable(env: Mapping[str, str], uri: str) -> None:
    """Raises ConfigurationError if a folder is lost with the pod that this process runs in."""
    if IN_POD in env and (folder := folder_of(uri)) is not None and not container.on_volume(Path(folder)):
        raise ConfigurationError(
            f"{Env.CHECKPOINT_URI} (checkpoint.uri, --checkpoint) is {uri}, a folder on no volume of this "
            "pod, so the checkpoints are lost with the pod: use s3://bucket/prefix or gs://bucket/prefix, or "
            "a folder below the mountPath of a volume"
        )


def _init_from(env: Mapping[str, str], uri: str | None) -> InitFrom | None:
    source = _uri(env, Env.INIT_FROM)
    ignore = tuple(name for part in env.get(Env.INIT_IGNORE, "").split(",") if (name := part.strip()))
    if not source:
        if ignore:
            raise ConfigurationError(
                f"{Env.INIT_IGNORE} (--init-ignore) names parameters that are not loaded from "
                f"{Env.INIT_FROM} (--init-from), which is not set: set it, or leave both out"
            )
        return None
    if uri is not None and same_place(source, uri, Path.cwd()):
        raise ConfigurationError(
            f"{Env.INIT_FROM} (checkpoint.initFrom, --init-from) is {source}, the checkpoint URI of this run "
            "itself, from which it resumes anyway: name another run's URI, or leave it out"
        )
    return InitFrom(source=source, ignore=ignore)


def grace_seconds(env: Mapping[str, str]) -> float:
    """Seconds from SIGTERM to SIGKILL. Never raises: it is needed before errors can be reported."""
    try:
        return _seconds(env.get(Env.GRACE_SECONDS, "")) or DEFAULT_GRACE
    except ValueError:
        return DEFAULT_GRACE


def deadline_file(env: Mapping[str, str]) -> Path | None:
    return Path(env[Env.DEADLINE_FILE]) if env.get(Env.DEADLINE_FILE) else None


def save_advised_file(env: Mapping[str, str]) -> Path | None:
    return Path(env[Env.SAVE_ADVISED_FILE]) if env.get(Env.SAVE_ADVISED_FILE) else None


def data_cache_folder(env: Mapping[str, str]) -> Path:
    """Folder for downloads: on the job's volume, or on a laptop in the user's cache folder."""
    if folder := env.get(Env.DATA_CACHE):
        if not Path(folder).is_absolute():
            raise ConfigurationError(f"{Env.DATA_CACHE}={folder!r} must be an absolute path")
        return Path(folder)
    user = env.get("XDG_CACHE_HOME", "")  # its specification says to ignore a relative path
    return (Path(user) if user.startswith("/") else Path.home() / ".cache") / "spottrain" / "data"


def use_data_cache(env: Mapping[str, str], environ: MutableMapping[str, str]) -> None:
    """Points other libraries' download folders at the job's volume, unless the user has set them.

    Call it before those libraries are imported. On a laptop nothing is set: their own folders outlive a run.
    """
    if not env.get(Env.DATA_CACHE):
        return
    for name, folder in library_homes(str(data_cache_folder(env))).items():
        if _serves(Path(folder)):
            environ.setdefault(name, folder)
        elif environ.get(name, folder) == folder:  # not the user's choice, but perhaps the operator's
            environ.pop(name, None)
            why = f"it is not writable, so {name} is not set: what is downloaded is lost with the pod"
            log.event("data-cache-not-writable", folder=folder, why=why)


def _serves(home: Path) -> bool:
    """Whether a library can download into `home`, or may find files there already (a read-only volume)."""
    try:
        if home.is_dir() and any(home.iterdir()):
            return True
        there = next(each for each in (home, *home.parents) if each.exists())
    except OSError:  # a folder that may not be listed
        return False
    return os.access(there, os.W_OK | os.X_OK)


def read(env: Mapping[str, str], name: str, parse: Callable[[str], T], default: Any, must: str = "") -> Any:
    """Returns a variable's value. `must`: what it must be, for the message. Raises ConfigurationError."""
    text = env.get(name, "")
    if not text:
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigurationError(f"{name}={text!r}{must}: {error}") from error


def _count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"must be a whole number, at least {least}")
        return int(text)

    return parse


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.0 <= (value := float(text)) < math.inf:
            return value
    raise ValueError("must be a number of seconds, at least 0")


def _limit(text: str) -> float:
    if value := _seconds(text):
        return value
    raise ValueError("must be a number of seconds above 0")


def _one_of(known: Mapping[str, T]) -> Callable[[str], T]:
    def parse(text: str) -> T:
        if text not in known:
            raise ValueError(
                f"must be {' or '.join(known) if len(known) == 2 else 'one of ' + ', '.join(known)}"
            )
        return known[text]

    return parse


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) <= 65535:
        raise ValueError("must be a port, 0 to 65535 (0 = any free one)")
    return int(text)


def _on_existing(text: str) -> OnExisting:
    return _one_of({each.lower(): each for each in OnExisting})(text.lower())
