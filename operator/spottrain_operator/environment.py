"""What a process reads of its environment: its settings, and the API server of its pod."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from spottrain_operator.names import service_account

SHOWN: Final = 200
"""Maximum number of characters of a value in an error message."""


def from_text(parse: Callable[[str], object]) -> BeforeValidator:
    """Parses a variable's text. A value of another type was given in code, and is taken as it is."""
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


Words = Annotated[tuple[str, ...], from_text(_words)]
"""Separated by commas."""
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
"""Up to a year, which every computation with times can hold."""


class EnvironmentSettings(BaseSettings):
    """Base of a process' settings: a field `x` is read from the variable PREFIX_X.

    An empty variable is the default. A required field has a description, for the sentence that asks for it.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        env_ignore_empty=True,
        enable_decoding=False,  # JSON is parsed by `from_text`, with sentences that name the field
        allow_inf_nan=False,
        str_strip_whitespace=True,
    )

    @classmethod
    def from_env(cls) -> Self:
        """Reads the environment. Raises ValueError with one sentence that names variable and value."""
        prefix = cls.model_config["env_prefix"]
        known = [name.upper() for name, field in cls.model_fields.items() if field.validation_alias is None]
        for variable in os.environ:
            if variable.startswith(prefix) and variable.removeprefix(prefix) not in known:
                raise ValueError(f"{variable} is unknown; after {prefix} may follow: {', '.join(known)}")
        try:
            return cls()
        except ValidationError as error:
            raise ValueError(cls._sentence(error.errors(include_url=False)[0])) from error

    @classmethod
    def _sentence(cls, details: ErrorDetails) -> str:
        why, name = details["msg"].removeprefix("Value error, "), str(next(iter(details["loc"]), ""))
        if name not in cls.model_fields:  # it names the variable itself
            return why
        variable = f"{cls.model_config['env_prefix']}{name.upper()}"
        if details["type"] == "missing":
            return f"{variable} is missing: {cls.model_fields[name].description}"
        return f"{variable}={str(details['input'])[:SHOWN]}: {why}"


class NotInPod(ValueError):
    """This process has no service account of a pod."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The API server, and the account by which this process asks it."""

    url: str
    token_file: Path
    ca_file: Path | None = None

    @classmethod
    def in_pod(cls) -> Endpoint:
        """Returns the API server of this pod. Raises NotInPod.

        The address is that of the environment, as the official clients use it: the cluster's DNS may have run
        on the reclaimed node.
        """
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
        if not host or not port:
            raise NotInPod("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set: run it in a pod")
        account = service_account(os.environ)
        for file in (account / "token", account / "ca.crt"):
            if not file.is_file():
                raise NotInPod(f"{file} does not exist: the pod needs automountServiceAccountToken")
        address = f"[{host}]" if ":" in host else host
        return cls(url=f"https://{address}:{port}", token_file=account / "token", ca_file=account / "ca.crt")

    @cached_property
    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context(cafile=str(self.ca_file)) if self.ca_file else None

    def token(self) -> str:
        """Reads the token, which the kubelet replaces about every hour: it is read for each request."""
        return self.token_file.read_text().strip()
