"""The last finished step of a custom loop, for a save that another thread makes.

A loop may do something else for minutes between two steps, such as a validation, or wait for data. A stop
that comes meanwhile saves the step before, although the script may have gone on since: it has drawn random
numbers, or its scheduler has stepped. So after each step the small part of the state is copied. The tensors
of the modules are too large for that; the save is made only if they have not changed since.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch

from spottrain.checkpoint.tree import Flattened, unflatten
from spottrain.errors import CheckpointError
from spottrain.techniques.ema import EMA
from spottrain.training.position import LoopPosition
from spottrain.training.state_tree import FinishedStep, StateTree, is_scaler

COPIED_BYTES: Final = 2**20
"""Limit of the tensors and arrays in the copied part of the state."""
LARGEST_SHARE: Final = 0.02
"""Share of the training's time that the copies may take."""
FREE_SECONDS: Final = 0.001
"""A copy that takes no longer is made after each step, however short the steps are."""
LOOK_SECONDS: Final = 1.0
"""So often the tensors of the modules are looked up again: a script may replace a buffer."""
MEASURED: Final = 8
"""The shortest of so many copies is the time of one: other processes only lengthen it."""

Record = tuple[list[tuple[int, int]], list[torch.Tensor]]
"""Version and address of each tensor, and one element of each, by device."""


class TensorRecorder:
    """Records what shows a change of tensors: their versions and addresses, and one element of each.

    The element shows what writes through `tensor.data`, which leaves the version as it is: averaged weights
    are often put in the place of a model's own in that way.
    """

    def __init__(self) -> None:
        self._places: list[tuple[int, int]] = []
        self._elements: dict[torch.device, list[torch.Tensor]] = {}
        """Views of one element each, as bytes."""

    def record(self, tensors: list[torch.Tensor]) -> Record:
        places = [(id(each), each.data_ptr() if _is_plain(each) else 0) for each in tensors]
        if places != self._places:
            self._places, self._elements = places, {}
            for each in filter(_is_plain, tensors):
                if each.numel():
                    middle = each.detach()[tuple(size // 2 for size in each.shape)]
                    self._elements.setdefault(each.device, []).append(middle.reshape(1).view(torch.uint8))
        versions = [-1 if each.is_inference() else each._version for each in tensors]
        seen = list(zip(versions, (address for _, address in places), strict=True))
        return seen, [torch.cat(each) for each in self._elements.values()]


def _is_plain(tensor: torch.Tensor) -> bool:
    kind = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return kind and tensor.layout is torch.strided and tensor.device.type != "meta"


def _same(one: Record, other: Record) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


class _TooLarge(Exception):
    """A state is too large to be copied after each step."""


def _copied(value: Any) -> Any:
    """Returns a copy, as a checkpoint would give it back. Raises CheckpointError if it cannot be stored."""
    flat = Flattened(value)
    if sum(leaf.tensor.nbytes for leaf in flat.leaves) > COPIED_BYTES:
        raise _TooLarge
    return unflatten(flat.plain, lambda number: flat.leaves[number].tensor.detach().clone())


class FinishedSteps:
    """Keeps the last finished step."""

    def __init__(self, state: StateTree, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._state, self._clock = state, clock
        self._objects = {
            name: each
            for name, each in state.objects.items()
            if not isinstance(each, EMA) and not is_scaler(name)
        }
        self._recorder = TensorRecorder()
        self._tensors: list[torch.Tensor] = []
        self._record: Record = [], []
        """Of the tensors when the last step was kept."""
        self._seconds: deque[float] = deque(maxlen=MEASURED)
        self._not_before = self._look_again_at = float("-inf")
        self.last: FinishedStep | None = None
        self.saved: FinishedStep | None = None
        """The step whose copies a save takes; None: it takes the present state."""

    def forget(self) -> None:
        """Forgets it: the next step has changed the state, or is about to."""
        self.last = self.saved = None

    def keep(self, position: LoopPosition) -> None:
        """Keeps the step that is finished now, unless copying its state takes too long."""
        began = self._clock()
        if began < self._not_before:
            return
        try:
            self.last = self._copy(position)
        except (_TooLarge, CheckpointError):  # a save says what cannot be stored
            self.last = None
        self._seconds.append(self._clock() - began)
        seconds = min(self._seconds)
        if len(self._seconds) == MEASURED and seconds > FREE_SECONDS:
            self._not_before = began + seconds / LARGEST_SHARE

    def _copy(self, position: LoopPosition) -> FinishedStep:
        with_own = {name: each for name, each in self._objects.items() if hasattr(each, "own_state_dict")}
        if self._clock() >= self._look_again_at:
            self._tensors = self._all_tensors()
            self._look_again_at = self._clock() + LOOK_SECONDS
        self._record = self._recorder.record(self._tensors)
        return FinishedStep(
            own_place=position.own(),
            place=_copied(position.shared()),
            groups={name: _copied(_groups(each)) for name, each in self._state.optimizers.items()},
            objects={name: _copied(each.state_dict()) for name, each in self._objects.items()},
            own={name: _copied(each.own_state_dict()) for name, each in with_own.items()},
        )

    def unmoved(self) -> bool:
        """Whether the last finished step can be saved, which is then what is saved.

        The script may have drawn random numbers since.
        """
        self.saved = self.last if self.unchanged else None
        return self.saved is not None

    @property
    def unchanged(self) -> bool:
        """Whether the tensors are still those of the last finished step."""
        if self.last is None or any(each.is_applied for each in self._state.averages.values()):
            return False
        tensors, groups = self._all_tensors(), self.last.groups
        same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        return (
            same
            and _same(self._record, self._recorder.record(tensors))
            and all(_sizes(groups[n]) == _sizes(_groups(o)) for n, o in self._state.optimizers.items())
        )

    def _all_tensors(self) -> list[torch.Tensor]:
        state = self._state
        modules = [state.model, *state.modules.values()]
        found = [each for module in modules for each in (*module.parameters(), *module.buffers())]
        averages = [tensor for each in state.averages.values() for tensor in each.by_weight().values()]
        return [*found, *state.loose.values(), *averages]


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{**group, "params": len(group["params"])} for group in optimizer.param_groups]


def _sizes(groups: list[dict[str, Any]]) -> list[int]:
    return [group["params"] for group in groups]
