"""Keeps figures in bench/results/NAME/DATE-COMMIT.json, and writes bench/RESULTS.md from them.

    python -m bench.record                                        # only writes the page again
    python -m bench.record door --by-hand demo_cold_s=410 demo_disk_gb=7.1 --note "16 cores"
    python -m bench.record gpu --read out.txt -- python -m bench.gpu    # an output that is there already
    python -m bench.record random_kills -- python -m tests.chaos.random_kills --runs 300

`python -m bench NAME` records by itself. The last line of an output must be a JSON object. Its field
`machine`, if there is one, says where it was measured. A record stays until a newer one has the same goals'
figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from bench.benchmarks import BENCHMARKS
from bench.page import page, told

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "bench" / "results"
PAGE: Final = ROOT / "bench" / "RESULTS.md"
Record = dict[str, Any]


# --- one run ----------------------------------------------------------------------------------------
def last_figures(output: str) -> dict[str, Any]:
    """Returns the JSON object in the last line. Raises ValueError where that is none."""
    line = next((line for line in reversed(output.split("\n")) if line.strip()), "")
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"the last line of the output is not a JSON object: {line[:200]!r}")
    return found


def check_whole(name: str, figures: Mapping[str, Any]) -> None:
    """Raises ValueError where no figure with a goal is there: the benchmark ended early."""
    wanted = goal_figures(name)
    if wanted and not wanted & set(paths(figures)):
        raise ValueError(f"the last line has none of {', '.join(sorted(wanted))}: did it end early?")


def goal_figures(name: str) -> set[str]:
    goals = BENCHMARKS[name].goals if name in BENCHMARKS else ()
    return {figure for goal in goals for figure in (*goal.figures, *goal.compared)}


def paths(figures: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from paths(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def run(command: Sequence[str]) -> tuple[str, int]:
    """Returns standard output, which is shown as it comes, and the exit code."""
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
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory) / 2**20, 1),
        "cpu": cpu or "unknown",
        "torch": torch,
        "load": round(os.getloadavg()[0], 1),
    }


# --- the folder -------------------------------------------------------------------------------------
def stored() -> dict[str, list[Record]]:
    """Returns the records of each benchmark, the newest first."""
    found: dict[str, list[Record]] = {}
    for path in sorted(RESULTS.glob("*/*.json")):
        found.setdefault(path.parent.name, []).append(json.loads(path.read_text()))
    return {name: sorted(each, key=lambda record: record["date"])[::-1] for name, each in found.items()}


def file_name(date: str, commit: str, taken: Iterable[str]) -> str:
    """Returns DATE-COMMIT.json; a second run of one commit on one day ends in -2."""
    stem, there = f"{date[:10]}-{commit}", set(taken)
    names = (f"{stem}{'' if number == 1 else f'-{number}'}.json" for number in range(1, len(there) + 2))
    return next(name for name in names if name not in there)


def store(record: Record) -> Path:
    """Writes a record, and removes the older ones that it replaces."""
    folder = RESULTS / str(record["benchmark"])
    folder.mkdir(parents=True, exist_ok=True)
    older = list(folder.iterdir())
    path = folder / file_name(record["date"], record["commit"], (each.name for each in older))
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    wanted, new = goal_figures(record["benchmark"]), set(paths(record["figures"]))
    for each in older:
        if wanted & set(paths(json.loads(each.read_text())["figures"])) <= new:
            each.unlink()
    return path


def keep(name: str, command: Sequence[str], figures: Mapping[str, Any], *, note: str = "") -> None:
    """Stores figures, and writes the page."""
    at = figures.get("machine") or machine()
    record: Record = {
        "benchmark": name,
        "command": shlex.join(
            Path(word).name if word.startswith(("/", ".venv/")) else word for word in command
        ),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "machine": at,
        "note": note,
        "figures": {key: value for key, value in figures.items() if key != "machine"},
    }
    path = store(record)
    write_page()
    for line in told(name, record["figures"]):
        print(line, file=sys.stderr)
    print(f"recorded in {path.relative_to(ROOT)} and bench/RESULTS.md", file=sys.stderr)


def write_page() -> None:
    PAGE.write_text(page(stored()))


# --- by hand ------------------------------------------------------------------------------------------
def figure(text: str) -> tuple[str, Any]:
    """Parses KEY=VALUE; what is not JSON is a string."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def main(words: Sequence[str]) -> int:
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="python -m bench.record",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="folder of bench/results/; none: only write the page")
    parser.add_argument("--by-hand", nargs="+", type=figure, metavar="KEY=VALUE", help="figures")
    parser.add_argument("--read", type=Path, help="a file with an output")
    parser.add_argument("--note", default="", help="a sentence that is kept with the record")
    options, command = parser.parse_args(words[:at]), list(words[at + 1 :])
    if not options.name:
        write_page()
        return 0
    if bool(options.by_hand) == bool(options.read or command):
        parser.error("one of --by-hand, --read and -- COMMAND")
    if options.by_hand:
        unknown = {key for key, _ in options.by_hand} - goal_figures(options.name)
        if options.name in BENCHMARKS and unknown - {"machine"}:
            parser.error(f"no goal names {', '.join(sorted(unknown))}: see bench/benchmarks.py")
        keep(options.name, ["by hand"], dict(options.by_hand), note=options.note)
        return 0
    output, code = (options.read.read_text(), 0) if options.read else run(command)
    return recorded(options.name, command or ["elsewhere"], output, code, note=options.note)


def recorded(name: str, command: Sequence[str], output: str, code: int, *, note: str = "") -> int:
    """Keeps what an output ends with. Returns its exit code, or 1 where nothing could be kept."""
    try:
        figures = last_figures(output)
        check_whole(name, figures)
    except ValueError as error:
        print(f"nothing was recorded: {error}", file=sys.stderr)
        return code or 1
    keep(name, command, figures, note=note)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
