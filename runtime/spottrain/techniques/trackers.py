"""Experiment trackers (W&B, MLflow, TensorBoard) that show one run for all attempts, each step once.

    trackers = Trackers([TensorBoard(folder="/data/tb")])
    trackers.begin(run_id(job_uid), resumed_step=run.global_step)
    trackers.log(run.global_step + 1, {"loss": 0.25})    # before run.step_completed()
    trackers.close()                                # done by a Run(extra={"trackers": trackers})

W&B and MLflow get the outcome of the attempt: finished, failed, or for an interruption preempted (W&B) or
killed (MLflow). The next attempt continues the same run.

A killed attempt has logged steps after its last checkpoint, and the next attempt repeats them. TensorBoard
hides the old values (`purge_step`). W&B and MLflow return the last step they have, and steps up to it are not
sent again. There the first attempt's values stay; in deterministic mode both are equal.

A tracker neither stops nor delays training. Each has its own thread and a bounded queue. Its first exception
is logged (`event=tracker-failed`), and their number when it is closed. Only rank 0 logs. A missing package
raises ConfigurationError in the constructor.
"""

from __future__ import annotations

import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from spottrain.contract import EXIT_CODE_OF, Outcome
from spottrain.core import log
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError

QUEUED: Final = 1000
"""Calls that may wait for a tracker; further ones are dropped."""
CLOSE_SECONDS: Final = 10.0
"""Time limit to send queued calls. A preemption notice is short, and the checkpoint goes first."""
INTERRUPTED: Final = (Outcome.INTERRUPTED, Outcome.INTERRUPTED_LOST, Outcome.SUPERSEDED)
"""Outcomes after which another attempt continues the run."""
TAG: Final = "spottrain.run"
"""MLflow tag that holds the run id."""


class Tracker(Protocol):
    """A tracker. All calls come from one thread, `begin` first. Exceptions are logged, not raised.

    If it has a method `ended(outcome)`, it is called just before `close`.
    """

    name: str

    def begin(self, run_id: str, resumed_step: int) -> None:
        """Opens the run, whose id is the same in all attempts. resumed_step: 0 at a fresh start."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs finite values by name after a step, counted from 1. Later attempts may repeat a step."""

    def close(self) -> None:
        """Closes the run."""


def run_id(job_uid: str) -> str:
    """Makes a run id of the job's UID, the same in all attempts: at most 64 letters, digits, `_` and `-`."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", job_uid).strip("-")[:64]


def listed(given: Sequence[Tracker] | None, where: str) -> list[Tracker]:
    """Returns the trackers as a list. Raises ConfigurationError, which names the argument by `where`."""
    words = ("name", "begin", "log", "close")
    several = isinstance(given, Sequence) and not isinstance(given, str)
    if given is None or (several and all(hasattr(each, word) for each in given for word in words)):
        return list(given or ())
    raise ConfigurationError(
        f"{where} is {given!r:.80}: pass a list of trackers, such as "
        "[spottrain.techniques.trackers.TensorBoard(folder=...)]"
    )


class Trackers:
    """Several trackers as one. Ranks other than 0 log nothing.

    Args:
        trackers: the trackers; None: none.
        world: rank and number of ranks; None: from the environment.
        close_seconds: time limit of `close` to send queued calls.

    Raises:
        ConfigurationError: `trackers` is not a list of trackers.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker] | None,
        *,
        world: World | None = None,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        given = listed(trackers, "Trackers(...)")
        first = (World.from_env(os.environ) if world is None else world).first
        self._lines = [_Line(each) for each in given] if first else []
        self._close_seconds = close_seconds
        self._run = ""
        self._begun = self._closed = self._late = False

    def begin(self, run_id: str, resumed_step: int) -> None:
        """Opens the run in all trackers. Call it after the restore and before the first step.

        Args:
            run_id: id of the run, the same in all attempts.
            resumed_step: optimizer step of the restored checkpoint; 0 at a fresh start.
        """
        if self._run and self._run != run_id:
            log.event("override", setting="tracker-run", checkpoint=self._run, script=run_id)
        self._run, self._begun = run_id, True
        for line in self._lines:
            line.send(partial(line.tracker.begin, run_id, resumed_step))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Queues values for all trackers, and returns at once.

        Args:
            step: optimizer step, counted from 1.
            values: numbers, or tensors of one element, by name. Reading a tensor waits for its device. None,
                NaN and infinite values are left out.
        """
        self._begun = True
        if self._closed:
            if self._lines and not self._late:
                why = "the trackers are closed (a Run closes them when it ends): later values are dropped"
                log.event("tracker-closed", step=step, why=why)
            self._late = True
            return
        finite = {name: v for name, each in values.items() if math.isfinite(v := _number(each))}
        for line in self._lines if finite else ():
            line.send(partial(line.tracker.log, step, finite))

    def close(self, outcome: Outcome = Outcome.DONE, *, within: float = math.inf) -> None:
        """Sends queued calls, to all trackers at once, and closes them. Values that come later are dropped.

        Args:
            outcome: outcome of this attempt.
            within: time limit in seconds, such as the rest of a preemption notice; at most `close_seconds`.
        """
        if not self._begun or self._closed:
            return
        self._closed = True
        for line in self._lines:
            line.end(outcome)
        for line in self._lines:
            line.join(max(min(self._close_seconds, within), 0.0))

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values, the same on all ranks."""
        return {"run": self._run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state. Call it before `begin`."""
        self._run = state["run"]


def _number(value: Any) -> float:
    value = value.detach() if hasattr(value, "detach") else value
    return math.nan if value is None else float(value)


class _Line:
    """One tracker with its thread and its queue of calls."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failed = self._dropped = 0
        self._thread = threading.Thread(target=self._work, name=f"tracker-{tracker.name}", daemon=True)
        self._thread.start()

    def send(self, call: Callable[[], None]) -> None:
        if self._queue.qsize() < QUEUED:
            return self._queue.put(call)
        self._dropped += 1
        if self._dropped == 1:
            why = f"{QUEUED} calls are queued: further values are dropped until there is room"
            log.event("tracker-slow", tracker=self.tracker.name, why=why)

    def end(self, outcome: Outcome) -> None:
        """Queues the last calls of the tracker."""
        if hasattr(self.tracker, "ended"):
            self._queue.put(partial(self.tracker.ended, outcome))
        self._queue.put(self.tracker.close)
        self._queue.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        waiting = self._queue.qsize() if self._thread.is_alive() else None
        if waiting is not None or self._failed or self._dropped:
            words = {"failed": self._failed, "left_out": self._dropped, "waiting": waiting or 0}
            log.event("tracker-incomplete", tracker=self.tracker.name, **words)

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except Exception as error:  # no error of a tracker may stop training
                self._failed += 1
                if self._failed == 1:
                    why = f"{type(error).__name__}: {str(error)[:200]}"
                    log.event("tracker-failed", tracker=self.tracker.name, why=why, then="training continues")


# --- implementations --------------------------------------------------------------------------------
class TensorBoard:
    """Writes the event files of all attempts to one folder, which must outlive the pod (a volume).

    TensorBoard hides events of repeated steps: each file starts with the step it resumes from, and readers
    drop the events of older files from there on.

    Args:
        folder: folder of the event files.

    Raises:
        ConfigurationError: tensorboard is not installed.
    """

    name = "tensorboard"

    def __init__(self, *, folder: str | Path) -> None:
        _require("tensorboard")
        self._folder = Path(folder)

    def begin(self, run_id: str, resumed_step: int) -> None:
        module = import_module("torch.utils.tensorboard")
        purge = resumed_step + 1 if resumed_step else 0
        self._writer = module.SummaryWriter(log_dir=str(self._folder / run_id), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Outcome:
    """Keeps the outcome of the attempt for `close`."""

    _outcome = Outcome.DONE

    def ended(self, outcome: Outcome) -> None:
        self._outcome = outcome


class WandB(_Outcome):
    """Logs to one Weights & Biases run with the job's id, which each attempt resumes (`resume="allow"`).

    W&B accepts steps in rising order only, and a resume returns the next one (`run.step`); smaller steps are
    not sent. Offline, a file beside W&B's folders stores the last step, so both outlive the pod or neither
    does. Syncing the offline folders of several attempts later is not tested. Console output is not captured,
    because the job has its own logs. W&B reads WANDB_API_KEY and its other variables itself.

    Args:
        project: W&B project.
        entity: W&B entity; None: the default one.
        mode: "online", "offline" or "disabled"; None: W&B's default.
        folder: folder for W&B's files; None: W&B's default.
        config: settings to show with the run.

    Raises:
        ConfigurationError: wandb is not installed.
    """

    name = "wandb"

    def __init__(
        self,
        *,
        project: str,
        entity: str | None = None,
        mode: str | None = None,
        folder: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        _require("wandb")
        place = None if folder is None else str(folder)
        self._words = {"project": project, "entity": entity, "mode": mode, "dir": place}
        self._config = dict(config or {})

    def begin(self, run_id: str, resumed_step: int) -> None:
        wandb = import_module("wandb")
        words = {"settings": wandb.Settings(console="off"), "config": self._config, **self._words}
        self._run = wandb.init(id=run_id, name=run_id, resume="allow", **words)
        self._mark: Path | None = None
        floor = int(self._run.step) - 1
        if self._run.offline:
            self._mark = Path(self._run.dir).parents[1] / f"spottrain-{run_id}.step"
            floor = max(floor, int(self._mark.read_text()) if self._mark.exists() else 0)
        self._floor = floor
        """Step up to which this run was logged by earlier attempts."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._floor:
            if self._mark is not None:  # first: a crash in between loses a step, but repeats none
                self._mark.write_text(str(step))
            self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finishes the run. With a non-zero exit code it is failed, or preempted if it was marked."""
        if self._outcome in INTERRUPTED:
            self._run.mark_preempting()
        self._run.finish(exit_code=int(EXIT_CODE_OF[self._outcome]))


class MLflow(_Outcome):
    """Logs to one MLflow run, found by its tag `spottrain.run`.

    MLflow also keeps repeated steps. So the history of each metric is read once at the start, and only later
    steps are sent.

    Args:
        experiment: name of the experiment; it is created if it does not exist.
        tracking_uri: MLflow server; None: MLflow's default, such as MLFLOW_TRACKING_URI.
        config: parameters to log with the run.

    Raises:
        ConfigurationError: mlflow is not installed.
    """

    name = "mlflow"

    def __init__(
        self, *, experiment: str, tracking_uri: str | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        _require("mlflow")
        self._experiment, self._uri, self._config = experiment, tracking_uri, dict(config or {})

    def begin(self, run_id: str, resumed_step: int) -> None:
        self._client = import_module("mlflow").MlflowClient(tracking_uri=self._uri)
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(self._experiment)
        found = self._client.search_runs([experiment], filter_string=f"tags.`{TAG}` = '{run_id}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            history = self._client.get_metric_history
            names = found[0].data.metrics
            self._last = {n: max(int(p.step) for p in history(self._id, n)) for n in names}
            return
        self._id = self._client.create_run(experiment, run_name=run_id, tags={TAG: run_id}).info.run_id
        self._last = dict[str, int]()
        """Step up to which each metric was logged by earlier attempts."""
        for name, value in self._config.items():
            self._client.log_param(self._id, name, value)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        metric = import_module("mlflow.entities").Metric
        now = int(time.time() * 1000)
        fresh = {name: value for name, value in values.items() if step > self._last.get(name, 0)}
        new = [metric(name, value, now, step) for name, value in fresh.items()]
        if new:
            self._client.log_batch(self._id, metrics=new)

    def close(self) -> None:
        if self._outcome is Outcome.SUPERSEDED:
            return  # the current attempt uses the same run
        status = "KILLED" if self._outcome in INTERRUPTED else "FAILED"
        self._client.set_terminated(self._id, status="FINISHED" if self._outcome is Outcome.DONE else status)


def _require(package: str) -> None:
    if find_spec(package) is None:
        raise ConfigurationError(
            f"the tracker {package} needs the package {package}, which is not installed in this "
            f"image: add it (pip install {package}), or remove the tracker from Trainer(trackers=...) "
            "and spec.training.trackers"
        )
