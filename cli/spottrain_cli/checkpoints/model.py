"""Which files make a model that a person can use: of a run that is done, or of one of its checkpoints.

what the script has saved after its training, else
the final weights with configuration and tokenizer, or an adapter alone, else
the newest checkpoint: a library's own files, or our tensors as one file
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from spottrain.checkpoint.head.owner import HeadClient, without_head
from spottrain.checkpoint.head.state import Entry, Head, HeadState
from spottrain.checkpoint.manifest import FOLDER, Damaged, Manifest
from spottrain.contract import FINAL_PREFIX, MANIFEST_NAME, Reason
from spottrain.errors import CheckpointError
from spottrain.storage.base import Store
from spottrain.sync.manifest import SyncManifest

from spottrain_cli.checkpoints import synced, weights
from spottrain_cli.checkpoints.items import Item, stored_object, stored_shard
from spottrain_cli.checkpoints.reading import Shards, choose, manifest_of
from spottrain_cli.errors import NotFound
from spottrain_cli.jobs import Job

FINAL: Final = "final"
"""Used in place of a step: what a run that is done has left."""
NEWEST: Final = "newest"
CONFIG: Final = "config.json"
ADAPTER: Final = "adapter_config.json"
WEIGHTS: Final = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")
"""Files of the final weights."""
NO_MODEL: Final = re.compile(
    r"(optimizer|scheduler|scaler|sampler|rng_state|random_states|custom_checkpoint)\w*\.\w+|best-model/.*"
)
"""What only a resume needs, of the files of Hugging Face's libraries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    of: str
    """What it is, for messages."""
    step: int
    key: str
    """Other contents have another key."""
    items: tuple[Item, ...] = ()
    folder: tuple[Entry, SyncManifest] | None = None
    """In place of `items`: what `spottrain sync` has stored."""
    note: str = ""
    """What is worth knowing about it, as a sentence."""


def find(store: Store, which: str, job: Job | None = None) -> Model:
    """Returns the model of a step, or what `which` names; "" is the final weights, else the newest one.

    `job`: whose it has to be.

    Raises NotFound, and CheckpointError if the checkpoint is damaged.
    """
    head, final = HeadClient(store).read(), _final_of(store)
    if job is not None and head is not None and head.jobUID != job.uid:
        raise NotFound(
            f"job {job.ref} has saved nothing yet: what {store.uri} has is of job {head.job} (UID "
            f"{head.jobUID}); to get that, give the URI"
        )
    if which == FINAL or (not which and final is not None and (head is None or _done(head))):
        if final is None:
            raise NotFound(f"there are no final weights at {store.uri}: no run there has finished")
        return final.model(store)
    if head is None:
        raise NotFound(str(without_head(store)))
    if not head.checkpoints:
        raise NotFound(f"job {head.job} has no checkpoint at {store.uri} yet; it is {head.state}")
    entry = choose(head, which or NEWEST)
    try:
        found = _checkpoint(store, entry, final if _done(head) else None)
    except Damaged as error:
        raise damaged(f"step {entry.step}", store, error) from error
    if which or final is None:
        return found
    return replace(
        found,
        note=f"The final weights of an earlier run, of step {final.step}, are there too: --step {FINAL}.",
    )


def damaged(what: str, store: Store, error: Damaged) -> CheckpointError:
    return CheckpointError(
        f"{what} cannot be downloaded: {error}; choose another --step (spottrain checkpoints verify "
        f"{store.uri} shows which are intact)",
        reason=Reason.CHECKPOINT_DAMAGED,
    )


def _done(head: Head) -> bool:
    return head.state in (HeadState.DONE, HeadState.DELETED)


# --- a run that is done -----------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class _Final:
    """The manifest of `final/`. Lists have name, bytes and sha256 of each file."""

    step: int
    digest: str
    files: list[dict[str, Any]]
    beside: list[dict[str, Any]]
    saved: list[dict[str, Any]]

    @property
    def adapter(self) -> bool:
        """Whether the model was trained by an adapter of PEFT."""
        return any(each["name"] == ADAPTER for each in self.beside)

    @property
    def description(self) -> list[dict[str, Any]]:
        """Configuration, tokenizer and the like of a whole model."""
        return [] if self.adapter else [each for each in self.beside if not WEIGHTS.fullmatch(each["name"])]

    def model(self, store: Store) -> Model:
        if self.saved:
            of, listed = f"what the script saved after step {self.step}", self.saved
        elif self.adapter:
            of = f"the adapter of step {self.step}"
            listed = [each for each in self.beside if not WEIGHTS.fullmatch(each["name"])]
        else:
            of, listed = f"the final weights of step {self.step}", self.files + self.beside
        sums = "".join(str(each["sha256"]) for each in listed)
        return Model(of=of, step=self.step, key=f"{self.digest} {sums}", items=tuple(_items(store, listed)))


def _items(store: Store, listed: list[dict[str, Any]]) -> Iterator[Item]:
    for each in listed:
        key = FINAL_PREFIX + each.get("at", each["name"])
        yield stored_object(store, key, each["name"], each["bytes"], each["sha256"])


def _final_of(store: Store) -> _Final | None:
    """Returns what a run has left, if it is done. Raises CheckpointError if it is not readable."""
    found = store.get(FINAL_PREFIX + MANIFEST_NAME)
    if found is None:
        return None
    try:
        facts: Mapping[str, Any] = json.loads(found.body)
        return _Final(
            step=facts["step"],
            digest=facts["digest"],
            files=facts["files"],
            beside=facts["beside"] if "beside" in facts else _unlisted(store, facts),
            saved=facts.get("saved", []),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{FINAL_PREFIX}{MANIFEST_NAME} at {store.uri} does not name the files of the final weights: "
            "another version of spottrain wrote it, or it is damaged. Download a checkpoint: --step N "
            "(spottrain checkpoints list URI shows them)",
            reason=Reason.CHECKPOINT_DAMAGED,
        ) from error


def _unlisted(store: Store, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the files beside the weights of a run of version 0.3.0, which did not list them."""
    listed = {MANIFEST_NAME, *(each["name"] for each in facts["files"])}
    found = []
    for key in store.list(FINAL_PREFIX):
        name, stat = key.removeprefix(FINAL_PREFIX), store.stat(key)
        if name not in listed and stat is not None:
            found.append({"name": name, "bytes": stat.bytes, "sha256": None})
    return found


# --- a checkpoint -----------------------------------------------------------------------------------------
def _checkpoint(store: Store, entry: Entry, final: _Final | None) -> Model:
    """Raises Damaged."""
    of = f"step {entry.step}"
    if (folder := synced.folder_of(store, entry)) is not None:
        return Model(of=of, step=entry.step, key=entry.key, folder=(entry, folder))
    manifest, _ = manifest_of(store, entry.key)
    shards = Shards(store, entry.key, manifest)
    if manifest.kind == FOLDER:
        items = tuple(_library_files(manifest, shards))
    else:
        file = weights.weights_file(manifest, shards, entry)
        if file is None:
            raise NotFound(f"step {entry.step} at {store.uri} has no model; choose another --step")
        items = (file,)
    if final is not None and not {CONFIG, ADAPTER} & {each.name for each in items}:
        items += tuple(_items(store, final.description))  # the same for all steps of a run
    return Model(of=of, step=entry.step, key=entry.key, items=items)


def _library_files(manifest: Manifest, shards: Shards) -> Iterator[Item]:
    by_name = {shard.name: shard for shard in manifest.shards}
    for file in manifest.files:
        if not NO_MODEL.fullmatch(file.path):
            yield stored_shard(shards, by_name[file.shard], file.path)
