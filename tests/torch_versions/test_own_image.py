"""examples/own-image/Dockerfile on an image that has a torch of its own: built, run as root and not.

The base is Debian with a virtual environment and pip. Its torch is that of
`make test-with X=torch`, on a volume.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from localcluster.disk import Meter
from localcluster.images import Builder, build_all
from localcluster.layout import default_paths
from localcluster.shell import locked

from tests.torch_versions.conftest import version_of

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "examples" / "own-image" / "Dockerfile"
PYTHON, PLAIN, OWN = (f"localhost/spottrain-test-{name}:dev" for name in ("python", "plain", "own"))
PLAIN_FILE = f"""\
FROM {PYTHON}
RUN python3 -m venv /opt/venv && echo /opt/torch > /opt/venv/lib/python3.11/site-packages/torch.pth
"""
TRUST = ("/etc/ssl/certs", "/etc/pip.conf")
"""Of the machine that builds: pip asks the same registry, and trusts the same authorities."""

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("buildah"), reason="builds images: needs root and buildah"
)


@dataclass(frozen=True, kw_only=True)
class Container:
    builder: Builder
    name: str
    torch: Path

    def run(self, *words: str, user: str = "0:0", folder: str = "/tmp") -> str:
        volume = f"{self.torch}:/opt/torch:ro"
        given = ("--volume", volume, "--env", "STEPS=20", "--workingdir", folder, "--user", user)
        return self.builder.buildah("run", *given, self.name, "--", *words, timeout=120)


@pytest.fixture(scope="module")
def container(other: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    torch = other.parents[1] / "lib" / "python3.11" / "site-packages"
    if not torch.is_dir():
        pytest.skip("Debian's Python is 3.11, and this environment has another")
    paths = default_paths()
    builder = Builder(paths=paths, meter=Meter(state=paths.state, file=paths.measures))
    plain = tmp_path_factory.mktemp("plain") / "Dockerfile"
    plain.write_text(PLAIN_FILE)
    with locked(paths.state / "lock"):
        build_all(builder, {PYTHON: "base"})
        builder.buildah("bud", "--tag", PLAIN, "--file", plain, plain.parent, timeout=300)
        lent = [word for path in TRUST if Path(path).exists() for word in ("--volume", f"{path}:{path}:ro")]
        arguments = ("--build-arg", f"IMAGE={PLAIN}", "--tag", OWN, "--file", DOCKERFILE)
        builder.buildah("bud", *lent, *arguments, ROOT, timeout=300)
        name = builder.buildah("from", OWN)
        try:
            yield Container(builder=builder, name=name, torch=torch)
        finally:
            builder.buildah("rm", name)
            for image in (OWN, PLAIN, PYTHON):
                builder.buildah("rmi", image)


def test_it_has_at_most_five_lines() -> None:
    assert len(DOCKERFILE.read_text().splitlines()) <= 5


def test_the_wheel_is_installed_beside_the_torch_of_the_image(container: Container, other: Path) -> None:
    shows = "import spottrain, boto3, torch; print(spottrain.__file__, torch.__file__, torch.__version__)"
    shown = container.run("python", "-c", shows).splitlines()[-1].split()
    assert shown[0].startswith("/opt/venv/") and shown[1].startswith("/opt/torch/")
    assert shown[2].split("+")[0] == version_of(other)


@pytest.mark.parametrize("user", ["0:0", "1234:1234"])
@pytest.mark.parametrize("command", [["spottrain", "run"], ["python"]], ids=["entry point", "python"])
def test_it_trains_as_any_user(container: Container, user: str, command: list[str]) -> None:
    folder = container.run("mktemp", "--directory", user=user)
    trained = container.run(*command, "/opt/train/own_loop.py", user=user, folder=folder)
    assert "event=done" in trained
    assert f"{folder}/checkpoints/own_loop/HEAD" in container.run("find", folder, user=user)
