"""Translates S3 errors, by their codes, to the store's exceptions with messages for the user."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import urllib3.exceptions
from botocore import exceptions as boto

from spottrain.errors import (
    BucketNotFound,
    CheckpointArchived,
    ConfigurationError,
    RunError,
    StoreDenied,
    StoreUnavailable,
    StoreUnsuitable,
)
from spottrain.storage.base import KeyMissing, PreconditionFailed, Truncated
from spottrain.storage.s3_client import may_come

POLICY: Final = (
    "check that its policy allows s3:ListBucket and s3:ListBucketMultipartUploads on the bucket, and "
    "s3:GetObject, s3:PutObject, s3:AbortMultipartUpload and s3:DeleteObject on the prefix"
)
ENCRYPTION: Final = (
    "; if the bucket's policy demands encryption, set checkpoint.encryption.kmsKey "
    "(SPOTTRAIN_CHECKPOINT_KMS_KEY) to AES256, or to the key that it names"
)
"""Added where a write is denied: no response of S3 says which statement of a policy denied it."""
WRITES: Final = frozenset({"PutObject", "CreateMultipartUpload"})
DENIED: Final[Mapping[str, str]] = {
    "AccessDenied": POLICY,
    "InvalidAccessKeyId": "the store does not know this AWS_ACCESS_KEY_ID; check it, and the endpoint",
    "XAdminUserNotFound": "the store does not know this AWS_ACCESS_KEY_ID; check it",  # versitygw, with 404
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY, and that no proxy rewrites the Host header",
    "ExpiredToken": "the temporary credentials have expired; check what should renew them",
    "TokenRefreshRequired": "the temporary credentials have expired; check what should renew them",
    "InvalidToken": "check AWS_SESSION_TOKEN; it must belong to the access key",
    "RequestTimeTooSkewed": "the clocks of this node and the store differ too much; check its time service",
}
KMS: Final = (
    "check checkpoint.encryption.kmsKey, that the key is enabled and in the bucket's region, and that the "
    "role may kms:GenerateDataKey and kms:Decrypt with it"
)
GIVE: Final = (
    "set checkpoint.credentialsSecretRef, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the service "
    "account a role"
)
WEB_IDENTITY: Final = (
    "check AWS_ROLE_ARN and AWS_WEB_IDENTITY_TOKEN_FILE, and that the role trusts this service account"
)
MOVED: Final = frozenset(
    {
        "PermanentRedirect",
        "TemporaryRedirect",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
    }
)
GONE: Final = frozenset({"NoSuchKey", "NoSuchUpload"})
BY_TIER: Final = frozenset({"ARCHIVE_ACCESS", "DEEP_ARCHIVE_ACCESS"})
"""Intelligent-Tiering's archive tiers: restored permanently, so the request must not set Days."""
RESTORED_DAYS: Final = 7
PASSING: Final = frozenset({"RequestTimeout", "BadDigest", "XAmzContentSHA256Mismatch", "OperationAborted"})
"""4xx codes where a retry may succeed."""
STS_PASSING: Final = frozenset({"Throttling", "IDPCommunicationError", "ExpiredTokenException"})
"""Codes of AssumeRoleWithWebIdentity where a retry may succeed: the token in the file is replaced in time."""
NO_CREDENTIALS: Final = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.NoAuthTokenError,
    boto.UnauthorizedSSOTokenError,
    boto.ProfileNotFound,
)
NO_ANSWER: Final = (
    boto.ConnectionError,  # no server at that address
    boto.HTTPClientError,  # connect, read, TLS, proxy
    boto.IncompleteReadError,
    boto.ResponseStreamingError,
    boto.ChecksumError,
    boto.FlexibleChecksumError,
    urllib3.exceptions.HTTPError,  # botocore does not wrap it when the body of an error response stalls
)
FAILURES: Final = (boto.ClientError, boto.BotoCoreError, urllib3.exceptions.HTTPError, OSError)
"""All exceptions that a call of botocore raises; OSError: a web identity token that cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTarget:
    """The object and server of a request, for error messages."""

    bucket: str
    key: str
    endpoint: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key} at {self.endpoint}"


def translate(error: Exception, place: RequestTarget) -> Exception:
    """Returns the store's own exception for one of botocore's."""
    if isinstance(error, boto.ClientError):
        return _from_reply(error, place)
    if isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return ConfigurationError(
            f"the certificate of {place} is not trusted ({error}); name the file with its CA in AWS_CA_BUNDLE"
        )
    if isinstance(error, boto.CredentialRetrievalError) and may_come(error):
        return StoreUnavailable(f"no credentials for {place} yet: {error}; if this lasts, {GIVE}")
    if isinstance(error, NO_CREDENTIALS):
        return StoreDenied(f"no credentials for {place} ({error}); {GIVE}")
    if isinstance(error, NO_ANSWER):
        return StoreUnavailable(f"{place} did not respond: {error}")
    if isinstance(error, FileNotFoundError) and Path(error.filename or "").parent.is_dir():
        return StoreUnavailable(
            f"no credentials for {place} yet: {error.filename}: {error.strerror}; if this lasts, "
            f"{WEB_IDENTITY}"
        )
    if isinstance(error, OSError) and error.filename:
        return StoreDenied(f"no credentials for {place}: {error.filename}: {error.strerror}; {WEB_IDENTITY}")
    return ConfigurationError(f"{place} cannot be used: {error}")


def restore_command(place: RequestTarget, storage_class: str, aws: bool) -> str:
    """Returns the command that restores an archived object. `storage_class` may be an archive tier."""
    wanted: dict[str, object] = {"GlacierJobParameters": {"Tier": "Standard"}}
    if storage_class not in BY_TIER:
        wanted = {"Days": RESTORED_DAYS, **wanted}
    words = ["aws", "s3api", "restore-object", "--bucket", place.bucket, "--key", place.key]
    words += ["--restore-request", json.dumps(wanted)]
    return shlex.join(words + ([] if aws else ["--endpoint-url", place.endpoint]))


def _archived(error: Mapping[str, Any], place: RequestTarget) -> CheckpointArchived:
    storage_class = str(error.get("AccessTier") or error.get("StorageClass") or "an archive class")
    command = restore_command(place, storage_class, aws=".amazonaws.com" in place.endpoint)
    return CheckpointArchived(
        f"{place} was moved to {storage_class} and cannot be read; restore it, and each other object "
        f"of its folder, with: {command} - and start the job again once that is done (hours)"
    )


def _from_reply(error: boto.ClientError, place: RequestTarget) -> Exception:
    response: Any = error.response
    code = str(response.get("Error", {}).get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    what = f"{place}: {status} {code}: {response.get('Error', {}).get('Message', '').rstrip('.')}"
    if error.operation_name == "AssumeRoleWithWebIdentity":
        return _role_error(status, code, what)
    if code == "InvalidObjectState":
        return _archived(response["Error"], place)
    if status == 416:
        return Truncated(what)
    if status == 412 or (status == 409 and code not in PASSING):
        return PreconditionFailed(what)
    if code in GONE or (status == 404 and error.operation_name == "HeadObject"):  # whose reply has no code
        return KeyMissing(what)
    refused = _refused(code, status, what)
    if code == "AccessDenied" and error.operation_name in WRITES:
        return StoreDenied(f"{refused}{ENCRYPTION}")
    return refused


def _role_error(status: int, code: str, what: str) -> RunError:
    """Error for a failed web identity: STS issued no credentials."""
    if status >= 500 or status == 429 or code in STS_PASSING:
        return StoreUnavailable(f"STS failed: {what}")
    return StoreDenied(f"STS refused the role for {what}; {WEB_IDENTITY}")


def _refused(code: str, status: int, what: str) -> RunError:
    # 403 never means that the object is absent.
    if code.startswith("KMS.") or (status == 403 and "kms:" in what):
        return StoreDenied(f"the store may not use the KMS key for {what}; {KMS}")
    if code in DENIED or status in (401, 403):
        return StoreDenied(f"the store denied {what}; {DENIED.get(code, POLICY)}")
    if not code or code.isdigit():
        # A truncated response, or a server that is not S3; neither says anything about the key.
        return StoreUnavailable(
            f"the response is not from an S3 server: {what}; if this lasts, check the endpoint"
        )
    if code == "NoSuchBucket":
        return BucketNotFound(
            f"the bucket does not exist: {what}; create it, or check the URI and the endpoint"
        )
    if code in MOVED:
        return ConfigurationError(f"the bucket is in another region: {what}; set AWS_REGION")
    if code == "NotImplemented" or status == 501:
        return StoreUnsuitable(f"the store lacks an operation that checkpoints need: {what}")
    if status >= 500 or status in (408, 429) or code in PASSING:
        return StoreUnavailable(f"the store failed: {what}")
    return ConfigurationError(f"the store refused {what}; check the URI and the endpoint")
