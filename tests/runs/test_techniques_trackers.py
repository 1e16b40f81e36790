"""The real W&B (offline), MLflow (SQLite) and TensorBoard; none is a dependency of the runtime.

Attempt 1 logs steps 1 to 5, its last checkpoint being of step 3; attempt 2 does 4 to 7.
"""

from __future__ import annotations

import importlib
import json
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from spottrain.contract import ExitCode
from spottrain.techniques.trackers import MLflow, TensorBoard, Tracker, Trackers, WandB

from tests.runs.conftest import SCRIPT, Lab
from tests.runs.foreign import preloading
from tests.support.heavy import sample

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, of themselves
zygote = preloading("mlflow.store.tracking.sqlalchemy_store", "torch.utils.tensorboard")


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


def accumulated(folder: Path) -> Any:
    """What TensorBoard shows of the folder."""
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    return reader.EventAccumulator(str(folder)).Reload()


def test_tensorboard_shows_each_step_once_and_of_the_later_attempt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_attempts(lambda: TensorBoard(folder=tmp_path), capsys)
    shown = accumulated(tmp_path / "run-1")
    loss = [(event.step, event.value) for event in shown.Scalars("loss")]
    assert loss == [(1, 101), (2, 102), (3, 103), (4, 204), (5, 205), (6, 206), (7, 207)]
    assert [event.step for event in shown.Scalars("eval_loss")] == [2, 4, 6]


def test_a_start_without_a_checkpoint_hides_all_that_tensorboard_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt(TensorBoard(folder=tmp_path), resumed=0, steps=range(1, 6), value=100)
    attempt(TensorBoard(folder=tmp_path), resumed=0, steps=range(1, 3), value=200)
    shown = accumulated(tmp_path / "run-1")
    assert [(event.step, event.value) for event in shown.Scalars("loss")] == [(1, 201), (2, 202)]


@pytest.mark.heavy
def test_mlflow_has_one_run_and_each_step_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mlflow = importlib.import_module("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = mlflow.MlflowClient(tracking_uri=uri)
    client.create_experiment("tests")  # its tables are made now, which may take longer than a close waits
    two_attempts(lambda: MLflow(experiment="tests", tracking_uri=uri, config={"lr": 0.1}), capsys)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params == {"lr": "0.1"}
    history = {name: client.get_metric_history(run.info.run_id, name) for name in ("loss", "eval_loss")}
    loss = sorted((point.step, point.value) for point in history["loss"])
    assert loss == [(1, 101), (2, 102), (3, 103), (4, 104), (5, 105), (6, 206), (7, 207)]
    assert sorted(point.step for point in history["eval_loss"]) == [2, 4, 6]


def test_trackers_of_the_manifest_show_one_run_over_an_attempt_that_was_killed(lab: Lab) -> None:
    """Steps 8 and 9 are done twice: the last checkpoint is that of step 7."""
    uri = f"sqlite:///{lab.folder / 'mlflow.db'}"
    training = {
        "trackers": {
            "tensorboard": {"folder": str(lab.folder / "tb")},
            "mlflow": {"experiment": "tests", "trackingURI": uri},
        }
    }
    client = importlib.import_module("mlflow").MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("tests")  # its tables are made now, which takes seconds

    def logged() -> list[int]:
        found = client.search_runs([experiment])
        points = client.get_metric_history(found[0].info.run_id, "loss") if found else []
        return sorted(point.step for point in points)

    holds = SCRIPT.replace("    time.sleep(PAUSE)\n", "    time.sleep(600 if trainer.step == 9 else 0)\n")
    first = lab.run(holds, training=json.dumps(training), attempt=1).until("step=9/")
    until(logged, rows=8, seconds=120)  # what a tracker still has in its queue dies with the process
    first.until("event=committed").killed()
    second = lab.run(training=json.dumps(training), attempt=2).done()
    assert "event=tracker" not in first.log + second.log
    assert min(second.losses) <= 9, "it had to do some steps again"
    shown = accumulated(lab.folder / "tb" / "uid-store")
    assert [event.step for event in shown.Scalars("loss")] == list(range(1, 25))
    (run,) = client.search_runs([experiment])
    assert run.data.params["global_batch_size"] == "8" and run.data.params["precision"] == "fp32"
    assert logged() == list(range(1, 25))


def test_a_tracker_of_the_manifest_stands_in_place_of_the_script_s_of_its_kind(lab: Lab) -> None:
    script = SCRIPT.replace(
        "    max_steps=24,\n",
        "    max_steps=24,\n    trackers=[spottrain.techniques.trackers.TensorBoard(folder='own')],\n",
    ).replace("import torch, spottrain", "import torch, spottrain, spottrain.techniques.trackers")
    it = lab.run(
        script, training=json.dumps({"trackers": {"tensorboard": {"folder": str(lab.folder / "tb")}}})
    ).done()
    assert "event=override setting=trackers.tensorboard" in it.log
    assert (lab.folder / "tb").exists() and not (lab.folder / "own").exists()


def test_wandb_offline_has_one_id_and_no_step_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Offline no server knows of the attempt before; each writes a file of its own."""
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

        def finish(self, exit_code: int) -> None:
            assert exit_code == 0

    class Module:
        given: dict[str, Any]
        run = Run()

        def Settings(self, **words: Any) -> dict[str, Any]:
            return words

        def init(self, **words: Any) -> Run:
            self.given = words
            return self.run

    module = Module()
    name = "spottrain.techniques.trackers"
    monkeypatch.setattr(f"{name}.find_spec", lambda _: True)
    monkeypatch.setattr(f"{name}.import_module", lambda _: module)
    attempt(WandB(project="tests"), resumed=3, steps=range(4, 8), value=200)
    assert (module.given["id"], module.given["resume"]) == ("run-1", "allow")
    assert module.run.rows == [6, 6, 7], "6 has an evaluation as well"


ENDS = {
    "a script that raises": ("raise ValueError('no')", ExitCode.FAILED, "FAILED"),
    "a script that leaves": ("raise SystemExit(3)", 3, "FAILED"),
    "a loss that is no number": ("loss = loss * float('nan')", ExitCode.FAILED, "FAILED"),
    "a signal": ("os.kill(os.getpid(), 15)", ExitCode.INTERRUPTED, "KILLED"),
    "the end": ("pass", ExitCode.DONE, "FINISHED"),
}
LOOP = """\
import os, time
import torch, spottrain, spottrain.techniques.trackers as of

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
several = [of.MLflow(experiment="tests", tracking_uri=os.environ["MLFLOW"])]
if "WANDB" in os.environ:
    several.append(of.WandB(project="tests", mode="offline", folder="."))
trackers = spottrain.techniques.Trackers(several, close_seconds=60)
trackers.begin("run-1", 0)
extra = {"trackers": trackers}
run = spottrain.Run(model=model, optimizer=optimizer, extra=extra, max_steps=9, log_every=1)
while not run.done:
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    optimizer.step()
    if run.global_step == 4 and "HERE" not in os.environ:
        while not all({"_id", "_floor"} & vars(each).keys() for each in several):  # to import them takes long
            time.sleep(0.05)
        ACT
    trackers.log(run.global_step + 1, {"loss": 1.0})
    run.step_completed(loss=loss)
run.finish()
"""


@pytest.mark.parametrize("case", sample(ENDS, "a signal"))
def test_a_tracker_s_run_ends_as_the_training_did_and_goes_on_where_it_was_interrupted(
    lab: Lab, case: str
) -> None:
    act, code, status = ENDS[case]
    uri = f"sqlite:///{lab.folder / 'mlflow.db'}"
    client = importlib.import_module("mlflow").MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("tests")
    env = {"MLFLOW": uri, "SPOTTRAIN_GRACE_SECONDS": "600"}
    ended = lab.run(LOOP.replace("ACT", act), env=env | ({"WANDB": "1"} if case == "a signal" else {})).ends(
        code
    )
    assert [run.info.status for run in client.search_runs([experiment])] == [status], ended.log
    if case != "a signal":
        return
    (file,) = lab.folder.glob("wandb/offline-run-*/*.wandb")
    assert until(lambda: [r for r in records_of(file) if r.HasField("preempting")], rows=1)
    exits = until(lambda: [r.exit.exit_code for r in records_of(file) if r.HasField("exit")], rows=1)
    assert exits == [ExitCode.INTERRUPTED]
    lab.run(LOOP, attempt=2, env=env | {"HERE": "1"}).done()
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FINISHED"


def until(read: Callable[[], list[Any]], rows: int, seconds: float = 30) -> list[Any]:
    """W&B's own process writes the file, and may still do so when `finish` has come back."""
    give_up = time.monotonic() + seconds
    while len(found := read()) < rows and time.monotonic() < give_up:
        time.sleep(0.1)
    return found


def history_of(path: Path) -> Iterator[dict[str, Any]]:
    for record in records_of(path):
        if record.WhichOneof("record_type") == "history":
            yield {".".join(i.nested_key) or i.key: float(i.value_json) for i in record.history.item}


def records_of(path: Path) -> Iterator[Any]:
    """Of an offline file: protobuf records in LevelDB's log format, after a header of 7 bytes."""
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
            yield records.Record.FromString(whole)
            whole = b""
