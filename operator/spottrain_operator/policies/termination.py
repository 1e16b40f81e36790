"""Reads the termination message of a pod. Pure."""

from __future__ import annotations

from spottrain.contract import TerminationMessage

from spottrain_operator.api.observed import Ended, PodView
from spottrain_operator.api.reports import bounded


def termination_message_of(pod: PodView) -> TerminationMessage | None:
    """Returns the pod's termination message; None where it is not in our format.

    It is the trainer's, or with checkpoint.mode Sync the sidecar's: there `done` means that all is uploaded,
    and not that the training is done.
    """
    return _read(pod.sync.ended if pod.sync is not None else pod.ended)


def _read(ended: Ended | None) -> TerminationMessage | None:
    try:
        word = TerminationMessage.from_json(ended.message) if ended and ended.message else None
    except RecursionError:  # [[[[[[...
        return None
    return bounded(word) if word is not None else None
