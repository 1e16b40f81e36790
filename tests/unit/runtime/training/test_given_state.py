"""Plain values in `Run(extra=...)`: what is stored, what is restored in place, what is refused."""

from __future__ import annotations

import json
import random
from collections import Counter, UserDict, defaultdict, deque, namedtuple
from typing import Any

import numpy
import pytest
import torch
from spottrain.checkpoint.tree import Flattened, unflatten
from spottrain.training.given_state import Generator, Plain, adapted

from tests.support.sentences import Told

State = namedtuple("State", "hidden count")


def stored(value: Any) -> Any:
    """As a checkpoint gives it back."""
    flat = Flattened(value)
    tensors = [leaf.tensor.clone() for leaf in flat.leaves]
    return unflatten(json.loads(json.dumps(flat.plain)), tensors.__getitem__)


def over(value: Any, fresh: Any) -> Any:
    """What `fresh` is after the state of `value` was put into it."""
    before, after = {"it": value}, {"it": fresh}
    saving, loading = adapted(before, "it"), adapted(after, "it")
    assert isinstance(saving, Plain) and isinstance(loading, Plain)
    loading.load_state_dict(stored(saving.state_dict()))
    return after["it"]


SCALARS = [
    (3, 0),
    (2.5, 0),
    (float("inf"), 0.0),
    (True, False),
    ("a", ""),
    ((1, "b"), (0, "")),
    (None, 5),
    (5, None),
]


def test_a_number_or_a_string_comes_back_by_its_name() -> None:
    assert [over(value, fresh) for value, fresh in SCALARS] == [value for value, _ in SCALARS]


def test_what_can_be_changed_is_restored_in_place_and_in_its_order() -> None:
    fresh: Any = {"b": {}, "a": torch.zeros(2), "list": [torch.zeros(1)], "deque": deque([1], maxlen=2)}
    value: Any = {
        "b": {"z": 1, "y": {3: "three"}, "x": torch.ones(1)},
        "a": torch.ones(2),
        "list": [torch.ones(1), 7],
        "deque": deque([4, 5, 6], maxlen=2),
    }
    names = {name: fresh[name] for name in fresh}
    inner = fresh["list"][0]
    back = over(value, fresh)
    assert back is fresh and all(back[name] is names[name] for name in names) and back["list"][0] is inner
    assert list(back) == ["b", "a", "list", "deque"] and list(back["b"]) == ["z", "y", "x"]
    assert back["b"]["y"] == {3: "three"} and torch.equal(back["a"], torch.ones(2))
    assert torch.equal(inner, torch.ones(1)) and back["list"][1] == 7
    assert back["deque"] == deque([5, 6], maxlen=2) and back["deque"].maxlen == 2
    pair = (torch.zeros(1), torch.zeros(1))
    back = over((torch.ones(1), torch.ones(1)), pair)
    assert all(each is mine and each == 1 for each, mine in zip(back, pair, strict=True))
    assert over(State(torch.ones(1), 2), State(pair[0], 0)) == State(pair[0], 2) and pair[0] == 1
    seen = {1}
    assert over({2, 3}, seen) is seen and seen == {2, 3}
    counts = Counter(a=1)
    assert over(Counter(b=-2), counts) is counts and counts == Counter(b=-2)
    fresh = []
    value = [Counter("ab"), deque([1], maxlen=2), {"z": {1}, "a": numpy.ones(2)}, defaultdict(list, a=[{}])]
    back = over(value, fresh)
    assert back is fresh and list(map(type, back)) == list(map(type, value)) and back[:2] == value[:2]
    assert back[1].maxlen == 2 and list(back[2]) == ["z", "a"] and back[3]["new"] == []
    array = numpy.zeros((2, 2))
    assert over(numpy.eye(2), array) is array and (array == numpy.eye(2)).all()


@pytest.mark.parametrize(
    "make",
    [
        random.Random,
        lambda seed: torch.Generator().manual_seed(seed),
        numpy.random.default_rng,
        numpy.random.RandomState,
        lambda seed: numpy.random.Generator(numpy.random.MT19937(seed)),
        lambda seed: numpy.random.Generator(numpy.random.Philox(seed)),
        lambda seed: numpy.random.Generator(numpy.random.SFC64(seed)),
    ],
)
def test_a_generator_goes_on_where_it_was_and_a_new_rank_keeps_its_own(make: Any) -> None:
    def draw(it: Any) -> float:
        if isinstance(it, torch.Generator):
            return float(torch.rand((), generator=it))
        # Of the numbers of normal() a RandomState keeps a second one.
        return float(it.normal() if isinstance(it, numpy.random.RandomState) else it.random())

    first, second, third = make(1), make(2), make(2)
    draw(first)
    saving, loading, new = (adapted({"it": each}, "it") for each in (first, second, third))
    assert isinstance(saving, Generator) and isinstance(loading, Generator) and isinstance(new, Generator)
    own = stored(saving.own_state_dict())
    loading.load_state_dict(stored(saving.state_dict()), own)
    new.load_state_dict({}, None)
    assert [draw(second) for _ in range(5)] == [draw(first) for _ in range(5)]
    assert draw(third) == draw(make(2))


def test_what_cannot_be_stored_is_nothing_of_this_kind() -> None:
    for value in (object(), {"a": object()}, [{print}], lambda: 1, UserDict(a=1)):
        assert adapted({"it": value}, "it") is None


@pytest.mark.parametrize(
    ("value", "fresh"),
    [(torch.ones(2), torch.ones(3)), (3, torch.ones(())), (torch.ones(()), 3), ({"a": 1}, 3), ([1], "a")],
)
def test_another_kind_or_shape_is_refused(value: Any, fresh: Any, told: Told) -> None:
    told(lambda: over(value, fresh))
