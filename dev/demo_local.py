"""`make demo-local`: what spottrain promises, on this machine, without root and without a cluster.

Trains examples/gpt_stdlib.py twice on a folder: once undisturbed; once interrupted by a real SIGTERM and
started again as its second attempt. Both must agree in every loss and in the final weights. The last line is
one JSON object; the exit code is 1 where they do not agree.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from spottrain.contract import Env, ExitCode, TerminationMessage

ROOT = Path(__file__).resolve().parents[1]
STEP = re.compile(r" step=(\d+)/\d+ loss=(\S+)")


@dataclass
class Attempt:
    """What one `spottrain run` said."""

    code: int = -1
    losses: dict[int, str] = field(default_factory=dict)
    digest: str = ""
    message: TerminationMessage | None = None


@dataclass(frozen=True, kw_only=True)
class Demo:
    folder: Path
    steps: int
    batch_size: int

    def run(self, title: str, store: str, attempt: int, stop_after: int | None = None) -> Attempt:
        """One attempt, shown live; after step `stop_after` it gets a SIGTERM."""
        print(f"--- {title}", flush=True)
        found = Attempt()
        message = self.folder / f"{store}-{attempt}.json"
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "spottrain", "run", str(ROOT / "examples" / "gpt_stdlib.py")],
            env=os.environ | self._variables(store, attempt, message),
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self._follow(process, found, stop_after)
        except KeyboardInterrupt:
            process.wait(timeout=60)
            raise
        found.message = TerminationMessage.from_json(message.read_text())
        return found

    def _follow(self, process: subprocess.Popen[str], found: Attempt, stop_after: int | None) -> None:
        assert process.stdout
        for line in process.stdout:
            print("    " + line, end="", flush=True)
            if match := STEP.search(line):
                found.losses[int(match[1])] = match[2]
                if int(match[1]) == stop_after:
                    print("--- SIGTERM, as a node gives it that is about to be reclaimed", flush=True)
                    process.send_signal(signal.SIGTERM)
            elif " event=done " in line:
                found.digest = line.split("digest=")[1].split()[0]
        found.code = process.wait(timeout=60)

    def _variables(self, store: str, attempt: int, message: Path) -> dict[str, str]:
        training = {"maxSteps": self.steps, "globalBatchSize": self.batch_size, "deterministic": True}
        return {
            Env.JOB_NAME: f"demo-{store}",
            Env.JOB_UID: f"demo-{store}",
            Env.ATTEMPT: str(attempt),
            Env.CHECKPOINT_URI: str(self.folder / store),
            Env.CHECKPOINT_INTERVAL: f"{max(2, self.steps // 4)}steps",
            Env.GRACE_SECONDS: "25",
            Env.TRAINING: json.dumps(training),
            Env.TERMINATION_MESSAGE: str(message),
            # The order of sums, and with it the last digits of a loss, depends on the number of threads.
            "OMP_NUM_THREADS": "1",
        }


def compare(whole: Attempt, parts: list[Attempt], steps: int) -> dict[str, object]:
    """The verdict, with the figures behind it."""
    first, last = parts[0].message, parts[-1].message
    done = [step for part in parts for step in part.losses]
    losses = {step: loss for part in parts for step, loss in part.losses.items()}
    codes = [part.code for part in parts]
    repeated, skipped = len(done) - len(set(done)), len(set(range(1, steps + 1)) - set(done))
    digests_equal = bool(whole.digest) and whole.digest == parts[-1].digest
    losses_equal = losses == whole.losses
    as_told = whole.code == ExitCode.DONE and codes == [ExitCode.INTERRUPTED, ExitCode.DONE]
    good = as_told and digests_equal and losses_equal and not repeated and not skipped
    return {
        "outcome": "equal" if good else "different",
        "attempts": len(parts),
        "interruptions": codes.count(ExitCode.INTERRUPTED),
        "failures": sum(code not in (ExitCode.DONE, ExitCode.INTERRUPTED) for code in codes),
        "sigterm_to_durable_s": _rounded(first.durableSeconds if first else None),
        "start_to_first_step_s": _rounded(last.startupSeconds if last else None),
        "resume_to_first_step_s": _rounded(last.firstStepSeconds if last else None),
        "repeated_steps": repeated,
        "skipped_steps": skipped,
        "losses_equal": losses_equal,
        "digests_equal": digests_equal,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def write_report(checkpoints: Path) -> Path:
    file = ROOT / "out" / "demo-local-report.html"
    file.parent.mkdir(exist_ok=True)
    program = str(Path(sys.executable).with_name("spottrain"))
    subprocess.run([program, "report", str(checkpoints), "-o", str(file)], stdout=subprocess.PIPE, check=True)
    return file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="keep the checkpoints here (default: a temporary folder)")
    chosen = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="spottrain-demo-") as temporary:
        folder = Path(chosen.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        demo = Demo(folder=folder, steps=chosen.steps, batch_size=chosen.batch_size)
        whole = demo.run("one run, undisturbed", "whole", 1)
        stop = chosen.steps // 2
        first = demo.run(f"the same, interrupted after step {stop}", "parts", 1, stop_after=stop)
        second = demo.run("started again: attempt 2", "parts", 2)
        verdict = compare(whole, [first, second], chosen.steps)
        print(f"--- both attempts on one page, by `spottrain report`: {write_report(folder / 'parts')}")
    print(json.dumps(verdict | {"seconds": round(time.monotonic() - began, 1)}))
    return 0 if verdict["outcome"] == "equal" else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the training has got it too, and ends by itself
        sys.exit("stopped; `make demo-local` begins anew")
