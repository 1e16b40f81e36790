"""Experiment trackers (W&B, MLflow, TensorBoard) that show one run over all attempts, and no step twice.

    trackers = Trackers([TensorBoard(folder="/data/tb")])
    trackers.begin(run_id(job_uid), resumed_step=run.global_step)
    trackers.log(run.global_step + 1, {"loss": 0.25})    # before run.step_completed()
    trackers.close()                                # done by a Run(extra={"trackers": trackers})

How the attempt ended is told to W&B and MLflow: done is finished, a failure is failed, and an interruption is
preempted (W&B) or killed (MLflow), from which the next attempt goes on with the same run.

An attempt that was killed has logged steps after its last checkpoint, and its successor does them again.
TensorBoard hides the old ones (`purge_step`); W&B and MLflow are asked for the last step they have, and up
to it nothing is sent again: there the first attempt's values stand, in deterministic mode the same ones.

A tracker never stops nor holds up the training: each has a thread and a short queue of its own, what it
raises is told once (`event=tracker-failed`), and after some failures in a row it is left alone. Rank 0 alone
logs. The three are imported when they begin; that one is not installed is told when it is made.
"""

from __future__ import annotations

import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""Calls that wait for a tracker before further ones are dropped."""
GIVE_UP: Final = 10
"""Failures in a row after which a tracker is left alone until the next attempt."""
CLOSE_SECONDS: Final = 10.0
"""That a tracker has to send what is queued; a notice is short, and the checkpoint is first."""
INTERRUPTED: Final = (Outcome.INTERRUPTED, Outcome.INTERRUPTED_LOST, Outcome.SUPERSEDED)
"""Outcomes after which another attempt goes on with the run."""
TAG: Final = "spottrain.run"
"""MLflow's tag with the run id."""


class Tracker(Protocol):
    """Called from one thread: `begin` once, then the rest. Whatever it raises is told and survived."""

    name: str

    def begin(self, run_id: str, resumed_step: int) -> None:
        """resumed_step: of the checkpoint that the attempt goes on from; 0 at a fresh start."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Values after optimizer step `step`, counted from 1; what was logged already is not logged again."""

    def close(self) -> None:
        """A tracker that has a method `ended(outcome)` as well is called that just before."""


def run_id(job_uid: str) -> str:
    """The same in all attempts of a job, in characters that W&B and a file name allow."""
    found = re.sub(r"[^A-Za-z0-9_-]+", "-", job_uid).strip("-")[:64]
    if not found:
        raise ConfigurationError(
            f"the job UID {job_uid!r} has no letter or digit to name a tracker's run by: give it a name"
        )
    return found


def listed(given: Sequence[Tracker] | None, where: str) -> list[Tracker]:
    """None is none. Raises ConfigurationError, in which `where` names the argument."""
    words = ("name", "begin", "log", "close")
    several = isinstance(given, Sequence) and not isinstance(given, str)
    if given is None or (several and all(hasattr(each, word) for each in given for word in words)):
        return list(given or ())
    raise ConfigurationError(
        f"{where} is {given!r:.80}: give it a list of trackers, such as "
        "[spottrain.techniques.trackers.TensorBoard(folder=...)]"
    )


class Trackers:
    """Several trackers as one. On other ranks than 0 it does nothing but to keep the same state.

    world: None: by the environment, as launchers set it. Raises ConfigurationError.
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
        self._last = 0
        self._begun = self._closed = self._late = False

    def begin(self, run_id: str, resumed_step: int) -> None:
        """After the restore, before the first step."""
        if self._run and self._run != run_id:
            log.event("override", setting="tracker-run", checkpoint=self._run, script=run_id)
        self._run, self._begun = run_id, True
        for line in self._lines:
            line.send(partial(line.tracker.begin, run_id, resumed_step))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Numbers, or tensors of one, which are read from their device now: log where they are read anyway.

        What is None or no finite number is left out. Returns at once otherwise.
        """
        self._last, self._begun = max(self._last, step), True
        if self._closed:
            return self._tell_late(step)
        finite = {name: v for name, each in values.items() if math.isfinite(v := _number(each))}
        for line in self._lines if finite else ():
            line.send(partial(line.tracker.log, step, finite))

    def close(self, outcome: Outcome = Outcome.DONE, *, within: float = math.inf) -> None:
        """Sends what is queued, for so long as `close_seconds`; all trackers at once. Nothing comes after.

        outcome: of this attempt. within: seconds that there are at most, such as what is left of a notice.
        """
        if not self._begun or self._closed:
            return
        self._closed = True
        for line in self._lines:
            line.end(outcome)
        for line in self._lines:
            line.join(max(min(self._close_seconds, within), 0.0))

    def _tell_late(self, step: int) -> None:
        if self._lines and not self._late:
            why = "they were closed, as a Run does at its end: what comes after that is left out"
            log.event("tracker-closed", step=step, why=why)
        self._late = True

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on all ranks, which must all call `log`."""
        return {"run": self._run, "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before `begin`."""
        self._run, self._last = state["run"], int(state["last"])


def _number(value: Any) -> float:
    value = value.detach() if hasattr(value, "detach") else value
    return math.nan if value is None else float(value)


class _Line:
    """One tracker, its thread and what waits for it."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failed = 0
        self._in_a_row = 0
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name=f"tracker-{tracker.name}", daemon=True)
        self._thread.start()

    def send(self, call: Callable[[], None]) -> None:
        if self._queue.qsize() < QUEUED:
            return self._queue.put(call)
        self._dropped += 1
        if self._dropped == 1:
            why = f"{QUEUED} calls wait for it: what comes meanwhile is left out"
            log.event("tracker-slow", tracker=self.tracker.name, why=why)

    def end(self, outcome: Outcome) -> None:
        """Nothing is sent after this."""
        if hasattr(self.tracker, "ended"):
            self._queue.put(partial(self.tracker.ended, outcome))
        self._queue.put(self.tracker.close)
        self._queue.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        late = self._queue.qsize() if self._thread.is_alive() else 0
        if self._thread.is_alive() or self._failed or self._dropped:
            log.event(
                "tracker-incomplete",
                tracker=self.tracker.name,
                failed=self._failed,
                left_out=self._dropped,
                waiting=late,
            )

    def _work(self) -> None:
        for call in self._calls():
            if self._in_a_row >= GIVE_UP:
                self._failed += 1
                continue
            try:
                call()
                self._in_a_row = 0
            except Exception as error:  # whatever it is, the training goes on
                self._note(error)

    def _calls(self) -> Iterator[Callable[[], None]]:
        while (call := self._queue.get()) is not None:
            yield call

    def _note(self, error: Exception) -> None:
        self._failed += 1
        self._in_a_row += 1
        if self._failed == 1:
            why = f"{type(error).__name__}: {str(error)[:200]}"
            log.event("tracker-failed", tracker=self.tracker.name, why=why, then="the training goes on")


class Once:
    """Which values of a step were not logged yet: by name, for a loss and an evaluation come one by one."""

    def __init__(self, floor: int = 0, last: Mapping[str, int] | None = None) -> None:
        self._floor = floor
        self._last = dict(last or {})

    def fresh(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Those of them; from now on they count as logged."""
        new = {name: v for name, v in values.items() if step > max(self._floor, self._last.get(name, 0))}
        self._last |= dict.fromkeys(new, step)
        return new


# --- the three --------------------------------------------------------------------------------------
class TensorBoard:
    """Event files of all attempts in one folder, which must outlive the pod (a volume).

    TensorBoard hides events of the steps that are done again: each file begins with the step it goes on from,
    and readers drop what older files have from there on.
    """

    name = "tensorboard"

    def __init__(self, *, folder: str | Path) -> None:
        _require("tensorboard")
        self._folder = Path(folder)
        self._once = Once()

    def begin(self, run_id: str, resumed_step: int) -> None:
        module = import_module("torch.utils.tensorboard")
        purge = resumed_step + 1 if resumed_step else 0
        self._writer = module.SummaryWriter(log_dir=str(self._folder / run_id), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in self._once.fresh(step, values).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """One run of Weights & Biases, whose id is the job's, so that each attempt resumes it (`resume="allow"`).

    W&B takes steps in rising order only and answers at a resume which comes next (`run.step`); smaller ones
    are not sent. Offline nobody answers: there a file beside W&B's own folders keeps the last step, so that
    both outlive the pod or neither does. What a server makes of several of these, synced later, was not
    tested.
    Output is not captured: the run keeps its own logs. WANDB_API_KEY and the like are W&B's own environment.
    """

    name = "wandb"
    _outcome = Outcome.DONE

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
        self._words = {
            "project": project,
            "entity": entity,
            "mode": mode,
            "dir": None if folder is None else str(folder),
            "config": dict(config or {}),
        }

    def begin(self, run_id: str, resumed_step: int) -> None:
        wandb = import_module("wandb")
        settings = wandb.Settings(console="off")
        self._run = wandb.init(id=run_id, name=run_id, resume="allow", settings=settings, **self._words)
        self._mark = (
            Path(self._run.dir).parents[1] / f"spottrain-{run_id}.step" if self._run.offline else None
        )
        self._once = Once(max(int(self._run.step) - 1, self._marked()))

    def _marked(self) -> int:
        return int(self._mark.read_text()) if self._mark is not None and self._mark.exists() else 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if new := self._once.fresh(step, values):
            if self._mark is not None:  # first: after a crash between the two a step is missing, not twice
                self._mark.write_text(str(step))
            self._run.log(new, step=step)

    def ended(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def close(self) -> None:
        """An exit code makes a run a failed one, or, where it was marked, a preempted one."""
        if self._outcome in INTERRUPTED:
            self._run.mark_preempting()
        self._run.finish(exit_code=int(EXIT_CODE_OF[self._outcome]))


class MLflow:
    """One MLflow run, found by its tag `spottrain.run`. MLflow keeps whatever is logged, a step twice too, so
    the history of each metric is read once at the beginning, and goes on after its end.

    tracking_uri: None: MLFLOW_TRACKING_URI, as MLflow has it.
    """

    name = "mlflow"
    _outcome = Outcome.DONE

    def __init__(
        self, *, experiment: str, tracking_uri: str | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        _require("mlflow")
        self._experiment, self._uri, self._config = experiment, tracking_uri, dict(config or {})

    def begin(self, run_id: str, resumed_step: int) -> None:
        self._client = import_module("mlflow").MlflowClient(tracking_uri=self._uri)
        experiment = self._id_of_experiment()
        found = self._client.search_runs([experiment], filter_string=f"tags.`{TAG}` = '{run_id}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            self._once = Once(last={name: self._last_step(name) for name in found[0].data.metrics})
            return
        self._id = self._client.create_run(experiment, run_name=run_id, tags={TAG: run_id}).info.run_id
        self._once = Once()
        for name, value in self._config.items():
            self._client.log_param(self._id, name, value)

    def _id_of_experiment(self) -> str:
        known = self._client.get_experiment_by_name(self._experiment)
        return str(self._client.create_experiment(self._experiment) if known is None else known.experiment_id)

    def _last_step(self, name: str) -> int:
        return max(int(point.step) for point in self._client.get_metric_history(self._id, name))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        metric = import_module("mlflow.entities").Metric
        now = int(time.time() * 1000)
        new = [metric(name, value, now, step) for name, value in self._once.fresh(step, values).items()]
        if new:
            self._client.log_batch(self._id, metrics=new)

    def ended(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def close(self) -> None:
        if self._outcome is Outcome.SUPERSEDED:
            return  # the attempt that trains now has the same run
        status = "KILLED" if self._outcome in INTERRUPTED else "FAILED"
        self._client.set_terminated(self._id, status="FINISHED" if self._outcome is Outcome.DONE else status)


def _require(package: str) -> None:
    if find_spec(package) is None:
        raise ConfigurationError(
            f"the tracker {package} is asked for, and the package {package} is not installed in this image: "
            f"add it (pip install {package}), or leave the tracker out of Trainer(trackers=...) and of "
            f"spec.training.trackers"
        )
