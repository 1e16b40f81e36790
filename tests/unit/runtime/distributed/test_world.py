"""Who a process is, in the words of torch's env://; what cannot be is refused in a sentence."""

from __future__ import annotations

import pytest
from spottrain.contract import Outcome
from spottrain.distributed.process_group import gpu_of
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError

from tests.support.sentences import Told


def env(rank: str = "", size: str = "", local_rank: str = "", local_size: str = "") -> dict[str, str]:
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    return {name: value for name, value in values.items() if value}


@pytest.mark.parametrize(
    ("found", "world"),
    [
        (env(), World()),
        (env(size="1"), World()),
        (env(rank="0", size="1"), World()),
        (env(local_rank="0"), World()),
        (env("5", "8", "1", "4"), World(rank=5, size=8, local_rank=1, local_size=4)),
        (env("3", "5", "1", "2"), World(rank=3, size=5, local_rank=1, local_size=2)),
    ],
)
def test_a_process_knows_its_place(found: dict[str, str], world: World) -> None:
    assert World.from_env(found) == world


def test_a_place_says_what_is_its_to_do() -> None:
    first, second, other_pod = (
        World(rank=rank, size=4, local_rank=rank % 2, local_size=2) for rank in (0, 1, 2)
    )
    assert first.first and first.first_here and first.distributed
    assert not second.first and not second.first_here
    assert not other_pod.first and other_pod.first_here
    assert not World().distributed


@pytest.mark.parametrize(
    "found",
    [
        env(rank="0"),
        env(size="2"),
        env("0", "2"),
        env("0", "2", "0"),
        env("2", "2", "0", "1"),
        env("1", "4", "2", "2"),
        env("0", "2", "1", "2"),
        env("0", "2", "0", "4"),
        env("-1", "2", "0", "2"),
        env("0", "0", "0", "1"),
    ],
    ids=lambda env: " ".join(map("=".join, env.items())),
)
def test_what_cannot_be_is_refused_in_a_sentence(found: dict[str, str], told: Told) -> None:
    with pytest.raises(ConfigurationError) as refused:
        World.from_env(found)
    told(refused)
    assert refused.value.outcome is Outcome.BAD_CONFIGURATION


def test_a_rank_takes_the_gpu_of_its_number_or_the_one_that_it_alone_sees(told: Told) -> None:
    second = World(rank=1, size=2, local_rank=1, local_size=2)
    assert gpu_of(second, 8, "") == gpu_of(second, 2, "0,1") == 1
    assert gpu_of(second, 1, "3") == 0
    assert gpu_of(World(rank=1, size=2, local_rank=0, local_size=1), 1, "") == 0, "in a pod of its own"
    told(lambda: gpu_of(second, 1, ""))
    told(lambda: gpu_of(World(rank=1, size=4, local_rank=1, local_size=4), 2, "0,1"))
