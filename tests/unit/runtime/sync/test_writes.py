"""What the kernel tells of writes to a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from spottrain.sync.writes import Write, Writes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")


@pytest.fixture
def seen(tmp_path: Path) -> Callable[[], dict[str, Write]]:
    """What is known of the writes to tmp_path / "folder"."""
    (tmp_path / "folder").mkdir()
    writes = Writes(tmp_path / "folder")
    writes.start()
    return writes.now


def test_a_file_is_open_until_it_is_closed_also_by_another_process(
    tmp_path: Path, seen: Callable[[], dict[str, Write]]
) -> None:
    path = tmp_path / "folder/ckpt"
    with path.open("wb", buffering=0) as file:
        file.write(b"1")
        first = seen()["ckpt"]
        assert first.closed is None
    assert seen()["ckpt"].closed is not None and not seen()["ckpt"].renamed
    subprocess.run(["sh", "-c", f"echo 2 > {path}"], check=True)
    last = seen()["ckpt"]
    assert last.closed is not None and last.number > first.number and last.began > first.began
    path.chmod(0o600)
    assert seen()["ckpt"].number > last.number, "it is no other version, but a change"
    path.read_bytes()
    assert seen()["ckpt"].closed == last.closed


def test_names_are_followed(tmp_path: Path, seen: Callable[[], dict[str, Write]]) -> None:
    folder = tmp_path / "folder"
    (folder / "tmp").write_text("1")
    os.replace(folder / "tmp", folder / "ckpt")
    assert seen().keys() == {"ckpt"} and seen()["ckpt"].renamed
    (folder / "step_1.tmp").mkdir()
    seen()
    (folder / "step_1.tmp/model").write_text("1")
    os.rename(folder / "step_1.tmp", folder / "step_1")
    assert seen()["step_1/model"].renamed
    (folder / "step_1/model").write_text("2")
    assert not seen()["step_1/model"].renamed, "a folder is known by its new name"
    (tmp_path / "elsewhere").write_text("1")
    os.rename(tmp_path / "elsewhere", folder / "from-elsewhere")
    assert seen()["from-elsewhere"].renamed
    os.link(folder / "ckpt", folder / "link")
    assert "link" not in seen(), "nobody has written it"
    os.rename(folder / "step_1", tmp_path / "step_1")
    (tmp_path / "step_1/model").write_text("3")
    (folder / "ckpt").unlink()
    assert seen().keys() == {"from-elsewhere"}


def test_a_folder_that_is_made_again_is_watched_again(
    tmp_path: Path, seen: Callable[[], dict[str, Write]]
) -> None:
    shutil.rmtree(tmp_path / "folder")
    assert not seen()
    (tmp_path / "folder").mkdir()
    seen()
    (tmp_path / "folder/ckpt").write_text("1")
    assert seen()["ckpt"].closed is not None
