"""`make test-with X=...`: the levels beside another program, or another version of a library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
Environment = dict[str, str]


class Missing(Exception):
    """What the person has to name first."""


def main(words: Sequence[str]) -> int:
    name = words[0] if words else ""
    if name not in LEVELS:
        print("make test-with X=NAME, one of", file=sys.stderr)
        for known, (what, _, _) in LEVELS.items():
            print(f"  {known:<11} {what}", file=sys.stderr)
        return 2
    _, folder, prepare = LEVELS[name]
    try:
        environment = prepare()
    except Missing as sentence:
        print(f"error: {sentence}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(
            f"error: `{' '.join(map(str, error.cmd[:4]))} ...` ended with {error.returncode}", file=sys.stderr
        )
        return 1
    command = [sys.executable, "-m", "pytest", "-n", "0", *folder]
    return subprocess.call(command, cwd=ROOT, env=os.environ | environment)


def nothing() -> Environment:
    return {}


def kueue() -> Environment:
    checkout, program = os.environ.get("KUEUE"), os.environ.get("PROGRAM")
    if not checkout or not program:
        raise Missing("make test-with X=kueue KUEUE=/path/of/a/checkout PROGRAM=/path/of/its/kueue")
    return {"SPOTTRAIN_KUEUE": checkout, "SPOTTRAIN_KUEUE_PROGRAM": program}


def torch() -> Environment:
    """An environment with another torch and our wheel: TORCH=2.6.0, PYTHON=3.11 or a path (5 to 7 GB)."""
    version, python = os.environ.get("TORCH", "2.6.0"), os.environ.get("PYTHON", "3.11")
    folder = ROOT / ".torch" / f"{version}-{Path(python).name}"
    subprocess.run(["make", "wheel"], cwd=ROOT, check=True)
    wheel = next((ROOT / "dist").glob("spottrain-*.whl"))
    install = ["pip", "install", "--quiet", "--python", str(folder)]
    uv("venv", "--quiet", "--allow-existing", "--python", python, str(folder))
    uv(*install, f"torch=={version}")
    uv(*install, "--reinstall-package", "spottrain", f"spottrain[s3] @ {wheel.as_uri()}")
    return {"SPOTTRAIN_TORCH": str(folder / "bin" / "python")}


def frameworks() -> Environment:
    """An environment with FRAMEWORK=keras (1.4 GB), jax (0.6) or trl (5.5)."""
    name = os.environ.get("FRAMEWORK", "keras")
    project, folder = ROOT / "tests" / "frameworks" / name, ROOT / ".frameworks" / name
    if not (project / "uv.lock").exists():
        raise Missing(f"FRAMEWORK={name} is not known; it is keras, jax or trl")
    uv("sync", "--frozen", "--quiet", "--project", str(project), UV_PROJECT_ENVIRONMENT=str(folder))
    return {"SPOTTRAIN_FRAMEWORK": name, "SPOTTRAIN_FRAMEWORK_PYTHON": str(folder / "bin" / "python")}


def native() -> Environment:
    return {"SPOTTRAIN_NATIVE_KUBERNETES": os.environ.get("KUBERNETES", "1.37.1")}


def kubernetes() -> Environment:
    return {"SPOTTRAIN_TEST_KUBERNETES": os.environ.get("KUBERNETES", "1.37.2")}


def uv(*words: str, **environment: str) -> None:
    program = shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
    subprocess.run([program, *words], cwd=ROOT, check=True, env=os.environ | environment)


LEVELS: Final[dict[str, tuple[str, tuple[str, ...], Callable[[], Environment]]]] = {
    "karpenter": (
        "the real Karpenter with its kwok provider (built once, 9 minutes)",
        ("tests/karpenter",),
        nothing,
    ),
    "kueue": ("the real Kueue that you have: KUEUE=/checkout PROGRAM=/kueue", ("tests/kueue",), kueue),
    "prometheus": (
        "a real Prometheus scrapes a real run (built once, 10 minutes)",
        ("tests/prometheus",),
        nothing,
    ),
    "torch": (
        "the wheel beside another torch: TORCH=2.6.0 PYTHON=3.11 (7 GB)",
        ("tests/torch_versions",),
        torch,
    ),
    "frameworks": (
        "an example beside its library: FRAMEWORK=keras, jax or trl",
        ("tests/frameworks",),
        frameworks,
    ),
    "native": (
        "gangs by Kubernetes' own scheduler: KUBERNETES=1.37.1 (20 minutes)",
        ("tests/native",),
        native,
    ),
    "kubernetes": ("the api level on KUBERNETES=1.37.2 (built once, 20 minutes)", ("tests/api",), kubernetes),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
