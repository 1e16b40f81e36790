"""Lifecycle rules of a bucket and tags of its objects. Called by `cli/cooling.py`; no training run needs it.

S3 keeps all rules of a bucket in one document without conditional writes: another's change between our GET
and our PUT is lost. So the document is read right before, nothing but our own rule (by its ID) is touched,
and it is read back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from spottrain.errors import ConfigurationError, RunError
from spottrain.storage.s3 import S3Store

NO_RULES: Final = "NoSuchLifecycleConfiguration"
DEFAULT_SIZE: Final = "TransitionDefaultMinimumObjectSize"
"""A setting of the document beside its rules; a PUT without it would reset it."""

Rule = dict[str, Any]
Call = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The whole document."""

    rules: tuple[Rule, ...] = ()
    other: tuple[tuple[str, Any], ...] = ()

    def having(self, rule: Rule) -> Rules:
        """With `rule` in the place of the one of its ID, or at the end."""
        if rule["ID"] not in [each.get("ID") for each in self.rules]:
            return Rules(rules=(*self.rules, rule), other=self.other)
        merged = (rule if each.get("ID") == rule["ID"] else each for each in self.rules)
        return Rules(rules=tuple(merged), other=self.other)


class S3Lifecycle:
    def __init__(self, store: S3Store) -> None:
        self._call: Call = getattr(store, "call", None) or store._call
        self._prefix = store._prefix
        self.uri = store.uri

    def key_prefix(self, prefix: str) -> str:
        """In the bucket, as a rule's filter wants it."""
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
        """Puts `rule` beside the bucket's others. Raises ConfigurationError where it is not there then."""
        before = self.rules()
        old = [each.get("ID", "without an ID") for each in before.rules if "Prefix" in each]
        if old:
            raise ConfigurationError(
                f"the bucket of {self.uri} has lifecycle rules in the old form, without Filter "
                f"({', '.join(old)}), beside which S3 takes no rule with tags; write them anew with a "
                "Filter. No rule was changed"
            )
        wanted = before.having(rule)
        document = {"Rules": list(wanted.rules)}
        other = dict(wanted.other)
        self._call("put_bucket_lifecycle_configuration", None, LifecycleConfiguration=document, **other)
        after = self.rules()
        if rule not in after.rules or any(each not in after.rules for each in wanted.rules):
            raise ConfigurationError(
                f"the lifecycle rules of the bucket of {self.uri} are not as they were written: somebody "
                "changed them at the same time, or the server alters rules. Look at them "
                "(aws s3api get-bucket-lifecycle-configuration), then try again"
            )
        return after

    def tags(self, key: str) -> dict[str, str]:
        reply = self._call("get_object_tagging", key)
        return {each["Key"]: each["Value"] for each in reply["TagSet"]}

    def set_tags(self, key: str, tags: dict[str, str]) -> None:
        """All tags of the object; there is no call that sets one."""
        pairs = [{"Key": name, "Value": value} for name, value in tags.items()]
        self._call("put_object_tagging", key, Tagging={"TagSet": pairs})


def _code(error: RunError) -> str:
    response: Any = getattr(error.__cause__, "response", {})
    return str(response.get("Error", {}).get("Code", ""))
