"""What a pod's own times say about its job's cost: sums by hand, to compare with the status."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

from localcluster.layout import GPUS_PER_NODE
from processcluster.install import DOLLARS_PER_HOUR
from spottrain.contract import TerminationMessage, TimeSplit

from tests.support.lab import Raw

PARTS = (
    "productive", "startup", "dataWait", "checkpointStall", "restore", "rollback", "waiting", "other",
)  # fmt: skip
CENT = Decimal("0.01")
SHARE = Decimal(1) / GPUS_PER_NODE
"""Of a node, of a pod with one GPU."""


def now() -> str:
    return datetime.now(UTC).isoformat()


def seconds(since: str, until: str) -> Decimal:
    begin, end = (datetime.fromisoformat(text) for text in (since, until))
    return Decimal(int((end - begin).total_seconds()))


def dollars(since: str, until: str) -> Decimal:
    return seconds(since, until) * DOLLARS_PER_HOUR / 3600


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of a pod that has ended, as its kubelet reported them."""

    bound: str
    began: str
    ended: str
    split: TimeSplit


def times(pod: Raw) -> Times:
    state = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    word = TerminationMessage.from_json(state["message"])
    assert word is not None and word.timeSplit is not None
    return Times(bound=bound(pod), began=state["startedAt"], ended=state["finishedAt"], split=word.timeSplit)


def bound(pod: Raw) -> str:
    conditions = pod["status"]["conditions"]
    return str(next(c["lastTransitionTime"] for c in conditions if c["type"] == "PodScheduled"))
