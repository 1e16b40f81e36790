"""Every attribute of other code that this package replaces goes through `replace`, which can undo it.

    DataLoader._get_iterator           lifecycle.worker_signals: workers ignore stop signals
    DataLoader.__iter__                integrations.lightning, integrations.pass_position: a library's
                                       loop goes on in the middle of an epoch
    Trainer.train, Trainer.fit         integrations.attach: an unchanged script is saved
    Trainer's register_signal_handlers integrations.lightning: a stop is ours
    save_model, save_pretrained        integrations.attach: what a script saves is stored
    Trainer._init_training_state       integrations.transformers: the position in a stream
    Trainer._run_epoch                 integrations.transformers: all steps were done before
    Trainer._get_output_dir            integrations.transformers: a checkpoint lies in a folder of ours
    Trainer._maybe_log_save_evaluate   integrations.transformers: a save follows what is due at a step
    optimizer.add_param_group          checkpoint.plain_state: a restored group is not added twice
    destroy_process_group              training.run: sharded weights are stored before it
    sys.excepthook                     lifecycle.session: an uncaught error is reported
    stream.write                       cli.main: the last words of a script that fails

Beside these: `forward` of modules that recompute their activations, which `remove` puts back
(techniques.activation_checkpointing); a finder in `sys.meta_path` for libraries that are imported later
(integrations.attach); fork hooks, which Python cannot unregister (core.preemption,
distributed.control_channel); `worker_init_fn` of a user's loader (lifecycle.worker_signals); torch's hook
before each optimizer's step (checkpoint.model_watch); `gc.freeze` (core.device) and, until the first step,
the collector's threshold (core.garbage).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_ABSENT: Final = object()


def replace(owner: Any, name: str, new: Any) -> Callable[[], None]:
    """Sets an attribute of a module, class or object that is not ours.

    Returns a function that puts back what was there. It does nothing if other code has replaced the attribute
    since, which may rely on ours.
    """
    before = getattr(owner, "__dict__", {}).get(name, _ABSENT)
    setattr(owner, name, new)

    def undo() -> None:
        if vars(owner).get(name) is not new:
            return
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo
