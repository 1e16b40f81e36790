"""State of a run (`ProgressBoard`), and the small HTTP server through which the operator reads it.

Several threads write to the board and read from it: training, upload, HTTP server, watchdogs.
"""

from __future__ import annotations

import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
MAX_CONNECTIONS: Final = 16
"""Maximum number of open connections, each with a thread: the operator's, a scraper's, and room for both to
restart."""
IDLE_SECONDS: Final = 90.0
"""A connection without a request for so long is closed. The operator keeps those of trainers that it asks
every 10 to 40 s. Prometheus asks every 15 to 60 s."""


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
    utilisation: float | None = None
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
    def seconds_left(self) -> float | None:
        """Estimated seconds until the last step; None if the end or the speed is unknown."""
        if not self.total_steps or not self.steps_per_second:
            return None
        return max(0, self.total_steps - self.step) / self.steps_per_second

    @property
    def lost_steps(self) -> int:
        """Steps done that are in no committed checkpoint."""
        return self.step - max(self.durable_step or 0, self.start_step or 0)


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
            state=facts.shown_state,
            attempt=facts.attempt,
            jobUID=facts.job_uid,
            worker=facts.worker,
            step=facts.step,
            totalSteps=facts.total_steps,
            loss=facts.finite_loss,
            samplesPerSecond=facts.samples_per_second,
            stepsPerSecond=facts.steps_per_second,
            etaSeconds=facts.seconds_left,
            durableStep=facts.durable_step,
            durableTime=log.rfc3339(facts.durable_time) if facts.durable_time else "",
            startStep=facts.start_step,
            saveSeconds=facts.save_seconds,
            emergencySeconds=facts.emergency_seconds,
            graceSeconds=facts.grace_seconds,
            warning=facts.warning,
            waitingFor=facts.waiting_for,
            ignoredSettings=facts.ignored_settings,
            idleSeconds=self.heartbeat.idle,
            hangSeconds=self.heartbeat.limit(facts.state),
            gpuUtilisation=facts.utilisation,
            gpuMemory=facts.gpu_memory,
            timeSplit=self.time_split,
            bestStep=facts.best_step,
        )

    def message(
        self,
        outcome: Outcome,
        text: str,
        *,
        reason: str = "",
        signalled_at: float | None = None,
        durable_seconds: float | None = None,
    ) -> TerminationMessage:
        """Builds the termination message from `text` and the current facts."""
        facts = self.facts
        if facts.save_failures:
            text += f" {facts.save_failures} save(s) failed on the way, the last with: {facts.last_failure}"
        return TerminationMessage(
            outcome=outcome,
            reason=reason,
            message=text,
            attempt=facts.attempt,
            step=facts.step if facts.total_steps or facts.step else None,
            totalSteps=facts.total_steps or None,
            loss=facts.finite_loss,
            startStep=facts.start_step,
            durableStep=facts.durable_step,
            key=facts.key,
            signalledAt=signalled_at,
            durableSeconds=durable_seconds,
            firstStepSeconds=facts.first_step_seconds,
            startupSeconds=facts.startup_seconds,
            outputURI=facts.output_uri,
            emergencySeconds=facts.emergency_seconds,
            graceSeconds=facts.grace_seconds,
            warning=facts.warning,
            ignoredSettings=facts.ignored_settings,
            timeSplit=None if outcome is Outcome.UNTRAINED else self.time_split,
            bestStep=facts.best_step,
        )

    def metrics(self) -> str:
        """Returns the metrics in Prometheus text format."""
        facts, split = self.facts, self.time_split
        gauges: dict[str, float | None] = {
            "spottrain_attempt": facts.attempt,
            "spottrain_step": facts.step,
            "spottrain_total_steps": facts.total_steps or None,
            "spottrain_loss": facts.loss,
            "spottrain_samples_per_second": facts.samples_per_second,
            "spottrain_steps_per_second": facts.steps_per_second,
            "spottrain_durable_step": facts.durable_step,
            "spottrain_save_seconds": facts.save_seconds,
            "spottrain_save_stall_seconds": facts.stall_seconds,
            "spottrain_emergency_seconds": facts.emergency_seconds,
            "spottrain_grace_seconds": facts.grace_seconds,
            "spottrain_gpu_utilisation": facts.utilisation,
            "spottrain_gpu_memory": facts.gpu_memory,
            "spottrain_mfu": facts.mfu,
            "spottrain_flops_per_step": facts.flops_per_step,
            "spottrain_idle_seconds": self.heartbeat.idle,
            "spottrain_hang_seconds": self.heartbeat.limit(facts.state),
            "spottrain_durable_age_seconds": time.time() - facts.durable_time if facts.durable_time else None,
            "spottrain_unsaved_seconds": None if split is None else split.unsaved,
            "spottrain_best_step": facts.best_step,
        }
        counters = {
            "spottrain_saves_total": facts.saves,
            "spottrain_save_failures_total": facts.save_failures,
        }
        lines = [_family(name, value) for name, value in {**gauges, **counters}.items() if value is not None]
        lines.append(_family("spottrain_state", {f'state="{facts.shown_state}"': 1}))
        if split is not None:
            seconds = {f'part="{part}"': getattr(split, part) for part in PARTS}
            lines.append(_family("spottrain_seconds_total", seconds))
        if facts.shares:
            shares = {f'part="{part}"': share for part, share in facts.shares.items()}
            lines.append(_family("spottrain_time_share", shares))
        if facts.verdict:
            lines.append(_family("spottrain_verdict", {f'name="{facts.verdict}"': 1}))
        return "\n".join(lines) + "\n"


METRICS: Final = {
    "spottrain_attempt": "Number of the attempt.",
    "spottrain_step": "Optimizer steps done.",
    "spottrain_total_steps": "Optimizer steps of the whole training.",
    "spottrain_loss": "Loss of the last logged step.",
    "spottrain_samples_per_second": "Samples trained per second.",
    "spottrain_steps_per_second": "Optimizer steps per second.",
    "spottrain_durable_step": "Last step that HEAD lists.",
    "spottrain_durable_age_seconds": "Seconds since the copy of that step was taken.",
    "spottrain_best_step": "Step of the evaluation with the lowest loss so far.",
    "spottrain_save_seconds": "Seconds of the last save, from its copy to its commit.",
    "spottrain_save_stall_seconds": "Seconds for which the last save stopped the training.",
    "spottrain_saves_total": "Saves that were committed.",
    "spottrain_save_failures_total": "Saves that failed.",
    "spottrain_unsaved_seconds": "Seconds of training that no checkpoint has.",
    "spottrain_emergency_seconds": "Estimated seconds of a save after a request to stop.",
    "spottrain_grace_seconds": "Seconds from SIGTERM to SIGKILL.",
    "spottrain_idle_seconds": "Seconds since the training last moved.",
    "spottrain_hang_seconds": "Seconds of no movement after which it counts as hung.",
    "spottrain_gpu_utilisation": "Share of the time in which the GPU ran a kernel (NVML).",
    "spottrain_gpu_memory": "Share of the GPU's memory in use (NVML).",
    "spottrain_mfu": "Model FLOP utilisation.",
    "spottrain_flops_per_step": "FLOP of an optimizer step.",
    "spottrain_state": "1 for the present state.",
    "spottrain_seconds_total": "Where the seconds of this process went.",
    "spottrain_time_share": "Where the time of a step goes, as shares.",
    "spottrain_verdict": "1 for what limits the training.",
}
"""What the trainer's metrics say; those that end in `_total` are counters, the others gauges."""


def _family(name: str, samples: float | Mapping[str, float]) -> str:
    """Returns a metric in Prometheus' text format; `samples` by their labels, or one without labels."""
    kind = "counter" if name.endswith("_total") else "gauge"
    lines = [f"# HELP {name} {METRICS[name]}", f"# TYPE {name} {kind}"]
    if isinstance(samples, Mapping):
        lines += [f"{name}{{{labels}}} {value}" for labels, value in samples.items()]
    else:
        lines.append(f"{name} {samples}")
    return "\n".join(lines)


class _Handler(BaseHTTPRequestHandler):
    board: ClassVar[ProgressBoard]
    stop: ClassVar[Callable[[Stop], bool]]
    protocol_version = "HTTP/1.1"
    timeout = 5.0
    """Seconds that a request may pause while it is read."""
    idle_seconds: ClassVar[float]
    wbufsize = -1  # headers and body are one packet: the second one would wait for the client's delayed ACK

    def handle_one_request(self) -> None:
        """Answers a request, and waits for the next one."""
        super().handle_one_request()
        if not self.close_connection:
            self.connection.settimeout(self.idle_seconds)
            self.close_connection = not self.rfile.peek(1)  # type: ignore[attr-defined]
            self.connection.settimeout(self.timeout)

    def parse_request(self) -> bool:
        server = self.server
        assert isinstance(server, _Server)
        server.requested(self.connection)
        return super().parse_request()

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
    """Has a thread for each connection. Of too many, the one whose last request is longest ago is closed.

    A new connection is therefore always served, whoever holds the others open.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[_Handler]) -> None:
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}
        """In the order of their last requests, or of their start."""
        # HTTPServer's own binding asks for the host's name, which may wait for a DNS server.
        super().__init__((host, port), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening_socket(host, port)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):  # the client has closed it
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread waits for a request, and ends
            self._open[request] = None
        super().process_request(request, client_address)

    def requested(self, connection: socket.socket) -> None:
        """Records that a request comes in on this connection."""
        with self._lock:
            if connection in self._open:
                del self._open[connection]
                self._open[connection] = None

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

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
    idle_seconds: float = IDLE_SECONDS,
) -> int | None:
    """Serves in a daemon thread and returns the port; None if it cannot listen (training goes on).

    Args:
        board: What is served.
        port: 0 takes a free one.
        stop: Handles the operator's stop order; returns False if the order is not meant for this trainer.
        host: IP address on which it listens; "" for all, of IPv4 and of IPv6.
        idle_seconds: How long a connection may be without a request.
    """
    given = {"board": board, "stop": staticmethod(stop), "idle_seconds": idle_seconds}
    try:
        server = _Server(host, port, type("Handler", (_Handler,), given))
    except OSError as error:
        why = f"{error} ({BIND_ADDRESS}={host})" if host else str(error)
        log.event("progress-not-served", port=port, error=why)
        return None
    threading.Thread(target=server.serve_forever, name="spottrain-progress", daemon=True).start()
    return int(server.server_address[1])
