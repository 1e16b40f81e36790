"""What version 0.3 wrote into a status, in today's names. Pure. Goes with the release after the next.

In 0.3 the status held the bookkeeping, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from decimal import Decimal
from typing import Any, Final

from spottrain_operator.api.bookkeeping import Bookkeeping, CostSums
from spottrain_operator.api.training_job import KEPT_ATTEMPTS
from spottrain_operator.api.wire import camel, decode

Json = Mapping[str, Any]

STATUS: Final = {"activeSince": "startTime", "gateUntil": "gateEndTime", "nextStart": "nextStartTime"}
TIMES: Final = {
    "started": "startTime",
    "bound": "boundTime",
    "stepped": "firstStepTime",
    "ended": "endTime",
    "startErrorSince": "startErrorTime",
}
CONDITIONS: Final = frozenset(
    {
        *("RuntimeAttached", "StoreReachable", "Interrupted", "CostLimited", "Reconciling"),
        *("SaveFitsNotice", "TrainingSettingsApplied"),
    }
)
"""Those that went."""
SINCE: Final = {
    ("Interrupted", "True"): "interruptionTime",
    ("StoreReachable", "False"): "storeUnreachableTime",
}
COST: Final = {"time": "updateTime"}
PROGRESS: Final = {"time": "pollTime"}
SUM_NAMES: Final = tuple(camel(each.name) for each in fields(CostSums))
SUMS: Final = ("spent", "use", "boot", "idle", "unknownSeconds", "onDemandIdeal", "saving", "updateTime")
PARTS: Final = (
    *("productive", "startup", "dataWait", "checkpointStall", "restore", "rollback", "waiting", "other"),
    *("wanted", "allocated", "runtime", "scheduling", "paid"),
)


def is_of_0_3(status: Json) -> bool:
    return "ready" in status


def status_of_0_3(status: Json) -> dict[str, Any]:
    """Returns a status with today's names and without what is in the bookkeeping now."""
    found = _renamed(status, STATUS)
    for name in ("ready", "interruptionTimes", "spotReclaims"):
        found.pop(name, None)
    conditions = status.get("conditions") or ()
    found["conditions"] = [c for c in conditions if c["type"] not in CONDITIONS]
    found |= {
        SINCE[state]: c["lastTransitionTime"]
        for c in conditions
        if (state := (c["type"], c["status"])) in SINCE
    }
    found["attempts"] = [_attempt(record) for record in status.get("attempts") or ()][-KEPT_ATTEMPTS:]
    for name, names, kept in (("cost", COST, SUMS), ("goodput", {}, PARTS)):
        if name in found:
            found[name] = {k: v for k, v in _renamed(found[name], names).items() if k in kept}
    if "progress" in found:
        found["progress"] = _renamed(found["progress"], PROGRESS)
    return found


def _attempt(record: Json) -> dict[str, Any]:
    found = _renamed(record, TIMES)
    ranks = found.pop("ranks", [])
    for name in ("useSeconds", "onDemandUse"):
        found.pop(name, None)
    return found | {"createdWorkers": len(ranks)}


def _renamed(part: Json, names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in part.items()}


def books_of_0_3(status: Json) -> Bookkeeping | None:
    """Returns the bookkeeping in a status; None where there is none."""
    cost, goodput = status.get("cost"), status.get("goodput")
    if not is_of_0_3(status) or not (cost or goodput):
        return None
    books: dict[str, Any] = {"nodes": [_nodes(record) for record in status.get("attempts") or ()]}
    if cost:
        books["ledger"] = _ledger(cost, status.get("attempts") or ())
    if goodput:
        names = ("time", "elapsed", "covered", "coveredUntil", "counted", "closed")
        times = {name: goodput[name] for name in names if name in goodput}
        books["times"] = times | {"attempts": [_renamed(a, TIMES) for a in goodput.get("attempts") or ()]}
    return decode(Bookkeeping, books, "status")


def _nodes(record: Json) -> dict[str, Any]:
    ranks = {rank["rank"]: rank.get("node", "") for rank in record.get("ranks") or ()}
    names = [ranks.get(rank, "") for rank in range(max(ranks, default=-1) + 1)]
    return {"number": record["number"], "names": names}


def _ledger(cost: Json, attempts: Any) -> dict[str, Any]:
    """Returns the sums by attempt, all as use, and what is left of the job's sums."""
    sums = {record["number"]: _sums_of_attempt(record) for record in attempts}
    whole = {name: Decimal(cost.get(name, "0")) for name in SUM_NAMES}
    whole["use"] -= Decimal(cost.get("refunded", "0"))
    rest = {name: whole[name] - sum(s.get(name, Decimal(0)) for s in sums.values()) for name in SUM_NAMES}
    return {
        "time": cost.get("time"),
        "nodes": [_account(node) for node in cost.get("nodes") or ()],
        "attempts": [{"number": n, "sums": _texts(sums[n])} for n in sorted(sums)],
        "earlier": _texts(rest),
    }


def _account(node: Json) -> dict[str, Any]:
    used, gpus = node.get("used"), node.get("gpus")
    share = Decimal(used) / gpus if used and gpus else Decimal(node.get("fraction") or 1)
    return _renamed(node, TIMES) | {"share": f"{min(Decimal(1), share):.6f}"}


def _sums_of_attempt(record: Json) -> dict[str, Decimal]:
    same = ("useSeconds", "unknownSeconds", "onDemandUse")
    return {name: Decimal(record.get(name, "0")) for name in same} | {
        "use": Decimal(record.get("spent", "0"))
    }


def _texts(sums: Mapping[str, Decimal]) -> dict[str, str]:
    return {name: f"{value:f}" for name, value in sums.items()}
