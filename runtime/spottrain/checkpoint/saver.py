"""Performs one save after another, on every rank: copy, upload, manifest, commit.

Each rank copies and uploads its own shards. It reports them to rank 0 over a TCP connection, not by a
collective, because a lost rank must not hang the others. Rank 0 writes the manifest, commits by changing
HEAD, and sends the result to the other ranks.
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
from spottrain.checkpoint.staging_buffer import StagingBuffer
from spottrain.checkpoint.tree import Flattened, Leaf
from spottrain.checkpoint.upload import Sent, Transfer, UploaderDied, UploadItem
from spottrain.core import log
from spottrain.distributed.control_channel import ControlChannel, broadcast_facts
from spottrain.distributed.world import World
from spottrain.errors import StoreUnavailable, TrainingFailed
from spottrain.storage.base import Cancelled

WAIT_SECONDS: Final = 1.0
"""Longest single wait for another rank, before the remaining time is checked again."""
WEIGHTS: Final = f"{MODEL}."
"""Path prefix of the model's weights."""
REPORT_SECONDS: Final = 3600.0
"""Longest wait for the other ranks' uploads; it is the only limit while no stop is requested."""


class Saver:
    """Copies, uploads and commits saves. `new_transfer` starts an uploader, and another if one has died."""

    def __init__(
        self,
        world: World,
        control: ControlChannel | None,
        new_transfer: Callable[[], Transfer],
        *,
        pin: bool = False,
    ) -> None:
        self._world = world
        self._control = control
        self._new_transfer = new_transfer
        self._transfer = new_transfer()
        self._pin = pin
        self._buffer: StagingBuffer | None = None
        self._number = 0
        self._files_bytes = 0
        self.of_first: Collection[str] = ()
        """Paths, or prefixes that end in a dot, of the shared tensors that rank 0 must store."""
        self.copy_seconds = 0.0
        self.bandwidth: float | None = None
        """Bytes per second of this rank's last upload that was not empty and not a retry; None if unknown."""

    @property
    def bytes(self) -> int:
        """Bytes of this rank's part of a save; 0 before one was prepared."""
        return self._files_bytes if self._buffer is None else self._buffer.layout.bytes

    # --- copy ---------------------------------------------------------------------------------------
    def prepare(self, tree: Any, own: Any) -> None:
        """Allocates the staging buffer for the first save, in the background.

        Raises CheckpointError for a state that cannot be stored, ConfigurationError if memory is short.
        """
        shared, private = Flattened(tree), Flattened(own)
        self._buffer_for(shared.leaves + private.leaves, self._mine(shared, private))

    def snapshot(self, tree: Any, own: Any, step: int, *, best: bool = False) -> Save:
        """Copies the state, after which training may continue. No other save may be in progress."""
        shared, private = Flattened(tree), Flattened(own)
        leaves = shared.leaves + private.leaves
        buffer = self._buffer_for(leaves, self._mine(shared, private))
        began = time.perf_counter()
        buffer.fill(leaves)
        self.copy_seconds = time.perf_counter() - began
        return Save(
            number=self._next(),
            step=step,
            best=best,
            tree=shared.plain,
            own=private.plain,
            shared=[describe(leaf) for leaf in shared.leaves],
            private=[describe(leaf) for leaf in private.leaves],
            layout=buffer.layout,
        )

    def folder(self, folder: Path, tree: Any, own: Any, step: int, *, best: bool = False) -> Save:
        """Prepares a save of a folder's files, which must not change until the save is done.

        Rank 0 uploads its files. The first rank of every other pod uploads the files that rank 0 lacks.
        The trees must hold no tensors.
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
        """Prepares a retry under the same key, so that objects already uploaded are not sent again."""
        save.number = self._next()
        save.tries += 1

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _mine(self, shared: Flattened, private: Flattened) -> list[int]:
        """Returns the numbers of the leaves that this rank stores; private leaves follow the shared ones."""
        count = len(shared.leaves)
        mine = divide(shared.leaves, self._world.size, self.of_first)[self._world.rank]
        return mine + list(range(count, count + len(private.leaves)))

    def _buffer_for(self, leaves: Sequence[Leaf], mine: Sequence[int]) -> StagingBuffer:
        if self._buffer is None or self._buffer.layout.signature != signature(leaves, mine):
            layout = plan(leaves, mine, rank=self._world.rank)
            before = 0 if self._buffer is None else self._buffer.size
            self._buffer = None  # freed before the next one is allocated: memory may not hold two
            self._transfer.forget()
            self._buffer = StagingBuffer(
                layout, pin=self._pin, freed=before, ranks_here=self._world.local_size
            )
            self._transfer.share(self._buffer)
        return self._buffer

    def forget(self) -> None:
        """Frees the staging buffer, after the last save."""
        self._buffer = None
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
        """Uploads and commits a save.

        Raises StoreError, Abandoned, PeerLost, TrainingFailed, or an error of `commit`. `new_key` and
        `commit` are called only on rank 0. `left` returns the remaining seconds.
        """
        try:
            self._require_no_nan(save)
            self._agree_on_key(save, new_key, left)
            sent = self._send(save)
            report = self._report(save, sent)
            if self._control is None:
                commit(save, manifest(save, self._world, [report]))
                return
            if self._world.first:
                commit(save, manifest(save, self._world, self._collect(save, report, left)))
            else:
                self._control.send_to_leader(f"save/{save.number}", json.dumps(report).encode())
        except (Cancelled, Abandoned):
            self._report_failure(save, "Abandoned", "")
            raise Abandoned from None
        except Exception as error:
            self._report_failure(save, type(error).__name__, str(error))
            raise

    def _require_no_nan(self, save: Save) -> None:
        """Raises TrainingFailed if weights hold NaN: every restart would resume from them."""
        if self._buffer is None or save.layout is None:
            return
        for number, each in enumerate(save.shared):
            if each.name.startswith(WEIGHTS) and self._buffer.has_nan(number):
                name = each.name.removeprefix(WEIGHTS)
                raise TrainingFailed(
                    f"{name} holds NaN after step {save.step}, which is not saved; "
                    "the checkpoints before it are whole. Lower the learning rate, clip the gradients "
                    "(clip_grad_norm), or look at the samples of the steps before"
                )

    def say_result(self, save: Save, **facts: Any) -> None:
        """On rank 0: sends the save's result to the other ranks."""
        broadcast_facts(self._control, f"save/{save.number}/result", facts)

    def say_over(self, save: Save) -> None:
        """On rank 0: announces that the save is not retried, so that the other ranks stop uploading."""
        broadcast_facts(self._control, f"save/{save.number}/over", {})

    def hear_result(self, save: Save, left: Callable[[], float]) -> dict[str, Any]:
        """On the other ranks: waits for the result; empty if the time runs out."""
        return self._heard(f"save/{save.number}/result", left)

    def _heard(self, name: str, left: Callable[[], float]) -> dict[str, Any]:
        assert self._control is not None
        while left() > 0:
            answer = self._control.receive(name, min(WAIT_SECONDS, left()))
            if answer is not None:
                return json.loads(answer)  # type: ignore[no-any-return]
        return {}

    def _agree_on_key(self, save: Save, new_key: Callable[[int], str], left: Callable[[], float]) -> None:
        """Sets the key that rank 0 chooses for all ranks, and drops the files that rank 0 uploads."""
        if self._world.first:
            save.key = save.key or new_key(save.step)
            words = {"key": save.key, "files": [file.path for file in save.files]}
            broadcast_facts(self._control, f"save/{save.number}/key", words)
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
        """Returns whether rank 0 has announced that the save is over."""
        if self._control is None or self._world.first:
            return False
        return self._control.has_message(f"save/{save.number}/over")

    def send(self, files: Sequence[UploadItem], cancelled: Callable[[], bool]) -> dict[str, Sent]:
        """Uploads the files, measures the bandwidth, and returns the results by key."""
        began = time.perf_counter()
        try:
            sent = self._transfer.put(files, cancelled)
        except UploaderDied as error:
            log.event("uploader-died", error=str(error), next="another one is started")
            self._transfer.close()
            self._transfer = self._new_transfer()
            if self._buffer is not None:
                self._transfer.share(self._buffer)
            files = [replace(file, again=True) for file in files]
            sent = self._transfer.put(files, cancelled)
        size = sum(each.bytes for each in sent.values())
        if size and not any(file.again for file in files):  # in a retry some objects exist already
            self.bandwidth = size / max(time.perf_counter() - began, 1e-6)
        return sent

    def _report(self, save: Save, sent: dict[str, Sent]) -> dict[str, Any]:
        """Returns what this rank has stored, as a JSON object."""
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
        """Returns the reports of all ranks, in rank order."""
        assert self._control is not None
        name = f"save/{save.number}"
        self._control.send_to_leader(name, json.dumps(own).encode())
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

    def _report_failure(self, save: Save, error: str, message: str) -> None:
        """Sends rank 0 the reason why this rank has no report, so that rank 0 stops waiting."""
        if self._control is not None and not self._world.first:
            words = {"error": error, "message": message, "rank": self._world.rank}
            self._control.send_to_leader(f"save/{save.number}", json.dumps(words).encode())

    def close(self) -> None:
        self._transfer.close()
