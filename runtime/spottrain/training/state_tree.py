"""`StateTree`: what `Trainer` and `Run` save beside the position. Each reads what the other wrote.

    model, beside                  tensors by name; the names of those that are not the model's own
    optimizers.<name>              by the names of the parameters
    loose.<optimizer>.<number>     trained parameters that no module has
    modules.<name>                 as the model
    objects.<name>                 scheduler, scaler, extra.ema, and whatever else has a state_dict()

Each rank has `live` and `objects` of its own. `progress` is the loop's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from spottrain.checkpoint import outside_parameters, plain_state
from spottrain.checkpoint.live_state import LiveState
from spottrain.checkpoint.manifest import BESIDE, MODEL, StoredTensor
from spottrain.checkpoint.model_watch import ModelWatch
from spottrain.checkpoint.plain_state import parameters_of
from spottrain.checkpoint.reader import Want
from spottrain.core import log
from spottrain.distributed.dtensor import Box
from spottrain.errors import CheckpointError
from spottrain.techniques.early_stopping import EarlyStopping
from spottrain.techniques.ema import EMA
from spottrain.techniques.trackers import Trackers

MAIN: Final = "main"
"""Name of a single optimizer."""
SCHEDULER: Final = "scheduler"
SCALER: Final = "scaler"
AVERAGE: Final = "extra.ema"
"""Name of a Trainer's average, as in Run(extra={"ema": ema})."""
TECHNIQUES: Final = (EMA, EarlyStopping, Trackers)
"""Techniques that the manifest may switch on or off between two attempts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedStep:
    """Copies that were made at the end of a custom loop's step."""

    place: dict[str, Any]
    own_place: dict[str, Any]
    """As `LoopPosition.shared` and `own` return them."""
    groups: dict[str, list[dict[str, Any]]]
    """Of each optimizer: its parameter groups, with the number of parameters in the place of these."""
    objects: dict[str, Any]
    own: dict[str, Any]


class StateTree:
    """The state of one loop, whose modules, optimizers and objects are given by name.

    Args:
        owner: "Run" or "Trainer", for errors.
        left_out: names whose state in a checkpoint is dropped.
        dataset: see `LiveState`.
        replicas: see `ModelWatch`, like `regroups` and `over`.
        incompatible: makes the error of a checkpoint that does not fit.
    """

    def __init__(
        self,
        owner: str,
        model: torch.nn.Module,
        optimizers: Mapping[str, torch.optim.Optimizer],
        modules: Mapping[str, torch.nn.Module],
        objects: Mapping[str, Any],
        *,
        left_out: Collection[str],
        dataset: Any,
        replicas: bool,
        regroups: bool,
        over: Callable[[], bool],
        incompatible: Callable[[str], CheckpointError],
    ) -> None:
        self._owner, self._left_out, self._incompatible = owner, left_out, incompatible
        self.model, self.optimizers, self.modules, self.objects = model, optimizers, modules, objects
        self._made = {name: plain_state.group_names(model, each) for name, each in optimizers.items()}
        parts = {MODEL: model, **modules}
        self.live = LiveState(parts, optimizers, dataset)
        self._watch = ModelWatch(parts, optimizers, replicas=replicas, regroups=regroups, over=over)

    @property
    def loose(self) -> dict[str, torch.nn.Parameter]:
        """Trained parameters that belong to no given module, such as a learnt temperature of the loss.

        Computed at each access: parameter groups may be added during training.
        """
        return outside_parameters.loose(self.optimizers, [self.model, *self.modules.values()])

    def trained_beside(self) -> dict[str, Any]:
        """Trained tensors outside the model; not those that follow its weights, such as an average."""
        trained = {id(each) for optimizer in self.optimizers.values() for each in parameters_of(optimizer)}
        found: dict[str, Any] = {f"{outside_parameters.LOOSE}.{n}": each for n, each in self.loose.items()}
        for name, module in self.modules.items():
            if trained.intersection(map(id, module.parameters())):
                found |= {f"{name}.{n}": each for n, each in plain_state.model_state(module).items()}
        return found

    @property
    def averages(self) -> dict[str, EMA]:
        return {name: each for name, each in self.objects.items() if isinstance(each, EMA)}

    @property
    def by_rank0(self) -> frozenset[str]:
        """See `TrainingState`: ranks need not have equal buffers and objects."""
        of_modules = (plain_state.buffers(each, f"modules.{name}") for name, each in self.modules.items())
        return plain_state.buffers(self.model).union(("loose.", "objects."), *of_modules)

    # --- save ---------------------------------------------------------------------------------------
    def shared(self, saved: FinishedStep | None = None) -> dict[str, Any]:
        """Returns what is equal on all ranks. `saved`: copies that are taken in the place of the present."""
        self._watch.require_unchanged()
        model = plain_state.model_state(self.model)  # first: FSDP2 shards it again
        optimizers = {
            name: plain_state.optimizer_state(self.model, each, self._made[name])
            for name, each in self.optimizers.items()
        }
        copies = {} if saved is None else saved.objects
        if saved is not None:
            optimizers = {name: _with_groups(each, saved.groups[name]) for name, each in optimizers.items()}
        return {
            MODEL: model,
            BESIDE: outside_parameters.beside(self.model),
            "optimizers": optimizers,
            "loose": {name: each.detach() for name, each in self.loose.items()},
            "modules": {name: plain_state.model_state(each) for name, each in self.modules.items()},
            "objects": copies | {n: each.state_dict() for n, each in self.objects.items() if n not in copies},
        }

    def own(self, saved: FinishedStep | None = None) -> dict[str, Any]:
        """Returns what is this rank's alone."""
        copies = {} if saved is None else saved.own
        with_own = {n: each for n, each in self.objects.items() if hasattr(each, "own_state_dict")}
        return {
            "live": self.live.state(),
            "objects": copies | {n: each.own_state_dict() for n, each in with_own.items() if n not in copies},
        }

    # --- restore ------------------------------------------------------------------------------------
    def want(self) -> Want:
        """Returns which part of each stored tensor this rank needs."""
        of_model = plain_state.boxes(self.model)
        places = {f"{MODEL}.": of_model, "optimizer.state.": of_model, "ema.average.": of_model}  # 0.3.0
        places |= {f"optimizers.{name}.state.": of_model for name in self.optimizers}
        places |= {f"objects.{name}.average.": of_model for name in self.averages}
        places |= {f"modules.{name}.": plain_state.boxes(each) for name, each in self.modules.items()}

        def want(stored: StoredTensor) -> Box | None:
            for begin, boxes in places.items():
                if stored.name.startswith(begin):
                    name = stored.name.removeprefix(begin)
                    of_parameter = name.rpartition(".")[0]  # in the state of an optimizer
                    shape, box = boxes.get(name) or boxes.get(of_parameter) or (None, None)
                    return box if shape == stored.shape else None
            return None

        return want

    def load(self, tree: Mapping[str, Any], own: Mapping[str, Any], new_rank: bool) -> Mapping[str, Any]:
        """Restores it. Returns the tree in today's form. Raises CheckpointError if it does not fit."""
        tree = _of_trainer_0_3(tree) if "optimizer" in tree else tree
        self._require_same_names(tree["optimizers"], self.optimizers)
        self._require_same_names(tree["loose"], self.loose)
        self._require_same_names(tree["modules"], self.modules, optional=True)
        self._require_same_names(tree["objects"], self.objects, optional=True)
        self.live.load(own.get("live", {}))
        for name, parameter in self.loose.items():
            saved = tree["loose"][name]
            if parameter.shape != saved.shape:
                was, now = tuple(saved.shape), tuple(parameter.shape)
                raise self._incompatible(f"parameter {name} has shape {was} there and {now} here")
            with torch.no_grad():
                parameter.copy_(saved)
        self._require(plain_state.load_model(self.model, tree[MODEL]))
        for name, optimizer in self.optimizers.items():
            self._require(plain_state.load_optimizer(self.model, optimizer, tree["optimizers"][name]))
        for name, module in self.modules.items():
            self._require(plain_state.load_model(module, tree["modules"][name]))
        of_rank = None if new_rank else own.get("objects", {})
        for name, each in self.objects.items():
            if name in tree["objects"]:
                self._load_object(name, each, tree["objects"][name], of_rank)
            else:
                _begin_again(name, each)
        return tree

    def _load_object(self, name: str, each: Any, saved: Any, own: Mapping[str, Any] | None) -> None:
        """Restores one object. `own`: this rank's part of all objects; None for a new rank."""
        if is_scaler(name) and not (saved and each.state_dict()):  # a disabled one has no state
            return _tell_dropped(name) if saved else _begin_again(name, each)
        try:
            if hasattr(each, "own_state_dict"):
                each.load_state_dict(saved, own.get(name) if own is not None else None)
            else:
                each.load_state_dict(saved)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise self._incompatible(f"its {name} does not fit ({error})") from error

    def _require(self, mismatch: str | None) -> None:
        if mismatch is not None:
            raise self._incompatible(mismatch)

    def _require_same_names(
        self, saved: Mapping[str, Any], here: Mapping[str, Any], *, optional: bool = False
    ) -> None:
        """Raises CheckpointError for a name that only one of them has.

        `optional`: allows a technique that the checkpoint lacks, and a name that is left out here.
        """
        for name, each in here.items():
            new = isinstance(each, TECHNIQUES) or is_scaler(name)
            if name not in saved and not (optional and new):
                raise self._incompatible(f"it has no state of {name}, which this {self._owner} is given")
        for name in sorted(set(saved) - set(here)):
            left_out = name in self._left_out or (is_scaler(name) and SCALER in self._left_out)
            if not (optional and left_out):
                to_do = _to_do_about(name, self._owner)
                raise self._incompatible(
                    f"it has a state of {name}, which this {self._owner} is not given: {to_do}"
                )
            if saved[name]:  # a disabled scaler has no state
                _tell_dropped(name)


def is_scaler(name: str) -> bool:
    return name.split(".")[0] == SCALER


def _with_groups(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns an optimizer's state with these values in its parameter groups."""
    pairs = zip(state["param_groups"], groups, strict=True)
    return state | {"param_groups": [kept | {"params": now["params"]} for now, kept in pairs]}


def _of_trainer_0_3(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the tree that a Trainer of spottrain 0.3.0 wrote, in today's form."""
    objects = {SCHEDULER: tree["schedule"], SCALER: tree["scaler"]}
    objects |= {AVERAGE: tree["ema"]} if tree.get("ema") else {}
    data = None if tree["data"] is None else {"state": tree["data"]}
    optimizer = tree["optimizer"] | ({"kind": tree["kind"]} if "kind" in tree else {})
    return {
        MODEL: tree[MODEL],
        "optimizers": {MAIN: optimizer},
        "loose": {},
        "modules": {},
        "objects": objects,
        "progress": {**tree["progress"], "data": data},
    }


def _to_do_about(name: str, owner: str) -> str:
    """Advice for state in the checkpoint that the owner is not given."""
    if owner == "Trainer":
        return "spottrain.Run can take it"
    if owner == "AccelerateRun":
        return "let the Accelerator prepare and register what it did then, in the same order"
    kind, _, key = name.partition(".")
    if key and kind in (SCHEDULER, "extra"):
        return f"give it, or {kind}={{{key!r}: None}} to do without"
    if kind == SCHEDULER:
        return "give it, for without it the learning rate would silently be another one"
    return "give it, or scaler=None to do without" if kind == SCALER else "give it"


def _tell_dropped(name: str) -> None:
    log.event("override", setting=name, checkpoint="there", script="none")


def _begin_again(name: str, technique: Any) -> None:
    if is_scaler(name) and not technique.state_dict():
        return  # disabled
    log.event("override", setting=name, checkpoint="none", script="begins again")
    if isinstance(technique, EMA):  # it holds the weights from before the restore
        technique.begin()
