"""The operator's Prometheus metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

RECONCILE_BUCKETS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25),
    *(0.3, 0.35, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60),
)
"""Fine around a quarter of a second, below which the 99th percentile of the latency is to stay."""
RECONCILE_SECONDS = Histogram(
    "spottrain_reconcile_seconds", "Time of one reconcile of one job.", buckets=RECONCILE_BUCKETS
)
QUEUE_WAIT = Histogram(
    "spottrain_queue_wait_seconds",
    "Time from an event, from when a job was due, or from a resync, to the begin of the reconcile.",
    ["lane"],
    buckets=RECONCILE_BUCKETS,
)
RECONCILE_LATENCY = Histogram(
    "spottrain_reconcile_latency_seconds",
    "The wait in the queue and the reconcile after it, together.",
    ["lane"],
    buckets=RECONCILE_BUCKETS,
)
RECONCILE_ERRORS = Counter("spottrain_reconcile_errors", "Reconciles that failed and are retried.")
QUEUE_DEPTH = Gauge("spottrain_queue_depth", "Jobs that wait for a worker.")
REQUESTS = Counter(
    "spottrain_api_requests", "Requests to the API server. Code none: no answer.", ["verb", "code"]
)
ATTEMPTS_STARTED = Counter("spottrain_attempts_started", "Pods created.")
GHOSTS = Counter(
    "spottrain_ghosts_dropped",
    "Cached objects that a LIST did not contain: no watch told of their end.",
    ["kind"],
)
RESYNCS = Counter("spottrain_resyncs", "Complete LISTs of the jobs.")
LEADER = Gauge("spottrain_leader", "1 while this process leads: the only one that writes.")
RELISTS = Counter("spottrain_relists", "LISTs by an informer: kind, and why it listed.", ["kind", "reason"])
WATCH_AGE = Gauge(
    "spottrain_watch_age_seconds", "Time since a watch last had an event or a bookmark; the oldest.", ["kind"]
)
LOOP_LAG = Gauge("spottrain_event_loop_lag_seconds", "How late the event loop runs a timer.")
JOBS = Gauge("spottrain_jobs", "Jobs known, by phase.", ["phase"])
OWNER = ("namespace", "team")
SPENT = Gauge("spottrain_spent_dollars", "What the nodes of the jobs that exist have cost.", OWNER)
UNPRICED = Gauge(
    "spottrain_unpriced_node_seconds", "Node-seconds of these jobs whose price is not known.", OWNER
)
ON_DEMAND = Gauge(
    "spottrain_on_demand_dollars",
    "What these jobs would have cost without interruptions on demand, where their saving is known.",
    OWNER,
)
COMPARED = Gauge(
    "spottrain_compared_spent_dollars", "What the jobs of spottrain_on_demand_dollars have cost.", OWNER
)
GOODPUT = Gauge("spottrain_goodput_seconds", "Where the time of these jobs went.", (*OWNER, "part"))


# --- what is measured of jobs ---------------------------------------------------------------------------
NOTICE_BUCKETS: Final = (0.25, 0.5, 1, 2, 3, 5, 10, 30, 60, 120)
SAVE_BUCKETS: Final = (0.5, 1, 2, 5, 10, 15, 20, 30, 60, 90, 120, 300)
RESTART_BUCKETS: Final = (5, 10, 20, 30, 60, 120, 180, 300, 600, 1200, 1800, 3600, 7200)
NOTICE_TO_SIGNAL = Histogram(
    "spottrain_notice_to_signal_seconds",
    "From the notice in the cloud's metadata, as the agent saw it, until the trainer knew.",
    buckets=NOTICE_BUCKETS,
)
SIGNAL_TO_DURABLE = Histogram(
    "spottrain_signal_to_durable_seconds",
    "From the request to stop until the last step was durable.",
    buckets=SAVE_BUCKETS,
)
INTERRUPTION_TO_RUNNING = Histogram(
    "spottrain_interruption_to_running_seconds",
    "From an interruption until all pods of the next attempt ran.",
    buckets=RESTART_BUCKETS,
)
INTERRUPTION_TO_TRAINING = Histogram(
    "spottrain_interruption_to_training_seconds",
    "From an interruption until the job trained again; of several in a row, from the first.",
    buckets=RESTART_BUCKETS,
)
START_TO_STEP = Histogram(
    "spottrain_start_to_first_step_seconds",
    "From an attempt's nodes to its first own step: images, restore, compilation.",
    ["resumed"],
    buckets=RESTART_BUCKETS,
)
INTERRUPTIONS = Counter(
    "spottrain_interruptions",
    "Interruptions, by cause, by source (such as AWS spot/instance-action) and by capacity type.",
    ["cause", "source", "capacity_type"],
)
LOST_GPU_SECONDS = Counter(
    "spottrain_lost_gpu_seconds", "GPU-seconds of steps that no checkpoint had when an attempt ended."
)
ATTEMPTS_ENDED = Counter("spottrain_attempts_ended", "Attempts that ended, by cause.", ["cause"])


@dataclass(frozen=True, slots=True)
class Measurement:
    """A value for a metric."""

    metric: Histogram | Counter
    value: float
    labels: tuple[str, ...] = ()
    """Values of the metric's labels, in their order."""

    def record(self) -> None:
        metric = self.metric.labels(*self.labels) if self.labels else self.metric
        if isinstance(metric, Histogram):
            metric.observe(self.value)
        else:
            metric.inc(self.value)
