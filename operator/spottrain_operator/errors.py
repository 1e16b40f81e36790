"""Errors of the operator. Raised by api, wire, cluster and apply; caught in apply, observe and the queue.

OperatorError
├── InvalidSpec     the job cannot be understood: a condition, no retry
├── Conflict        the view was stale or another writer was faster: read again, plan again
├── Incomplete      something of a plan failed, the rest was done: plan again, with a growing delay
└── ApiError        the API server refused (with its status and words) or did not answer (status 0)
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any


class OperatorError(Exception):
    """Anything that the operator raises itself."""


class InvalidSpec(OperatorError):
    """`str(error)` is a sentence that names the field's path."""


class Conflict(OperatorError):
    """The object has changed since it was read."""


class Incomplete(OperatorError):
    """Some actions of a plan failed; `str(error)` says which. The others were carried out."""

    def __init__(self, message: str, *, again: timedelta | None = None, silence: bool = False) -> None:
        super().__init__(message)
        self.silence = silence
        """Whether all of them failed because the API server did not answer."""
        self.again = again
        """When the job must be looked at again, whatever the delay after the failure."""


class ApiError(OperatorError):
    """An answer of the API server that is no success; `str(error)` is the server's sentence."""

    def __init__(self, status: int, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.details = details or {}

    @property
    def causes(self) -> set[str]:
        """The machine-readable reasons that the API server gives, such as NamespaceTerminating."""
        return {str(cause.get("reason", "")) for cause in self.details.get("causes") or ()}
