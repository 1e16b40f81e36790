"""Errors of the operator.

OperatorError
├── InvalidSpec     the job is invalid: sets a condition, no retry
├── NotLeading      a write was not sent, because another process may be the leader
├── Incomplete      some actions of a plan failed, the others were done: plan again, with a growing delay
└── ApiError        a request to the API server did not succeed; its `kind` is an ApiFailure
"""

from __future__ import annotations

from datetime import timedelta
from enum import Enum
from typing import Any


class OperatorError(Exception):
    """Base class of every error that the operator raises itself."""


class InvalidSpec(OperatorError, ValueError):
    """The job is invalid; `str(error)` is a sentence that names the field's path."""


class NotLeading(OperatorError):
    """A write was not sent, because this process does not lead, or not for certain."""


class Incomplete(OperatorError):
    """Some actions of a plan failed; `str(error)` says which. The others were carried out."""

    def __init__(self, message: str, *, again: timedelta | None = None, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable
        """Whether all of them failed because the API server did not respond."""
        self.again = again
        """When to reconcile the job again, whatever the delay after the failure."""


class ApiFailure(Enum):
    """Why a request to the API server did not succeed, in Kubernetes' words, by HTTP status."""

    UNREACHABLE = 0
    """No response, or one that is not the API server's."""
    BAD_REQUEST = 400
    FORBIDDEN = 403
    """By access rights or admission."""
    QUOTA_EXCEEDED = "403, by a ResourceQuota"
    NOT_FOUND = 404
    CONFLICT = 409
    """The object exists already, or is not the one or not in the version that was named."""
    EXPIRED = 410
    """The version that a watch or the next page of a LIST needs is no longer kept: list again."""
    INVALID = 422
    TOO_MANY_REQUESTS = 429
    SERVER_ERROR = 500
    OTHER = "another status"


class ApiError(OperatorError):
    """A request to the API server did not succeed; `str(error)` is the server's message.

    Args:
        status: The HTTP status; 0 without a usable response.
        message: The server's message.
        details: The `details` of its Status object.
    """

    def __init__(self, status: int, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.details = details or {}

    @property
    def kind(self) -> ApiFailure:
        if self.status == 403 and "exceeded quota" in str(self):
            return ApiFailure.QUOTA_EXCEEDED
        status = 500 if self.status >= 500 else self.status
        return next((kind for kind in ApiFailure if kind.value == status), ApiFailure.OTHER)

    @property
    def stale(self) -> bool:
        """Whether the object is gone, or is not what the request was about."""
        return self.kind in (ApiFailure.NOT_FOUND, ApiFailure.CONFLICT)

    @property
    def causes(self) -> set[str]:
        """The machine-readable reasons that the API server gives, such as NamespaceTerminating."""
        return {str(cause.get("reason", "")) for cause in self.details.get("causes") or ()}
