"""What the loader workers hold of their own: read, compared with the look before, and told in time."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import pytest
from spottrain.core.container import ContainerMemory
from spottrain.core.progress import ProgressBoard
from spottrain.diagnostics.loader_memory import LoaderMemory, Look, private_bytes, warning

from tests.support.sentences import Told

GIB = 2**30


def look(*private: float, left: float = 100) -> Look:
    memory = ContainerMemory(limit=64 * GIB, used=int((64 - left) * GIB))
    return Look(private={number: int(size * GIB) for number, size in enumerate(private)}, memory=memory)


@pytest.mark.parametrize(
    ("before", "now", "ranks", "told"),
    [
        (look(1, 1), look(2, 2, left=5), 1, False),  # 2 GiB more, and more than twice that are left
        (look(1, 1), look(2, 2, left=4), 1, True),
        (look(1, 1), look(2, 2, left=5), 2, True),  # the other rank's grow as well
        (look(1, 1), look(1, 1, left=0.1), 1, False),  # it is not they who grow
        (look(2, 2), look(1, 1, left=0.1), 1, False),
        (Look(), look(2, 2, left=1), 1, False),  # they have only just started
        (look(1), look(1, 5, left=1), 1, False),
        (look(1, 1), look(2, 2, left=-1), 1, True),
        (look(1, 1), Look(private={0: 5 * GIB}), 1, False),  # no limit is known
    ],
)
def test_a_growth_that_would_soon_reach_the_limit_is_told(
    before: Look, now: Look, ranks: int, told: bool
) -> None:
    assert bool(warning(before, now, seconds=30, ranks=ranks)) is told


def test_the_words_name_the_share_of_the_workers_and_the_ways_out(told: Told) -> None:
    told(warning(look(1, 1), look(2, 2, left=4), seconds=20))


def smaps(proc: Path, pid: int | str, *mappings: tuple[int, int, int]) -> None:
    """KiB of each mapping: Private_Clean, Private_Dirty, Anonymous."""
    (proc / str(pid)).mkdir(parents=True, exist_ok=True)
    text = "".join(
        "55781b28b000-7ffe437fb000 rw-p 00000000 00:00 0\nSize:  999 kB\nRss:  99 kB\nShared_Clean:  9 kB\n"
        f"Private_Clean:  {clean} kB\nPrivate_Dirty:  {dirty} kB\nReferenced:  9 kB\n"
        f"Anonymous:  {anonymous} kB\nAnonHugePages:  5 kB\nPrivate_Hugetlb:  7 kB\nVmFlags: rd wr mr\n"
        for clean, dirty, anonymous in mappings
    )
    (proc / str(pid) / "smaps").write_text(text)


def test_private_memory_is_what_linux_says_without_the_pages_of_files(tmp_path: Path) -> None:
    heap, shared_with_the_parent, file, written_file = (3, 40, 43), (0, 5, 900), (700, 0, 0), (0, 80, 0)
    smaps(tmp_path, 7, heap, shared_with_the_parent, file, written_file)
    assert private_bytes(7, tmp_path) == (43 + 5) * 1024
    assert private_bytes(8, tmp_path) is None, "it has ended"


def test_a_map_of_a_file_that_this_process_alone_reads_is_no_memory_of_its_own(tmp_path: Path) -> None:
    size = 64 * 2**20
    (tmp_path / "array").write_bytes(bytes(size))
    before = private_bytes(os.getpid())
    with (tmp_path / "array").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert not any(mapped[place] for place in range(0, size, 4096)), "every page is touched"
        after = private_bytes(os.getpid())
    assert before is not None and after is not None and after - before < size / 4


class Watched:
    """Two workers that hold `each` GiB of their own at look after look, in a container of 20 GiB."""

    def __init__(self, proc: Path, *each: float, other: float = 4) -> None:
        self.proc, self.each, self.other, self.given = proc, each, other, [0]
        self.enough = threading.Event()
        smaps(proc, "self")

    @property
    def now(self) -> float:
        return self.each[min(len(self.given), len(self.each)) - 1]

    def pids(self) -> tuple[int, ...]:
        for pid in (1, 2):
            smaps(self.proc, pid, (0, kib := int(self.now * 2**20), kib))
        return 1, 2, 3

    def told(self, found: int) -> None:
        self.given.append(found)
        if len(self.given) > len(self.each) + 1:
            self.enough.set()

    def memory(self) -> ContainerMemory:
        return ContainerMemory(limit=20 * GIB, used=int((self.other + 2 * self.now) * GIB))

    def lines(self, capfd: pytest.CaptureFixture[str]) -> list[str]:
        watching = LoaderMemory(self.pids, self.told, memory=self.memory, proc=self.proc, every=0.001)
        assert self.enough.wait(30)
        watching.close()
        watching.join()
        return [line for line in capfd.readouterr().out.splitlines() if "about=data" in line]


def test_it_is_told_once_and_before_the_limit_is_reached(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    each = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    watched = Watched(tmp_path, *each)
    (line,) = watched.lines(capfd)
    assert watched.given[1 : len(each) + 1] == [2 * int(size * 2**20) * 1024 for size in each]
    assert "worker(s) hold 12.00 GiB of private memory, 2.00 GiB more" in line
    assert "4.00 GiB of" in line, "what is left"


def test_where_linux_does_not_say_it_is_told_once_that_nothing_is_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = threading.Event()

    def pids() -> tuple[int, ...]:
        asked.set()
        return (1,)

    watching = LoaderMemory(pids, lambda found: None, proc=tmp_path, every=0.001)
    assert asked.wait(30)
    watching.join()
    assert capfd.readouterr().out.count("event=loader-memory") == 1


def test_what_they_hold_is_a_metric_once_there_are_workers() -> None:
    board = ProgressBoard()
    assert "spottrain_loader_private_bytes" not in board.metrics()
    board.update(loader_bytes=4096)
    assert (
        "# TYPE spottrain_loader_private_bytes gauge\nspottrain_loader_private_bytes 4096" in board.metrics()
    )
