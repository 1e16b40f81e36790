"""The defects of the articles' listings on precision and activation checkpointing, and the same with ours.

`test_defect_...` shows what goes wrong (listings_techniques.py), `test_ours_...` what ours does.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from spottrain.checkpoint.plain_state import load_model, model_state
from spottrain.techniques.activation_checkpointing import Policy, apply
from spottrain.techniques.precision import Amp

from tests.support.listings_techniques import ByItself, Net, begin_by_type, wrap_every_other
from tests.support.savedbytes import saved_bytes

CPU = torch.device("cpu")


# --- a scaler by a type that is not there (002) ---------------------------------------------------------
def test_defect_the_scaler_asks_for_a_name_that_is_not_there() -> None:
    with pytest.raises(NameError, match="dtype"):
        begin_by_type()


def test_defect_where_the_name_is_there_autocast_does_not_ask_for_it() -> None:
    scaler, autocast = begin_by_type(dtype=torch.float16)
    assert scaler.is_enabled(), "scaled as for fp16,"
    with autocast:
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.bfloat16, "and computed in bf16"


@pytest.mark.parametrize(
    ("name", "dtype", "scaled"), [("bf16", torch.bfloat16, False), ("fp16", torch.float16, True)]
)
def test_ours_one_word_says_what_is_computed_in_and_whether_it_is_scaled(
    name: str, dtype: torch.dtype, scaled: bool
) -> None:
    amp = Amp(name, CPU)
    assert amp.scaler.is_enabled() is scaled
    with amp.autocast():
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype


# --- a loop without a place for the scheduler (001) -----------------------------------------------------
def trained_rates(steps: int, *, ours: bool) -> list[float]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    theirs, amp = ByItself(model, optimizer, torch.bfloat16), Amp("bf16", CPU)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        if not ours:
            theirs.train_step(torch.ones(1, 2))
            continue
        with amp.autocast():
            loss = model(torch.ones(1, 2)).float().square().mean()
        amp.backward(loss)
        amp.step(optimizer, clip_grad_norm=1.0, scheduler=scheduler)
    return rates


def test_defect_in_mixed_precision_the_rate_never_changes() -> None:
    assert trained_rates(4, ours=False) == [1.0, 1.0, 1.0, 1.0]


def test_ours_the_rate_follows_its_schedule() -> None:
    assert trained_rates(4, ours=True) == [1.0, 0.5, 0.25, 0.125]


# --- a wrapper around every other block (002) -----------------------------------------------------------
def wrapped() -> Net:
    model = Net()
    wrap_every_other(model.blocks)
    return model


def patched() -> Net:
    model = Net()
    apply(model, Policy.of("every-2"))
    return model


def test_defect_the_wrapper_renames_what_is_saved() -> None:
    saved = wrapped().state_dict()
    assert "blocks.0.inner.wide.weight" in saved and "blocks.1.wide.weight" in saved
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks\.0\.wide\.weight"):
        Net().load_state_dict(saved)
    mismatch = load_model(wrapped(), model_state(Net()))
    assert mismatch and "has no blocks.0.inner.wide.weight" in mismatch


def test_defect_the_wrapper_drops_further_arguments() -> None:
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        wrapped()(torch.ones(1, 8), torch.zeros(8))


def test_ours_saved_with_it_loads_without_it_and_the_other_way_round() -> None:
    assert list(patched().state_dict()) == list(Net().state_dict())
    for saved, into in ((patched(), Net()), (Net(), patched())):
        torch.nn.init.ones_(saved.blocks[0].wide.weight)  # type: ignore[arg-type, union-attr]
        assert load_model(into, model_state(saved)) is None
        assert torch.equal(into.state_dict()["blocks.0.wide.weight"], torch.ones(32, 8))


def test_ours_every_argument_arrives_and_as_little_is_kept() -> None:
    x, mask = torch.ones(20, 8), torch.zeros(8)
    usual, ours, theirs = Net(), patched(), wrapped()
    assert torch.equal(ours(x, mask), usual(x, mask))
    kept = [saved_bytes(partial(model, x), model) for model in (usual, ours, theirs)]
    assert kept[1] == kept[2] < 0.7 * kept[0]
