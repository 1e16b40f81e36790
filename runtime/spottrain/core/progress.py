"""State of a run (`ProgressBoard`), and the small HTTP server through which the operator reads it.

Several threads write to the board and read from it: training, upload, HTTP server, watchdogs.
"""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Final

from spottrain.contract import (
    BIND_ADDRESS,
    STOP_PATH,
    WAITING_FOR_STORE,
    Outcome,
    Progress,
    Stop,
    TerminationMessage,
    TimeSplit,
    listening_socket,
)
from spottrain.core import log
from spottrain.core.heartbeat import Heartbeat
from spottrain.core.time_split import PARTS, TimeSplitClock

STOP_LIMIT: Final = 4096
"""Maximum bytes of a stop order's body."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressFacts:
    """One consistent view of a run. Steps are optimizer steps; times are Unix seconds, durations seconds."""

    attempt: int = 0
    job_uid: str = ""
    worker: int = 0
    state: str = "Starting"
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    samples_per_second: float | None = None
    steps_per_second: float | None = None
    start_step: int | None = None
    durable_step: int | None = None
    durable_time: float | None = None
    key: str = ""
    saves: int = 0
    save_failures: int = 0
    last_failure: str = ""
    save_seconds: float | None = None
    """From the start of the last save until HEAD listed it."""
    stall_seconds: float | None = None
    """Time that the last save blocked training."""
    emergency_seconds: float | None = None
    grace_seconds: float | None = None
    warning: str = ""
    waiting_for: str = ""
    """A sentence about the unreachable store; empty while it responds."""
    waits: bool = False
    """Whether the run waits for that store. Midway through training it goes on, and its saves fail."""
    ignored_settings: str = ""
    first_step_seconds: float | None = None
    startup_seconds: float | None = None
    best_step: int | None = None
    output_uri: str = ""
    ended_early: str = ""
    """Reason, if early stopping ended the run."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Shares of the time of the last steps, by the field names of `diagnostics.step_timer.Seconds`."""
    verdict: str = ""
    """The bottleneck, a `diagnostics.bottleneck.Name`."""
    diagnosis: str = ""
    """The whole sentence on it, with its fix."""
    gpu_utilisation: float | None = None
    """GPU utilisation by NVML, 0 to 1."""
    gpu_memory: float | None = None
    """Share of the GPU's memory that all processes use, 0 to 1; by NVML."""
    mfu: float | None = None
    flops_per_step: float | None = None
    """FLOPs of this rank."""

    @property
    def shown_state(self) -> str:
        """State for people and the operator. `state` is what resumes once the store responds again."""
        return WAITING_FOR_STORE if self.waiting_for and self.waits else self.state

    @property
    def finite_loss(self) -> float | None:
        """The loss where JSON can hold it, which has no NaN."""
        return self.loss if self.loss is not None and math.isfinite(self.loss) else None

    @property
    def eta_seconds(self) -> float | None:
        """Estimated seconds until the last step; None if the end or the speed is unknown."""
        if not self.total_steps or not self.steps_per_second:
            return None
        return max(0, self.total_steps - self.step) / self.steps_per_second

    @property
    def lost_steps(self) -> int:
        """Steps done that are in no committed checkpoint."""
        # A training that failed may begin again in the same process, at a step before what is durable.
        return max(self.step - max(self.durable_step or 0, self.start_step or 0), 0)


class ProgressBoard:
    """The current facts, replaced as a whole so that readers never see half an update."""

    def __init__(self, attempt: int = 0, clock: TimeSplitClock | None = None) -> None:
        self.heartbeat = Heartbeat()
        self.clock = clock or TimeSplitClock()
        self.trains = False
        """Whether this process trains with the runtime, or is expected to. Otherwise it has no time split."""
        self._facts = ProgressFacts(attempt=attempt)
        self._step = 0
        """Newer than the facts' step: a copy of the facts for each step would cost more than counting it."""
        self._lock = threading.Lock()

    @property
    def facts(self) -> ProgressFacts:
        if self._facts.step != self._step:
            self.update()
        return self._facts

    def update(self, **changes: Any) -> None:
        if changes.get("state", self._facts.state) != self._facts.state:
            self.heartbeat.beat()
        with self._lock:
            if "step" in changes:  # else `stepped`, which takes no lock, alone writes it
                self._step = changes.pop("step")
            self._facts = replace(self._facts, step=self._step, **changes)

    def stepped(self, step: int) -> None:
        """Records that `step` optimizer steps are done."""
        if self._facts.state != "Training":
            self.update(state="Training")
        self._step = step
        self.heartbeat.stepped()
        self.clock.step_done()

    @property
    def time_split(self) -> TimeSplit | None:
        return self.clock.split() if self.trains else None

    def save_failed(self, error: str) -> None:
        with self._lock:
            failures = self._facts.save_failures + 1
            self._facts = replace(self._facts, save_failures=failures, last_failure=error)

    def progress(self) -> Progress:
        facts = self.facts
        return Progress(
            **_named_as_in(Progress, facts)
            | {
                "state": facts.shown_state,
                "loss": facts.finite_loss,
                "durableTime": log.rfc3339(facts.durable_time) if facts.durable_time else "",
                "idleSeconds": self.heartbeat.idle,
                "hangSeconds": self.heartbeat.limit(facts.state),
                "timeSplit": self.time_split,
            }
        )

    def message(self, outcome: Outcome, text: str, **more: Any) -> TerminationMessage:
        """Builds the termination message from `text`, the current facts, and `more` of its fields."""
        facts = self.facts
        if facts.save_failures:
            text += f" {facts.save_failures} save(s) failed on the way, the last with: {facts.last_failure}"
        return TerminationMessage(
            **_named_as_in(TerminationMessage, facts)
            | {
                "outcome": outcome,
                "message": text,
                "step": facts.step if facts.total_steps or facts.step else None,
                "totalSteps": facts.total_steps or None,
                "loss": facts.finite_loss,
                "timeSplit": None if outcome is Outcome.UNTRAINED else self.time_split,
            }
            | more
        )

    def metrics(self) -> str:
        """Returns the metrics in Prometheus text format."""
        facts, split = self.facts, self.time_split
        values: dict[str, Any] = {name: getattr(facts, name, None) for name in METRICS} | {
            "total_steps": facts.total_steps or None,
            "save_stall_seconds": facts.stall_seconds,
            "saves_total": facts.saves,
            "save_failures_total": facts.save_failures,
            "idle_seconds": self.heartbeat.idle,
            "hang_seconds": self.heartbeat.limit(facts.state),
            "durable_age_seconds": time.time() - facts.durable_time if facts.durable_time else None,
            "unsaved_seconds": None if split is None else split.unsaved,
            "state": {f'{{state="{facts.shown_state}"}}': 1},
            "seconds_total": split and {f'{{part="{part}"}}': getattr(split, part) for part in PARTS},
            "time_share": {f'{{part="{part}"}}': share for part, share in facts.shares.items()},
            "verdict": {f'{{name="{facts.verdict}"}}': 1} if facts.verdict else None,
        }
        lines = []
        for name, value in values.items():
            if value is None or value == {}:
                continue
            full, kind = f"spottrain_{name}", "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {full} {METRICS[name]}", f"# TYPE {full} {kind}"]
            samples = value if isinstance(value, Mapping) else {"": value}  # by their labels
            lines += [f"{full}{labels} {sample}" for labels, sample in samples.items()]
        return "\n".join(lines) + "\n"


def _named_as_in(kind: Any, facts: ProgressFacts) -> dict[str, Any]:
    """Returns the facts that this dataclass has too, under its names: `durableStep` for `durable_step`."""
    snake = {each.name: re.sub("(?<=[a-z])[A-Z]+", r"_\g<0>", each.name).lower() for each in fields(kind)}
    return {name: getattr(facts, own) for name, own in snake.items() if hasattr(facts, own)}


METRICS: Final = {
    "attempt": "Number of the attempt.",
    "step": "Optimizer steps done.",
    "total_steps": "Optimizer steps of the whole training.",
    "loss": "Loss of the last logged step.",
    "samples_per_second": "Samples trained per second.",
    "steps_per_second": "Optimizer steps per second.",
    "durable_step": "Last step that HEAD lists.",
    "durable_age_seconds": "Seconds since the copy of that step was taken.",
    "best_step": "Step of the evaluation with the lowest loss so far.",
    "save_seconds": "Seconds of the last save, from its copy to its commit.",
    "save_stall_seconds": "Seconds for which the last save stopped the training.",
    "saves_total": "Saves that were committed.",
    "save_failures_total": "Saves that failed.",
    "unsaved_seconds": "Seconds of training that no checkpoint has.",
    "emergency_seconds": "Estimated seconds of a save after a request to stop.",
    "grace_seconds": "Seconds from SIGTERM to SIGKILL.",
    "idle_seconds": "Seconds since the training last moved.",
    "hang_seconds": "Seconds of no movement after which it counts as hung.",
    "gpu_utilisation": "Share of the time in which the GPU ran a kernel (NVML).",
    "gpu_memory": "Share of the GPU's memory in use (NVML).",
    "mfu": "Model FLOP utilisation.",
    "flops_per_step": "FLOP of an optimizer step.",
    "state": "1 for the present state.",
    "seconds_total": "Where the seconds of this process went.",
    "time_share": "Where the time of a step goes, as shares.",
    "verdict": "1 for what limits the training.",
}
"""What the trainer's metrics say, without their prefix `spottrain_`. Those that end in `_total` are counters,
the others gauges."""


class _Handler(BaseHTTPRequestHandler):
    board: ClassVar[ProgressBoard]
    stop: ClassVar[Callable[[Stop], bool]]
    timeout = 5.0
    """Seconds that a request may pause while it is read."""
    wbufsize = -1  # headers and body are one packet: the second one would wait for the client's delayed ACK

    def do_POST(self) -> None:
        """Returns 204 if this trainer stops, 403 if the order names another pod."""
        if self.path != STOP_PATH:
            return self.send_error(404)
        try:
            length = int(self.headers.get("Content-Length", ""))
            if not 0 <= length <= STOP_LIMIT:  # read(-1) would read without end
                return self.send_error(413)
            order = Stop.from_json(self.rfile.read(length).decode())
        except (ValueError, KeyError, TypeError):
            return self.send_error(400)
        if not type(self).stop(order):
            return self.send_error(403)
        self.send_response(204)
        self.end_headers()

    def do_GET(self) -> None:
        if self.path == "/progress":
            kind, text = "application/json", self.board.progress().to_json()
        elif self.path == "/metrics":
            kind, text = "text/plain; version=0.0.4", self.board.metrics()
        else:
            return self.send_error(404)
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silent: the operator polls every few seconds."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[_Handler]) -> None:
        # HTTPServer's own binding asks for the host's name, which may wait for a DNS server.
        super().__init__((host, port), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening_socket(host, port)
        self.server_address = self.socket.getsockname()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs one line instead of a traceback, and nothing if the client has disconnected."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            log.event("progress-request-failed", error=f"{type(error).__name__}: {error}")

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:  # for example no free file descriptor: accept would fail again at once, so pause
            time.sleep(0.5)
            raise


def serve(
    board: ProgressBoard,
    port: int,
    stop: Callable[[Stop], bool] = lambda _: False,
    *,
    host: str = "",
) -> int | None:
    """Serves in a daemon thread and returns the port; None if it cannot listen (training goes on).

    Args:
        board: What is served.
        port: 0 takes a free one.
        stop: Handles the operator's stop order; returns False if the order is not meant for this trainer.
        host: IP address on which it listens; "" for all, of IPv4 and of IPv6.
    """
    given = {"board": board, "stop": staticmethod(stop)}
    try:
        server = _Server(host, port, type("Handler", (_Handler,), given))
    except OSError as error:
        why = f"{error} ({BIND_ADDRESS}={host})" if host else str(error)
        log.event("progress-not-served", port=port, error=why)
        return None
    threading.Thread(target=server.serve_forever, name="spottrain-progress", daemon=True).start()
    return int(server.server_address[1])
