"""Errors of the operator. Raised by api, wire and cluster; caught in apply, observe and the work queue.

OperatorError
├── InvalidSpec     the job cannot be understood: a condition, no retry
├── Conflict        the view was stale or another writer was faster: read again, plan again
└── ApiError        the API server refused (with its status and words) or did not answer (status 0)
"""

from __future__ import annotations

from typing import Any


class OperatorError(Exception):
    """Anything that the operator raises itself."""


class InvalidSpec(OperatorError):
    """`str(error)` is a sentence that names the field's path."""


class Conflict(OperatorError):
    """The object has changed since it was read."""


class ApiError(OperatorError):
    """An answer of the API server that is no success; `str(error)` is the server's sentence."""

    def __init__(self, status: int, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.details = details or {}
