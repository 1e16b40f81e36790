"""Errors of the operator.

OperatorError
├── InvalidSpec     the job is invalid: sets a condition, no retry
├── Conflict        the view was stale or another writer was faster: read again, plan again
├── Incomplete      some actions of a plan failed, the others were done: plan again, with a growing delay
└── ApiError        the API server rejected it (with its status and message) or did not respond (status 0)
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any


class OperatorError(Exception):
    """Base class of every error that the operator raises itself."""


class InvalidSpec(OperatorError):
    """The job is invalid; `str(error)` is a sentence that names the field's path."""


class Conflict(OperatorError):
    """The object has changed since it was read."""


class Incomplete(OperatorError):
    """Some actions of a plan failed; `str(error)` says which. The others were carried out."""

    def __init__(self, message: str, *, again: timedelta | None = None, silence: bool = False) -> None:
        super().__init__(message)
        self.silence = silence
        """Whether all of them failed because the API server did not respond."""
        self.again = again
        """When to reconcile the job again, whatever the delay after the failure."""


class ApiError(OperatorError):
    """An unsuccessful response of the API server; `str(error)` is the server's message."""

    def __init__(self, status: int, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.details = details or {}

    @property
    def causes(self) -> set[str]:
        """The machine-readable reasons that the API server gives, such as NamespaceTerminating."""
        return {str(cause.get("reason", "")) for cause in self.details.get("causes") or ()}
