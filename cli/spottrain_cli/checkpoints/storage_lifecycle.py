"""`spottrain checkpoints lifecycle`: lets S3 move what no job will read again to a cheaper storage class.

The rule acts by tag only, and only this command sets the tag. It never tags what HEAD names, including the
newest and the best, except for leftovers of earlier jobs on request. A resuming job reads nothing else, so it
never meets an archived object.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from spottrain.checkpoint.head.state import folder_of
from spottrain.cli.output import Answer
from spottrain.contract import CHECKPOINTS_PREFIX
from spottrain.core.text import counted
from spottrain.errors import ConfigurationError
from spottrain.storage.base import KeyMissing, Store

from spottrain_cli.checkpoints.listing import Inventory, look
from spottrain_cli.figures import size

TAG: Final = "spottrain"
COLD: Final = "cold"
FEWEST_DAYS: Final = {
    "GLACIER": 0,
    "DEEP_ARCHIVE": 0,
    "GLACIER_IR": 0,
    "INTELLIGENT_TIERING": 0,
    "STANDARD_IA": 30,
}
"""Minimum age in days at which S3 moves an object to a class (S3 user guide, transitions)."""
ID_LIMIT: Final = 255
"""Maximum number of characters of a rule's ID (S3 API)."""
ASKING: Final = 16


def lifecycle(store: Store, *, days: int, storage_class: str, earlier_jobs: bool, apply: bool) -> Answer:
    """Shows the rule and what it affects; with `apply`, tags the objects and merges it. S3 only."""
    if days < (fewest := FEWEST_DAYS[storage_class]):
        raise ConfigurationError(
            f"--days is {days}; S3 moves objects to {storage_class} after {fewest} days or more"
        )
    bucket = _bucket(store)
    seen = look(store)
    cold = _cold_keys(seen, earlier_jobs=earlier_jobs)
    rule = _rule(bucket.key_prefix(CHECKPOINTS_PREFIX), days, storage_class)
    facts: dict[str, Any] = {"uri": store.uri, "rule": rule, "cold": list(cold), "bytes": seen.bytes(cold)}
    sum_ = f"cold: {counted(len(cold), 'object')}, {size(seen.bytes(cold))}"
    lines = [json.dumps(rule, indent=2), sum_]
    if not apply:
        hint = "nothing was changed; --apply tags these objects and adds the rule to those of the bucket"
        return Answer(facts=facts | {"applied": False}, lines=[*lines, hint])
    warm = [key for key in seen.objects if key not in cold]
    lifted, tagged = _tag(bucket, warm, cold=False), _tag(bucket, cold, cold=True)
    others = len(bucket.merge(rule).rules) - 1
    done = (
        f"tagged {counted(tagged, 'object')} {TAG}={COLD}, removed the tag from {lifted}; the rule is in "
        f"force beside {counted(others, 'other rule')} of the bucket"
    )
    applied = {"applied": True, "tagged": tagged, "untagged": lifted, "otherRules": others}
    return Answer(facts=facts | applied, lines=[*lines, done])


def _cold_keys(seen: Inventory, *, earlier_jobs: bool) -> tuple[str, ...]:
    """Returns objects that no job reads again: orphans and, on request, those set aside by a fresh start.

    Without HEAD there are none: a person may be about to restore HEAD.
    """
    if seen.head is None:
        return ()
    aside = {entry.key for entry in seen.head.checkpoints if entry.foreign and earlier_jobs}
    return (*seen.orphans, *(key for key in seen.objects if folder_of(key) in aside))


def _rule(prefix: str, days: int, storage_class: str) -> dict[str, Any]:
    """Returns the rule for one URI, identified by its ID, so that several URIs can share a bucket."""
    name = f"spottrain-cold:{prefix}"
    if len(name) > ID_LIMIT:
        name = f"spottrain-cold:{hashlib.sha256(prefix.encode()).hexdigest()}"
    return {
        "ID": name,
        "Status": "Enabled",
        "Filter": {"And": {"Prefix": prefix, "Tags": [{"Key": TAG, "Value": COLD}]}},
        "Transitions": [{"Days": days, "StorageClass": storage_class}],
    }


def _bucket(store: Store) -> Any:
    try:
        from spottrain.storage.s3 import S3Store
        from spottrain.storage.s3_lifecycle import S3Lifecycle
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"lifecycle rules need boto3 ({error}); install spottrain[s3]") from error
    if not isinstance(store, S3Store):
        raise ConfigurationError(f"{store.uri} is not in S3; only S3 has lifecycle rules and object tags")
    return S3Lifecycle(store)


def _tag(bucket: Any, keys: Sequence[str], *, cold: bool) -> int:
    """Sets or removes the tag where needed, and keeps all others. Returns the number of changed objects."""

    def one(key: str) -> bool:
        try:
            tags = bucket.tags(key)
            if (tags.get(TAG) == COLD) is cold:
                return False
            rest = {name: value for name, value in tags.items() if name != TAG}
            bucket.set_tags(key, rest | ({TAG: COLD} if cold else {}))
        except KeyMissing:  # deleted in the meantime
            return False
        return True

    with ThreadPoolExecutor(ASKING) as pool:
        return sum(pool.map(one, keys))
