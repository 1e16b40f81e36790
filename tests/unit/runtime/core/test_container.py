"""What the container may use, and what it does: read from cgroups as they are written, v1 and v2."""

from __future__ import annotations

from pathlib import Path

import pytest
from spottrain.core.container import ContainerMemory, cores, memory, memory_limit, on_volume


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "membership", "limit"),
    [
        ({"memory.max": "1000\n"}, "0::/\n", 1000),
        ({"memory.max": "max\n"}, "0::/\n", None),
        ({"a/memory.max": "900\n", "a/b/memory.max": "max\n"}, "0::/a/b\n", 900),
        ({"a/memory.max": "900\n", "a/b/memory.max": "500\n"}, "0::/a/b\n", 500),
        ({"memory/memory.limit_in_bytes": "700\n"}, "5:cpu:/x\n4:memory:/docker/1\n", 700),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, "4:memory:/\n", None),
        ({"memory/k/memory.limit_in_bytes": "70\n"}, "4:memory:/k\n", 70),
        ({}, "0::/\n", None),
    ],
)
def test_the_limit_of_the_container_is_read(
    tmp_path: Path, files: dict[str, str], membership: str, limit: int | None
) -> None:
    where = written(tmp_path / "own", {"cgroup": membership}) / "cgroup"
    assert memory_limit(written(tmp_path / "cgroups", files), where) == limit


def test_without_proc_the_mount_alone_is_read(tmp_path: Path) -> None:
    assert memory_limit(written(tmp_path, {"memory.max": "5"}), tmp_path / "absent") == 5


V2 = {"memory.max": "{limit}\n", "memory.current": "{used}\n", "memory.stat": "anon 5\n{files}"}
V1 = {
    "memory/memory.limit_in_bytes": "{limit}\n",
    "memory/memory.usage_in_bytes": "{used}\n",
    "memory/memory.stat": "rss 5\n{files}",
}


def filled(folder: Path, files: dict[str, str], limit: int, used: int, clean: str = "") -> Path:
    texts = {
        name: text.format(limit=limit, used=used, files=clean or "inactive_file 0\n")
        for name, text in files.items()
    }
    return written(folder, texts)


@pytest.mark.parametrize(
    ("files", "membership", "found"),
    [
        ({"pods/cpu.max": "max 100000\n", "pods/one/cpu.max": "200000 100000\n"}, "0::/pods/one\n", 2.0),
        ({"pods/cpu.max": "150000 100000\n", "pods/one/cpu.max": "max 100000\n"}, "0::/pods/one\n", 1.5),
        ({"pods/cpu.max": "150000 100000\n"}, "0::/other\n", 12.0),
        (
            {"cpu/k/cpu.cfs_quota_us": "300000\n", "cpu/k/cpu.cfs_period_us": "100000\n"},
            "5:cpu,cpuacct:/k\n4:memory:/m\n",
            3.0,
        ),
    ],
)
def test_the_quota_is_that_of_the_process_s_group_and_those_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], membership: str, found: float
) -> None:
    """A pod that sees the host's cgroups has its own somewhere below."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(12)), raising=False)
    where = written(tmp_path / "own", {"cgroup": membership}) / "cgroup"
    assert cores(written(tmp_path / "cgroups", files), where) == found


def test_where_the_system_does_not_say_which_cores_it_is_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    assert cores(tmp_path) == 12


@pytest.mark.parametrize("files", [V2, V1], ids=["v2", "v1"])
def test_clean_files_are_not_used_for_they_can_be_dropped(tmp_path: Path, files: dict[str, str]) -> None:
    filled(tmp_path, files, 1000, 700, "inactive_file 150\nactive_file 50\n")
    found = memory(tmp_path, tmp_path / "absent")
    assert found == ContainerMemory(limit=1000, used=500) and found.left == 500


def test_cgroup_v1_counts_the_files_of_the_groups_below_under_another_name(tmp_path: Path) -> None:
    clean = "inactive_file 1\nactive_file 1\ntotal_inactive_file 200\ntotal_active_file 50\n"
    found = memory(filled(tmp_path, V1, 1000, 700, clean), tmp_path / "absent")
    assert found is not None and found.used == 450


def test_the_group_with_the_least_left_counts_and_not_the_one_with_the_least_limit(tmp_path: Path) -> None:
    filled(tmp_path / "pod", V2, 1000, 950)
    filled(tmp_path / "pod" / "container", V2, 500, 100)
    where = written(tmp_path / "own", {"cgroup": "0::/pod/container\n"}) / "cgroup"
    assert memory(tmp_path, where) == ContainerMemory(limit=1000, used=950)
    assert memory_limit(tmp_path, where) == 500


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"memory.max": "max\n"},
        {"memory/memory.limit_in_bytes": "9223372036854771712\n"},
        {"memory.max": "1000\n"},
    ],
)
def test_without_a_limit_or_without_the_use_nothing_is_known(tmp_path: Path, files: dict[str, str]) -> None:
    assert memory(written(tmp_path, files), tmp_path / "absent") is None


def test_what_lies_on_a_volume_is_told_from_what_dies_with_the_container(tmp_path: Path) -> None:
    points = ["/", "/proc", "/dev/shm", "/data", r"/my\040volume", "/etc/hosts"]
    lines = [f"{n} 1 0:{n} / {point} rw,relatime - ext4 /dev/a rw" for n, point in enumerate(points)]
    lines.append("9 1 0:9 / /not-utf8-\udcff rw - ext4 /dev/a rw")
    mounts = tmp_path / "mountinfo"
    mounts.write_text("\n".join(lines), errors="surrogateescape")
    for folder in ("/data", "/data/run/x", "/my volume/x"):
        assert on_volume(Path(folder), mounts), folder
    for folder in ("/", "/opt/app/checkpoints", "/database", "/data/../x", "/dev/shm/x", "/proc/1"):
        assert not on_volume(Path(folder), mounts), folder
    assert on_volume(Path("/x"), tmp_path / "absent")
