"""Attaches to the training libraries of a script, so that it survives interruptions unchanged.

`install` waits for the script's import of a library, and then wraps the method that trains: `Trainer.train`
of transformers, `Trainer.fit` of Lightning. The first training of the script gets the callback that
`integrations` has for it, and resumes from the checkpoint URI. The job is done when the script ends.

Nothing is imported that the script does not import. A script that imports the callback itself is left alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from spottrain.contract import Outcome
from spottrain.core import log, patches
from spottrain.integrations.saved_models import SavedModels
from spottrain.lifecycle.endings import Ending
from spottrain.lifecycle.life import Phase
from spottrain.lifecycle.session import Session

FLAG: Final = "--no-auto-attach"


@dataclass(frozen=True, slots=True)
class Library:
    """A library whose `module.Trainer.method` trains. Versions from `least` to the next major one fit."""

    name: str
    """Of the distribution."""
    module: str
    method: str
    integration: str
    """Module with the callback, and with `run_attached(call, method)`."""
    least: tuple[int, int]
    tested: str


HUGGING_FACE: Final = "spottrain.integrations.transformers"
LIGHTNING: Final = "spottrain.integrations.lightning"
LIBRARIES: Final = (
    Library("transformers", "transformers.trainer", "train", HUGGING_FACE, (5, 10), "5.23"),
    Library("lightning", "lightning.pytorch.trainer.trainer", "fit", LIGHTNING, (2, 6), "2.6"),
    Library("pytorch-lightning", "pytorch_lightning.trainer.trainer", "fit", LIGHTNING, (2, 6), "2.6"),
)
FOLDER: Final = {"train": "output_dir", "fit": "default_root_dir"}
"""Attribute with the folder of a Trainer, by the method that trains."""
MODELS: Final = {"transformers.modeling_utils": "PreTrainedModel", "peft.peft_model": "PeftModel"}
"""Classes whose `save_pretrained` saves a model, by their modules."""
OPTIMIZER: Final = "torch.optim.optimizer"
NAMES: Final = re.compile(r"\b(transformers|trl|lightning|pytorch_lightning)\b.*\b\w*Trainer\b", re.DOTALL)
"""What a script contains that is going to train with one of the libraries."""
SECOND: Final = (
    "the script trains a second time. Only its first training is saved: after an interruption the second one "
    "begins again. To save both, make them two scripts with two checkpoint URIs"
)
LOST: Final = "A second training had begun, which is not saved: it begins again."
AFTER_FAILED: Final = (
    "a training has failed, and the script goes on with another Trainer, whose training is not saved: the "
    "checkpoints are of the first one. Give each training a script and a checkpoint URI of its own"
)
AFTER_FAILED_LOST: Final = (
    "Interrupted in a training after one that had failed: it is not saved, and begins again."
)
NOTHING: Final = "it is not attached to, and nothing is saved at a notice"
UNUSED: Final = (
    "the script imports the callback of {integration}, and this Trainer does not use it, so nothing is saved "
    "at a notice. Use it (docs/libraries.md), or do not import it"
)
SEARCH: Final = (
    "a hyperparameter search is not saved, nor a training after it, because after an interruption the search "
    "may find other parameters. Run the final training as a separate script"
)
CHILD: Final = (
    "a process that the script has started trains: nothing is saved at a notice. Start the processes by "
    "spottrain run --nproc N, and let each of them train by itself"
)


def install(session: Session) -> None:
    """Attaches to libraries from now on. Call it after `session.prepare`, before the script runs."""
    if session.run.auto_attach and session.run.checkpoint_uri is not None:
        LibraryAttachment(session).install()


class LibraryAttachment:
    """What is attached to in this process."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._process = os.getpid()
        self._imported: set[str] = set()
        """Integrations that were imported here, not by the script."""
        self._failed = self._left_out = self._stepped = False
        """Whether what was attached to has failed, a training was left out, and an optimizer has stepped."""
        self._trainer: Callable[[], Any] | None = None
        """Weak reference to the Trainer that was attached to. A script may free it after a failure."""
        self._advised: set[str] = set()
        self._saved = SavedModels(session)

    def install(self) -> None:
        hooks: dict[str, Callable[[ModuleType], None]] = {
            each.module: functools.partial(self._wrap, each) for each in LIBRARIES
        }
        hooks[OPTIMIZER] = self._watch_steps
        hooks |= dict.fromkeys(MODELS, self._wrap_model)
        self._session.attachment = self
        sys.meta_path.insert(0, _Finder(hooks))
        for name, hook in hooks.items():
            if name in sys.modules:
                hook(sys.modules[name])

    def _wrap(self, library: Library, module: ModuleType) -> None:
        kind = getattr(module, "Trainer", None)
        method: Any = getattr(kind, library.method, None)
        if kind is None or method is None:
            self._leave_out(
                _unfit(library) or f"{library.module} has no Trainer.{library.method}, so {NOTHING}"
            )
            return
        signature = inspect.signature(method)

        @functools.wraps(method)
        def attached(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            if not self._takes(library, call):
                return method(*args, **kwargs)
            return self._run(library, call, method)

        patches.replace(kind, library.method, attached)

    def _run(self, library: Library, call: inspect.BoundArguments, method: Callable[..., Any]) -> Any:
        self._imported.add(library.integration)
        integration = importlib.import_module(library.integration)
        trainer = call.arguments["self"]
        self._session.attached = f"{type(trainer).__name__}.{library.method}"
        if self._session.world.first:
            what = self._session.attached
            log.event("attached", library=library.name, version=_version(library), what=what, off=FLAG)
        if self._trainer is None or self._trainer() is not trainer:
            self._session.training = _identity(library, trainer, ranks=self._session.world.size)
        if library.method == "train" and "save_model" not in vars(trainer):
            saves = self._saved.noting(trainer.save_model, "output_dir", usual=trainer.args.output_dir)
            patches.replace(trainer, "save_model", saves)
        self._trainer, self._failed = weakref.ref(trainer), False
        try:
            return integration.run_attached(call, method)
        except BaseException:
            self._failed = True  # the script may catch it, and try again
            raise

    def _takes(self, library: Library, call: inspect.BoundArguments) -> bool:
        """Whether to attach to this call. What is left out for a reason gets a sentence."""
        session = self._session
        if library.integration in sys.modules and library.integration not in self._imported:
            if not session.phase.begun:  # the callback has not been asked to resume
                self._leave_out(UNUSED.format(integration=library.integration))
            return False
        callbacks = getattr(call.arguments["self"], "callbacks", None) or ()
        if any(getattr(each, "_early_exit", False) for each in callbacks):
            return False  # a trial of Lightning's Tuner, no training
        if session.phase in (Phase.STORED, Phase.DONE):
            session.lost_after_training = LOST
            return self._leave_out(SECOND)
        if session.phase.begun and not self._tries_again(call):
            return False
        if os.getpid() != self._process:
            return self._leave_out(CHILD)
        if call.arguments.get("trial") is not None or SEARCH in self._advised:
            return self._leave_out(SEARCH)
        if getattr(call.arguments["self"], "fast_dev_run", False):
            self._advise("fast_dev_run runs one batch as a check, and is not saved")
            return False
        if why := _unfit(library):
            return self._leave_out(why)
        return True

    def _tries_again(self, call: inspect.BoundArguments) -> bool:
        """Whether the training that has begun is one that failed, and this call is of the same Trainer."""
        if not self._failed or self._trainer is None:
            return False  # the training of a Run or Trainer of ours
        if self._trainer() is call.arguments["self"]:
            return True
        self._session.unsaved = Ending(Outcome.INTERRUPTED_LOST, AFTER_FAILED_LOST)
        return self._leave_out(AFTER_FAILED)

    def _leave_out(self, why: str) -> bool:
        self._left_out = True
        self._advise(why)
        return False

    def _advise(self, text: str) -> None:
        if text not in self._advised:
            self._advised.add(text)
            log.event("advice", about="attach", text=text)

    def _wrap_model(self, module: ModuleType) -> None:
        kind = getattr(module, MODELS[module.__name__], None)
        if kind is not None:
            saves = self._saved.noting(kind.save_pretrained, "save_directory")
            patches.replace(kind, "save_pretrained", saves)

    def _watch_steps(self, module: ModuleType) -> None:
        register = getattr(module, "register_optimizer_step_post_hook", None)
        if register is not None:
            register(self._note_step)

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    @property
    def serves(self) -> bool:
        """Whether the script has imported a library, or is going to: its training has not begun yet."""
        if self._left_out or self._stepped:
            return False
        if any(each.module in sys.modules for each in LIBRARIES):
            return True
        try:
            return NAMES.search(Path(self._session.script).read_text(errors="replace")) is not None
        except OSError:
            return False

    def saved_files(self) -> Mapping[str, Path]:
        """Returns the files of the models that the script has saved after its training, by name."""
        return self._saved.files()


class _Finder(MetaPathFinder):
    """Calls a hook with a module after its first execution. `hooks`: by the module's name."""

    def __init__(self, hooks: dict[str, Callable[[ModuleType], None]]) -> None:
        self._hooks = hooks
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._hooks or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)  # by the other finders
        finally:
            self._searching.remove(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Hooked(spec.loader, self._hooks[fullname])
        return spec


class _Hooked(Loader):
    """A loader that calls `hook` with the module after its execution. The module keeps the usual loader."""

    def __init__(self, usual: Loader, hook: Callable[[ModuleType], None]) -> None:
        self._usual, self._hook = usual, hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._usual.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._usual
        if module.__spec__ is not None:
            module.__spec__.loader = self._usual
        self._usual.exec_module(module)
        self._hook(module)


def _identity(library: Library, trainer: Any, *, ranks: int) -> dict[str, Any]:
    """Returns what its checkpoints are recognised by. Numbers of a time in a folder's name are left out."""
    of = trainer.args if library.method == "train" else trainer
    folder = os.path.basename(os.path.normpath(str(getattr(of, FOLDER[library.method], "") or "")))
    epochs = getattr(of, "num_train_epochs", None) or getattr(of, "max_epochs", None)
    return {
        "trainer": type(trainer).__name__,
        "folder": re.sub(r"\d{4,}([-_.:T]?\d{2,})*", "*", folder),
        "length": f"{of.max_steps} steps" if of.max_steps > 0 else f"{epochs} epochs",
        "ranks": ranks,
    }


def _unfit(library: Library) -> str:
    """Returns why this version cannot be attached to; "" if it can."""
    found = _version(library)
    match = re.match(r"(\d+)\.(\d+)", found)
    below = library.least[0] + 1
    if match and library.least <= (int(match[1]), int(match[2])) < (below, 0):
        return ""
    least = ".".join(map(str, library.least))
    return (
        f"{library.name} {found} is not attached to, so nothing is saved at a notice: it has to be at least "
        f"{least} and below {below}.0 (tested: {library.tested}). Install such a version, or use the "
        f"callback of {library.integration} (docs/libraries.md)"
    )


def _version(library: Library) -> str:
    try:
        return importlib.metadata.version(library.name)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
