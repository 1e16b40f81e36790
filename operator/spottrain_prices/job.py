"""One run: which prices are wanted, what the cloud says, and the ConfigMap with both old and new ones."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from spottrain_operator.api.prices import parse

from spottrain_prices import aws, azure
from spottrain_prices.cluster import Cluster, ClusterError, Conflict, Json
from spottrain_prices.fetched import Fetched
from spottrain_prices.history import as_text, merged
from spottrain_prices.log import log
from spottrain_prices.settings import Settings
from spottrain_prices.wanted import Wanted, wanted

KEY: Final = "prices.json"
"""In the ConfigMap's data."""
ATTEMPTS: Final = 5
"""How often a write is tried that meets a change by somebody else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    settings: Settings
    cluster: Cluster
    now: datetime

    def run(self) -> list[str]:
        """Fetches prices and writes those that were found. Returns a sentence for each error."""
        errors: list[str] = []
        types = self._wanted(errors)
        if not types:
            return [*errors, _nothing_wanted(self.settings)]
        found = Fetched(self.now)
        self._fetch(found, types)
        for note in found.notes:
            log("WARNING", note)
        errors.extend(found.errors)
        if found.rates:
            try:
                self._write(found)
            except ClusterError as error:
                errors.append(f"failed to write the prices: {error}")
        return errors

    def _wanted(self, errors: list[str]) -> Wanted:
        nodes: list[Json] = []
        if self.settings.from_nodes:
            try:
                nodes = list(self.cluster.nodes())
            except ClusterError as error:
                errors.append(f"failed to list the nodes, so their instance types have no price: {error}")
        return wanted(self.settings, nodes)

    def _fetch(self, found: Fetched, types: Wanted) -> None:
        since = self.now - self.settings.history
        if self.settings.provider == "AWS":
            region = self.settings.pricing_region
            aws.fetch(found, types, aws.connect(), since=since, pricing_region=region)
        else:
            azure.fetch(found, types, endpoint=self.settings.azure_endpoint)

    def _write(self, found: Fetched) -> None:
        for attempt in range(ATTEMPTS):
            body = self.cluster.config_map(self.settings.namespace, self.settings.config_map)
            data = body.get("data") or {}
            body["data"] = {**data, KEY: self._text(data.get(KEY, ""), found)}
            try:
                return self.cluster.replace_config_map(body)
            except Conflict as error:
                log("INFO", f"{error}, retrying")
                if attempt == ATTEMPTS - 1:
                    raise

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


def _nothing_wanted(settings: Settings) -> str:
    return (
        f"there is nothing to price: no node of {settings.provider} has labels for its region and instance "
        "type, and priceJob.regions with priceJob.instanceTypes is empty"
    )
