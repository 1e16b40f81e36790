"""The folder `final/` of a run that is done: what it leaves to its user. Rank 0 writes it.

model.safetensors    the weights, or several files and an index (`final_weights`)
config.json, ...     what a library needs beside them to read the model
saved/...            what the script has saved after its training, unless it is in the files above
manifest.json        name, size and SHA-256 of each file; written last
"""

from __future__ import annotations

import hashlib
import json
import mmap
import posixpath
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from spottrain.checkpoint import plain_state
from spottrain.checkpoint.final_weights import INDEX, WEIGHTS, Content, FinalWeights, equal_weights
from spottrain.contract import FINAL_PREFIX, MANIFEST_NAME
from spottrain.core import log
from spottrain.distributed.dtensor import is_sharded
from spottrain.storage.base import Store
from spottrain.storage.outage import Outage

SAVED: Final = "saved/"


class FinalFiles:
    """Writes the files of `final/`, one at a time. `outage` retries each after an outage of the store."""

    def __init__(self, store: Store, outage: Outage) -> None:
        self._store, self._outage = store, outage
        self._facts: dict[str, Any] = {}
        """The contents of the manifest."""
        self._contents: dict[str, Content] = {}
        """Of the final weights."""

    def write(
        self, weights: FinalWeights, beside: Iterable[tuple[str, Path]], facts: Mapping[str, Any]
    ) -> None:
        """Writes the weights. They replace those of an attempt that died writing.

        `beside`: name and place of further files. `facts`: what else the manifest holds.
        """
        self._through(self._clear)
        files: list[dict[str, Any]] = []
        for name, body in weights.files(first=True, keep=True):
            files.append(self._upload(name, name, body))
            del body  # else its memory is kept while the next file is made
        further = [] if weights.index is None else [self._upload(INDEX, INDEX, memoryview(weights.index))]
        further += [self._upload(name, name, _body(place)) for name, place in beside]
        self._contents = weights.contents
        self._facts = {"format": 1, **facts, "digest": weights.digest, "files": files, "beside": further}
        self._write_manifest()

    def add_saved(self, saved: Mapping[str, Path]) -> int:
        """Adds files that the script has saved, by their names. Returns the bytes that were sent.

        Files of weights that equal the final ones are not sent: the final ones stand for them.
        """
        found: list[dict[str, Any]] = []
        sent = 0
        final = [*self._facts["files"], *(each for each in self._facts["beside"] if each["name"] == INDEX)]
        same = self._same_weights(saved)
        for folder in sorted(same):
            found += [
                each | {"name": posixpath.join(folder, each["name"]), "at": each["name"]} for each in final
            ]
        for name, place in sorted(saved.items()):
            folder, base = posixpath.split(name)
            if folder not in same or not WEIGHTS.fullmatch(base):
                found.append(self._upload(name, SAVED + name, _body(place)) | {"at": SAVED + name})
                sent += found[-1]["bytes"]
        self._facts["saved"] = found
        self._write_manifest()
        return sent

    def _same_weights(self, saved: Mapping[str, Path]) -> set[str]:
        """Returns the folders whose files of weights hold the final weights."""
        weights: dict[str, list[Path]] = {}
        for name, place in saved.items():
            folder, base = posixpath.split(name)
            if WEIGHTS.fullmatch(base) and base.endswith(".safetensors"):
                weights.setdefault(folder, []).append(place)
        return {folder for folder, places in weights.items() if equal_weights(self._contents, places)}

    def _upload(self, name: str, at: str, body: memoryview) -> dict[str, Any]:
        """Returns what the manifest has of a file. `at`: its key below `final/`."""
        self._through(partial(self._replace, FINAL_PREFIX + at, body))
        return {"name": name, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}

    def _replace(self, key: str, body: memoryview) -> None:
        if self._store.stat(key) is not None:  # an earlier attempt got no response
            self._store.delete([key])
        # `put` is a single request, which S3 limits to 5 GiB.
        self._store.upload(key, body)

    def _clear(self) -> None:
        # List first: a needless DELETE that the network repeats late would delete the new weights.
        left = [key.removeprefix(FINAL_PREFIX) for key in self._store.list(FINAL_PREFIX)]
        if own := [FINAL_PREFIX + name for name in left if WEIGHTS.fullmatch(name) or name.startswith(SAVED)]:
            self._store.delete(own)

    def _through(self, act: Callable[[], None]) -> None:
        self._outage.through("the final weights", act, brief=False)

    def _write_manifest(self) -> None:
        text = json.dumps(self._facts, indent=1).encode()
        self._through(lambda: self._store.put(FINAL_PREFIX + MANIFEST_NAME, text))


def _body(path: Path) -> memoryview:
    """Maps a file, which may be larger than memory."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


# --- what libraries need beside the weights -----------------------------------------------------------------
def write_description(model: torch.nn.Module, processing: Any, folder: Path) -> None:
    """Writes what `from_pretrained` of Hugging Face's libraries needs: configuration, adapter, tokenizer.

    A model that is no model of transformers or PEFT has none.

    The parts of a sharded adapter are on other ranks, so it is left out. What the library refuses to save,
    such as a contradictory generation configuration, is logged: the training is not lost for it.

    Args:
        processing: tokenizer, image processor or the like; None if there is none.
        folder: of its own.
    """
    inner: Any = plain_state.plain(model)
    parts: list[Any] = [processing]
    if has_adapter(inner):
        parts += [] if any(map(is_sharded, inner.parameters())) else [inner]  # saves the adapter alone
    elif _is_of(inner, "PreTrainedModel"):
        inner.config.architectures = [type(inner).__name__.removeprefix("FSDP")]  # of FSDP2
        inner.config.dtype = str(inner.dtype).removeprefix("torch.")
        parts += [inner.config, inner.generation_config if inner.can_generate() else None]
    for part in parts:
        if hasattr(part, "save_pretrained"):
            _save(part, folder)


def _save(part: Any, folder: Path) -> None:
    try:
        part.save_pretrained(folder)
    except Exception as error:  # whatever the library, or a class of the script, raises
        text = (
            f"{type(part).__name__} is not stored beside the final weights: {type(error).__name__}: {error}"
        )
        log.event("advice", about="final-weights", text=text)


def has_adapter(model: Any) -> bool:
    """Whether it is trained by an adapter of PEFT, which is saved without the rest."""
    model = plain_state.plain(model)
    return _is_of(model, "PeftModel") or getattr(model, "_hf_peft_config_loaded", False)


def _is_of(model: torch.nn.Module, name: str) -> bool:
    """Whether a class of that name is among its classes; the library may not be installed."""
    return any(each.__name__ == name for each in type(model).__mro__)
