"""What works by the Python of this machine works by the image's, which is another one."""

from __future__ import annotations

from localcluster.layout import RUNTIME_IMAGE

from tests.support.lab import Lab

ROUND_TRIP = """
import pathlib, tempfile
from spottrain.checkpoint.compile_cache import listing, pack, unpack

one, two = pathlib.Path(tempfile.mkdtemp()), pathlib.Path(tempfile.mkdtemp())
(one / "deep" / "er").mkdir(parents=True)
(one / "deep" / "er" / "kernel.so").write_bytes(b"x" * 100_000)
unpack(bytes(pack({"inductor": one}, listing({"inductor": one}))), {"inductor": two})
assert (two / "deep" / "er" / "kernel.so").read_bytes() == b"x" * 100_000
print("unpacked")
"""


def test_a_compile_cache_can_be_unpacked_in_the_image(lab: Lab) -> None:
    """A restart of `make demo` compiled for 47 s: tarfile's filter is not there before Python 3.11.4."""
    container = {
        "name": "python",
        "image": RUNTIME_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["python", "-c", ROUND_TRIP],
    }
    spec = {"restartPolicy": "Never", "containers": [container]}
    lab.kubectl.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "image"}, "spec": spec})

    def ended() -> str:
        pod = lab.kubectl.get("pod", "image") or {}
        phase = pod.get("status", {}).get("phase", "")
        return phase if phase in ("Succeeded", "Failed") else ""

    assert lab.wait("the end of the pod", ended) == "Succeeded", lab.kubectl.run("logs", "image")
