"""An upload that was abandoned may still be at work in the uploader when the next one begins."""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any, cast

from spottrain.checkpoint.upload_process import Uploader
from spottrain.storage.base import Store

WAIT = 10.0


class Crossing:
    """A store in which the upload of `probe` ends while that of `shard` is under way."""

    def __init__(self) -> None:
        self.probing, self.let_go = threading.Event(), threading.Event()
        self.probe: threading.Thread | None = None

    def upload(self, key: str, body: memoryview, *, cancelled: Any = None) -> list[str]:
        if key == "probe":
            self.probing.set()
            assert self.let_go.wait(WAIT)
        elif self.probe is not None:
            self.let_go.set()
            self.probe.join(WAIT)
        return [key]


def test_what_an_abandoned_upload_still_sends_is_no_part_of_the_next_answer() -> None:
    store, said = Crossing(), list[dict[str, Any]]()
    uploader = Uploader(lambda: cast(Store, store), said.append)
    uploader.share(_memory(), mmap.PAGESIZE)
    store.probe = threading.Thread(target=uploader.work(1, [{"key": "probe", "bytes": 4, "offset": 0}]))
    store.probe.start()
    assert store.probing.wait(WAIT)
    uploader.abandon(1)
    uploader.work(2, [{"key": "shard", "bytes": 4, "offset": 0}])()
    answer = next(message for message in said if message["put"] == 2)
    assert list(answer["sent"]) == ["shard"]


def _memory() -> int:
    fd = os.memfd_create("test")
    os.truncate(fd, mmap.PAGESIZE)
    return fd
