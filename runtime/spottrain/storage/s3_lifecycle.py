"""Lifecycle rules of a bucket and tags of its objects. Training runs do not need them.

S3 keeps all rules of a bucket in one document, without conditional writes. A change by someone else between
our GET and our PUT is lost. So the document is read right before the PUT, only our own rule (found by its ID)
is changed, and the result is read back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from spottrain.errors import ConfigurationError, RunError
from spottrain.storage.s3 import S3Store

NO_RULES: Final = "NoSuchLifecycleConfiguration"
DEFAULT_SIZE: Final = "TransitionDefaultMinimumObjectSize"
"""A setting in the document besides its rules; a PUT without it would reset it."""

Rule = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The whole lifecycle document."""

    rules: tuple[Rule, ...] = ()
    other: tuple[tuple[str, Any], ...] = ()

    def having(self, rule: Rule) -> Rules:
        """Returns the document with `rule` in place of the rule with the same ID, or added at the end."""
        if rule["ID"] not in [each.get("ID") for each in self.rules]:
            return Rules(rules=(*self.rules, rule), other=self.other)
        merged = (rule if each.get("ID") == rule["ID"] else each for each in self.rules)
        return Rules(rules=tuple(merged), other=self.other)


class S3Lifecycle:
    def __init__(self, store: S3Store) -> None:
        self._call = store.call
        self._prefix = store._prefix
        self.uri = store.uri

    def key_prefix(self, prefix: str) -> str:
        """Returns the full key prefix in the bucket, for a rule's filter."""
        return self._prefix + prefix

    def rules(self) -> Rules:
        try:
            reply = self._call("get_bucket_lifecycle_configuration", None)
        except RunError as error:
            if _code(error) == NO_RULES:
                return Rules()
            raise
        other = tuple((name, reply[name]) for name in (DEFAULT_SIZE,) if name in reply)
        return Rules(rules=tuple(reply.get("Rules", ())), other=other)

    def merge(self, rule: Rule) -> Rules:
        """Adds or replaces `rule`. Raises ConfigurationError if it is missing afterwards."""
        before = self.rules()
        old = [each.get("ID", "without an ID") for each in before.rules if "Prefix" in each]
        if old:
            raise ConfigurationError(
                f"the bucket of {self.uri} has lifecycle rules in the old form, without Filter "
                f"({', '.join(old)}), and S3 accepts no rule with tags beside them; rewrite them with "
                "a Filter. No rule was changed"
            )
        wanted = before.having(rule)
        document = {"Rules": list(wanted.rules)}
        other = dict(wanted.other)
        self._call("put_bucket_lifecycle_configuration", None, LifecycleConfiguration=document, **other)
        after = self.rules()
        if rule not in after.rules or any(each not in after.rules for each in wanted.rules):
            raise ConfigurationError(
                f"the lifecycle rules of the bucket of {self.uri} differ from what was written: "
                "another client changed them at the same time, or the server alters rules. Check "
                "them (aws s3api get-bucket-lifecycle-configuration), then try again"
            )
        return after

    def tags(self, key: str) -> dict[str, str]:
        reply = self._call("get_object_tagging", key)
        return {each["Key"]: each["Value"] for each in reply["TagSet"]}

    def set_tags(self, key: str, tags: dict[str, str]) -> None:
        """Replaces all tags of the object; S3 has no call that sets one."""
        pairs = [{"Key": name, "Value": value} for name, value in tags.items()]
        self._call("put_object_tagging", key, Tagging={"TagSet": pairs})


def _code(error: RunError) -> str:
    response: Any = getattr(error.__cause__, "response", {})
    return str(response.get("Error", {}).get("Code", ""))
