"""The benchmarks that there are, what is recorded beside them, and the goals of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Goal:
    """A line of bench/RESULTS.md.

    Attributes:
        what: In words.
        limit: As "<= 1.25", ">= 0.85" or "= 0"; in place of the number may stand the name of another figure.
            "": the figure is only told.
        figures: Where they are in a record, as `bare.median`.
    """

    what: str
    limit: str
    figures: tuple[str, ...]

    @property
    def compared(self) -> tuple[str, ...]:
        """The figure that the limit names."""
        limit = self.limit.rpartition(" ")[2]
        return (limit,) if limit.isidentifier() else ()


def goal(what: str, limit: str, *figures: str) -> Goal:
    return Goal(what, limit, figures)


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A benchmark, or one of the parts of it that have records of their own.

    Attributes:
        about: In a line, for the list of benchmarks.
        theme: Section of bench/RESULTS.md.
        module: What runs it; "": its figures are told by hand.
        words: Arguments that choose this part.
    """

    about: str
    theme: str
    goals: tuple[Goal, ...] = ()
    module: str = ""
    words: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        name = self.module.removeprefix("bench.")
        if not self.module:
            return "by hand"
        if name == self.module:
            return f"`python -m {name}`"
        words = " ".join((name, *self.words))
        return f"`make bench NAME={words}`" if words == name else f'`make bench NAME="{words}"`'


def beside_jobs(what: str) -> tuple[Goal, ...]:
    return (
        goal(f"{what}: start, over Kubernetes' Job controller", "<= 0.75", "ratio"),
        goal("deletion, over the Job controller's", "<= 1", "delete_ratio"),
        goal("status writes for each job", "<= 4", "status_writes_per_job"),
    )


DOOR, SAVES, LOOP = "Two commands on any machine", "Checkpoints and restarts", "The training loop"
LOSSES, MANY, MONEY = (
    "Interruptions, kills and faults",
    "Many jobs at once",
    "Spot or on-demand, on recorded availability",
)
BENCHMARKS: Final[dict[str, Benchmark]] = {
    "door": Benchmark(
        about="what README's commands take on a fresh machine",
        theme=DOOR,
        goals=(
            goal("`make demo` on a fresh machine, seconds", "<= 480", "demo_cold_s"),
            goal("`make demo` again, seconds", "<= 90", "demo_warm_s"),
            goal("disk that it takes, GB", "", "demo_disk_gb"),
            goal("`make demo-containers` on a fresh machine, seconds", "", "demo_containers_cold_s"),
            goal("`make test` from a fresh clone, seconds", "<= 900", "test_cold_s"),
            goal("`make test` again, seconds", "<= 600", "test_warm_s"),
            goal("`.ci/run` from a fresh clone, seconds", "<= 3600", "ci_cold_s"),
            goal("lines of tests", "<= tests_lines_before", "tests_lines_after"),
            goal(
                "share of changed expressions that the tests notice", ">= mutation_before", "mutation_after"
            ),
        ),
    ),
    "checkpoint": Benchmark(
        module="bench.checkpoint",
        about="what a save costs: stall, upload, seconds to durable, beside others (15 minutes)",
        theme=SAVES,
        goals=(
            goal("stall of a save, over memcpy of its bytes", "<= 1.25", "stall_over_memcpy.median"),
            goal("the same over `torch.save` to the disk", "<= 0.08", "stall_over_torch_save.median"),
            goal("the first save over the later ones", "<= 1.1", "first_over_rest.median"),
            goal(
                "upload, download, over a bare client's rate",
                ">= 0.85",
                "upload_over_bare_client.median",
                "download_over_bare_client.median",
            ),
            goal(
                "seconds to durable of 1 GiB: ours, DCP on s3fs, s3torchconnector",
                "",
                "durable_s_ours.median",
                "durable_s_dcp.median",
                "durable_s_s3tc.median",
            ),
        ),
    ),
    "sync": Benchmark(
        module="bench.sync",
        about="`spottrain sync` beside a bare boto3 client: seconds to durable, bytes, memory (2 minutes)",
        theme=SAVES,
        goals=(
            goal("`spottrain sync`: upload over a bare client's rate", ">= 0.85", "upload_over_bare_client"),
            goal("bytes sent of files that did not change", "= 0", "unchanged_bytes_sent"),
            goal("most memory, MiB", "<= 100", "peak_memory_mib"),
        ),
    ),
    "restart": Benchmark(
        module="bench.restart",
        about="what a restart costs, cold and with the compile cache (15 minutes)",
        theme=SAVES,
        goals=(
            goal(
                "compilation with the stored cache, over without", "<= 0.15", "warm_over_cold_compile.median"
            ),
        ),
    ),
    "loop": Benchmark(
        module="bench.loop",
        about="our training loop beside one written by hand, in turns of the same core (10 minutes)",
        theme=LOOP,
        goals=(
            goal("overhead over a loop written by hand, percent", "<= 1", "overhead_percent"),
            goal("the same without the garbage collector's pauses", "<= 1", "between_pauses_percent"),
        ),
    ),
    "techniques": Benchmark(
        module="bench.techniques",
        about="time and memory of each technique of the training loop, on a CPU (10 minutes)",
        theme=LOOP,
    ),
    "techniques-data": Benchmark(
        module="bench.techniques",
        words=("--part", "data"),
        about="loader workers where reading a sample takes 40 ms (5 minutes)",
        theme=LOOP,
        goals=(
            goal(
                "step with 2 loader workers, `auto`, over without (samples of 40 ms)",
                "",
                "techniques.samples of 40 ms, 2 workers.time_over_base",
                "techniques.samples of 40 ms, numWorkers auto.time_over_base",
            ),
        ),
    ),
    "techniques-loader-memory": Benchmark(
        module="bench.techniques",
        words=("--part", "loader-memory"),
        about="what a loader worker comes to hold of the data set: estimated, and found (5 minutes)",
        theme=LOOP,
        goals=(
            goal(
                "seconds to estimate a loader worker's memory: four kinds of data",
                "<= 0.5",
                *(f"{kind}.seconds" for kind in ("coco", "byimage", "pool", "field0")),
            ),
        ),
    ),
    "techniques-verdicts": Benchmark(
        module="bench.techniques",
        words=("--part", "verdicts"),
        about="how often the verdict on what is slow is right (15 minutes)",
        theme=LOOP,
        goals=(goal("share of right verdicts on slow trainings", ">= 0.95", "share_right"),),
    ),
    "gpu": Benchmark(
        module="bench.gpu",
        about="loop, saves, restart, exactness, verdict, NCCL and techniques on a GPU (8 minutes)",
        theme=LOOP,
        goals=(
            goal("GPT 124M: tokens/s over a loop written by hand", ">= 1", "ours_over_hand_written"),
            goal("stall of a save, over a copy to pinned memory", "<= 0.2", "stall_over_pinned_copy"),
            goal(
                "seconds that a save takes from the training: ours, `torch.save`, DCP",
                "",
                "save_lost_s.ours",
                "save_lost_s.torch_save",
                "save_lost_s.dcp",
            ),
            goal("trainings whose weights differ after a stop", "= 0", "exact_differing"),
            goal(
                "seconds from the start to the first step: cold, with the stored cache",
                "",
                "start_s.cold",
                "start_s.warm",
            ),
            goal("wrong verdicts on slow trainings", "= 0", "verdicts_wrong"),
        ),
    ),
    "notice": Benchmark(
        module="bench.notice",
        about="from a spot notice to the next attempt, on the local cluster's nodes (40 minutes)",
        theme=LOSSES,
        goals=(
            goal("from the notice until the training knows, 99th percentile, seconds", "<= 3", "p99_s"),
            goal("share of noticed interruptions that lost no step", ">= 0.99", "saved_of_noticed"),
            goal("charged failures", "= 0", "charged_failures"),
        ),
    ),
    "scale-storm": Benchmark(
        module="bench.scale",
        words=("--scenario", "storm"),
        about="notices for 30 % of the nodes of 1,000 running jobs within a minute (5 minutes)",
        theme=LOSSES,
        goals=(
            goal(
                "storm: duplicate ranks, charged failures, unrecovered, miscounted",
                "= 0",
                *("duplicate_ranks", "charged_failures", "unrecovered", "miscounted"),
            ),
        ),
    ),
    "soak": Benchmark(
        module="bench.soak",
        about="a day of churn in 15 minutes, operators that go included: memory, leaks, stuck jobs",
        theme=LOSSES,
        goals=(
            goal(
                "soak: leaks, stuck, failed, charged, duplicate ranks, operator deaths",
                "= 0",
                *("leaks", "stuck_jobs", "failed_jobs", "charged_failures", "duplicate_ranks"),
                "operator_deaths",
            ),
        ),
    ),
    "scale": Benchmark(
        module="bench.scale",
        about="125 jobs of 8 workers beside Kubernetes' Job controller, on fake nodes (10 minutes)",
        theme=MANY,
        goals=beside_jobs("125 jobs of 8 workers"),
    ),
    "scale-singles": Benchmark(
        module="bench.scale",
        words=("--scenario", "singles"),
        about="the same with 1,000 jobs of one worker (10 minutes)",
        theme=MANY,
        goals=beside_jobs("1,000 jobs of one"),
    ),
    "scale-gang": Benchmark(
        module="bench.scale",
        words=("--scenario", "gang"),
        about="the same with one gang of 1,024 workers (10 minutes)",
        theme=MANY,
        goals=beside_jobs("a gang of 1,024"),
    ),
    "scale-capacity": Benchmark(
        module="bench.scale",
        words=("--scenario", "capacity"),
        about="5,000 jobs with 10,000 pods: memory, restart, failover, waits (an hour)",
        theme=MANY,
        goals=(
            goal("5,000 jobs: the operator's memory, MiB", "<= 384", "resident_mib"),
            goal("restarted until its caches are filled, seconds", "<= 15", "restart_to_synced_s"),
            goal("the leader killed until the next one writes, seconds", "<= 20", "failover_s"),
            goal("99th percentile of a reconcile's wait and work, ms", "<= 250", "reconcile_p99_ms"),
        ),
    ),
    "spot": Benchmark(
        module="bench.spot",
        about="cost of choosing spot or on-demand, and saved work: --traces FOLDER (10 minutes)",
        theme=MONEY,
        goals=(
            goal("cost over the optimum, which knows the future", "<= 1.06", "cost_over_optimum"),
            goal("worst case over Uniform Progress (NSDI'24)", "<= 1.01", "worst_over_uniform_progress"),
            goal("missed deadlines", "= 0", "missed_deadlines"),
            goal("dollars beside the published figures", "<= 0.05", "largest_deviation_dollars"),
            goal("goodput, over the best fixed save interval's", ">= 0.99", "interval_over_best_fixed"),
            goal("goodput where 95 % have a notice", ">= 0.955", "goodput_with_notices"),
        ),
    ),
    "random_kills": Benchmark(
        module="tests.chaos.random_kills",
        about="random kills of trainings, judged by what the store holds",
        theme=LOSSES,
        goals=(
            goal(
                "trainings: unreadable HEADs, other digests, stale commits, wrong ends",
                "= 0",
                *("unreadable_heads", "digest_mismatches", "stale_commits", "wrong_ends"),
            ),
            goal("share of noticed stops that lost no step", ">= 0.99", "saved_of_noticed"),
        ),
    ),
    "example_kills": Benchmark(
        module="tests.chaos.example_kills",
        about="each example killed at random moments",
        theme=LOSSES,
        goals=(goal("examples: kills after which something was wrong", "= 0", "failures"),),
    ),
    "random_faults": Benchmark(
        module="tests.chaosop.random_faults",
        about="random faults around the operator",
        theme=LOSSES,
        goals=(
            goal(
                "operator: duplicate ranks, stuck jobs, miscounted, resurrected",
                "= 0",
                *("duplicate_ranks", "stuck_jobs", "miscounted", "resurrected"),
            ),
        ),
    ),
    "head_races": Benchmark(
        module="tests.s3.head_races",
        about="races of two processes for HEAD on the real S3 server",
        theme=LOSSES,
        goals=(goal("races: unreadable HEADs, stale commits", "= 0", "unreadable_heads", "stale_commits"),),
    ),
    "matrix": Benchmark(
        module="tests.chaos.matrix",
        about="exactness after a kill: precision x accumulation x compile x workers x ranks",
        theme=LOSSES,
        goals=(goal("exactness: equal cells of the matrix", "= cells", "equal"),),
    ),
}
"""In the order of the page."""


def listed() -> Iterator[tuple[str, str]]:
    """Yields the words after `python -m bench` and what they measure."""
    for each in BENCHMARKS.values():
        if each.module.startswith("bench."):
            yield " ".join((each.module.removeprefix("bench."), *each.words)), each.about


def modules() -> dict[str, str]:
    """Returns the module of each name that may follow `python -m bench`."""
    found = {each.module.removeprefix("bench."): each.module for each in BENCHMARKS.values()}
    return {name: module for name, module in found.items() if module.startswith("bench.")}


def recorded_as(name: str, words: list[str]) -> str:
    """Returns the folder of the records of a benchmark with these arguments."""
    parts = {" ".join(each.words): key for key, each in BENCHMARKS.items() if each.module == f"bench.{name}"}
    told = " ".join(words).replace("=", " ")
    chosen = [key for said, key in parts.items() if said and f"{said} " in f"{told} "]
    return chosen[0] if chosen else parts[""]
