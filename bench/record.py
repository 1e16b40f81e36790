"""Runs a benchmark, keeps its figures, and writes RESULTS.md and docs/levers.md from the newest ones.

    python bench/record.py loop -- python bench/loop.py            # as `make bench-loop` does
    python bench/record.py loop --read out.txt -- make bench-loop  # an output that is there already
    python bench/record.py                                         # only writes both pages

The last line of the output must be a JSON object. It is stored in bench/results/BENCHMARK/DATE-COMMIT.json,
with the command, the commit, the date and the machine. Commit that file and both pages.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "bench" / "results"
PAGE: Final = ROOT / "bench" / "RESULTS.md"
HEAD: Final = """\
# Results

Written by `bench/record.py` from the newest record of each benchmark in `bench/results/`; do not edit it.
Older records stay in that folder. A goal stands behind its figure in parentheses; **bold** is a goal that was
missed. `load` is the load average of the machine when the benchmark began. Where it is as high as the number
of cores, other work ran beside it, and only ratios within one run mean something. Records with `by_hand` are
older than the script; their commit is the one that brought the figures. Nothing here was measured on a GPU or
in a cloud.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    title: str
    about: str = ""
    goals: Mapping[str, str] = field(default_factory=dict)
    """By figure, as `bare.median` or `p99_s`: "<= 1.25", ">= 0.85" or "= 0"."""


SCALE_GOALS: Final = {"ratio": "<= 0.75", "delete_ratio": "<= 1", "status_writes_per_job": "<= 4"}
BENCHMARKS: Final[dict[str, Benchmark]] = {
    "checkpoint": Benchmark(
        title="What a save costs",
        about="`stall`: seconds in which the training waits, beside memcpy of the same tensors and "
        "`torch.save` to the same disk. `upload`, `download`: beside a bare boto3 client with as many "
        "connections, as a ratio of rates. `durable`: seconds until another process could resume: ours, "
        "`torch.distributed.checkpoint` over s3fs (`dcp`) and s3torchconnector (`s3tc`). `blocked`: how long "
        "the training waits of that.",
        goals={
            "stall_over_memcpy.median": "<= 1.25",
            "stall_over_torch_save.median": "<= 0.08",
            "first_over_rest.median": "<= 1.1",
            "upload_over_bare_client.median": ">= 0.85",
            "download_over_bare_client.median": ">= 0.85",
        },
    ),
    "sync": Benchmark(
        title="Folders of checkpoints (spottrain sync)",
        about="Four files to the S3 server on this machine: `durable_seconds` from the start of the commit "
        "until HEAD names it, beside boto3's `upload_file` of the same files in another process, in turn. "
        "`unchanged_bytes_sent`: of files that were only touched. `peak_memory_mib`: resident, of the "
        "process.",
        goals={
            "upload_over_bare_client": ">= 0.85",
            "unchanged_bytes_sent": "= 0",
            "peak_memory_mib": "<= 100",
        },
    ),
    "restart": Benchmark(
        title="What a restart costs",
        about="Seconds of a process that starts with an empty compile cache (`cold`), and of one that "
        "restores the cache (`warm`).",
        goals={"warm_over_cold_compile.median": "<= 0.15"},
    ),
    "loop": Benchmark(
        title="The training loop beside a bare one",
        about="`overhead_percent` counts the pauses of Python's garbage collector, which ours shortens; "
        "`between_pauses_percent` compares the median turns. Seconds of a step on both sides.",
        goals={"overhead_percent": "<= 1", "between_pauses_percent": "<= 1"},
    ),
    "diagnosis": Benchmark(
        title="Is the verdict on what is slow right, and what it costs",
        about="`verdicts_right` of `verdicts` trainings that are slow for one known reason. Overhead: a loop "
        "with its phases marked beside the same loop without.",
        goals={"overhead_percent": "<= 2"},
    ),
    "techniques": Benchmark(
        title="Techniques of the training loop, on a CPU",
        about="Seconds of a step, and MiB above the process before the model, of the GPT of `examples/`. "
        "Ratios are to `base`. `percent_more_flops`: what activation checkpointing computes again.",
    ),
    "data_wait": Benchmark(
        title="A loop that waits for its data",
        about="The GPT of `examples/` on a data set that waits 40 ms for each sample, as for a request "
        "to an object store; 16 samples a step. Seconds of a step without loader workers and with them.",
    ),
    "policy": Benchmark(
        title="Spot or on-demand: what the choice costs",
        about="A job of 48 h on 240 windows of real spot availability (K80 and V100, us-west-2, 2022), by "
        "deadline, overhead of a start, and group of windows; dollars. `uniform_progress` is NSDI'24's rule, "
        "`optimum` knows the future and asks for nothing. With `paid_sight` and `stopped_sight` availability "
        "is learned by requests, and a start takes 2 minutes more; every fourth window. `paid_sight`: a "
        "refusal costs nothing. `stopped_sight`, the operator's: a request stops a job on on-demand for up "
        "to 10 minutes. The run lengths of our rule were fitted to `fitted`; `other_traces` played no part. "
        "`after_refund`: less what AWS does not bill for nodes that it takes back in their first hour. "
        "`zones`: ours in several zones, beside Uniform Progress that goes round them (`round_robin`), and "
        "one zone: the mean, and the best by hindsight; a start takes 12 minutes. Run with "
        "`make bench-policy TRACES=FOLDER`.",
        goals={
            "cost_over_optimum": "<= 1.06",
            "worst_over_uniform_progress": "<= 1.01",
            "missed_deadlines": "= 0",
            "largest_deviation_dollars": "<= 0.05",
        },
    ),
    "goodput": Benchmark(
        title="Saved work per paid time on real spot runs",
        about="`interval_over_best_fixed`: the runtime's learned interval beside the best fixed one of each "
        "zone, known by hindsight. `goodput_with_notices`: 95 % of interruptions are told in time for a last "
        "save of 30 s; a restart takes 180 s. `ceiling`: if only restarts cost time. `measured`: seconds of "
        "this machine's newest records. Run with `make bench-goodput TRACES=FOLDER`.",
        goals={"interval_over_best_fixed": ">= 0.99", "goodput_with_notices": ">= 0.955"},
    ),
    "gpu": Benchmark(title="Techniques on a GPU, and the 124M GPT beside a hand-written loop"),
    "loader_memory": Benchmark(
        title="Copies of the data set in loader workers",
        about="MiB that a forked worker comes to hold: estimated before the training, and found by Linux.",
        goals={f"{kind}.seconds": "<= 0.5" for kind in ("coco", "byimage", "pool", "dicts")},
    ),
    "agreement": Benchmark(
        title="Agreement of all ranks on saves and stops",
        about="Microseconds, the slowest rank's median, beside gloo's `all_reduce` of one element.",
    ),
    "notice": Benchmark(
        title="From a spot notice to the next attempt",
        about="Seconds, on the local cluster's two real nodes. `p50_s` and `p99_s`: from the notice until "
        "the training process knows.",
        goals={"p99_s": "<= 3", "saved_of_noticed": ">= 0.99", "charged_failures": "= 0"},
    ),
    "failover": Benchmark(
        title="The leader of two operators goes",
        about="Seconds until the standby leads, and until it has deleted the pod of a node whose notice came "
        "in the moment of the fault; two processes on one machine, default times. `stopped`: SIGSTOP.",
        goals={
            "failover_s.killed.longest": "<= 20",
            "failover_s.stopped.longest": "<= 20",
            "duplicates": "= 0",
            "miscounted": "= 0",
        },
    ),
    "scale": Benchmark(
        title="Many jobs at once, beside Kubernetes' Job controller",
        about="125 TrainingJobs of 8 workers on kwok's fake nodes, applied at once, beside 125 Indexed Jobs "
        "of the same pods with raised client limits, in turn; medians. `ratio`: from the first POST until "
        "all pods are Running and every TrainingJob says so, to the time until all pods of the Jobs run. "
        "`delete_ratio`: until no pod and no job is left. `floor_ratio`: a bare client that makes the same "
        "writes; both sides' writes for each job are counted in the API server's audit log.",
        goals=SCALE_GOALS,
    ),
    "scale_singles": Benchmark(
        title="1,000 jobs of one worker at once",
        about="The same with 1,000 TrainingJobs of one worker, beside 1,000 Jobs of one pod.",
        goals=SCALE_GOALS,
    ),
    "scale_gang": Benchmark(
        title="One gang of 1,024 workers",
        about="The same with one TrainingJob of 1,024 workers, beside an Indexed Job of 1,024 pods.",
        goals=SCALE_GOALS,
    ),
    "storm": Benchmark(
        title="Notices for a third of the nodes within a minute",
        about="Seconds, by the API server's audit log: from the notice on the node until the DELETE of the "
        "pod and until the POST of its replacement. Trainers answer the operator's polls. `unrecovered`: "
        "jobs that do not run, by their status and by their pods, in the attempt after their interruptions.",
        goals={
            "duplicate_ranks": "= 0",
            "charged_failures": "= 0",
            "unrecovered": "= 0",
            "miscounted": "= 0",
        },
    ),
    "capacity": Benchmark(
        title="5,000 jobs and 10,000 pods",
        about="On fake nodes of kwok's, all polled. `reconcile_p99_ms`: from an event, or from when a job "
        "was due, to the end of its reconcile, at rest and with a resync in it. `greatest_mib`: most memory "
        "that the operator ever had, its start included. `failover_s`: from SIGKILL of the leader to the "
        "first write of the next one; `failover_to_pod_s`: to the pod of a job that was applied at the kill.",
        goals={
            "resident_mib": "<= 384",
            "restart_to_synced_s": "<= 15",
            "failover_s": "<= 20",
            "reconcile_p99_ms": "<= 250",
        },
    ),
    "soak": Benchmark(
        title="Churn of jobs: memory, ghosts and stuck jobs",
        about="Jobs come, are interrupted, suspended, done and deleted; nodes go with a notice and without; "
        "as many resyncs as in a day. In the last third the leader of two operators is killed and asked to "
        "end in turn; memory is that of the time before. `ghosts`: objects that resyncs dropped from the "
        "operators' caches because the API server did not have them; one whose deletion the watch reported "
        "only after the LIST is among them.",
        goals={
            **dict.fromkeys(("leaks", "stuck_jobs", "failed_jobs", "charged_failures"), "= 0"),
            **dict.fromkeys(("duplicate_ranks", "operator_deaths"), "= 0"),
        },
    ),
    "informer": Benchmark(
        title="What an event of a pod costs: kopf's handler beside our informer",
        about="10,000 pods listed from one server by each side in turn, then as many changes; medians. Each "
        "event goes into the operator's caches and queue. Processor time of an event (microseconds) and of "
        "the LIST (seconds); MiB that the process grew by the LIST, and at most.",
    ),
    "head_race": Benchmark(
        title="Races of two processes for HEAD",
        about="On the real S3 server behind a proxy that delays, drops and repeats requests.",
        goals={"unreadable_heads": "= 0", "stale_commits": "= 0"},
    ),
    "head_explore": Benchmark(
        title="States of HEAD's protocol, explored exhaustively",
        goals={"violations": "= 0"},
    ),
    "chaos_runtime": Benchmark(
        title="Random kills of training runs",
        goals={
            "unreadable_heads": "= 0",
            "digest_mismatches": "= 0",
            "saved_of_noticed": ">= 0.99",
            "stale_commits": "= 0",
            "wrong_ends": "= 0",
        },
    ),
    "chaos_examples": Benchmark(
        title="Random kills of the examples with a loop of their own",
        about="Each example by its manifest's command, killed at random moments, start and end included, and "
        "started again. `lines`: of the script that are spottrain's (goal: 5). `lost`: steps that the next "
        "attempt had to do again; after SIGKILL those since the last save (`interval` in the manifest). "
        "`equal`: the final weights are those of the undisturbed run.",
        goals={"failures": "= 0"},
    ),
    "chaos_operator": Benchmark(
        title="Random faults around the operator",
        goals=dict.fromkeys(("duplicate_ranks", "stuck_jobs", "miscounted", "resurrected"), "= 0"),
    ),
    "mutation": Benchmark(
        title="Do the tests notice a changed expression",
        about="A seeded sample of changes to the operator's plan and cause, HEAD and the data sampler; "
        "`score` is the share that a test notices. `before`: the same at the commit of the sample.",
        goals={"score": ">= 0.9"},
    ),
}
"""In the order of the page. Other folders of bench/results/ follow, by name."""

COMPARES: Final = {
    "<=": lambda value, limit: value <= limit,
    ">=": lambda value, limit: value >= limit,
    "=": lambda value, limit: value == limit,
}


# --- one run ----------------------------------------------------------------------------------------
def last_figures(output: str) -> dict[str, Any]:
    """The JSON object in the last line. Raises ValueError where that is none."""
    lines = output.split("\n")
    line = next((line for line in reversed(lines) if line.strip()), "")
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"the last line of the output is not a JSON object: {line[:200]!r}")
    return found


def check_whole(name: str, figures: Mapping[str, Any]) -> None:
    """Raises ValueError where no figure with a goal is there: the benchmark ended early."""
    goals = BENCHMARKS[name].goals if name in BENCHMARKS else {}
    if goals and not set(goals) & set(paths(figures)):
        raise ValueError(f"the last line has none of {', '.join(goals)}: did the benchmark end early?")


def paths(figures: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from paths(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(before the first --, after it)."""
    at = words.index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def shown_command(command: Sequence[str]) -> str:
    return shlex.join(word.removeprefix(".venv/bin/") for word in command)


def file_name(date: str, commit: str, taken: Iterable[str]) -> str:
    """DATE-COMMIT.json; a second run of one commit on one day ends in -2."""
    stem, there = f"{date[:10]}-{commit}", set(taken)
    names = (f"{stem}{'' if number == 1 else f'-{number}'}.json" for number in range(1, len(there) + 2))
    return next(name for name in names if name not in there)


def run(command: Sequence[str]) -> tuple[str, int]:
    """(standard output, exit code); the output is also shown as it comes."""
    lines: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        assert process.stdout
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)
    return "".join(lines), process.returncode


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    others = (".", ":!bench/results", ":!bench/RESULTS.md")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *others)
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-dirty" if changed else "")


def machine() -> dict[str, Any]:
    memory = Path("/proc/meminfo").read_text().partition("MemTotal:")[2].split()[0]
    cpu = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0].lstrip("\t :")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory) / 2**20, 1),
        "cpu": cpu or "unknown",
        "torch": version("torch"),
        "load": round(os.getloadavg()[0], 1),
    }


# --- the page ---------------------------------------------------------------------------------------
def page(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """RESULTS.md, of the records of each benchmark."""
    names = [name for name in BENCHMARKS if name in records]
    names += sorted(set(records) - set(BENCHMARKS))
    newest = [(name, max(records[name], key=lambda record: record["date"])) for name in names]
    return "\n".join([HEAD, *(section(name, record) for name, record in newest)])


def section(name: str, record: Mapping[str, Any]) -> str:
    benchmark = BENCHMARKS.get(name) or Benchmark(title=name.replace("_", " ").capitalize())
    parts = [f"## {benchmark.title}", benchmark.about, origin(record)]
    parts += tables(record["figures"], benchmark.goals)
    return "\n\n".join(part for part in parts if part) + "\n"


def origin(record: Mapping[str, Any]) -> str:
    """Command, date, commit, machine."""
    on = record["machine"]
    what = f"`{record['command']}`, {record['date'][:10]}, commit {record['commit']}"
    where = f"{on['cores']} cores, {on['memory_gib']} GiB, {on['cpu']}, torch {on['torch']}"
    return f"{what}; {where}, load {on['load']}. {record['note']}".rstrip()


def tables(figures: Mapping[str, Any], goals: Mapping[str, str], above: str = "") -> list[str]:
    """A table of the figures that are alike, one of the others, and those of deeper levels."""
    deep = {name: value for name, value in figures.items() if is_deep(value)}
    flat = {name: value for name, value in figures.items() if name not in deep}
    rows = alike({name: value for name, value in flat.items() if isinstance(value, Mapping)})
    plain = {name: value for name, value in flat.items() if name not in rows}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    found = []
    if rows:
        body = [
            [name, *(cell(row.get(column), goals.get(f"{above}{name}.{column}")) for column in columns)]
            for name, row in rows.items()
        ]
        found.append(table([above.rstrip(".") or "figure", *columns], body))
    if plain:
        body = [[name, cell(value, goals.get(f"{above}{name}"))] for name, value in plain.items()]
        found.append(table([above.rstrip(".") or "figure", "value"], body))
    for name, value in deep.items():
        found += tables(value, goals, f"{above}{name}.")
    return found


def is_deep(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(inner, Mapping) for inner in value.values())


def alike(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Those that begin with the same field as another one, or with a median."""
    first = {name: next(iter(row), "") for name, row in rows.items()}
    count = Counter([*first.values(), "median"])
    return {name: row for name, row in rows.items() if count[first[name]] > 1}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any, goal: str | None = None) -> str:
    said = text(value)
    if goal is None or value is None:
        return said
    compare, _, limit = goal.partition(" ")
    met = COMPARES[compare](value, float(limit))
    return f"{said} ({goal})" if met else f"**{said}, missed ({goal})**"


def text(value: Any) -> str:
    """Four digits of a float, and no exponent."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        digits = max(0, 4 - len(str(int(abs(value))))) if abs(value) >= 1 else 4
        return f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text(inner)}" for name, inner in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(text, value))
    return str(value).replace("|", "\\|")


# --- the folder -------------------------------------------------------------------------------------
def stored() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(RESULTS.glob("*/*.json")):
        found.setdefault(path.parent.name, []).append(json.loads(path.read_text()))
    return found


def store(record: Mapping[str, Any]) -> Path:
    folder = RESULTS / str(record["benchmark"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(record["date"], record["commit"], (path.name for path in folder.iterdir()))
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.usage = "record.py [BENCHMARK [--read FILE] [--note TEXT] -- COMMAND ...]"
    parser.add_argument("benchmark", nargs="?", help="folder of bench/results/; none: only write the pages")
    parser.add_argument("--read", type=Path, help="a file with the output of the command, which is not run")
    parser.add_argument("--note", default="", help="a sentence for RESULTS.md")
    words, command = split(sys.argv[1:])
    options = parser.parse_args(words)
    code = 0
    if options.benchmark:
        if not command:
            parser.error("name the command after --")
        record: dict[str, Any] = {
            "benchmark": options.benchmark,
            "command": shown_command(command),
            "commit": commit(),
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
            "machine": machine(),
            "note": options.note,
        }
        output, code = (options.read.read_text(), 0) if options.read else run(command)
        try:
            figures = last_figures(output)
            check_whole(options.benchmark, figures)
        except ValueError as error:
            print(f"nothing was recorded: {error}", file=sys.stderr)
            return code or 1
        path = store(record | {"figures": figures})
        print(f"recorded in {path.relative_to(ROOT)}, bench/RESULTS.md", file=sys.stderr)
    PAGE.write_text(page(stored()))
    return code


if __name__ == "__main__":
    sys.exit(main())
