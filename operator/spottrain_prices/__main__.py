"""`python -m spottrain_prices`: one run of the price CronJob.

Its exit code is 0 where everything that was asked for has a price, else 1, so that the Job shows as failed;
what was found is written all the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from spottrain_operator.api.prices import parse
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.environment import Endpoint
from spottrain_operator.names import INSTANCE_TYPE_LABEL, Platform

from spottrain_prices import aws, azure
from spottrain_prices.cluster import CONFLICT, Cluster
from spottrain_prices.rates import Fetched, as_text, merged
from spottrain_prices.settings import Settings
from spottrain_prices.web import Failed

KEY: Final = "prices.json"
"""In the ConfigMap's data."""
ATTEMPTS: Final = 5
"""How often a write is tried that meets a change by somebody else."""
REGION_LABEL: Final = "topology.kubernetes.io/region"
SCHEMES: Final[Mapping[str, str]] = {Platform.AWS: "aws://", Platform.AZURE: "azure://"}
"""Start of `spec.providerID` of a cloud's nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    settings: Settings
    cluster: Cluster
    now: datetime

    def run(self) -> list[str]:
        """Fetches prices and writes those that were found. Returns a sentence for each error."""
        found = Fetched(self.now)
        nodes: list[dict[str, Any]] = []
        if self.settings.from_nodes:
            with found.part("failed to list the nodes, so their instance types have no price: "):
                nodes = list(self.cluster.nodes())
        self._fetch(found, wanted(self.settings, nodes))
        for note in found.notes:
            log("WARNING", note)
        if found.rates:
            with found.part("failed to write the prices: "):
                self._write(found)
        return found.errors

    def _fetch(self, found: Fetched, types: Mapping[str, tuple[str, ...]]) -> None:
        if not types:
            found.errors.append(
                f"there is nothing to price: no node of {self.settings.provider} has labels for its region "
                "and instance type, and priceJob.regions with priceJob.instanceTypes is empty"
            )
        elif self.settings.provider == Platform.AWS:
            aws.fetch(found, types, aws.connect(), pricing_region=self.settings.pricing_region)
        else:
            azure.fetch(found, types, endpoint=self.settings.azure_endpoint)

    def _write(self, found: Fetched) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            body = self.cluster.config_map(self.settings.namespace, self.settings.config_map)
            data = body.get("data") or {}
            body["data"] = {**data, KEY: self._text(data.get(KEY, ""), found)}
            try:
                return self.cluster.replace_config_map(body)
            except Failed as error:
                if error.status != CONFLICT or attempt == ATTEMPTS:
                    raise
                log("INFO", f"{error}, retrying")

    def _text(self, old_text: str, found: Fetched) -> str:
        old = parse(old_text)
        for problem in old.problems:
            log("WARNING", f"in the ConfigMap {self.settings.config_map}, {problem}")
        rates = merged(old.rates, found.rates, since=self.now - self.settings.history)
        text, dropped = as_text(rates)
        if dropped:
            log(
                "WARNING",
                f"{dropped} rates are dropped, those that ended first: a ConfigMap holds 1 MiB. "
                "Set a smaller priceJob.historyDays, or price fewer instance types",
            )
        total = sum(len(history) for history in rates.values()) - dropped
        log(
            "INFO", f"{total} rates of {len(rates)} kinds of capacity; {len(found.rates)} kinds were seen now"
        )
        return text


def wanted(settings: Settings, nodes: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Returns by region the types of its nodes and, in the listed regions, the listed types.

    Where no region is listed, the listed types are priced in the regions of the nodes.
    """
    found: dict[str, set[str]] = {region: set() for region in settings.regions}
    for node in nodes:
        labels = node["metadata"].get("labels") or {}
        region, kind = labels.get(REGION_LABEL), labels.get(INSTANCE_TYPE_LABEL)
        ours = str(node.get("spec", {}).get("providerID", "")).startswith(SCHEMES[settings.provider])
        if ours and region and kind:
            found.setdefault(region, set()).add(kind)
    for region in settings.regions or found:
        found[region].update(settings.instance_types)
    return {region: tuple(sorted(types)) for region, types in sorted(found.items()) if types}


def log(level: str, message: str) -> None:
    """Prints one JSON line."""
    time = rfc3339(datetime.now(UTC), timespec="milliseconds")
    print(json.dumps({"time": time, "level": level, "component": "prices", "message": message}), flush=True)


def main() -> int:
    """Returns the exit code."""
    try:
        settings, endpoint = Settings.from_env(), Endpoint.in_pod()
    except ValueError as error:
        log("ERROR", f"the price job cannot start: {error}")
        return 1
    now = datetime.now(UTC).replace(microsecond=0)
    errors = Job(settings=settings, cluster=Cluster(endpoint), now=now).run()
    for sentence in errors:
        log("ERROR", sentence)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
