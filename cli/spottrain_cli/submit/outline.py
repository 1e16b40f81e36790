"""What a submission will do, as lines for a person. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from spottrain.core.log_format import counted

from spottrain_cli.submit.pack import Packed
from spottrain_cli.submit.survival import Keeper, Survival

Json = Mapping[str, Any]

INSTANCE_TYPE: Final = "node.kubernetes.io/instance-type"
NODES: Final = {
    "Spot": "spot nodes",
    "OnDemand": "on-demand nodes",
    "Reserved": "reserved nodes",
    "SpotFirst": "spot nodes, on-demand where there are none",
    "Cheapest": "spot nodes, on-demand where the deadline needs it",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """List prices of an hour, of all workers together."""

    instance: str
    spot: float | None
    on_demand: float | None
    date: str


def of_manifest(manifest: Json) -> Survival:
    """Returns what survives by the manifest alone: its script is in the image."""
    checkpoint = manifest["spec"].get("checkpoint") or {}
    match checkpoint.get("mode", "Runtime"):
        case "Sync":
            return Survival(
                keeper=Keeper.SYNC, evidence=f"checkpoint.mode Sync of {checkpoint.get('syncPath')}"
            )
        case "Self":
            return Survival(keeper=Keeper.IMAGE, evidence="checkpoint.mode Self")
        case _:
            return Survival(
                keeper=Keeper.UNSEEN,
                evidence="the script is in the image",
                todo="`spottrain rehearse` tries a manifest on this machine",
            )


def lines(manifest: Json, survival: Survival, packed: Packed | None, price: Price | None) -> list[str]:
    """Returns a title, and below it what is done, each with a word in front."""
    metadata, spec = manifest["metadata"], manifest["spec"]
    name = metadata.get("name") or f"{metadata.get('generateName')}..."
    where = f" in namespace {metadata['namespace']}" if metadata.get("namespace") else ""
    rows = {
        "nodes": _nodes(spec),
        "price": _price(price),
        "image": ", ".join(
            dict.fromkeys(str(c.get("image")) for c in spec["template"]["spec"]["containers"])
        ),
        "code": ""
        if packed is None
        else f"{counted(len(packed.names), 'file')} of {packed.folder}, {_size(len(packed.body))} packed",
        "checkpoints": _checkpoints(spec),
        "reclaim": str(survival),
        "limits": ", ".join(_limits(spec)),
    }
    return [f"{name}{where}", *(f"  {word:<11}  {text}" for word, text in rows.items() if text)]


def instance_type(spec: Json) -> str:
    """Returns the only instance type that the pods can get; "" where several are possible."""
    selectors = [spec["template"]["spec"].get("nodeSelector") or {}]
    selectors += [pool.get("nodeSelector") or {} for pool in (spec.get("capacity") or {}).get("pools") or ()]
    found = {each[INSTANCE_TYPE] for each in selectors if INSTANCE_TYPE in each}
    return found.pop() if len(found) == 1 else ""


def _nodes(spec: Json) -> str:
    workers, capacity = spec.get("workers", 1), spec.get("capacity") or {}
    gpus = _gpus(spec)
    each = "no GPU" if gpus == 0 else counted(gpus, "GPU")
    pools = [str(pool.get("name")) for pool in capacity.get("pools") or ()]
    of_pools = f" of {', '.join(pools)}" if pools else ""
    number = counted(workers, "worker")
    every = " each" if workers > 1 else ""
    return f"{number} with {each}{every}, on {NODES[capacity.get('type', 'Spot')]}{of_pools}"


def _gpus(spec: Json) -> int:
    containers = spec["template"]["spec"]["containers"]
    trainer = next((each for each in containers if each.get("name") == "trainer"), containers[0])
    limits = (trainer.get("resources") or {}).get("limits") or {}
    asked = [int(n) for name, n in limits.items() if "gpu" in name and str(n).isdecimal()]
    return sum(asked) if asked else int(spec.get("gpusPerWorker", 1))


def _price(price: Price | None) -> str:
    if price is None:
        return "not known before the nodes are there; `spottrain cost` says it then"
    known = ((price.spot, "on spot"), (price.on_demand, "on demand"))
    words = ", ".join(f"${usd:,.2f} {what}" for usd, what in known if usd is not None)
    return f"about {words} an hour ({price.instance}, list prices of {price.date})"


def _checkpoints(spec: Json) -> str:
    checkpoint = spec.get("checkpoint") or {}
    if checkpoint.get("mode") == "Self":
        return ""
    uri = checkpoint.get("uri") or "below the default prefix of the namespace or cluster, at NAMESPACE/NAME"
    return f"{uri}, every {checkpoint.get('interval', '10m')}" if checkpoint.get("mode") != "Sync" else uri


def _limits(spec: Json) -> Iterator[str]:
    capacity = spec.get("capacity") or {}
    if limit := capacity.get("maxCostUSD"):
        yield f"suspended at ${limit}"
    if deadline := (capacity.get("cheapest") or {}).get("deadline"):
        yield f"done by {deadline}"
    if seconds := spec.get("activeDeadlineSeconds"):
        yield f"failed after {seconds} s"


def _size(number: int) -> str:
    return f"{number / 1024:,.1f} KiB" if number < 2**20 else f"{number / 2**20:,.1f} MiB"
