"""Which instance types are priced in which regions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from spottrain_operator.names import INSTANCE_TYPE_LABEL, Platform

from spottrain_prices.settings import Settings

REGION_LABEL: Final = "topology.kubernetes.io/region"
SCHEMES: Final[Mapping[str, str]] = {Platform.AWS: "aws://", Platform.AZURE: "azure://"}
"""Start of `spec.providerID` of a cloud's nodes."""

Wanted = Mapping[str, tuple[str, ...]]
"""Instance types by region."""


def wanted(settings: Settings, nodes: Iterable[Mapping[str, Any]]) -> Wanted:
    """Returns the types of the nodes, each in its region, and the listed types in the listed regions.

    Where no region is listed, the listed types are priced in the regions of the nodes.
    """
    found: dict[str, set[str]] = {}
    for node in nodes:
        if not str(node.get("spec", {}).get("providerID", "")).startswith(SCHEMES[settings.provider]):
            continue
        labels = node["metadata"].get("labels") or {}
        region, kind = labels.get(REGION_LABEL, ""), labels.get(INSTANCE_TYPE_LABEL, "")
        if region and kind:
            found.setdefault(region, set()).add(kind)
    for region in settings.regions or tuple(found):
        found.setdefault(region, set()).update(settings.instance_types)
    return {region: tuple(sorted(types)) for region, types in sorted(found.items()) if types}
