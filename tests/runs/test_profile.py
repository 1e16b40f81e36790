"""A profile of some steps: what is stored where, what is said first, and that it disturbs no training."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from spottrain.contract import PROFILE, Env, ExitCode
from spottrain.core.profile_window import profile_key
from spottrain.core.training_settings import Profile
from spottrain.diagnostics.bottleneck import Measurements
from spottrain.diagnostics.profiler import Profiler
from spottrain.diagnostics.step_timer import Seconds, Shares
from spottrain.errors import ConfigurationError, StoreUnavailable
from spottrain.storage.local import FolderStore

from tests.runs.conftest import Lab
from tests.runs.launched import Run

WINDOW = Profile(wait=1, warmup=1, active=2)
FOLDER = profile_key(2, 3, "")
WAITING = Measurements(shares=Shares(steps=10, seconds=Seconds(data=5, compute=5)))

OWN_LOOP = """\
import os, torch
from spottrain.diagnostics.profiler import Profiler
from spottrain.core.profile_window import asked_for
from spottrain.lifecycle.session import current

session = current()
total = session.run.training.get("max_steps", 100)
window, rank = asked_for(os.environ), session.world.rank
profiler = Profiler(window, session.store, attempt=session.attempt, rank=rank, total_steps=total)
model = torch.nn.Linear(8, 8)
for step in range(1, total + 1):
    model(torch.randn(4, 8)).sum().backward()
    profiler.step()
profiler.close()
print(f"trained {step}")
"""


class Broken(FolderStore):
    def upload(self, key: str, body: memoryview, **more: Any) -> list[str]:
        raise StoreUnavailable("the store is away")


def profiled(store: FolderStore, steps: int, **more: Any) -> Profiler:
    """The loop."""
    profiler = Profiler(WINDOW, store, attempt=2, rank=3, total_steps=10, **more)
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


def test_without_a_window_nothing_is_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiler = Profiler(None, None, attempt=1, rank=0, total_steps=0)
    profiler.step()
    profiler.close()
    assert not profiler.on and capsys.readouterr().out == ""


def test_a_window_past_the_end_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not fit from step 7 on into the run's 10 steps"):
        Profiler(WINDOW, store_in(tmp_path), attempt=1, rank=0, total_steps=10, start=7)
    with pytest.raises(ConfigurationError, match="there is no store for it"):
        Profiler(WINDOW, None, attempt=1, rank=0, total_steps=10)


# --- the command ------------------------------------------------------------------------------------
def spottrain(lab: Lab, verb: str, *words: str, **env: str) -> Run:
    (lab.folder / "train.py").write_text(OWN_LOOP)
    return lab.start([*words, "train.py"], {Env.CHECKPOINT_URI: str(lab.folder / "store"), **env}, verb=verb)


def test_the_command_profiles_a_short_run_in_a_folder_of_its_own(lab: Lab) -> None:
    flags = ("--wait", "2", "--warmup", "1", "--active", "3")
    run = spottrain(lab, "profile", *flags, **{Env.CHECKPOINT_URI: ""}).done()
    assert "trained 6" in run.log and "aten::addmm" in run.log
    (own,) = (lab.folder / "profiles").iterdir()
    assert own.name.startswith("train-")
    kept = [each.name for each in (own / profile_key(1, 0, "")).iterdir()]
    assert len(kept) == 2 and any(each.endswith(".pt.trace.json.gz") for each in kept)
    assert not (lab.folder / "checkpoints").exists()


def test_a_run_that_is_told_to_profile_keeps_it_beside_its_checkpoints(lab: Lab) -> None:
    env = {PROFILE: WINDOW.to_json(), Env.TRAINING: '{"maxSteps": 9}'}
    assert "trained 9" in spottrain(lab, "run", **env).done().log
    assert len(list((lab.folder / "store" / profile_key(1, 0, "")).iterdir())) == 2


def test_a_window_that_does_not_fit_ends_the_run_with_64(lab: Lab) -> None:
    env = {PROFILE: WINDOW.to_json(), Env.TRAINING: '{"maxSteps": 3}'}
    run = spottrain(lab, "run", **env).ends(ExitCode.BAD_CONFIGURATION)
    assert "make the window smaller, or set maxSteps to at least 4" in run.message.message
