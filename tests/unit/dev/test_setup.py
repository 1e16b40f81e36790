"""What a fresh machine lacks is said in a sentence before anything is downloaded."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import setup as bootstrap
from localcluster import layout
from localcluster.shell import ClusterError
from processcluster.site import Site

ROOT = Path(__file__).resolve().parents[3]


def test_too_little_disk_is_told_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "free_gb", lambda folder: 0.5)
    with pytest.raises(ClusterError, match=r"0\.5 GB free, and 11 GB are needed; make room"):
        bootstrap.check_disk(layout.Paths(state=tmp_path), packages=True, builds=True)
    assert "11 GB" in capsys.readouterr().err


def test_a_network_that_cannot_be_reached_names_proxy_and_index(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError("no route")

    for name in ("UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("urllib.request.urlopen", refused)
    with pytest.raises(ClusterError, match=r"no route.*HTTPS_PROXY.*UV_DEFAULT_INDEX"):
        bootstrap.check_network()


def test_an_index_of_ones_own_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("it was asked"))
    bootstrap.check_network()


def test_a_home_that_cannot_be_written_leaves_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPOTTRAIN_DEV_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert layout.default_paths().state == tmp_path / "cache" / "spottrain" / "dev"
    (tmp_path / "cache").write_text("a file, where a folder belongs")
    assert layout.default_paths().state == ROOT / ".tools" / "dev"


def test_two_clusters_have_networks_of_their_own(tmp_path: Path) -> None:
    one, two = Site.claim(tmp_path / "one"), Site.claim(tmp_path / "two")
    try:
        assert one.network != two.network
        assert {n.address for n in one.nodes}.isdisjoint(n.address for n in two.nodes)
        new = one.pod_addresses()
        assert len({new() for _ in range(1000)}) == 1000
    finally:
        one.lock.close()
        two.lock.close()


def test_help_is_sixteen_lines_at_most() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = done.stdout.strip().splitlines()
    assert 1 < len(lines) <= 16 and all(re.search(r"\S {2,}|\x1b\[0m \S", row) for row in lines)
