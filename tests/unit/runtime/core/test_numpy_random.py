"""NumPy's global random state is copied and put back as NumPy itself would do it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
from spottrain.checkpoint.tree import Flattened, unflatten
from spottrain.core import device as devices
from spottrain.core import numpy_random
from spottrain.core.numpy_random import copied, plain, restore

RANDOM: Any = numpy.random
DRAWS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "a number": numpy.random.random,
    "a normal number": numpy.random.standard_normal,
    "two normal numbers": lambda: numpy.random.standard_normal(2),
    "all words": lambda: numpy.random.random(312),
    "an odd number of words": lambda: numpy.random.randint(0, 2**31, 623),
}


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    generator, state = RANDOM.get_bit_generator(), numpy.random.get_state()
    yield
    RANDOM.set_bit_generator(generator)
    numpy.random.set_state(state)


def same(one: Any, other: Any) -> bool:
    return bool((one[1] == other[1]).all()) and (one[0], *one[2:]) == (other[0], *other[2:])


@pytest.mark.parametrize("after", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("before", DRAWS.values(), ids=DRAWS)
def test_a_copy_changes_nothing_and_brings_everything_back(
    before: Callable[[], Any], after: Callable[[], Any]
) -> None:
    numpy.random.seed(7)
    before()
    state = numpy.random.get_state()
    kept = copied()
    assert same(numpy.random.get_state(), state)
    after()
    numpy.random.seed(9)
    after()
    restore(kept)
    assert same(numpy.random.get_state(), state)


@pytest.mark.parametrize("before", DRAWS.values(), ids=DRAWS)
def test_plain_values_are_those_that_numpy_returns(before: Callable[[], Any]) -> None:
    numpy.random.seed(7)
    before()
    state: Any = numpy.random.get_state()
    kind, keys, *rest = state
    assert plain() == plain(copied()) == (kind, keys.tolist(), *rest)


def test_plain_values_are_only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the script may draw numbers meanwhile."""
    for name in ("seed", "set_state", "standard_normal"):
        monkeypatch.setattr(numpy.random, name, None)
    assert plain() is not None


def test_words_that_are_not_where_they_are_known_to_be_are_left_to_numpy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numpy_random, "WORDS", 2504)
    monkeypatch.setattr(numpy_random, "_known", None)
    state = numpy.random.get_state()
    kept = copied()
    assert not isinstance(kept, numpy_random.Words)
    numpy.random.seed(9)
    restore(kept)
    assert same(numpy.random.get_state(), state)


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
@pytest.mark.parametrize("there", ["the same one", "the usual one", "another one"])
def test_a_generator_that_the_script_has_put_in_place_is_saved_and_comes_back_with_its_kind(
    kind: str, there: str
) -> None:
    RANDOM.set_bit_generator(getattr(numpy.random, kind)(3))
    numpy.random.standard_normal()
    assert devices.random_state(devices.random_copy())["numpy"] == plain()
    kept, saved = copied(), json.loads(json.dumps(Flattened(devices.random_state()).plain["numpy"]))
    expected = [*numpy.random.standard_normal(3), *numpy.random.random(3)]
    for state in (kept, unflatten(saved, lambda number: None)):
        if there != "the same one":
            RANDOM.set_bit_generator((numpy.random.MT19937 if "usual" in there else numpy.random.SFC64)(9))
        restore(state)
        assert [*numpy.random.standard_normal(3), *numpy.random.random(3)] == expected
        assert type(RANDOM.get_bit_generator()).__name__ == kind


def test_a_checkpoint_names_a_generator_and_nothing_else_of_numpy() -> None:
    state = numpy.random.get_state()
    with pytest.raises(ValueError, match="MT19937"):
        restore({"bit_generator": "standard_normal", "state": {}})
    assert same(numpy.random.get_state(), state)


def test_a_generator_of_the_same_kind_that_the_script_has_set_is_copied() -> None:
    RANDOM.set_bit_generator(numpy.random.MT19937(5))
    state = numpy.random.get_state()
    kept = copied()
    numpy.random.seed(9)
    restore(kept)
    assert isinstance(kept, numpy_random.Words) and same(numpy.random.get_state(), state)
