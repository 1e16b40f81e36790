"""How many loader workers there are where their number is auto: by the cores that the container has."""

from __future__ import annotations

from pathlib import Path

import pytest
from spottrain.data import dataloader
from spottrain.data.dataloader import cores, workers
from spottrain.data.plan import Plan
from spottrain.data.source import Batches, source
from spottrain.distributed.world import World


@pytest.mark.parametrize(
    ("available", "found"), [(0.5, 1), (1, 1), (2, 1), (2.5, 1), (4, 3), (9, 8), (96, 8)]
)
def test_auto_is_the_cores_less_one_from_one_to_eight(
    available: float, found: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dataloader, "cores", lambda local_ranks: available / local_ranks)
    assert workers("auto", local_ranks=1) == found
    assert f"event=loader-workers workers={found}" in capsys.readouterr().out
    assert workers(3, local_ranks=1) == 3


def test_a_rank_has_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataloader, "cores", lambda local_ranks: 8 / local_ranks)
    world = World(rank=0, size=2, local_rank=0, local_size=2)
    made = source(list(range(8)), world, global_batch_size=4, micro_batch_size=2, num_workers="auto")
    assert made.num_workers == 3


def test_the_cores_are_the_container_s_shared_by_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(96)))
    assert (cores(tmp_path), cores(tmp_path, local_ranks=2)) == (96, 48)
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert (cores(tmp_path), cores(tmp_path, local_ranks=2)) == (0.5, 0.25)


def test_without_workers_the_prefetch_factor_is_left_out() -> None:
    """torch refuses it there."""
    batches = Batches(
        list(range(64)), Plan(size=64, global_batch_size=8, micro_batch_size=8), prefetch_factor=4
    )
    _, parts = next(iter(batches))
    assert len(list(parts)) == 1
