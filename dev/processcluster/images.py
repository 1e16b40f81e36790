"""What stands for an image: a start command, an environment, and folders of this checkout.

An image is known by the last part of its repository, whatever registry and tag stand around it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Image:
    """`user` is the image's own one (USER in the Dockerfile), whose part the person plays who runs the
    cluster.
    """

    entrypoint: tuple[str, ...]
    user: int
    roots_files: bool = False
    """It asks for root only to read and give back files of another user; here all are one user's."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """In words of this machine: nothing of it is translated."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """More of it, with paths of the container."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """Folders of the image, by the folders of this machine that stand for them."""


def known_images() -> dict[str, Image]:
    """The images of our Dockerfile, from this checkout and its environment."""
    python = sys.executable
    environment = {
        "PATH": f"{Path(python).parent}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT / 'runtime'}",
        "PYTHONUNBUFFERED": "1",
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "NO_PROXY": "*",  # a person's proxy is not for traffic that stays on this machine
    }
    prices = {
        f"SPOTTRAIN_OPERATOR_{name}_FILE": f"/etc/spottrain/prices/{file}.json"
        for name, file in (("PRICE", "prices"), ("FETCHED_PRICE", "fetched"))
    }
    trainer = {"/opt/spottrain/examples": str(ROOT / "examples")}
    return {
        "spottrain-operator": Image(
            entrypoint=(python, "-m", "spottrain_operator"),
            user=65532,
            environment=environment,
            settings=prices,
        ),
        "spottrain-prices": Image(
            entrypoint=(python, "-m", "spottrain_prices"), user=65532, environment=environment
        ),
        "spottrain-runtime": Image(
            entrypoint=(python, "-m", "spottrain", "run"), user=1000, environment=environment, folders=trainer
        ),
        "spottrain-sync": Image(
            entrypoint=(python, "-m", "spottrain", "sync"),
            user=1000,
            roots_files=True,
            environment=environment,
        ),
    }


def repository(image: str) -> str:
    """`spottrain-runtime` of `registry:5000/team/spottrain-runtime:0.3.0@sha256:...`."""
    return image.partition("@")[0].rpartition("/")[2].partition(":")[0]
