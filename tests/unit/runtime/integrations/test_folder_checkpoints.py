"""Checkpoints that are files of a library: what is kept of them, by whom, and what a fork may not break."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from spottrain.core import device
from spottrain.integrations.folder_checkpoints import link_tree, packed, unpacked
from spottrain.storage.local import FolderStore


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


def _write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, body in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return folder


def _read(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


FILES = {"model.bin": b"m" * 1000, "deep/er/state.json": b"{}", "empty": b""}


def test_linked_files_outlive_their_folder(tmp_path: Path) -> None:
    source = _write(tmp_path / "checkpoint-3", FILES)
    link_tree(source, tmp_path / "ours")
    assert (tmp_path / "ours" / "model.bin").stat().st_ino == (source / "model.bin").stat().st_ino
    for path in source.rglob("*"):
        if path.is_file():
            path.unlink()
    assert _read(tmp_path / "ours") == FILES


def test_a_process_forked_while_the_stores_lock_is_held_does_not_keep_it(store: FolderStore) -> None:
    """Loader workers are forked at any moment, also during a commit."""
    store.probe()
    stay = multiprocessing.get_context("fork").Event()
    with store._locked():
        child = multiprocessing.get_context("fork").Process(target=stay.wait, daemon=True)
        child.start()
    done = threading.Event()

    def write() -> None:
        store.put_if_absent("key", b"x")
        done.set()

    threading.Thread(target=write, daemon=True).start()
    try:
        assert done.wait(10), "the store's lock was not given back"
    finally:
        stay.set()
        child.join(10)


def test_what_a_rank_keeps_comes_back_in_its_shape_and_type() -> None:
    state = device.random_state()
    again = unpacked(packed(state))
    assert torch.equal(again["torch"], state["torch"]) and again["python"] == state["python"]
    for dtype in (torch.int64, torch.bfloat16, torch.bool, torch.uint8):
        batch: Any = {"x": [torch.ones(shape).to(dtype) for shape in ((2, 3), (), (0, 4))], "n": (1, "a")}
        back = unpacked(packed(batch))
        assert back["n"] == (1, "a")
        for now, before in zip(back["x"], batch["x"], strict=True):
            assert torch.equal(now, before) and (now.dtype, now.shape) == (dtype, before.shape)
