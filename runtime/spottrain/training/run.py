"""`Run`: makes a custom training loop survive interruptions, in three to five lines. Its base is `loop.Loop`.

run = spottrain.Run(model=model, optimizer=optimizer, scheduler=scheduler, data=loader, max_steps=1000)
for batch in run.batches(loader):
    ...                              # forward, backward, optimizer.step(), scheduler.step()
    run.step_completed(loss=loss)
run.finish()
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from spottrain.checkpoint import outside_parameters, plain_state
from spottrain.checkpoint.kinds import StateCheckpoints, TrainingState
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.session import Session, current
from spottrain.techniques.early_stopping import EarlyStopping
from spottrain.techniques.trackers import Trackers
from spottrain.training import job_settings
from spottrain.training.extra_state import adapted, final_weights
from spottrain.training.finished_step import FinishedSteps
from spottrain.training.loop import Loop
from spottrain.training.position import has_state
from spottrain.training.state_tree import MAIN, SCALER, StateTree, is_scaler


class Run(Loop):
    """Saves and restores a custom training loop.

    The constructor claims the checkpoint URI and restores what it is given; `global_step` then says how many
    steps are done. Create it last, after DDP, FSDP2 or torch.compile has wrapped the model. The random state
    of Python, NumPy, torch and the current GPU is saved for each rank.

    A None in a dict, and `scaler=None`, mean "not used": the checkpoint's state of that name is dropped. A
    scaler or a technique (EMA, EarlyStopping, Trackers) without state in the checkpoint starts fresh. Both
    are logged.

    Args:
        model: a module, wrapped or not, or a dict of several.
        optimizer: a torch optimizer, or a dict of several. It may also train parameters outside the model:
            those of modules in `extra`, and single ones, which are saved without buffers of their module.
            They are stored with the final weights too (`spottrain.load_weights(path, "extra.loss")`).
        scheduler: an object with state_dict() and load_state_dict(), or a dict of several.
        scaler: the same for a GradScaler.
        data: the source of the batches, if it keeps its position: `spottrain.data.loader`, a DataLoader over
            a sampler of `spottrain.data`, torchdata's StatefulDataLoader, or any object with a state.
        extra: further state, by name. Its values must be equal on all ranks, except random generators.
            Objects with state_dict() and load_state_dict(). If one also has own_state_dict(), that part is
            saved per rank; both parts are passed to load_state_dict(state, own), where own is None on a new
            rank.
            Modules, such as an average of the weights: stored like the model.
            An `EMA` of the whole model: it becomes the final weights.
            A `spottrain.EarlyStopping`: its reason is reported if training ends early.
            `Trackers`: closed at the end.
            Plain values: numbers, strings, tensors, dicts and lists of them, and random generators of torch,
            Python and NumPy. They are restored in place, except numbers and strings, which the script
            reads and writes as `run.extra[name]`.
        max_steps: optimizer steps of the whole training; None: until `finish`. spec.training.maxSteps wins.
            spec.training.profile takes effect too. The loop must apply all other settings itself, with
            `spottrain.job_settings`; those that it does not name are logged.
        log_every: steps between two log lines, at least 1.
        session: the process's own session by default.

    Raises:
        RunError: an argument cannot be saved, the checkpoint does not match, or the store fails.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        extra: Mapping[str, Any] | None = None,
        max_steps: int | None = None,
        log_every: int = 10,
        session: Session | None = None,
    ) -> None:
        session = session or current()
        super().__init__(data=data, max_steps=max_steps, log_every=log_every, session=session)
        self._model = _models(model)
        self._optimizers = _optimizers(optimizer)
        self._modules: dict[str, torch.nn.Module] = {}
        self._objects: dict[str, Any] = {}
        self._left_out: set[str] = set()
        self.extra = dict(extra) if isinstance(extra, Mapping) else {}
        """The given values, by name. Numbers and strings are read and written here."""
        for kind, given in (("scheduler", scheduler), (SCALER, scaler), ("extra", extra)):
            self._add(kind, given)
        given = model.values() if isinstance(model, Mapping | torch.nn.ModuleDict) else [model]
        self._state = StateTree(
            "Run",
            self._model,
            self._optimizers,
            self._modules,
            self._objects,
            left_out=self._left_out,
            dataset=getattr(data, "dataset", None),
            replicas=session.world.distributed and any(map(plain_state.replica, given)),
            regroups=True,
            over=lambda: self._engine.ended or self.ended_by_itself,
            incompatible=self._engine.incompatible,
        )
        self._require_whole(scheduler)
        self._engine.join()
        state = TrainingState(
            shared=self._shared,
            own=self._own,
            load=self._load,
            unmoved=self._unmoved,
            want=self._state.want(),
            by_rank0=self._state.by_rank0,
        )
        modules = [self._model, *self._modules.values()]
        module = torch.nn.ModuleList(modules)
        if not session.world.distributed and self._data.shared:
            self._finished = FinishedSteps(
                modules=modules,
                optimizers=self._optimizers,
                objects={name: each for name, each in self._objects.items() if not is_scaler(name)},
                loose=lambda: self._state.loose.values(),
            )
        self._begin(StateCheckpoints(state, self._model), module, list(self._optimizers.values()))

    def _require_whole(self, scheduler: Any) -> None:
        """Raises ConfigurationError unless all that is trained is saved."""
        for each in scheduler.values() if isinstance(scheduler, Mapping) else [scheduler]:
            outside_parameters.require_of(each, self._optimizers.values(), "Run(scheduler=...)")
        self._may_schedule = scheduler is not None or any(
            hasattr(each, "optimizer") for each in self._objects.values()
        )
        self._require_scheduler()

    def _require_scheduler(self) -> None:
        """Raises ConfigurationError if the script has made a torch scheduler that is not saved."""
        groups = [group for each in self._optimizers.values() for group in each.param_groups]
        if not self._may_schedule and any("initial_lr" in group for group in groups):
            raise ConfigurationError(
                "a torch scheduler was made for the optimizer, and the Run is not given it, so after an "
                "interruption it would begin anew: Run(scheduler=scheduler), or scheduler={} where the "
                "script sets the rates by run.global_step"
            )

    def _add(self, kind: str, given: Any) -> None:
        if isinstance(given, Mapping):
            named = {f"{kind}.{name}": each for name, each in given.items()}
        elif given is None and kind != SCALER:
            return
        elif kind == "extra":
            raise ConfigurationError(
                f"Run(extra=...) is a {type(given).__name__}: give it a dict of names, such as "
                "extra={'ema': ema}"
            )
        else:
            named = {kind: given}
        for name, each in named.items():
            if each is None:  # not used now, e.g. the scaler of fp16, or an average
                self._left_out.add(name)
            else:
                self._keep(kind, name, each)

    def _keep(self, kind: str, name: str, each: Any) -> None:
        if isinstance(each, EarlyStopping):
            job_settings.use_first_rank(each, self.session.world)
        if isinstance(each, Trackers):
            self._engine.close_at_end(each)
        if isinstance(each, torch.nn.Module):
            self._modules[name] = plain_state.plain(each)
        elif has_state(each):
            self._objects[name] = each
        elif kind == "extra" and (plain := adapted(self.extra, name.removeprefix("extra."))) is not None:
            self._objects[name] = plain
        else:
            raise ConfigurationError(
                f"Run: {name} is a {type(each).__name__} without state_dict() and load_state_dict(), "
                "so it cannot be saved; give it both, or leave it out"
                + ("; or give what is in it: numbers, tensors, dicts of them" if kind == "extra" else "")
            )

    # --- state --------------------------------------------------------------------------------------
    def _shared(self) -> dict[str, Any]:
        self._require_scheduler()
        return self._state.shared(self._saved_step) | {"progress": self._progress()}

    def _load(self, tree: Any, own: Any, new_rank: bool) -> None:
        """Restores a checkpoint. Raises CheckpointError if it does not match the arguments."""
        tree = self._state.load(tree, own, new_rank)
        self._load_progress(tree["progress"], own, new_rank)

    def _own(self) -> dict[str, Any]:
        return super()._own() | self._state.own(self._saved_step)

    # --- overrides of Loop ----------------------------------------------------------------------------
    def _saved_besides(self) -> Collection[Any]:
        return self._objects.values()

    def _initialize(self) -> None:
        if self._engine.initialize(self._model):
            for average in self._state.averages.values():
                average.begin()  # it holds the weights from before

    def _count(self, loss: torch.Tensor | float | None, samples: int | None) -> None:
        self._state.live.note()
        super()._count(loss, samples)

    def _final(self) -> Mapping[str, Any]:
        weights = final_weights(self._model, self._state.averages, tell=self.session.world.first)
        return weights | self._trained_beside()

    def _trained_beside(self) -> dict[str, Any]:
        """Trained tensors outside the model; not those that follow its weights, such as an average."""
        given = {id(p) for each in self._optimizers.values() for g in each.param_groups for p in g["params"]}
        found: dict[str, Any] = {
            f"{outside_parameters.LOOSE}.{name}": each for name, each in self._state.loose.items()
        }
        for name, module in self._modules.items():
            if given.intersection(map(id, module.parameters())):
                found |= {f"{name}.{n}": each for n, each in plain_state.model_state(module).items()}
        return found

    def _names_beside(self) -> Collection[str]:
        return self._trained_beside().keys()

    def _early(self) -> str:
        """Reason of an EarlyStopping, else "". It is ignored once `max_steps` are done."""
        given = (each.reason for each in self._objects.values() if isinstance(each, EarlyStopping))
        return "" if self.done else next((reason for reason in given if reason), "")


def _models(given: Any) -> torch.nn.Module:
    """Returns one module; parameters of several are named `<key>.<parameter>`."""
    if isinstance(given, torch.nn.Module) and not isinstance(given, torch.nn.ModuleDict):
        return plain_state.plain(given)
    if not isinstance(given, Mapping | torch.nn.ModuleDict) or not given:
        raise ConfigurationError(
            f"Run(model=...) is {given!r:.80}; give a torch module, or a dict of modules"
        )
    try:
        return torch.nn.ModuleDict({name: plain_state.plain(each) for name, each in given.items()})
    except (KeyError, TypeError) as error:
        raise ConfigurationError(
            f"Run(model=...): {error}; give a dict of names and torch modules"
        ) from error


def _optimizers(given: Any) -> dict[str, torch.optim.Optimizer]:
    named = dict(given) if isinstance(given, Mapping) else {MAIN: given}
    for name, each in named.items():
        each = getattr(each, "optimizer", each)  # unwraps Accelerate's optimizer
        if not isinstance(each, torch.optim.Optimizer):
            raise ConfigurationError(
                f"Run(optimizer=...): {name} is a {type(each).__name__}; give a torch optimizer, or a dict "
                "of several"
            )
        named[name] = each
    if not named:
        raise ConfigurationError("Run(optimizer={}) is empty; give a torch optimizer, or a dict of them")
    return named
