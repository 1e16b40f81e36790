"""Settings of a process, by its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeVar
from unittest.mock import patch

from spottrain_operator.environment import EnvironmentSettings

Settings = TypeVar("Settings", bound=EnvironmentSettings)


def read(settings: type[Settings], env: Mapping[str, str]) -> Settings:
    """What `settings` reads where these variables are all."""
    with patch.dict(os.environ, env, clear=True):
        return settings.from_env()
