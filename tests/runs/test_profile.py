"""A profile of some steps: what is stored where, what is said first, and that it disturbs no training."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from spottrain.contract import profile_key
from spottrain.core.training_settings import Profile
from spottrain.diagnostics.bottleneck import Measurements
from spottrain.diagnostics.profiler import Profiler
from spottrain.diagnostics.step_timer import Shares
from spottrain.errors import ConfigurationError, StoreUnavailable
from spottrain.storage.local import FolderStore

WINDOW = Profile(wait=1, warmup=1, active=2)
FOLDER = profile_key(2, 3, "")
WAITING = Measurements(shares=Shares(10, data=5, compute=5))


class Broken(FolderStore):
    def upload(self, key: str, body: memoryview, **more: Any) -> list[str]:
        raise StoreUnavailable("the store is away")


def profiled(store: FolderStore, steps: int, **more: Any) -> Profiler:
    """The loop."""
    profiler = Profiler(WINDOW, store, attempt=2, rank=3, **more)
    model = torch.nn.Linear(16, 16)
    for _ in range(steps):
        model(torch.randn(4, 16)).square().mean().backward()
        profiler.step()
    profiler.close()
    return profiler


def store_in(folder: Path) -> FolderStore:
    return FolderStore(folder, uri=str(folder))


def test_a_window_leaves_a_trace_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiler = profiled(store_in(tmp_path), steps=5, facts=lambda: WAITING)
    assert not profiler.on
    trace, table = sorted((tmp_path / FOLDER).iterdir())
    if trace.name.endswith(".top.txt"):
        trace, table = table, trace
    assert trace.name.startswith("rank-00003.") and trace.name.endswith(".pt.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events]
    assert any(name == "aten::addmm" for name in names)
    steps = {name for name in names if str(name).startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3"}, "those after one to wait and one to warm up"
    words = table.read_text()
    assert words.startswith(
        "utilisation is 50%, below 70%: speed up data loading first, not the computation; data-bound"
    )
    assert "aten::addmm" in words
    out = capsys.readouterr().out
    assert out.index("event=profiling") < out.index("event=profiled") < out.index("event=profile-stored")


def test_a_loop_that_ends_in_the_window_says_so_and_stores_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiled(store_in(tmp_path), steps=3)
    assert "event=profile-cut-short steps_missing=1" in capsys.readouterr().out
    assert not (tmp_path / FOLDER).exists()


def test_a_store_that_fails_ends_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiled(Broken(tmp_path, uri="broken"), steps=5)
    assert "event=profile-not-stored" in (out := capsys.readouterr().out) and "the store is away" in out


@pytest.mark.parametrize(("kind", "stored"), [(FolderStore, True), (Broken, False)])
def test_the_end_of_a_script_that_trains_by_itself_tells_a_stored_profile_from_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[FolderStore], stored: bool
) -> None:
    run = SimpleNamespace(profiled=False)
    monkeypatch.setattr("spottrain.lifecycle.session._current", run)
    profiled(kind(tmp_path, uri=str(tmp_path)), steps=5)
    assert run.profiled is stored


def test_without_a_window_nothing_is_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiler = Profiler(None, None, attempt=1, rank=0)
    profiler.step()
    profiler.close()
    assert not profiler.on and capsys.readouterr().out == ""


def test_without_a_store_a_window_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="there is no store for it"):
        Profiler(WINDOW, None, attempt=1, rank=0)
