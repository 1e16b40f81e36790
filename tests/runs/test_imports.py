"""`spottrain run` imports nothing that the script, its store and its loop do not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from spottrain.contract import Env

from tests.runs.conftest import SCRIPT
from tests.runs.launched import Launched

HEAVY = (
    "torch",
    "numpy",
    "boto3",
    "botocore",
    "google",
    "safetensors",
    "transformers",
    "lightning",
    "accelerate",
)
"""What a pod may lack, or what takes long to import."""
SHOWS = f"""
import sys
from pathlib import Path
def show(when):
    print(when, sorted({{name.split(".")[0] for name in sys.modules}} & set({HEAVY!r})), flush=True)
"""


def test_the_launcher_imports_none_of_them() -> None:
    shows = f"import spottrain.cli.main{SHOWS}show('launcher')"
    shown = subprocess.run([sys.executable, "-c", shows], capture_output=True, text=True, check=True).stdout
    assert shown == "launcher []\n"


@pytest.mark.heavy
def test_a_training_on_a_folder_imports_torch_alone(tmp_path: Path) -> None:
    script = f"{SHOWS}show('before')\n{SCRIPT}\nshow('after')"
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "spottrain", "run", "train.py"]
    run = Launched(tmp_path, command, **{Env.JOB_UID: "uid", Env.LOGS: "off"}).done()
    assert "before []" in run.log
    assert "after ['numpy', 'torch']" in run.log or "after ['torch']" in run.log  # torch imports NumPy
