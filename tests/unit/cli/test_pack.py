"""A script's folder, packed by its content, and unpacked in the pod."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from spottrain.cli import code
from spottrain.contract import Env
from spottrain.errors import ConfigurationError
from spottrain_cli.errors import UsageError
from spottrain_cli.submit import pack
from spottrain_cli.submit.pack import send


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name, text in (
        ("train.py", "import model"),
        ("model.py", ""),
        ("conf/a.yaml", "a: 1"),
        ("data/huge.bin", "x" * 1000),
        (".env", "SECRET=1"),
        ("__pycache__/train.pyc", ""),
    ):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


def unpacked(folder: Path, into: Path) -> list[str]:
    code.unpack(pack.pack(folder).body, into, "uri")
    return sorted(str(file.relative_to(into)) for file in into.rglob("*") if not file.is_dir())


def test_without_git_all_but_hidden_files_and_caches_is_packed(folder: Path, tmp_path: Path) -> None:
    assert unpacked(folder, tmp_path / "out") == ["conf/a.yaml", "data/huge.bin", "model.py", "train.py"]


def test_an_ignore_file_counts_with_and_without_a_checkout(folder: Path, tmp_path: Path) -> None:
    (folder / ".spottrainignore").write_text("data/\n")
    assert unpacked(folder, tmp_path / "plain") == ["conf/a.yaml", "model.py", "train.py"]
    git(folder, "init", "--quiet")
    (folder / ".gitignore").write_text(".env\n__pycache__\n")
    git(folder, "add", "data/huge.bin", "model.py")
    (folder / "model.py").unlink()
    found = [".gitignore", ".spottrainignore", "conf/a.yaml", "train.py"]
    assert unpacked(folder, tmp_path / "git") == found, "tracked and ignored, deleted and new"


def test_the_same_content_is_the_same_archive_on_every_machine(folder: Path) -> None:
    before = pack.pack(folder)
    os.utime(folder / "train.py", (0, 0))
    (folder / "train.py").chmod(0o600)
    assert pack.pack(folder).digest == before.digest
    (folder / "train.py").write_text("import model  # changed")
    assert pack.pack(folder).digest != before.digest


def test_links_within_are_kept_and_others_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "link.py").symlink_to("train.py")
    unpacked(folder, tmp_path / "out")
    assert (tmp_path / "out" / "link.py").resolve() == tmp_path / "out" / "train.py"
    (folder / "out.py").symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match=r"out.py is a link to /etc/passwd, outside of .*; name it in"):
        pack.pack(folder)


def test_a_folder_that_is_too_large_is_refused_with_its_largest_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "LIMIT", 500)
    with pytest.raises(UsageError, match=r"name what is no code in .spottrainignore, such as data/huge.bin"):
        pack.pack(folder)


def test_what_was_sent_is_the_working_directory_of_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bucket").mkdir()
    uri = send(pack.pack(folder), str(tmp_path / "bucket"), "")
    assert uri == send(pack.pack(folder), str(tmp_path / "bucket"), ""), "it is there already"
    for _ in range(2):  # of the second rank too
        code.enter(uri, {str(Env.CACHE_DIR): str(tmp_path / "cache")})
        assert Path("train.py").read_text() == "import model"
    assert str(tmp_path / "cache" / "code") in os.getcwd()


def test_an_archive_that_is_not_what_was_sent_is_not_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = send(pack.pack(folder), str(tmp_path), "")
    Path(uri).write_bytes(Path(uri).read_bytes() + b"x")
    env = {str(Env.CACHE_DIR): str(tmp_path / "cache")}
    with pytest.raises(ConfigurationError, match="has another content than its name says"):
        code.enter(uri, env)
    Path(uri).unlink()
    with pytest.raises(ConfigurationError, match="is not there; send it again with spottrain submit"):
        code.enter(uri, env)
    with pytest.raises(ConfigurationError, match="names no packed folder"):
        code.enter("s3://bucket/code/latest.tar.gz", env)
    with pytest.raises(ConfigurationError, match="cannot be unpacked to"):
        code.unpack(b"no archive", tmp_path / "out", uri)
