"""About how much a loader worker comes to hold of its own for the set: by what the set is made of."""

from __future__ import annotations

import gc
import json
import multiprocessing
import random
import sys
from collections import defaultdict, deque
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from spottrain.data import worker_copies
from spottrain.data.object_size import PAGE, touched
from spottrain.data.worker_copies import MOST, copy_of, start_method

from tests.support.fresh import Fresh

MANY = 50_000
MIB = 2**20


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


def size_of_paths(count: int = MANY) -> int:
    return count * 80
    """49 of a str and 26 letters, in pieces of 16."""


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
    assert estimate == pytest.approx(size_of_paths() + numbers, rel=0.02)


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
    ],
)
def test_what_has_no_reference_counts_inside_is_not_copied_by_a_fork(held: Any) -> None:
    assert forked(Set(held=held)) < 4 * PAGE


def test_of_a_long_object_a_fork_copies_the_page_with_its_reference_count() -> None:
    assert forked(Set(images=[bytes(50_000) for _ in range(1000)])) == pytest.approx(1000 * PAGE, rel=0.01)


def test_a_map_of_a_file_is_shared(tmp_path: Any) -> None:
    held = numpy.memmap(tmp_path / "set", dtype="float32", mode="w+", shape=(MANY,))
    assert forked(Set(held=held)) < PAGE


def test_records_are_counted_with_all_that_is_in_them() -> None:
    one = [{"text": f"{number:09d}" * 9, "words": [f"{number}a", f"{number}b"]} for number in range(100)]
    many = [{"text": f"{number:09d}" * 9, "words": [f"{number}a", f"{number}b"]} for number in range(MANY)]
    assert forked(Set(rows=many)) == pytest.approx(forked(Set(rows=one)) * MANY / 100, rel=0.05)


def test_what_many_samples_hold_in_common_is_counted_once() -> None:
    words = {f"word {number}": float(number) for number in range(20_000)}
    alone = forked(Set(words=words))
    rows = [(f"/data/{number:09d}", words) for number in range(MANY)]
    plain = [(f"/data/{number:09d}", None) for number in range(MANY)]
    assert forked(Set(rows=rows)) - forked(Set(rows=plain)) == pytest.approx(alone, rel=0.05)


def test_a_list_under_two_names_is_counted_once() -> None:
    found = paths()
    assert forked(Set(samples=found, images=found)) == pytest.approx(size_of_paths(), rel=0.02)


def test_a_copy_of_the_list_holds_the_same_words() -> None:
    found = paths()
    for copied in (list, dict.fromkeys, set, partial(numpy.array, dtype=object)):
        held = Set(samples=found, other=copied(found))
        assert forked(held) == pytest.approx(size_of_paths(), rel=0.05)
        del held


def test_neither_the_first_items_alone_nor_every_n_th_are_taken_for_the_rest() -> None:
    mixed = ["x" * 1000 + str(number) if number % 1024 == 0 else str(number) for number in range(MANY)]
    whole = sum(-(-sys.getsizeof(each) // 16) * 16 for each in mixed)
    assert forked(Set(rows=mixed)) == pytest.approx(whole, rel=0.2)
    halves = ["x" * 400 + str(number) for number in range(MANY // 2)] + [str(n) for n in range(MANY // 2)]
    whole = sum(-(-sys.getsizeof(each) // 16) * 16 for each in halves)
    assert forked(Set(rows=halves)) == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("large", range(8))
def test_which_field_of_a_record_is_the_large_one_changes_nothing(large: int) -> None:
    def row(number: int) -> dict[str, Any]:
        words = [f"{number} word {word}" for word in range(20)]
        return {f"field{place}": words if place == large else None for place in range(8)}

    names: dict[str, str] = {}
    rows = [{names.setdefault(name, name): held for name, held in row(n).items()} for n in range(5000)]
    assert forked(rows) == pytest.approx(exactly(rows), rel=0.08)


def exactly(held: Any) -> int:
    """By a look at every object."""
    return copy_size(held, set())


def copy_size(value: Any, met: set[int]) -> int:
    if id(value) in met:
        return 0
    met.add(id(value))
    _, inside = worker_copies._inside(value)
    return touched(value) + sum(copy_size(each, met) for each in inside if not isinstance(each, type))


class Coco:
    """As pycocotools holds what it has read: the same records in a list, by their number, by their image."""

    def __init__(self, images: int = 3000) -> None:
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


def test_records_that_are_held_in_several_indices_are_counted_once() -> None:
    made = Coco()
    assert forked(made) == pytest.approx(exactly(made), rel=0.1)


def test_what_many_records_refer_to_and_no_container_holds_is_counted_once() -> None:
    people = [[f"{number} " * 50] for number in range(5000)]
    rows = [(number, people[number % 5000]) for number in range(100_000)]
    del people
    assert forked(rows) == pytest.approx(exactly(rows), rel=0.1)


def test_what_the_script_also_holds_elsewhere_is_not_estimated_too_high() -> None:
    elsewhere = [f"/data/{number:09d}" for number in range(100_000)]
    pairs = list(zip(elsewhere, elsewhere, strict=True))
    truth = exactly(pairs)
    assert 0.5 * truth < forked(pairs) <= 1.02 * truth


def test_however_much_there_is_so_many_objects_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def touched(value: Any) -> int:
        looked.append(1)
        return 64

    monkeypatch.setattr(worker_copies, "touched", touched)
    monkeypatch.setattr(worker_copies, "OBJECTS", 1000)
    rows = [[[[f"{a} {b} {c}"] * 9 for c in range(9)] for b in range(9)] for a in range(90)]
    copy_of(*(rows[start::9] for start in range(9)), method="fork")
    assert len(looked) <= worker_copies.OBJECTS


def test_the_collector_is_as_it_was() -> None:
    forked(paths(10))
    assert gc.isenabled()
    gc.disable()
    try:
        forked(paths(10))
        assert not gc.isenabled()
    finally:
        gc.enable()


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


def test_a_frame_s_columns_are_counted_once_and_without_its_own_word_for_it() -> None:
    class Frame:
        def __init__(self) -> None:
            self.rows = paths()

        def __sizeof__(self) -> int:
            raise AssertionError("called")

    class Deep(Frame):
        def __sizeof__(self) -> int:
            return sum(map(sys.getsizeof, self.rows))

    assert forked(Set(frame=Frame())) == pytest.approx(size_of_paths(), rel=0.02)
    assert sent(Set(frame=Deep())) == pytest.approx(size_of_paths() + 8 * MANY, rel=0.05)


def test_a_spawned_worker_is_sent_arrays_too_but_torch_s_tensors_are_shared() -> None:
    assert sent(Set(held=numpy.ones((MANY, 10)))) == pytest.approx(MANY * 80, rel=0.01)
    assert sent(Set(held=numpy.ones((MANY, 10))[MANY // 2 :])) == pytest.approx(MANY * 40, rel=0.01)
    assert sent(Set(held=torch.ones(MANY, 10))) < PAGE
    assert sent(Set(held=bytes(10 * MIB))) == pytest.approx(10 * MIB, rel=0.01)
    assert sent(Set(held=paths())) == pytest.approx(size_of_paths() + 8 * MANY, rel=0.05)


def test_nothing_of_the_set_is_called_and_no_random_state_is_touched() -> None:
    class Touchy(list[str]):
        def __len__(self) -> int:
            raise AssertionError("called")

        def __iter__(self) -> Any:
            raise AssertionError("called")

        def __getitem__(self, index: Any) -> Any:
            raise AssertionError("called")

        def __sizeof__(self) -> int:
            raise AssertionError("called")

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError("called")

    before = torch.get_rng_state(), random.getstate()
    numbers = numpy.random.get_state(legacy=False)["state"]["key"].copy()
    touchy = Touchy(paths())
    assert forked(touchy) == pytest.approx(size_of_paths(), rel=0.02)
    assert torch.equal(before[0], torch.get_rng_state())
    assert random.getstate() == before[1]
    assert (numbers == numpy.random.get_state(legacy=False)["state"]["key"]).all()


def test_what_leads_to_the_interpreter_is_passed_over() -> None:
    assert forked(Set(transform=pytest.fail, module=sys, kind=Set, log=print, function=paths)) < 4 * PAGE


def test_a_circle_and_a_long_chain_come_to_an_end() -> None:
    circle: list[Any] = []
    circle += [circle, {"back": circle}] * 10_000
    assert forked(circle) < 200 * PAGE
    chain: Any = None
    for _ in range(100_000):
        chain = [chain, "link"]
    assert forked(chain) > MIB


def test_containers_in_containers_are_looked_at_in_fewer_places() -> None:
    each = range(20)
    heap = [[[[f"{a} {b} {c} {d}" for d in each] for c in each] for b in each] for a in range(40)]
    found = copy_of(Set(heap=heap), method="fork")
    assert found.whole and found.bytes == pytest.approx(40 * 20 * 20 * 20 * 64, rel=0.25)


def test_a_set_of_too_many_objects_of_its_own_is_at_least_what_was_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_copies, "OBJECTS", 1000)
    found = copy_of(*([[f"{number}"] for number in range(5000)]), method="fork")
    assert not found.whole and found.bytes >= 1000 * 64
    assert copy_of(Set(path="/data"), method="fork").whole


def test_only_some_items_of_a_container_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    sizes = touched

    def counted(value: Any) -> int:
        looked.append(1)
        return sizes(value)

    monkeypatch.setattr(worker_copies, "touched", counted)
    forked(Set(rows=paths()))
    assert len(looked) < 2 * MOST


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
