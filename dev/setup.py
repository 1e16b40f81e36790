"""Everything that a fresh machine lacks: the locked Python environment, and the programs of the local
cluster.

    python3 dev/setup.py environment      .venv alone
    python3 dev/setup.py programs         both, side by side
    python3 dev/setup.py docs             .docs alone, for the site

Needs Python 3.11 and its standard library, nothing else. Says in the first seconds what cannot work, and why.
"""

import hashlib
import os
import platform
import shutil
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Final

from localcluster import binaries, layout, releases
from localcluster.disk import free_gb
from localcluster.downloads import TRY_SECONDS, fetch
from localcluster.progress import Progress, line
from localcluster.shell import ClusterError, run

ROOT: Final = layout.repository()
ENVIRONMENT: Final = ROOT / ".venv"
STAMP: Final = ENVIRONMENT / ".synced"
INPUTS: Final = ("pyproject.toml", "cli/pyproject.toml", "uv.lock")
PACKAGES_GB: Final = 6.0
"""torch with its CUDA libraries, transformers and the like: 5.6 unpacked, seen on x86_64."""
PACKAGES_SECONDS: Final = 60
UV_VERSION: Final = "0.13.9"


def main(words: list[str]) -> int:
    wanted = words[0] if words else ""
    if wanted not in ("environment", "programs", "docs"):
        print(__doc__, file=sys.stderr)
        return 2
    names = binaries.DEMO_PROGRAMS if wanted == "programs" else frozenset()
    try:
        if wanted == "docs":
            sync_docs(find_uv())
        else:
            prepare(names)
    except ClusterError as error:
        line(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        line("stopped; the same command goes on where this one was")
        return 130
    return 0


def prepare(programs: frozenset[str]) -> None:
    """Brings what is missing, and does nothing where nothing is."""
    paths = layout.default_paths()
    packages = not is_synced()
    builds = binaries.missing(paths, programs)
    if not packages and not builds:
        return
    check_machine(programs)
    check_disk(paths, packages=packages, builds=bool(builds))
    if packages:
        check_network()
    uv = find_uv()
    if not packages:
        binaries.ensure(paths, programs)
        return
    failures: list[BaseException] = []

    def build() -> None:
        try:
            binaries.ensure(paths, programs)
        except BaseException as error:
            failures.append(error)

    other = threading.Thread(target=build, daemon=True)
    other.start()
    sync(uv)
    other.join()
    if failures:
        raise failures[0]


def check_machine(programs: frozenset[str]) -> None:
    if programs and sys.platform != "linux":
        raise ClusterError(
            f"the local cluster needs Linux, and this is {platform.system()}; `make demo-local` works here"
        )
    if programs and platform.machine() not in ("x86_64", "aarch64"):
        raise ClusterError(f"no pinned program runs on {platform.machine()}; `make demo-local` may work here")


def check_disk(paths: layout.Paths, *, packages: bool, builds: bool) -> None:
    """Says how much is needed before the first download."""
    needed = {ROOT: PACKAGES_GB if packages else 0.0}
    needed[paths.state] = binaries.BUILD_GB if builds else 0.0
    total = sum(needed.values())
    line(f"First start: this needs {total:.0f} GB of disk; the same command takes a minute from then on.")
    for folder, gigabytes in needed.items():
        together = total if _same_disk(ROOT, paths.state) else gigabytes
        if gigabytes and free_gb(folder) < together:
            raise ClusterError(
                f"the disk of {folder} has {free_gb(folder):.1f} GB free, and {together:.0f} GB are needed; "
                "make room, or set SPOTTRAIN_DEV_DIR (programs) and clone to another disk (packages)"
            )


def _same_disk(one: Path, other: Path) -> bool:
    while not other.exists():
        other = other.parent
    return one.stat().st_dev == other.stat().st_dev


def check_network() -> None:
    """One try. An index of one's own is not asked: only uv and pip know how to reach it."""
    own = ("UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "PIP_INDEX_URL")
    if any(os.environ.get(name) for name in own):
        return
    try:
        urllib.request.urlopen("https://pypi.org/simple/uv/", timeout=TRY_SECONDS).close()
    except OSError as error:
        raise ClusterError(
            f"pypi.org cannot be reached ({error}), and the first start downloads about 4 GB from there; "
            "behind a proxy set HTTPS_PROXY, with an index of your own UV_DEFAULT_INDEX"
        ) from None


def find_uv() -> Path:
    """uv on PATH, else the pinned one in .tools, by its wheel or by pip."""
    if found := shutil.which("uv"):
        return Path(found)
    here = ROOT / ".tools" / "bin" / "uv"
    if here.exists() and UV_VERSION in run([here, "--version"]):
        return here
    wheel = releases.UV.get(platform.machine()) if sys.platform == "linux" else None
    if wheel is not None:
        try:
            fetch({here: wheel})
            return here
        except ClusterError as error:
            line(f"{error}; trying pip")
    pip: list[str | Path] = [sys.executable, "-m", "pip", "install", "--quiet", "--root-user-action=ignore"]
    run([*pip, "--target", ROOT / ".tools", f"uv=={UV_VERSION}"], timeout=300)
    return here


def sync(uv: Path) -> None:
    """Installs the locked environment."""
    command: list[str | Path] = [uv, "sync", "--frozen", "--quiet", "--python", sys.executable]
    with Progress("Installing the locked Python packages (torch is most of it)", usual=PACKAGES_SECONDS):
        run(command, cwd=ROOT, env=binaries.uv_env(), timeout=3600)
    STAMP.write_text(fingerprint())


def sync_docs(uv: Path) -> None:
    """Installs what builds the site, in a folder of its own."""
    command: list[str | Path] = [uv, "sync", "--frozen", "--quiet", "--only-group", "docs"]
    env = binaries.uv_env() | {"UV_PROJECT_ENVIRONMENT": str(ROOT / ".docs")}
    run([*command, "--python", sys.executable], cwd=ROOT, env=env, timeout=600)


def is_synced() -> bool:
    return STAMP.exists() and STAMP.read_text() == fingerprint()


def fingerprint() -> str:
    """Of what the environment is made from, and of the place: entry points hold their own path."""
    digest = hashlib.sha256(f"{ROOT} {sys.version}".encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
