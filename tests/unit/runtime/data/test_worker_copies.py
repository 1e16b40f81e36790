"""About how much a loader worker comes to hold of its own for the set: by what the set is made of."""

from __future__ import annotations

import json
import multiprocessing
import random
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy
import pytest
import torch
from spottrain.data import worker_copies
from spottrain.data.worker_copies import LEVEL, OBJECTS, PAGE, copy_of, start_method

from tests.support.fresh import Fresh

MANY = 10_000
MIB = 2**20
OF_PATHS = MANY * 80
"""49 of a str and 26 letters, in pieces of 16."""


class Set:
    """As a person writes one: whatever is given is an attribute."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


def forked(*held: Any) -> int:
    return copy_of(*held, method="fork").bytes


def sent(*held: Any) -> int:
    return copy_of(*held, method="spawn").bytes


def paths(count: int = MANY) -> list[str]:
    return [f"/data/images/{number:09d}.jpeg" for number in range(count)]


# --- forked workers -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda found: found, id="list"),
        pytest.param(tuple, id="tuple"),
        pytest.param(set, id="set"),
        pytest.param(deque, id="deque"),
        pytest.param(lambda found: {number: each for number, each in enumerate(found)}, id="dict"),
        pytest.param(lambda found: numpy.array(found, dtype=object), id="numpy-of-objects"),
        pytest.param(lambda found: [found[: MANY // 2], found[MANY // 2 :]], id="lists"),
        pytest.param(lambda found: partial(len, found), id="partial"),
        pytest.param(lambda found: lambda index: found[index], id="closure"),
    ],
)
def test_what_a_fork_copies_of_many_words_is_the_words(made: Any) -> None:
    """Not the places in the container, except in a dict's case the numbers that are its keys."""
    estimate = forked(Set(held=made(paths())))
    numbers = 32 * MANY if isinstance(made(["a"]), dict) else 0
    assert estimate == pytest.approx(OF_PATHS + numbers, rel=0.03)


@pytest.mark.parametrize(
    "held",
    [
        pytest.param(numpy.ones((MANY, 10)), id="numpy"),
        pytest.param(torch.ones(MANY, 10), id="torch"),
        pytest.param([torch.ones(MANY, 5), torch.ones(MANY, 5)], id="torch-s"),
        pytest.param({"x": numpy.ones((MANY, 10))[5:]}, id="a-view"),
        pytest.param(bytes(10 * MIB), id="bytes"),
        pytest.param(bytearray(10 * MIB), id="bytearray"),
        pytest.param(range(MANY), id="range"),
        pytest.param([7] * MANY, id="one-number"),
        pytest.param([number % 10 for number in range(MANY)], id="classes"),
        pytest.param([pytest.fail, sys, Set, print, paths], id="what-leads-to-the-interpreter"),
    ],
)
def test_what_has_no_reference_counts_inside_is_not_copied_by_a_fork(held: Any) -> None:
    assert forked(Set(held=held)) < 4 * PAGE


def test_a_map_of_a_file_is_shared(tmp_path: Any) -> None:
    held = numpy.memmap(tmp_path / "set", dtype="float32", mode="w+", shape=(MANY,))
    assert forked(Set(held=held)) < 2 * PAGE


def test_of_a_long_object_a_fork_copies_the_page_with_its_reference_count() -> None:
    images = [bytes(50_000) for _ in range(1000)]
    assert forked(Set(images=images)) == pytest.approx(1000 * PAGE, rel=0.02)


def of_which_one_is_large(large: int) -> list[dict[str, Any]]:
    """Records of eight fields, one of which is a list of words."""
    names = [f"field{place}" for place in range(8)]
    return [
        {
            name: [f"{number} word {word}" for word in range(20)] if place == large else None
            for place, name in enumerate(names)
        }
        for number in range(2000)
    ]


class Coco:
    """As pycocotools holds what it has read: the same records in a list, by their number, by their image."""

    def __init__(self, images: int = 1000) -> None:
        texts = [
            json.dumps({"id": number, "image": number % images, "box": [number / 7, 2.5], "of": [[0.5] * 9]})
            for number in range(6 * images)
        ]
        found = json.loads(f"[{','.join(texts)}]")
        self.of_image: dict[int, list[Any]] = defaultdict(list)
        for each in found:
            self.of_image[each["image"]].append(each)
        self.dataset = {"annotations": found}
        self.anns = {each["id"]: each for each in found}


def with_words_in_common() -> list[Any]:
    words = {f"word {number}": float(number) for number in range(5000)}
    return [(f"/data/{number:09d}", words) for number in range(MANY)]


def with_people_in_common() -> list[Any]:
    people = [[f"{number} " * 50] for number in range(2000)]
    return [(number, people[number % 2000]) for number in range(2 * MANY)]


def twice(copied: Callable[[list[str]], Any]) -> Set:
    found = paths(4 * MANY)
    return Set(samples=found, other=copied(found))


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda: [{"text": f"{n:09d}" * 9, "words": [f"{n}a"]} for n in range(MANY)], id="rows"),
        pytest.param(lambda: ["x" * 1000 + str(n) if n % 64 == 0 else str(n) for n in range(MANY)], id="nth"),
        pytest.param(lambda: ["x" * 400 if n < MANY / 2 else str(n) for n in range(MANY)], id="halves"),
        pytest.param(lambda: of_which_one_is_large(0), id="first-field"),
        pytest.param(lambda: of_which_one_is_large(5), id="sixth-field"),
        pytest.param(with_words_in_common, id="words-in-common"),
        pytest.param(with_people_in_common, id="people-in-common"),
        pytest.param(lambda: twice(lambda found: found), id="two-names"),
        pytest.param(lambda: twice(list), id="a-copy"),
        pytest.param(lambda: twice(dict.fromkeys), id="a-dict-of-them"),
        pytest.param(lambda: twice(set), id="a-set-of-them"),
        pytest.param(lambda: twice(partial(numpy.array, dtype=object)), id="an-array-of-them"),
        pytest.param(Coco, id="several-indices"),
    ],
)
def test_from_some_items_of_each_container_the_estimate_is_near_a_look_at_every_object(
    made: Callable[[], Any],
) -> None:
    held = made()
    assert forked(held) == pytest.approx(copy_size(held, set()), rel=0.15)


def copy_size(value: Any, met: set[int]) -> int:
    if id(value) in met or isinstance(value, type):
        return 0
    met.add(id(value))
    return worker_copies._touched(value) + sum(copy_size(each, met) for each in worker_copies._items(value))


def test_what_the_script_also_holds_elsewhere_is_not_estimated_too_high() -> None:
    elsewhere = [f"/data/{number:09d}" for number in range(4 * MANY)]
    pairs = list(zip(elsewhere, elsewhere, strict=True))
    truth = copy_size(pairs, set())
    assert 0.5 * truth < forked(pairs) <= 1.05 * truth


def test_however_much_there_is_so_many_objects_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = count()
    monkeypatch.setattr(worker_copies, "_touched", lambda value: 64 + 0 * next(looked))
    each = range(20)
    heap = [[[[f"{a} {b} {c} {d}" for d in each] for c in each] for b in each] for a in range(40)]
    found = copy_of(Set(heap=heap), method="fork")
    assert found.whole and found.bytes == pytest.approx(64 * 20**3 * 40, rel=0.25)
    assert next(looked) <= OBJECTS + LEVEL


def test_where_there_are_too_many_objects_it_is_at_least_what_was_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_copies, "OBJECTS", 1000)
    found = copy_of([[[f"{number}"]] for number in range(5000)], method="fork")
    assert not found.whole and found.bytes >= 1000 * 64
    assert copy_of(Set(path="/data"), method="fork").whole


def test_a_circle_and_a_long_chain_come_to_an_end() -> None:
    circle: list[Any] = []
    circle += [circle, {"back": circle}] * 10_000
    assert forked(circle) < 200 * PAGE
    chain: Any = None
    for _ in range(50_000):
        chain = [chain, "link"]
    assert forked(chain) > MIB


# --- spawned workers ----------------------------------------------------------------------------------
class Mapped:
    """As a table that maps a file: it is sent as the path."""

    def __init__(self) -> None:
        self.columns = [bytes(MIB) for _ in range(20)]

    def __reduce__(self) -> Any:
        return Mapped, ()


class Stated(Set):
    def __getstate__(self) -> Any:
        return {"path": "/data"}


@pytest.mark.parametrize("made", [Mapped, lambda: Stated(rows=paths())], ids=["reduce", "getstate"])
def test_what_says_itself_how_it_is_sent_is_not_taken_for_what_it_holds(made: Any) -> None:
    found = copy_of(Set(table=made()), method="spawn")
    assert found.bytes < 4 * PAGE and not found.whole
    assert copy_of(Set(rows=set(paths(10)), t=torch.ones(2), a=numpy.ones(2)), method="spawn").whole


def test_a_spawned_worker_is_sent_arrays_too_but_torch_s_tensors_are_shared() -> None:
    assert sent(Set(held=numpy.ones((MANY, 10)))) == pytest.approx(MANY * 80, rel=0.01)
    assert sent(Set(held=numpy.ones((MANY, 10))[MANY // 2 :])) == pytest.approx(MANY * 40, rel=0.01)
    assert sent(Set(held=torch.ones(MANY, 10))) < PAGE
    assert sent(Set(held=bytes(10 * MIB))) == pytest.approx(10 * MIB, rel=0.01)
    assert sent(Set(held=paths())) == pytest.approx(OF_PATHS + 8 * MANY, rel=0.05)


# --- what it must not do ------------------------------------------------------------------------------
def test_a_frame_s_columns_are_counted_once_and_without_its_own_word_for_it() -> None:
    class Frame:
        def __init__(self) -> None:
            self.rows = paths()

        def __sizeof__(self) -> int:
            raise AssertionError("called")

    class Deep(Frame):
        def __sizeof__(self) -> int:
            return sum(map(sys.getsizeof, self.rows))

    assert forked(Set(frame=Frame())) == pytest.approx(OF_PATHS, rel=0.02)
    assert sent(Set(frame=Deep())) == pytest.approx(OF_PATHS + 8 * MANY, rel=0.05)


def test_nothing_of_the_set_is_called_and_no_random_state_is_touched() -> None:
    def called(*_: Any) -> Any:
        raise AssertionError("called")

    class Touchy(list[str]):
        __len__ = __iter__ = __getitem__ = __sizeof__ = __getattribute__ = called

    before = torch.get_rng_state(), random.getstate()
    numbers = numpy.random.get_state(legacy=False)["state"]["key"].copy()
    estimate = forked(Touchy(paths()))  # apart: pytest looks at what an assert names
    assert estimate == pytest.approx(OF_PATHS, rel=0.02)
    assert torch.equal(before[0], torch.get_rng_state())
    assert random.getstate() == before[1]
    assert (numbers == numpy.random.get_state(legacy=False)["state"]["key"]).all()


def test_how_workers_are_started_is_asked_without_settling_it_for_the_script(fresh: Fresh) -> None:
    script = (
        "import multiprocessing\n"
        "from spottrain.data.worker_copies import start_method\n"
        "assert start_method() == multiprocessing.get_all_start_methods()[0]\n"
        "multiprocessing.set_start_method('spawn')\n"
        "assert start_method() == 'spawn'\n"
    )
    fresh.run(script)
    assert start_method("forkserver") == "forkserver"
    assert start_method(multiprocessing.get_context("spawn")) == "spawn"
