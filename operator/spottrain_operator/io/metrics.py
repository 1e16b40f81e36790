"""The operator's Prometheus metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

RECONCILE_SECONDS = Histogram("spottrain_reconcile_seconds", "Time of one reconcile of one job.")
RECONCILE_ERRORS = Counter("spottrain_reconcile_errors", "Reconciles that failed and are retried.")
QUEUE_DEPTH = Gauge("spottrain_queue_depth", "Jobs that wait for a worker.")
REQUESTS = Counter("spottrain_api_requests", "Requests to the API server.", ["verb", "code"])
ATTEMPTS_ENDED = Counter("spottrain_attempts_ended", "Attempts that ended, by cause.", ["cause"])
ATTEMPTS_STARTED = Counter("spottrain_attempts_started", "Pods created.")
GHOSTS = Counter("spottrain_ghosts_dropped", "Cached objects that a fresh LIST did not contain.", ["kind"])
RESYNCS = Counter("spottrain_resyncs", "Complete LISTs of jobs, pods and nodes.")
LOOP_LAG = Gauge("spottrain_event_loop_lag_seconds", "How late the event loop runs a timer.")
JOBS = Gauge("spottrain_jobs", "Jobs known, by phase.", ["phase"])
SPENT = Gauge(
    "spottrain_spent_dollars", "What the nodes of the jobs that exist have cost, by namespace.", ["namespace"]
)
UNPRICED = Gauge(
    "spottrain_unpriced_node_seconds",
    "Node-seconds of these jobs whose price is not known, by namespace.",
    ["namespace"],
)
