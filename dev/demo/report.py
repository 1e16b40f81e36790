"""The page that `spottrain report` makes of the interrupted job, as a person at the demo's cluster does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from demo.target import ROOT, Target


def write_report(target: Target, job: str) -> Path:
    """Returns the page's file. Raises RuntimeError with what the command said."""
    kubectl, file = target.kubectl, ROOT / "out" / "demo-report.html"
    file.parent.mkdir(exist_ok=True)
    env = os.environ | target.keys | {"KUBECONFIG": kubectl.kubeconfig}
    if Path(kubectl.binary).is_absolute():
        env["PATH"] = f"{Path(kubectl.binary).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    program = str(Path(sys.executable).with_name("spottrain"))
    done = subprocess.run(
        [program, "report", job, "--namespace", kubectl.namespace, "--output", str(file)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the report was not made: {done.stderr.strip()}")
    return file
