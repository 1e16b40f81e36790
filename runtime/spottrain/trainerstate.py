"""What the next step of a `Trainer` depends on, as a checkpoint has it. Called by `trainer`, for `keeper`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from spottrain import device as devices
from spottrain import log, parts
from spottrain.checkpoint import modelstate, trained
from spottrain.errors import CheckpointError
from spottrain.keeper import State
from spottrain.meter import require_finite
from spottrain.weights import BESIDE

if TYPE_CHECKING:
    from spottrain.trainer import Trainer

COMPRESSION: Final = "compression"


def of(trainer: Trainer) -> State:
    return State(
        shared=partial(_shared, trainer),
        own=partial(_own, trainer),
        load=partial(_load, trainer),
        intact=lambda: trainer.intact,
        want=modelstate.wanted(trainer.model),
        of_first=modelstate.buffers(trainer.model),
    )


def _shared(it: Trainer) -> dict[str, Any]:
    """Everything that is equal on all ranks."""
    require_finite(float(it.last_loss), it.step)
    return {
        modelstate.MODEL: modelstate.model_state(it.model),
        BESIDE: trained.beside(it.model),
        modelstate.OPTIMIZER: modelstate.optimizer_state(it.model, it.optimizer),
        "kind": type(it.optimizer).__name__,
        modelstate.EMA: None if it.ema is None else it.ema.state_dict(),
        "schedule": it.schedule.state_dict(),
        "scaler": it.scaler.state_dict(),
        COMPRESSION: it.compression.state_dict(),
        "data": None if it.batches.per_rank else it.batches.state_dict(),
        "progress": {
            "step": it.step,
            "trained": it.keeper.trained,
            "trackers": it.trackers.state_dict(),
            "micro_batch_size": it.fitting.size,
            "micro_batch_room": it.fitting.room,
            **it.judge.state_dict(),
        },
    }


def _own(it: Trainer) -> dict[str, Any]:
    """The rest of it."""
    return {
        "random": it.waiting or devices.random_state(),
        "loss": float(it.last_loss),
        "data": it.batches.state_dict() if it.batches.per_rank else None,
        COMPRESSION: it.compression.own_state_dict(),
    }


def _load(it: Trainer, tree: dict[str, Any], own: dict[str, Any], new_rank: bool) -> None:
    """Raises CheckpointError where the checkpoint is of another model, optimizer or data."""
    was, now = tree.get("kind"), type(it.optimizer).__name__
    mismatch = None if was in (None, now) else f"its optimizer is {was}, and here it is {now}"
    mismatch = mismatch or modelstate.load_model(it.model, tree[modelstate.MODEL])
    mismatch = mismatch or modelstate.load_optimizer(it.model, it.optimizer, tree[modelstate.OPTIMIZER])
    if mismatch is not None:
        raise _incompatible(it, mismatch)
    try:
        it.schedule.load_state_dict(tree["schedule"])
        if it.scaler.is_enabled() and tree["scaler"]:
            it.scaler.load_state_dict(tree["scaler"])
    except (ValueError, KeyError) as error:
        raise _incompatible(it, f"its schedule does not fit ({error})") from error
    _load_levers(it, tree, own, new_rank)
    it.batches.load_state_dict(own["data"] if it.batches.per_rank else tree["data"])
    progress = tree["progress"]
    it.step, it.keeper.trained = progress["step"], progress["trained"]
    it.judge.load_state_dict(progress)
    it.last_loss = torch.tensor(0.0 if new_rank else own.get("loss", 0.0), device=it.device)
    it.fitting.before = progress.get("micro_batch_size")
    it.fitting.room_before = progress.get("micro_batch_room")
    if new_rank:
        log.event("new-rank", why="the checkpoint has no random state of this rank; it gets a fresh one")
        devices.seed_rank(it.session.world.rank)
    else:
        devices.set_random_state(own["random"])


def _load_levers(it: Trainer, tree: dict[str, Any], own: dict[str, Any], new_rank: bool) -> None:
    """What a checkpoint of before there was such a lever, or of a run without it, does not have."""
    if it.ema is not None:
        try:
            parts.restore_average(it.ema, tree.get(modelstate.EMA))
        except ValueError as error:
            raise _incompatible(it, str(error)) from error
    if tree.get(COMPRESSION) is not None:  # laid out when DDP is there
        it.saved_compression = (tree[COMPRESSION], None if new_rank else own.get(COMPRESSION))
    if tree["progress"].get("trackers") is not None:
        it.trackers.load_state_dict(tree["progress"]["trackers"])


def _incompatible(it: Trainer, why: str) -> CheckpointError:
    return modelstate.incompatible(it.session.run.checkpoint_uri, why)
