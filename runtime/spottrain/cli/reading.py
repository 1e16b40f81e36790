"""Opens the store that a URI names, and reads its HEAD."""

from __future__ import annotations

import os

from spottrain.checkpoint.head.owner import HeadClient, without_head
from spottrain.checkpoint.head.state import Head
from spottrain.contract import Env, Reason
from spottrain.core.uri import folder_of, given
from spottrain.errors import ConfigurationError
from spottrain.storage.base import Store
from spottrain.storage.open import open_store


def open_existing(uri: str, endpoint: str | None) -> Store:
    """Opens an existing store: an absent folder is a mistyped URI, not an empty store."""
    uri = given(uri, "URI")
    folder = folder_of(uri)
    if folder is not None and _absent(folder):
        raise ConfigurationError(
            f"there is no folder {folder}; check the URI", reason=Reason.CHECKPOINT_MISSING
        )
    return open_there(uri, endpoint)


def open_there(uri: str, endpoint: str | None) -> Store:
    """Opens a store, which may be empty, with the settings of S3 that the environment gives."""
    style, key = (os.environ.get(name, "") for name in (Env.CHECKPOINT_PATH_STYLE, Env.CHECKPOINT_KMS_KEY))
    path_style = {"true": True, "false": False}.get(style)
    return open_store(given(uri, "URI"), endpoint, path_style=path_style, kms_key=key or None)


def _absent(folder: str) -> bool:
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # the store reports it
        return False
    return not os.path.isdir(folder)


def head_of(store: Store) -> Head:
    head = HeadClient(store).read()
    if head is None:
        raise without_head(store)
    return head
