"""A rehearsal from the manifest to the verdict: an undisturbed run, then with reclaims, and both results.

Where the results differ, a second undisturbed run says whether the reclaims are to blame.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from spottrain.core.log_format import counted

from spottrain_cli import manifests
from spottrain_cli.errors import CommandError, UsageError
from spottrain_cli.rehearsal import moments, results, verdict
from spottrain_cli.rehearsal.local_cluster import LocalCluster, require_idle, require_process_nodes
from spottrain_cli.rehearsal.manifest import Adapted, Here, adapted, named, the_job, with_steps
from spottrain_cli.rehearsal.play import Reclaimer, Stage, to_end
from spottrain_cli.rehearsal.record import Record
from spottrain_cli.rehearsal.source import copy_beside
from spottrain_cli.rehearsal.verdict import Verdict

Json = dict[str, Any]
SECRET: Final = "checkpoint-credentials"
PACE_SECONDS: Final = 3.0
"""Of training, after which it is known how long a step takes."""
LOG_LINES: Final = 15
UNDISTURBED, SHORT, AGAIN, RECLAIMED = "undisturbed", "undisturbed-short", "undisturbed-again", "reclaimed"


@dataclass(frozen=True, kw_only=True)
class Options:
    manifest: Path
    reclaims: int
    seed: int
    max_steps: int | None
    python: str
    seconds: float
    """Longest time of each job."""


def rehearse(options: Options, say: Callable[[str], None]) -> Verdict:
    """Plays the rehearsal; `say` gets each thing that happens. Raises CommandError."""
    job, others = the_job(manifests.read(str(options.manifest)), options.manifest.name)
    cluster = LocalCluster.find(os.environ)
    require_process_nodes(cluster.items("nodes"))
    require_idle(cluster.items("tj", "-A"))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="spottrain-rehearsal-") as source:
        number = uuid.uuid4().hex[:8]
        here = _here(options, cluster, f"s3://{cluster.bucket}/rehearsals/{number}", source)
        made = adapted(job, others, here)
        if made.mode != "Runtime" and options.max_steps is not None:
            raise UsageError(
                f"--max-steps has no effect on a job with checkpoint.mode {made.mode}: leave it out"
            )
        if made.needs_source:
            copy_beside(options.manifest.absolute(), Path(source))
        _say_changes(made, options, say)
        with _namespace(cluster, f"rehearsal-{number}", here, made) as namespace:
            stage = Stage(
                cluster=cluster,
                namespace=namespace,
                seconds=options.seconds,
                say=lambda text: say(f"{time.monotonic() - began:6.1f} s  {text}"),
            )
            return _Rehearsal(options, stage, made, here).play()


@dataclass
class _Rehearsal:
    options: Options
    stage: Stage
    made: Adapted
    here: Here

    def play(self) -> Verdict:
        undisturbed = self._undisturbed()
        if (ended := verdict.of_undisturbed(undisturbed, self.options.seconds)) is not None:
            self._say_log(undisturbed)
            return ended
        reclaimed = to_end(self.stage, self._job(RECLAIMED), self._reclaimer(undisturbed))
        if reclaimed.phase == "Failed":
            self._say_log(reclaimed)
        both = self._results(undisturbed.name), self._results(RECLAIMED)
        noisy: frozenset[str] = frozenset()
        if reclaimed.phase == "Succeeded" and verdict.differing(*both):
            self.stage.say("the results differ; a second undisturbed job shows whether it was the reclaims")
            again = to_end(self.stage, self._job(AGAIN), lambda _: False)
            if again.phase == "Succeeded":
                noisy = verdict.differing(both[0], self._results(AGAIN))
        return verdict.of_reclaimed(
            undisturbed, reclaimed, self.options.reclaims, self.options.seconds, both, noisy
        )

    def _undisturbed(self) -> Record:
        """The job without reclaims; where it is much longer than needed, a shorter one in its place."""
        if self.made.mode != "Runtime":
            return to_end(self.stage, self._job(UNDISTURBED), lambda _: False)
        if self.options.max_steps is not None:
            return self._of_steps(UNDISTURBED, self.options.max_steps, "--max-steps")
        trial = _Trial(self.options.reclaims)
        record = to_end(self.stage, self._job(UNDISTURBED), trial)
        if trial.fewer is None:
            return record
        assert trial.pace is not None
        self.stage.cluster.kubectl("-n", self.stage.namespace, "delete", "tj", UNDISTURBED)
        before = f"of {trial.pace.total}" if trial.pace.total else "of an unknown number"
        step = f"{trial.pace.seconds_of_step:.2g} s"
        return self._of_steps(SHORT, trial.fewer, f"{before}, a step takes {step} here")

    def _of_steps(self, name: str, steps: int, why: str) -> Record:
        """Raises UsageError where the loop does not apply maxSteps."""
        self.made = replace(self.made, job=with_steps(self.made.job, steps))
        warmup = self.made.job["spec"]["training"]["warmupSteps"]
        self.stage.say(f"training.maxSteps: {steps} ({why}), training.warmupSteps: {warmup}")

        def look(record: Record) -> bool:
            attempt = record.latest
            total = max(attempt.total or 0, attempt.step or 0) if attempt is not None else 0
            if total > steps:
                pace = record.pace(time.time())
                whole = f" or more, at {pace.seconds_of_step:.2g} s each" if pace is not None else ""
                raise UsageError(
                    f"the script's loop does not apply spec.training.maxSteps: it trains {total} "
                    f"steps{whole}; shorten it by its own arguments, in a copy of the manifest"
                )
            return False

        return to_end(self.stage, self._job(name), look)

    def _reclaimer(self, undisturbed: Record) -> Reclaimer:
        """Raises UsageError where the training is too short to be interrupted so often."""
        chance, wanted = random.Random(self.options.seed), self.options.reclaims
        by_steps = self.made.mode == "Runtime"
        found: Sequence[float]
        if by_steps:
            pace = undisturbed.pace(undisturbed.ended_at)
            if pace is None:
                raise UsageError("the training ended before two steps of it were seen; give more --max-steps")
            if short := moments.too_short(pace, wanted):
                raise UsageError(short)
            found = moments.steps(pace, wanted, chance)
        else:
            whole = undisturbed.seconds(undisturbed.ended_at)
            if short := moments.too_short_run(whole, wanted):
                raise UsageError(short)
            found = moments.seconds(whole, wanted, chance)
        return Reclaimer(
            stage=self.stage,
            moments=found,
            by_steps=by_steps,
            notice_seconds=self.made.notice_seconds,
            chance=chance,
        )

    def _job(self, name: str) -> Json:
        return named(self.made.job, name, self.here.uri)

    def _results(self, name: str) -> dict[str, str]:
        with self.stage.cluster.credentials():
            return results.results(f"{self.here.uri}/{name}", self.here.endpoint, self.made.mode)

    def _say_log(self, record: Record) -> None:
        """The end of the log of its last attempt: from its pod, or as it was kept."""
        attempt = record.latest
        if attempt is None:
            return
        words = ("-n", self.stage.namespace, "logs", attempt.pod, "--all-containers", f"--tail={LOG_LINES}")
        lines: list[str] = []
        with suppress(CommandError):
            lines = self.stage.cluster.kubectl(*words).splitlines()
        if not lines and self.made.mode == "Runtime":
            with self.stage.cluster.credentials():
                uri = f"{self.here.uri}/{record.name}"
                lines = results.end_of_log(uri, self.here.endpoint, attempt.number, LOG_LINES)
        for line in lines:
            self.stage.say(f"{record.name}: | {line}")


@dataclass
class _Trial:
    """Ends a job once it is known that fewer steps are enough."""

    reclaims: int
    pace: moments.Pace | None = None
    fewer: int | None = None

    def __call__(self, record: Record) -> bool:
        if self.pace is None or self.pace.total is None:
            pace = record.pace(time.time())
            if pace is not None and pace.seconds >= PACE_SECONDS:
                self.pace, self.fewer = pace, moments.fewer_steps(pace, self.reclaims)
        return self.fewer is not None


def _here(options: Options, cluster: LocalCluster, uri: str, source: str) -> Here:
    folder = options.manifest.absolute().parent
    if options.python and not os.access(options.python, os.X_OK):
        raise UsageError(f"--python {options.python} is no program")
    return Here(
        name=options.manifest.name,
        uri=uri,
        endpoint=cluster.endpoint,
        secret=SECRET,
        beside=lambda path: (folder / path).exists(),
        on_machine=lambda path: Path(path).exists(),
        source=source,
        # Not resolved: a virtual environment's Python is a link to another one.
        python=os.path.abspath(options.python) if options.python else "",
        seed=options.seed,
    )


def _say_changes(made: Adapted, options: Options, say: Callable[[str], None]) -> None:
    say(
        f"Rehearsal of {options.manifest} on nodes of this machine: "
        f"{counted(options.reclaims, 'reclaim')}, "
        f"--seed {options.seed}"
    )
    say("What is not as in the manifest:")
    for line in made.changes:
        say(f"  {line}")


@contextmanager
def _namespace(cluster: LocalCluster, name: str, here: Here, made: Adapted) -> Iterator[str]:
    """A namespace with what the job names; nodes without a notice before it and after it."""
    for node in cluster.nodes():
        cluster.restore(node)
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    keys = {"AWS_ACCESS_KEY_ID": cluster.access_key, "AWS_SECRET_ACCESS_KEY": cluster.secret_key}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": keys}
    try:
        cluster.apply(name, [namespace])
        cluster.apply(name, [secret, *made.others])
        yield name
    finally:
        _clean_up(cluster, name, here)


def _clean_up(cluster: LocalCluster, namespace: str, here: Here) -> None:
    """Each part also where another one fails: the cluster may be gone."""
    for node in cluster.nodes() if _answers(cluster) else ():
        with suppress(CommandError):
            cluster.restore(node)
    for words in (
        ("-n", namespace, "delete", "tj", "--all"),
        ("-n", namespace, "wait", "--for=delete", "pods", "--all", "--timeout=40s"),  # they may still save
        ("delete", "namespace", namespace, "--wait=false"),
    ):
        with suppress(CommandError):
            cluster.kubectl(*words)
    with suppress(Exception), cluster.credentials():
        results.delete(here.uri, here.endpoint)


def _answers(cluster: LocalCluster) -> bool:
    try:
        cluster.ask("status")
    except CommandError:
        return False
    return True
