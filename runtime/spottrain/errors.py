"""Errors that end a run, each with the outcome and reason that go into the termination message.

RunError                 any error that ends the run with a message for the user
├── ConfigurationError   64: restarting will not help (bad URI, bad value, foreign HEAD, lost checkpoints)
├── StoreError           the store refused a request or was unreachable
│   ├── StoreDenied      64: 401, 403, no credentials
│   ├── BucketNotFound   64
│   ├── StoreUnsuitable  64: no conditional PUT
│   └── StoreUnavailable 69: 5xx or no response for too long; the next start may succeed
├── CheckpointError      64: missing, damaged beyond fall-back, or not for this model
│   └── CheckpointArchived 64: in an archive storage class
├── TrainingFailed       1: the training itself failed, such as a loss that is NaN or infinite
├── DataCacheFull        1: no space left for a download; another job may free some
├── PeerLost             79, or 75 if no step is lost: another rank is gone
└── Superseded           76: a newer attempt owns HEAD
"""

from __future__ import annotations

from typing import ClassVar

from spottrain.contract import Outcome, Reason


class RunError(Exception):
    """Ends the run. `str(error)` is a sentence: what went wrong, where, and what to do."""

    outcome: ClassVar[Outcome] = Outcome.FAILED
    reason: str = Reason.SCRIPT_FAILED

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason


class ConfigurationError(RunError):
    outcome = Outcome.BAD_CONFIGURATION
    reason = Reason.BAD_CONFIGURATION


class StoreError(RunError):
    outcome = Outcome.BAD_CONFIGURATION


class StoreDenied(StoreError):
    reason = Reason.STORE_DENIED


class BucketNotFound(StoreError):
    reason = Reason.BUCKET_NOT_FOUND


class StoreUnsuitable(StoreError):
    reason = Reason.STORE_UNSUITABLE


class StoreUnavailable(StoreError):
    outcome = Outcome.STORE_UNREACHABLE
    reason = Reason.STORE_UNAVAILABLE


class CheckpointError(RunError):
    outcome = Outcome.BAD_CONFIGURATION
    reason = Reason.CHECKPOINT_DAMAGED


class CheckpointArchived(CheckpointError):
    reason = Reason.CHECKPOINT_ARCHIVED


class TrainingFailed(RunError):
    reason = Reason.TRAINING_FAILED


class DataCacheFull(RunError):
    reason = Reason.DATA_CACHE_FULL


class PeerLost(RunError):
    """Not counted as this rank's failure: the rank that is gone reports the cause."""

    outcome = Outcome.INTERRUPTED_LOST
    reason = Reason.PEER_LOST


class Superseded(RunError):
    outcome = Outcome.SUPERSEDED
    reason = "Superseded"
