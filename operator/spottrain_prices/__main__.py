"""`python -m spottrain_prices`: one run of the price CronJob.

Its exit code is 0 where everything that was asked for has a price, else 1, so that the Job shows as failed;
what was found is written all the same.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime

from spottrain_operator.environment import Endpoint

from spottrain_prices.cluster import Cluster
from spottrain_prices.job import Job
from spottrain_prices.log import log
from spottrain_prices.settings import Settings


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
