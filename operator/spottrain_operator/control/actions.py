"""What a plan does to the cluster: each action is a value, and runs itself by the client's requests.

What happened to it is a value too (`Result`). The API server's rejection is remembered for the next plan,
which reports it and decides when to try again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from spottrain_operator import names
from spottrain_operator.api import kueue
from spottrain_operator.api.bookkeeping import Bookkeeping
from spottrain_operator.api.kueue import Told, WorkloadView
from spottrain_operator.api.native_gangs import API_VERSION
from spottrain_operator.api.observed import Event, PodView, Refusal
from spottrain_operator.api.template import admission_words
from spottrain_operator.api.training_job import Job, Status
from spottrain_operator.api.validation import parse_job
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import JobMemory, Memory
from spottrain_operator.errors import ApiError, ApiFailure
from spottrain_operator.io.cluster import APPLY, Cluster, release_pod, set_finalizer
from spottrain_operator.io.logs import about
from spottrain_operator.io.metrics import ATTEMPTS_STARTED, Measurement
from spottrain_operator.names import Reason
from spottrain_operator.policies.pod_end import trainer_ended

logger = logging.getLogger(__name__)

RETRY_QUOTA = timedelta(seconds=20)
RETRY_REFUSED = timedelta(seconds=30)
"""Admission may soon accept what it rejects now (a missing service account, a webhook without response)."""
RETRY_INVALID = timedelta(minutes=5)
"""What is invalid in this cluster now may be valid once an administrator has changed it."""
ANNOTATE_SECONDS: Final = 1.0
"""Limit of an annotation of a pod: its DELETE waits for that, and a webhook may take half a minute."""
NAMESPACE_TERMINATING = "NamespaceTerminating"
"""The API server's cause when it rejects new objects in a namespace that is being deleted."""
TEMPLATE: Final = "spec.template"
"""The field of the job that pods come from."""
UNDECIDED: Final = frozenset({ApiFailure.UNREACHABLE, ApiFailure.CONFLICT, ApiFailure.TOO_MANY_REQUESTS})
"""The API server has neither accepted nor rejected the request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What actions need to run."""

    cluster: Cluster
    caches: Caches
    memory: Memory
    now: datetime

    def reject(self, job: Job, no: Refusal) -> Rejected:
        self.memory.reject(job.key, no)
        return Rejected()

    def forget_refusal(self, job: Job) -> bool:
        """Forgets the rejection of an object of the job; returns whether there was one."""
        known = self.memory.of(job.key)
        had, known.refusal = known.refusal is not None, None
        return had


# --- results ------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """Carried out, or not needed any more."""

    again: bool = False
    """Whether to plan again at once; otherwise watch events lead to the next plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """The API server rejected an object of ours; the memory knows why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed:
    """An object, or what the cluster serves, is not as observed: read again, plan again."""

    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PodEnded:
    """The pod that was to be deleted has ended: its end must be evaluated before the status is written."""

    why: str


Result = Done | Rejected | Changed | PodEnded


# --- existing objects -----------------------------------------------------------------------------------
class Action:
    """`str` of it completes the sentence "could not ..."."""

    async def run(self, job: Job, context: Context) -> Result:
        """Raises ApiError where the request did not succeed."""
        raise NotImplementedError

    async def stale(self, error: ApiError, job: Job, context: Context) -> Result:
        """Returns what follows where the object is gone, or is not what the request was about."""
        raise error


@dataclass(frozen=True, kw_only=True, slots=True)
class _OfPod(Action):
    pod: PodView

    async def stale(self, error: ApiError, job: Job, context: Context) -> Result:
        """A pod that is gone is removed from the cache: no event may come for it."""
        pod = self.pod
        found = error.kind is ApiFailure.CONFLICT
        raw = await context.cluster.get("pods", pod.name, pod.namespace) if found else None
        if raw is not None and raw["metadata"]["uid"] == pod.uid:
            return Changed(why=f"pod {pod.name} has changed: {error}")
        which = about(pod.job, attempt=pod.attempt, rank=pod.rank)
        logger.info("%s: pod %s is already gone: %s", pod.job, pod.name, error, extra=which)
        context.caches.pods.drop(pod)
        return Done(again=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Annotate(_OfPod):
    """Annotate a pod, for example with its deadline; the trainer reads the annotations as files.

    It must precede the DELETE: an update at the same instant would not reach the files.
    """

    words: dict[str, str]
    until: datetime | None = None
    """When the pod is deleted with or without it; None: at no time."""

    def __str__(self) -> str:
        return f"annotate pod {self.pod.name}"

    async def run(self, job: Job, context: Context) -> Result:
        """In a storm of notices it waits for its turn, while its DELETE can wait for it."""
        pod = self.pod
        left = (self.until - context.now).total_seconds() if self.until is not None else None
        change = {"metadata": {"annotations": self.words}}
        try:
            async with asyncio.timeout(left):
                raw = await context.cluster.patch(
                    "pods", pod.name, pod.namespace, change, uid=pod.uid, seconds=ANNOTATE_SECONDS
                )
        except (ApiError, TimeoutError) as error:
            if names.DEADLINE_ANNOTATION in self.words:
                context.memory.could_not_annotate(pod, context.now)
            if isinstance(error, TimeoutError):
                raise ApiError(0, "no response before the pod must be deleted") from error
            raise
        context.caches.pods.remember(raw)
        return Done(again=True)  # its DELETE is due soon, even if the watch event is late


@dataclass(frozen=True, kw_only=True, slots=True)
class Delete(_OfPod):
    grace: int | None = None
    """Seconds; None: the pod's own."""

    def __str__(self) -> str:
        return f"delete pod {self.pod.name}"

    async def run(self, job: Job, context: Context) -> Result:
        """Deletes the pod in the version that was judged. A newer one is deleted unless it has ended."""
        pod, cluster = self.pod, context.cluster
        version = None if trainer_ended(pod) else pod.resource_version
        while True:
            try:
                await cluster.delete(
                    "pods", pod.name, pod.namespace, uid=pod.uid, version=version, grace=self.grace
                )
                return Done()
            except ApiError as error:
                if error.kind is not ApiFailure.CONFLICT or version is None:
                    raise
                raw = await cluster.get("pods", pod.name, pod.namespace)
                live = context.caches.pods.remember(raw) if raw is not None else None
                if live is None or live.uid != pod.uid or live.resource_version == version:
                    raise  # the pod is gone, or the conflict has another cause
            if trainer_ended(live):
                return PodEnded(why=f"pod {pod.name} has ended meanwhile")
            version = live.resource_version


@dataclass(frozen=True, kw_only=True, slots=True)
class Release(_OfPod):
    """Remove our finalizer: the pod's outcome is in the status, or is not needed."""

    def __str__(self) -> str:
        return f"remove the finalizer of pod {self.pod.name}"

    async def run(self, job: Job, context: Context) -> Result:
        pod = self.pod
        context.caches.pods.remember(await release_pod(context.cluster, pod.name, pod.namespace, uid=pod.uid))
        return Done()


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold(Action):
    """Add our finalizer to the TrainingJob object, or remove it."""

    on: bool

    def __str__(self) -> str:
        return "change the finalizers of the job"

    async def run(self, job: Job, context: Context) -> Result:
        key = job.key
        try:
            raw = await set_finalizer(context.cluster, key.name, key.namespace, uid=key.uid, on=self.on)
        except ApiError as error:
            if error.kind is ApiFailure.INVALID:
                return await self.stale(error, job, context)
            if self.on and not error.stale and error.kind not in UNDECIDED:  # it blocks all pods; report why
                context.memory.reject(key, refusal(error, job.generation, context.now))
            raise
        context.caches.jobs.put(parse_job(raw))
        return Done(again=self.on)

    async def stale(self, error: ApiError, job: Job, context: Context) -> Result:
        await context.caches.read_job(job.key, context.cluster)
        return Done(again=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteJob(Action):
    """Delete the TrainingJob object: its time to live is over."""

    def __str__(self) -> str:
        return "delete the job"

    async def run(self, job: Job, context: Context) -> Result:
        key = job.key
        await context.cluster.delete(names.PLURAL, key.name, key.namespace, uid=key.uid)
        return Done()

    async def stale(self, error: ApiError, job: Job, context: Context) -> Result:
        return Done()


@dataclass(frozen=True, kw_only=True, slots=True)
class _OfWorkload(Action):
    workload: WorkloadView

    async def stale(self, error: ApiError, job: Job, context: Context) -> Result:
        return Changed(why=f"Workload {self.workload.name} has changed: {error}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tell(_OfWorkload):
    """Tell Kueue about the job, in the status of its Workload. Its next event leads to the next plan."""

    words: tuple[Told, ...]

    @property
    def release(self) -> bool:
        """Whether its quota is given back."""
        return any(word.type == kueue.QUOTA_RESERVED for word in self.words)

    def __str__(self) -> str:
        return f"write the status of Workload {self.workload.name}"

    async def run(self, job: Job, context: Context) -> Result:
        found, kind = self.workload, kueue.WORKLOADS
        raw = await context.cluster.get(kind, found.name, found.namespace)
        if raw is None or raw["metadata"]["uid"] != found.uid:
            return Changed(why=f"Workload {found.name} is another one by now")
        if self.release and int(raw["metadata"]["resourceVersion"]) != found.resource_version:
            return Changed(why=f"Workload {found.name} has changed: it may have been admitted since")
        change = kueue.status_patch(raw, self.words, context.now, release=self.release)
        await context.cluster.patch(
            kind, found.name, found.namespace, change, uid=found.uid, subresource="status"
        )
        return Done()


@dataclass(frozen=True, kw_only=True, slots=True)
class Discard(_OfWorkload):
    """Delete the job's Workload, and give its quota back."""

    def __str__(self) -> str:
        return f"delete Workload {self.workload.name}"

    async def run(self, job: Job, context: Context) -> Result:
        found = self.workload
        await context.cluster.delete(kueue.WORKLOADS, found.name, found.namespace, uid=found.uid)
        return Done()


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteBooks(Action):
    """Write the ConfigMap with the job's bookkeeping."""

    manifest: dict[str, Any]

    def __str__(self) -> str:
        return f"write ConfigMap {self.manifest['metadata']['name']}"

    async def run(self, job: Job, context: Context) -> Result:
        meta = self.manifest["metadata"]
        await context.cluster.patch("configmaps", meta["name"], meta["namespace"], self.manifest, form=APPLY)
        return Done()


# --- new objects --------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class Provide(Action):
    """Create an object that the pods need, such as a gang's Service, unless it exists."""

    kind: str
    """As the client names it."""
    manifest: dict[str, Any]
    generation: int = 0

    def __str__(self) -> str:
        return _creation(self.manifest)

    async def run(self, job: Job, context: Context) -> Result:
        """Creates the object. A missing kind is no failure: the scheduler reports it."""
        key, workload = job.key, self.kind.startswith(f"{kueue.API_GROUP}/")
        try:
            await context.cluster.create(self.kind, self.manifest)
        except ApiError as error:
            exists = error.kind is ApiFailure.CONFLICT
            if self.kind == "pods" and not exists:
                return self._cleanup_refused(error, context.memory.of(key))
            # Also where groups are no longer served: pods with a missing group never start.
            gang = self.kind.startswith(f"{API_VERSION}/")
            if gang and error.kind in (ApiFailure.NOT_FOUND, ApiFailure.FORBIDDEN):
                logger.warning("%s starts without a pod group: %s", key, error, extra=about(key))
                context.memory.of(key).ungrouped = True
                return Changed(why=f"{key}: the next plan does without groups")
            if not error.stale and error.kind not in UNDECIDED:  # the job waits, and its status says why
                field = f"the Workload for {names.QUEUE_LABEL}" if workload else TEMPLATE
                return context.reject(job, refusal(error, self.generation, context.now, field))
            if not error.stale:
                raise
            logger.info("%s: %s", self, error)
        # Of a Workload no pod follows for a long time, so that none shows it.
        return Done(again=workload and context.forget_refusal(job))

    def _cleanup_refused(self, error: ApiError, known: JobMemory) -> Done:
        """Records a rejection: for good (the namespace is being deleted), or until the next try."""
        if error.kind is ApiFailure.NOT_FOUND or NAMESPACE_TERMINATING in error.causes:
            known.cleanup_refused = str(error)
            return Done(again=True)
        before = known.cleanup_rejected
        known.cleanup_rejected = f"the API server rejects the cleanup pod: {admission_words(str(error))}"
        return Done(again=known.cleanup_rejected != before)


@dataclass(frozen=True, kw_only=True, slots=True)
class Create(Action):
    """Create a pod of an attempt."""

    manifest: dict[str, Any]
    generation: int
    attempt: int

    def __str__(self) -> str:
        return _creation(self.manifest)

    async def run(self, job: Job, context: Context) -> Result:
        try:
            raw = await context.cluster.create("pods", self.manifest)
        except ApiError as error:
            if error.kind is ApiFailure.CONFLICT:
                return await self._adopt(job, context)
            return context.reject(job, refusal(error, self.generation, context.now))
        context.forget_refusal(job)
        ATTEMPTS_STARTED.inc()
        context.caches.pods.remember(raw)
        return Done()

    async def _adopt(self, job: Job, context: Context) -> Result:
        """Handles an existing pod of that name: ours from before a crash, or another owner's."""
        name = self.manifest["metadata"]["name"]
        raw = await context.cluster.get("pods", name, job.key.namespace)
        if raw is None:
            return Changed(why=f"pod {name} was created and deleted meanwhile")
        pod = context.caches.pods.remember(raw)
        if pod is not None and pod.job == job.key:
            context.forget_refusal(job)
            return Done(again=True)
        taken = Refusal(
            generation=self.generation,
            reason=Reason.POD_NAME_TAKEN,
            message=f"pod {name} exists and is not this job's; delete it",
            at=context.now,
            retry=RETRY_REFUSED,
        )
        return context.reject(job, taken)


def _creation(manifest: dict[str, Any]) -> str:
    return f"create {manifest.get('kind', 'Pod')} {manifest['metadata']['name']}"


def refusal(error: ApiError, generation: int, now: datetime, field: str = TEMPLATE) -> Refusal:
    """Classifies a rejection. Raises the error where the API server has not decided: a retry is enough."""
    if error.kind in UNDECIDED:
        raise error
    words = admission_words(str(error))
    match error.kind:
        case ApiFailure.BAD_REQUEST | ApiFailure.INVALID:
            reason, words, retry = Reason.INVALID_TEMPLATE, f"{field}: {words}", RETRY_INVALID
        case ApiFailure.QUOTA_EXCEEDED:
            reason, retry = Reason.QUOTA_EXCEEDED, RETRY_QUOTA
        case _:
            reason, retry = Reason.REFUSED, RETRY_REFUSED
    return Refusal(generation=generation, reason=reason, message=words, at=now, retry=retry)


# --- what a plan consists of ------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Actions of one reconcile, done in this order: before, status, after, events.

    A rule gives the first ones; the others follow from them (follow.py).
    """

    reason: str
    message: str
    before: tuple[Action, ...] = ()
    status: Status | None = None
    """None: no status to write."""
    after: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    """For the operator's metrics, once the status is written."""
    recheck_after: timedelta | None = None
    books: Bookkeeping | None = None
    """The bookkeeping up to now, to be remembered once the actions are done; None: as it was."""
