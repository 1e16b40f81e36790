"""Parts are stored once, whatever the store answers, and whoever else writes at the same place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from spottrain.contract import log_key
from spottrain.errors import StoreDenied, StoreUnavailable
from spottrain.lifecycle.log_capture.uploader import Limits, LogUploader
from spottrain.storage.base import Body
from spottrain.storage.local import FolderStore

from tests.support.command import checkpoints as main


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Faulty(FolderStore):
    """`before` and `after` each write; `listed`: prefixes that were asked for; `read`: keys."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.before: Callable[[str], None] = lambda key: None
        self.after: Callable[[str], None] = lambda key: None
        self.listed: list[str] = []
        self.read: list[str] = []
        self.put_to: list[str] = []

    def put_if_absent(self, key: str, body: Body) -> str:
        self.put_to.append(key)
        self.before(key)
        etag = super().put_if_absent(key, body)
        self.after(key)
        return etag

    def list(self, prefix: str) -> list[str]:
        self.listed.append(prefix)
        return super().list(prefix)

    def get(self, key: str):  # type: ignore[no-untyped-def]
        self.read.append(key)
        return super().get(key)


class Scene:
    def __init__(self, folder: Path, *, ranks: tuple[int, ...] = (0,), attempt: int | None = 2) -> None:
        self.folder = folder
        self.store = Faulty(folder)
        self.clock = Clock()
        self.said: list[str] = []
        self.shelf = LogUploader(
            lambda: self.store,
            ranks,
            attempt=attempt,
            say=self.said.append,
            limits=Limits(every=30.0),
            clock=self.clock,
        )

    def after(self, seconds: float) -> None:
        """What is due then is sent."""
        self.clock.now += seconds
        self.shelf.send()

    def prints(self, *texts: str) -> None:
        """Each half a minute after the one before."""
        for text in texts:
            self.shelf.add(0, text.encode())
            self.after(30)

    def stored(self, rank: int = 0, attempt: int = 2) -> dict[int, str]:
        folder = self.folder / log_key(attempt, rank, 1).rpartition("/")[0]
        return {int(path.stem): path.read_text() for path in sorted(folder.glob("*.log"))}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "store")


def no_answer(key: str) -> None:
    raise StoreUnavailable(f"no answer for {key}")


def answers(key: str) -> None:
    pass


def test_each_rank_has_parts_of_its_own_and_nothing_is_read_or_listed_for_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "store", ranks=(0, 3))
    scene.shelf.add(0, b"zero\n")
    scene.after(30)
    scene.shelf.add(3, b"three\n")
    scene.shelf.add(0, b"more\n")
    scene.after(30)
    assert scene.stored(0) == {1: "zero\n", 2: "more\n"} and scene.stored(3) == {1: "three\n"}
    assert scene.store.listed == [] and scene.store.read == [] and scene.said == []


def test_a_store_that_fails_is_told_once_and_tried_again_with_the_next_part(scene: Scene) -> None:
    scene.store.before = no_answer
    scene.prints("a\n", "b\n", "c\n")
    assert len(scene.said) == 1 and "event=logs-failed" in scene.said[0]
    assert "StoreUnavailable: no answer for logs/attempt-000002" in scene.said[0]
    scene.store.before = answers
    scene.after(30)
    assert "".join(scene.stored().values()) == "a\nb\nc\n"
    scene.store.before = no_answer
    scene.prints("d\n")
    assert len(scene.said) == 2, "another outage is another line"


def test_a_part_whose_answer_was_lost_is_not_stored_a_second_time(scene: Scene) -> None:
    scene.store.after = no_answer
    scene.prints("a\n")
    scene.store.after = answers
    scene.prints("b\n")
    assert scene.stored() == {1: "a\n", 2: "b\n"}
    assert scene.store.listed == []


def test_parts_of_somebody_else_are_left_and_ours_follow_them(scene: Scene) -> None:
    other = FolderStore(scene.folder)
    for number in (1, 2, 3):
        other.put(log_key(2, 0, number), b"theirs\n")
    scene.prints("a\n")
    other.put(log_key(2, 0, 5), b"theirs\n")
    scene.prints("b\n")
    assert scene.stored() == dict.fromkeys((1, 2, 3, 5), "theirs\n") | {4: "a\n", 6: "b\n"}


def test_another_s_part_that_came_after_a_failed_try_is_not_taken_for_ours(scene: Scene) -> None:
    def denied(key: str) -> None:
        raise StoreDenied("403")

    scene.store.before = denied
    scene.prints("a\n")
    FolderStore(scene.folder).put(log_key(2, 0, 1), b"theirs\n")
    scene.store.before = answers
    scene.after(30)
    assert scene.stored() == {1: "theirs\n", 2: "a\n"}


def test_an_attempt_that_nobody_has_numbered_is_the_one_after_the_last_with_logs(tmp_path: Path) -> None:
    FolderStore(tmp_path / "store").put(log_key(6, 0, 1), b"earlier\n")
    scene = Scene(tmp_path / "store", attempt=None)
    scene.prints("a\n")
    scene.prints("b\n")
    assert scene.stored(attempt=7) == {1: "a\n", 2: "b\n"} and scene.store.listed == ["logs/"]


class Gate:
    """Holds the first part until it is opened, and then lets it fail or not."""

    def __init__(self, scene: Scene, error: Exception | None = None) -> None:
        self.began, self.open = threading.Event(), threading.Event()
        self.order: list[str] = []
        self._error = error
        scene.store.before = self
        scene.shelf.add(0, b"first\n")
        scene.clock.now += 30
        scene.shelf.start()
        assert self.began.wait(10)
        scene.shelf.add(0, b"last\n")

    def __call__(self, key: str) -> None:
        if key == log_key(2, 0, 1) and not self.open.is_set():
            self.began.set()
            assert self.open.wait(10)
            if self._error is not None:
                raise self._error
        self.order.append(key)


@pytest.mark.parametrize("error", [None, StoreUnavailable("503")])
def test_at_the_end_a_part_that_is_on_its_way_is_waited_for_and_comes_first_however_it_ends(
    scene: Scene, error: Exception | None
) -> None:
    gate = Gate(scene, error)
    threading.Timer(0.2, gate.open.set).start()
    scene.shelf.finish(20.0)
    assert scene.stored() == {1: "first\n", 2: "last\n"}
    assert gate.order == [log_key(2, 0, 1), log_key(2, 0, 2)]
    assert [line for line in scene.said if "logs-missing" in line] == []


def test_at_the_end_a_store_that_hangs_is_not_waited_for(scene: Scene) -> None:
    gate = Gate(scene)
    scene.shelf.finish(0.0)
    assert scene.stored() == {}
    assert len(scene.said) == 1 and "event=logs-missing of=0 bytes=11" in scene.said[0]
    gate.open.set()


# --- reading them back ----------------------------------------------------------------------------------
@pytest.fixture
def kept(scene: Scene) -> Scene:
    for attempt, rank, number, text in (
        (1, 0, 1, "first\n"),
        (2, 0, 1, "one\n"),
        (2, 0, 2, "two\n"),
        (2, 0, 10, "ten\n"),
        (2, 1, 1, "of rank 1\n"),
    ):
        scene.store.put(log_key(attempt, rank, number), text.encode())
    return scene


def said(capfdbinary: pytest.CaptureFixture[bytes], *words: str) -> tuple[int, str]:
    code = main(["logs", *words])
    out = capfdbinary.readouterr()
    return code, (out.out + out.err).decode()


def test_logs_are_printed_in_order_and_what_is_missing_is_named(
    kept: Scene, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    missing = "".join(f"[part {number} is missing]\n" for number in range(3, 10))
    uri = str(kept.folder)
    assert said(capfdbinary, uri, "--attempt", "2", "--rank", "0") == (0, f"one\ntwo\n{missing}ten\n")
    assert said(capfdbinary, uri, "--rank", "1") == (0, "of rank 1\n")
    code, text = said(capfdbinary, uri)
    assert code == 0 and [line for line in text.splitlines() if "==>" in line] == [
        "==> attempt 1, rank 0 <==",
        "==> attempt 2, rank 0 <==",
        "==> attempt 2, rank 1 <==",
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--attempt", "3"], "there are no logs of attempt 3 at"),
        (["--attempt", "1", "--rank", "1"], "attempt 1, rank 1 at"),
        (["--attempt", "3"], "there are logs of attempt 1 rank 0, attempt 2 rank 0, attempt 2 rank 1"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(
    kept: Scene, capfdbinary: pytest.CaptureFixture[bytes], words: list[str], says: str
) -> None:
    code, text = said(capfdbinary, str(kept.folder), *words)
    assert code == 3 and says in text


def test_a_uri_without_logs_says_where_they_come_from(
    scene: Scene, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    scene.store.put("HEAD", b"{}")
    code, text = said(capfdbinary, str(scene.folder))
    assert code == 3 and "SPOTTRAIN_LOGS is keep" in text
    assert said(capfdbinary) == (
        2,
        "spottrain: Missing argument 'JOB|URI'; see spottrain checkpoints logs --help\n",
    )
