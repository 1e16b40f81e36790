"""The real W&B (offline), MLflow (SQLite) and TensorBoard, where they are installed: they are no dependency.

Attempt 1 logs steps 1 to 5, its last checkpoint being of step 3; attempt 2 does 4 to 7.
"""

from __future__ import annotations

import importlib
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from spottrain.levers.trackers import MLflow, TensorBoard, Tracker, Trackers, WandB

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, of themselves


def attempt(tracker: Tracker, *, resumed: int, steps: range, value: float) -> None:
    trackers = Trackers([tracker], close_seconds=60)
    trackers.begin("run-1", resumed)
    for step in steps:
        trackers.log(step, {"loss": value + step})
        if step % 2 == 0:
            trackers.log(step, {"eval_loss": value - step})
    trackers.close()


def two_attempts(make: Callable[[], Tracker], capsys: pytest.CaptureFixture[str]) -> None:
    attempt(make(), resumed=0, steps=range(1, 6), value=100)
    attempt(make(), resumed=3, steps=range(4, 8), value=200)
    assert "event=tracker" not in capsys.readouterr().out


def test_tensorboard_shows_each_step_once_and_of_the_later_attempt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    two_attempts(lambda: TensorBoard(folder=tmp_path), capsys)
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    shown = reader.EventAccumulator(str(tmp_path / "run-1")).Reload()
    loss = [(event.step, event.value) for event in shown.Scalars("loss")]
    assert loss == [(1, 101), (2, 102), (3, 103), (4, 204), (5, 205), (6, 206), (7, 207)]
    assert [event.step for event in shown.Scalars("eval_loss")] == [2, 4, 6]


def test_a_start_without_a_checkpoint_hides_all_that_tensorboard_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    attempt(TensorBoard(folder=tmp_path), resumed=0, steps=range(1, 6), value=100)
    attempt(TensorBoard(folder=tmp_path), resumed=0, steps=range(1, 3), value=200)
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    shown = reader.EventAccumulator(str(tmp_path / "run-1")).Reload()
    assert [(event.step, event.value) for event in shown.Scalars("loss")] == [(1, 201), (2, 202)]


def test_mlflow_has_one_run_and_each_step_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    two_attempts(lambda: MLflow(experiment="tests", tracking_uri=uri, config={"lr": 0.1}), capsys)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params == {"lr": "0.1"}
    history = {name: client.get_metric_history(run.info.run_id, name) for name in ("loss", "eval_loss")}
    loss = sorted((point.step, point.value) for point in history["loss"])
    assert loss == [(1, 101), (2, 102), (3, 103), (4, 104), (5, 105), (6, 206), (7, 207)]
    assert sorted(point.step for point in history["eval_loss"]) == [2, 4, 6]


def test_wandb_offline_has_one_id_and_no_step_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Offline no server knows of the attempt before; each writes a file of its own."""
    pytest.importorskip("wandb")
    before = signal.getsignal(signal.SIGTERM)
    two_attempts(lambda: WandB(project="tests", mode="offline", folder=tmp_path), capsys)
    assert signal.getsignal(signal.SIGTERM) is before
    found = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert [path.name for path in found] == ["run-run-1.wandb"] * 2
    for path, steps, value in zip(found, (range(1, 6), range(6, 8)), (100, 200), strict=True):
        rows = until(lambda path=path: list(history_of(path)), len(steps))  # type: ignore[misc]
        assert Counter(row["_step"] for row in rows) == Counter(steps)
        assert [(row["_step"], row["loss"]) for row in rows] == [(step, value + step) for step in steps]
        assert [row["_step"] for row in rows if "eval_loss" in row] == [n for n in steps if n % 2 == 0]


def test_wandb_sends_nothing_up_to_the_step_that_the_server_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake of the server's answer alone: `run.step` is the step that comes next."""

    class Run:
        step = 6
        dir = "/w/wandb/run-x/files"
        offline = False

        def __init__(self) -> None:
            self.rows: list[int] = []

        def log(self, values: dict[str, float], *, step: int) -> None:
            self.rows.append(step)

        def finish(self) -> None:
            pass

    class Module:
        given: dict[str, Any]
        run = Run()

        def Settings(self, **words: Any) -> dict[str, Any]:
            return words

        def init(self, **words: Any) -> Run:
            self.given = words
            return self.run

    module = Module()
    name = "spottrain.levers.trackers"
    monkeypatch.setattr(f"{name}.find_spec", lambda _: True)
    monkeypatch.setattr(f"{name}.import_module", lambda _: module)
    attempt(WandB(project="tests"), resumed=3, steps=range(4, 8), value=200)
    assert (module.given["id"], module.given["resume"]) == ("run-1", "allow")
    assert module.run.rows == [6, 6, 7], "6 has an evaluation as well"


def until(read: Callable[[], list[Any]], rows: int, seconds: float = 30) -> list[Any]:
    """W&B's own process writes the file, and may still do so when `finish` has come back."""
    give_up = time.monotonic() + seconds
    while len(found := read()) < rows and time.monotonic() < give_up:
        time.sleep(0.1)
    return found


def history_of(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of an offline file: protobuf records in LevelDB's log format, after a header of 7 bytes."""
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    body, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(body):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", body[at : at + 7])
        whole += body[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            record = records.Record.FromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                yield {".".join(i.nested_key) or i.key: float(i.value_json) for i in record.history.item}
