"""From an unchanged script to a model in a local folder, over one reclaim, on a cluster of process nodes.

The script is Hugging Face's Trainer on a made-up text, in a folder of its own; nothing of spottrain is in it.
Each command is what a person types. The node is taken away while it trains, as `make reclaim` does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from localcluster import layout
from localcluster.api import Cluster
from processcluster import install, lifecycle

SCRIPT: Final = Path(__file__).resolve().parents[1] / "examples" / "hf_trainer.py"
IMAGE: Final = "spottrain-runtime:checkout"
JOB: Final = "train"
STEPS: Final = 2000
PATIENCE: Final = 300.0


@dataclass(kw_only=True)
class Terminal:
    """A person's, in the folder of the script."""

    cluster: Cluster
    folder: Path
    commands: list[str] = field(default_factory=list)

    def type(self, *words: str) -> str:
        """Runs a command that a person types. Returns what it prints."""
        self.commands.append(" ".join(words))
        print("$", self.commands[-1], flush=True)
        program = [sys.executable, "-m", *words] if words[0] == "spottrain" else list(words)
        done = subprocess.run(
            program,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=600,
        )
        print(done.stdout, end="", flush=True)
        if done.returncode:
            raise SystemExit(f"{self.commands[-1]} ended with {done.returncode}")
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        programs = f"{layout.default_paths().bin}{os.pathsep}{os.environ['PATH']}"
        keys = {
            "AWS_ACCESS_KEY_ID": self.cluster.s3_access_key,
            "AWS_SECRET_ACCESS_KEY": self.cluster.s3_secret_key,
            "AWS_REGION": self.cluster.s3_region,
        }
        return install.environment(self.cluster) | keys | {"PATH": programs, "NO_PROXY": "*"}

    def status(self) -> Any:
        """Looked at by the benchmark, not by the person."""
        words = ["kubectl", "get", "tj", JOB, "-o", "json"]
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout).get("status", {})


def played(cluster: Cluster, folder: Path) -> dict[str, Any]:
    here = Terminal(cluster=cluster, folder=folder)
    shutil.copy(SCRIPT, folder / "train.py")
    subprocess.run(
        ["kubectl", "apply", "-f", "-"],
        input=json.dumps(install.credentials(cluster)), env=here.environment, text=True, check=True,
        capture_output=True,
    )  # fmt: skip
    began = time.monotonic()
    here.type(
        "spottrain", "submit", "train.py", "--image", IMAGE, "--bucket", f"s3://{install.BUCKET}/mine",
        "--endpoint", cluster.s3_endpoint, "--secret", install.SECRET, "--env", f"STEPS={STEPS}",
        "--env", "OMP_NUM_THREADS=1", "--yes",
    )  # fmt: skip
    node = _training_on(here)
    cluster.reclaim(node, 30)
    here.commands.append(f"make reclaim NODE={node}")
    print("$", here.commands[-1], flush=True)
    here.type("spottrain", "watch", JOB)
    here.type("spottrain", "checkpoints", "download", JOB, "--to", "model")
    seconds = time.monotonic() - began
    attempts = here.status()["attempts"]
    return {
        "commands": len(here.commands),
        "seconds": round(seconds, 1),
        "attempts": [each.get("cause") for each in attempts],
        "steps_lost": sum(max(each.get("lastStep", 0) - each.get("durableStep", 0), 0) for each in attempts),
        "files": sorted(path.name for path in (folder / "model").iterdir()),
        "from_pretrained": _loads(folder / "model"),
    }


def _training_on(here: Terminal) -> str:
    """Waits until it trains; returns the node."""
    give_up = time.monotonic() + PATIENCE
    while time.monotonic() < give_up:
        status = here.status()
        if status.get("progress", {}).get("step", 0) >= 10:
            return str(status["attempts"][-1]["node"])
        if status.get("phase") in ("Failed", "Succeeded", "Invalid"):
            raise SystemExit(f"the job ended before its node was taken: {status.get('conditions')}")
        time.sleep(0.5)
    raise SystemExit(f"no step within {PATIENCE:.0f} s: {here.status()}")


def _loads(folder: Path) -> bool:
    """Whether the library reads the folder as a model."""
    program = "import sys, transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    return subprocess.run([sys.executable, "-c", program, str(folder)], check=False).returncode == 0


def figures() -> dict[str, Any]:
    with lifecycle.temporary_cluster() as running, tempfile.TemporaryDirectory() as folder:
        install.install(running.cluster)
        return played(running.cluster, Path(folder))
