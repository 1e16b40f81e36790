"""Gradient compression: what is refused and advised, and what of a state is taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spottrain.lifecycle.topology import LOOPBACK, reserve_port
from spottrain.techniques.gradient_compression import PowerSGD, attach
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.sentences import Told


@pytest.fixture(scope="module", autouse=True)
def world_of_one() -> Iterator[None]:
    with reserve_port() as reserved:
        where = f"tcp://{LOOPBACK}:{reserved.getsockname()[1]}"
        dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def power(**words: Any) -> PowerSGD:
    model = torch.nn.Linear(8, 8)
    names = {id(p): name for name, p in model.named_parameters()}
    return PowerSGD(names, **{"matrix_rank": 1, "start_step": 2, "min_compression_rate": 2.0} | words)


@pytest.mark.parametrize("kind", ["bf16", "powerSGD"])
def test_with_one_rank_it_does_nothing_and_says_so(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    for model in (DistributedDataParallel(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2)):
        assert attach(model, kind).kind == "none"
        assert "event=advice about=compression" in capsys.readouterr().out


@pytest.mark.parametrize(("precision", "told"), [(None, True), ("bf16", False)])
def test_power_sgd_that_is_not_told_the_format_says_so(
    precision: str | None, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    assert attach(ddp, "powerSGD", precision=precision).kind == "powerSGD"
    assert ("attach(precision=amp.precision.name)" in capsys.readouterr().out) is told


def test_none_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    none = attach(torch.nn.Linear(2, 2))
    assert none.state_dict() == {"kind": "none"} and none.own_state_dict() == {}
    assert capsys.readouterr().out == ""


@pytest.mark.filterwarnings("ignore")  # torch's own of a mesh of one
def test_a_model_without_ddp_is_refused(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    sharded = torch.nn.Linear(2, 2)
    fully_shard(sharded)
    told(lambda: attach(sharded, "bf16"))
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    told(lambda: attach(torch.nn.Linear(2, 2), "bf16"))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("fp8", {}),
        ("powerSGD", {"precision": "fp16"}),
        ("powerSGD", {"matrix_rank": 0}),
        ("powerSGD", {"start_step": 1}),
        ("powerSGD", {"min_compression_rate": 0.0}),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(kind: str, words: dict[str, Any], told: Told) -> None:
    told(lambda: attach(torch.nn.Linear(2, 2), kind, **words))


# --- what of a state is taken ---------------------------------------------------------------------------
SAVED: dict[str, Any] = {"kind": "powerSGD", "step": 7, "matrix_rank": 1, "qs": {"weight": torch.ones(8)}}
OWN: dict[str, Any] = {"errors": {"weight": torch.ones(64), "bias": torch.ones(8)}}


def test_a_state_comes_back_as_it_was() -> None:
    it = power()
    it.load_state_dict(SAVED, OWN)
    assert it.state_dict()["step"] == 7
    assert torch.equal(it.state_dict()["qs"]["weight"], torch.ones(8))
    assert torch.equal(it.own_state_dict()["errors"]["weight"], torch.ones(64))


def test_a_new_rank_has_no_errors_and_what_all_must_agree_on(capsys: pytest.CaptureFixture[str]) -> None:
    it = power()
    it.load_state_dict(SAVED, None)
    state = it.state_dict()
    assert state["step"] == 7 and state["qs"].keys() == {"weight"}
    assert it.own_state_dict() == {"errors": {}}
    assert "event=new-rank" in capsys.readouterr().out


def test_qs_of_another_matrix_rank_do_not_fit_and_errors_do(capsys: pytest.CaptureFixture[str]) -> None:
    it = power(matrix_rank=2)
    it.load_state_dict(SAVED, OWN)
    assert it.state_dict()["qs"] == {} and it.own_state_dict()["errors"].keys() == {"weight", "bias"}
    assert "setting=powerSGD.matrixRank checkpoint=1 script=2" in capsys.readouterr().out


@pytest.mark.parametrize("saved", ["none", "bf16"])
def test_after_another_kind_it_begins_again(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    it = power()
    it.load_state_dict({"kind": saved}, {})
    assert it.state_dict()["step"] == 0
    assert f"setting=compression checkpoint={saved} script=powerSGD" in capsys.readouterr().out
