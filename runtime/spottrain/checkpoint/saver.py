"""One save after another: copy, upload, manifest, commit. Called by `checkpointer`, by every rank.

Each rank copies and uploads its own shards and reports them to rank 0 over their connection to it, not by a
collective: a rank that is gone must not hang the others. Rank 0 writes the manifest and changes HEAD, which
is the commit, and says what became of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from spottrain.checkpoint.layout import describe, divide, plan, signature
from spottrain.checkpoint.manifest import File, Manifest
from spottrain.checkpoint.plain_state import MODEL
from spottrain.checkpoint.save import Abandoned, Save, fingerprint, manifest, raise_first_error
from spottrain.checkpoint.staging_buffer import Arena
from spottrain.checkpoint.tree import Flattened, Leaf
from spottrain.checkpoint.upload import Sent, Transfer, UploaderDied, UploadItem
from spottrain.core import log
from spottrain.distributed.control_channel import Control, say
from spottrain.distributed.world import World
from spottrain.errors import StoreUnavailable, TrainingFailed
from spottrain.storage.base import Cancelled

WAIT_SECONDS: Final = 1.0
"""How long a rank waits for another at once, before it looks whether it should."""
WEIGHTS: Final = f"{MODEL}."
"""What the paths of weights begin with."""
REPORT_SECONDS: Final = 3600.0
"""Longest difference between the uploads of two ranks; without a stop nothing else bounds it."""


class Saver:
    """`new_transfer` starts an uploader; a second one where the first has died."""

    def __init__(
        self,
        world: World,
        control: Control | None,
        new_transfer: Callable[[], Transfer],
        *,
        pin: bool = False,
    ) -> None:
        self._world = world
        self._control = control
        self._new_transfer = new_transfer
        self._transfer = new_transfer()
        self._pin = pin
        self._arena: Arena | None = None
        self._number = 0
        self._files_bytes = 0
        self.of_first: Collection[str] = ()
        """Paths of the shared tensors that rank 0 must store."""
        self.copy_seconds = 0.0
        self.bandwidth: float | None = None
        """Bytes per second of this rank's last upload of some size."""

    @property
    def bytes(self) -> int:
        """Of this rank's part of a save; 0 before one was prepared."""
        return self._files_bytes if self._arena is None else self._arena.layout.bytes

    # --- copy ---------------------------------------------------------------------------------------
    def prepare(self, tree: Any, own: Any) -> None:
        """Makes the memory that the first save will need, in the background.

        Raises CheckpointError for a state that cannot be stored, ConfigurationError where memory is short.
        """
        shared, private = Flattened(tree), Flattened(own)
        self._fit(shared.leaves + private.leaves, self._mine(shared, private))

    def snapshot(self, tree: Any, own: Any, step: int, *, best: bool = False) -> Save:
        """A copy of the state; no other save may be on its way. The caller may then go on training."""
        shared, private = Flattened(tree), Flattened(own)
        leaves = shared.leaves + private.leaves
        arena = self._fit(leaves, self._mine(shared, private))
        began = time.perf_counter()
        arena.fill(leaves)
        self.copy_seconds = time.perf_counter() - began
        return Save(
            number=self._next(),
            step=step,
            best=best,
            tree=shared.plain,
            own=private.plain,
            shared=[describe(leaf) for leaf in shared.leaves],
            private=[describe(leaf) for leaf in private.leaves],
            layout=arena.layout,
        )

    def folder(self, folder: Path, tree: Any, own: Any, step: int, *, best: bool = False) -> Save:
        """The files of a folder, which nobody may change until the save is done. No tensors in the trees.

        Rank 0 sends them, and the first rank of every other pod what is missing there.
        """
        paths = sorted(path for path in folder.rglob("*") if path.is_file()) if self._world.first_here else []
        files = [
            File(path=path.relative_to(folder).as_posix(), shard=f"f{self._world.rank:05d}-{number:05d}")
            for number, path in enumerate(paths)
        ]
        self._files_bytes = sum(path.stat().st_size for path in paths)
        shared, private = Flattened(tree), Flattened(own)
        assert not shared.leaves and not private.leaves, "a folder's trees hold no tensors"
        return Save(
            number=self._next(),
            step=step,
            best=best,
            tree=shared.plain,
            own=private.plain,
            files=files,
            folder=folder,
        )

    def again(self, save: Save) -> None:
        """For a second try: under the same key, so that what is there already need not be sent once more."""
        save.number = self._next()
        save.tries += 1

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _mine(self, shared: Flattened, private: Flattened) -> list[int]:
        """Numbers of the leaves that this rank stores; its private ones come after the shared ones."""
        count = len(shared.leaves)
        mine = divide(shared.leaves, self._world.size, self.of_first)[self._world.rank]
        return mine + list(range(count, count + len(private.leaves)))

    def _fit(self, leaves: Sequence[Leaf], mine: Sequence[int]) -> Arena:
        if self._arena is None or self._arena.layout.signature != signature(leaves, mine):
            layout = plan(leaves, mine, rank=self._world.rank)
            before = 0 if self._arena is None else self._arena.size
            self._arena = None  # before the next one is made: there may not be memory for two
            self._transfer.forget()
            self._arena = Arena(layout, pin=self._pin, freed=before, ranks_here=self._world.local_size)
            self._transfer.share(self._arena)
        return self._arena

    def forget(self) -> None:
        """Gives the memory back, after the last save."""
        self._arena = None
        self._transfer.forget()

    # --- upload and commit --------------------------------------------------------------------------
    def write(
        self,
        save: Save,
        *,
        new_key: Callable[[int], str],
        commit: Callable[[Save, Manifest], None],
        left: Callable[[], float],
    ) -> None:
        """Makes it durable. Raises StoreError, Abandoned, PeerLost, TrainingFailed, or what `commit` raises.

        `new_key` and `commit` are called on rank 0 alone. `left`: seconds that may still be spent.
        """
        try:
            self._require_numbers(save)
            self._key(save, new_key, left)
            sent = self._send(save)
            report = self._report(save, sent)
            if self._control is None:
                commit(save, manifest(save, self._world, [report]))
                return
            if self._world.first:
                commit(save, manifest(save, self._world, self._collect(save, report, left)))
            else:
                self._control.gather(f"save/{save.number}", json.dumps(report).encode())
        except (Cancelled, Abandoned):
            self._excuse(save, "Abandoned", "")
            raise Abandoned from None
        except Exception as error:
            self._excuse(save, type(error).__name__, str(error))
            raise

    def _require_numbers(self, save: Save) -> None:
        """Weights that are no numbers are worth no checkpoint: every restart would go on from them."""
        if self._arena is None or save.layout is None:
            return
        for number, each in enumerate(save.shared):
            if each.name.startswith(WEIGHTS) and self._arena.has_nan(number):
                name = each.name.removeprefix(WEIGHTS)
                raise TrainingFailed(
                    f"{name} holds NaN after step {save.step}, which is not saved; "
                    "the checkpoints before it are whole. Lower the learning rate, clip the gradients "
                    "(clip_grad_norm), or look at the samples of the steps before"
                )

    def say_result(self, save: Save, **facts: Any) -> None:
        """On rank 0: what became of it."""
        say(self._control, f"save/{save.number}/result", facts)

    def say_over(self, save: Save) -> None:
        """On rank 0: it is not tried again, so that nobody need send the rest of it."""
        say(self._control, f"save/{save.number}/over", {})

    def hear_result(self, save: Save, left: Callable[[], float]) -> dict[str, Any]:
        """On the other ranks. Empty when no time is left."""
        return self._heard(f"save/{save.number}/result", left)

    def _heard(self, name: str, left: Callable[[], float]) -> dict[str, Any]:
        assert self._control is not None
        while left() > 0:
            answer = self._control.hear(name, min(WAIT_SECONDS, left()))
            if answer is not None:
                return json.loads(answer)  # type: ignore[no-any-return]
        return {}

    def _key(self, save: Save, new_key: Callable[[int], str], left: Callable[[], float]) -> None:
        """All ranks write below the key that rank 0 has chosen."""
        if self._world.first:
            save.key = save.key or new_key(save.step)
            words = {"key": save.key, "files": [file.path for file in save.files]}
            say(self._control, f"save/{save.number}/key", words)
            return
        heard = self._heard(f"save/{save.number}/key", left)
        if not heard:
            raise Abandoned
        save.key = heard["key"]
        theirs = set(heard["files"])
        save.files = [file for file in save.files if file.path not in theirs]

    def _send(self, save: Save) -> dict[str, Sent]:
        files = [
            UploadItem(key=save.key + each.name, bytes=each.bytes, offset=each.offset, again=save.tries > 0)
            for each in (save.layout.shards if save.layout else ())
        ]
        for file in save.files:
            assert save.folder is not None
            path = (save.folder / file.path).absolute()
            size = path.stat().st_size
            files.append(
                UploadItem(key=save.key + file.shard, bytes=size, path=str(path), again=save.tries > 0)
            )
        return self.send(files, lambda: save.abandoned or self._given_up(save))

    def _given_up(self, save: Save) -> bool:
        """Whether rank 0 has said already that nothing comes of it."""
        if self._control is None or self._world.first:
            return False
        return self._control.came(f"save/{save.number}/over")

    def send(self, files: Sequence[UploadItem], cancelled: Callable[[], bool]) -> dict[str, Sent]:
        """By key; measures the bandwidth."""
        began = time.perf_counter()
        try:
            sent = self._transfer.put(files, cancelled)
        except UploaderDied as error:
            log.event("uploader-died", error=str(error), next="another one is started")
            self._transfer.close()
            self._transfer = self._new_transfer()
            if self._arena is not None:
                self._transfer.share(self._arena)
            sent = self._transfer.put([replace(file, again=True) for file in files], cancelled)
        size = sum(each.bytes for each in sent.values())
        if size and not any(file.again for file in files):  # else some of it was there already
            self.bandwidth = size / max(time.perf_counter() - began, 1e-6)
        return sent

    def _report(self, save: Save, sent: dict[str, Sent]) -> dict[str, Any]:
        """What this rank has stored, as JSON."""
        count = len(save.shared)
        pieces: dict[int, list[Any]] = {}
        for place in save.layout.places if save.layout else ():
            pieces.setdefault(place.number, []).append(asdict(place.piece))
        private = [
            asdict(each) | {"pieces": pieces.get(count + n, [])} for n, each in enumerate(save.private)
        ]
        return {
            "pieces": {str(number): found for number, found in pieces.items() if number < count},
            "private": private,
            "own": save.own,
            "shared": fingerprint(save.shared),
            "files": [asdict(file) for file in save.files],
            "shards": [
                {"name": key.removeprefix(save.key), "bytes": each.bytes, "chunks": each.chunks}
                for key, each in sorted(sent.items())
            ],
        }

    def _collect(self, save: Save, own: dict[str, Any], left: Callable[[], float]) -> list[dict[str, Any]]:
        """The reports of all ranks, in their order."""
        assert self._control is not None
        name = f"save/{save.number}"
        self._control.gather(name, json.dumps(own).encode())
        answers = self._control.collect(name, min(left(), REPORT_SECONDS), lambda: save.abandoned)
        if save.abandoned:
            raise Abandoned
        if self._control.lost is not None:
            raise self._control.lost
        reports = [json.loads(answer) for answer in answers if answer is not None]
        raise_first_error(reports)
        if len(reports) < self._world.size:
            raise StoreUnavailable("not all ranks had uploaded their shards in time")
        return reports

    def _excuse(self, save: Save, error: str, message: str) -> None:
        """Tells rank 0 why there is no report, so that it need not wait for one."""
        if self._control is not None and not self._world.first:
            words = {"error": error, "message": message, "rank": self._world.rank}
            self._control.gather(f"save/{save.number}", json.dumps(words).encode())

    def close(self) -> None:
        self._transfer.close()
