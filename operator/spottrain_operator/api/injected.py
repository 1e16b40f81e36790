"""spec.runtime.inject: the commands into which the operator can put the launcher, and what it refuses. Pure.

The launcher stands before the script, so it must be known which word is the script. A command that names the
launcher itself is left as it is.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from spottrain.contract import LAUNCHER_FILE

from spottrain_operator.api import volumes
from spottrain_operator.api.template import judged, trainer_path
from spottrain_operator.api.training_job import TrainingJobSpec
from spottrain_operator.names import INJECT_CONTAINER

FOLDER: Final = "/spottrain"
"""Where the runtime is mounted."""
LAUNCHER: Final = f"{FOLDER}/{LAUNCHER_FILE}"
PYTHON: Final = re.compile(r"python(3(\.\d+)?)?")
ONE_RANK: Final = ("--nproc", "1")
"""Of our launcher under accelerate launch, which says nothing of ranks to a process that it starts alone.
Under torchrun it is not needed, and torchrun takes it for an abbreviation of its own flag."""
MODULE_FLAGS: Final = frozenset({"-m", "--module"})
NO_SCRIPT_FLAGS: Final = frozenset({"--no-python", "--no_python", "--run-path", "--run_path"})
TORCHRUN_SWITCHES: Final = frozenset({"--standalone", "--virtual-local-rank", "--virtual_local_rank"})
ACCELERATE_SWITCHES: Final = frozenset(
    spelling
    for name in (
        *("cpu", "debug", "downcast_bf16", "dynamo_use_dynamic", "dynamo_use_fullgraph"),
        *("dynamo_use_regional_compilation", "enable_cpu_affinity", "fp8_use_autocast_during_eval"),
        *("multi_gpu", "no_tpu_cluster", "quiet", "same_network", "tpu", "tpu_cluster", "tpu_use_sudo"),
        *("use_deepspeed", "use_fsdp", "use_megatron_lm", "use_parallelism_config"),
    )
    for spelling in (f"--{name}", f"--{name.replace('_', '-')}")
) | {"-q"}
"""Flags without a value; after another flag comes its value, unless there is a = in it."""
UNDERSTOOD: Final = (
    "with spec.runtime.inject it must be python [-u] SCRIPT, python [-u] -m MODULE, torchrun or "
    "accelerate launch with [FLAGS] SCRIPT.py or [FLAGS] -m MODULE, or name the launcher itself: "
    f"python {LAUNCHER} SCRIPT"
)


def words_of(trainer: Mapping[str, Any]) -> list[str]:
    return [str(word) for kind in ("command", "args") for word in trainer.get(kind) or ()]


def launched(words: Sequence[str]) -> list[str]:
    """Returns a command with the launcher in it. Raises ValueError with what is not understood."""
    if any(LAUNCHER in word for word in words):
        return list(words)
    program = posixpath.basename(words[0])
    if PYTHON.fullmatch(program):
        return _of_python(words)
    if program == "torchrun":
        return [*words[:1], *_of_ranks(words[1:], TORCHRUN_SWITCHES, ())]
    if program == "accelerate" and words[1:2] == ["launch"]:
        return [*words[:2], *_of_ranks(words[2:], ACCELERATE_SWITCHES, ONE_RANK)]
    raise ValueError(f"starts with {words[0]}")


def _of_python(words: Sequence[str]) -> list[str]:
    at = 2 if words[1:2] == ["-u"] else 1
    interpreter, rest = words[:at], words[at:]
    match rest:
        case []:
            raise ValueError("names no script")
        case ["-m", "torch.distributed.run", *more]:
            return [*interpreter, *rest[:2], *_of_ranks(more, TORCHRUN_SWITCHES, ())]
        case ["-m", "accelerate.commands.launch", *more]:
            return [*interpreter, *rest[:2], *_of_ranks(more, ACCELERATE_SWITCHES, ONE_RANK)]
        case ["-m", "torch.distributed.launch", *_]:
            raise ValueError("starts torch.distributed.launch, which torchrun has replaced")
        case ["-m", "spottrain", "run", *more]:
            return [*interpreter, LAUNCHER, *more]
        case ["-m", module, *_] if not module.startswith("-"):
            return [*interpreter, LAUNCHER, *rest]
        case [word, *_] if word.startswith("-"):
            raise ValueError(f"has {word} (options of Python have variables too, such as PYTHONOPTIMIZE)")
    return [*interpreter, LAUNCHER, *rest]


def _of_ranks(words: Sequence[str], switches: frozenset[str], ours: tuple[str, ...]) -> list[str]:
    """Returns the words after torchrun, or accelerate launch, with the launcher as their script."""
    flags, rest = list[str](), list(words)
    while rest and rest[0].startswith("-"):
        name, equals, _ = rest[0].partition("=")
        value = rest[1] if rest[1:] and not rest[1].startswith("-") else ""
        if name in MODULE_FLAGS and value:
            return [*flags, LAUNCHER, *ours, "-m", *rest[1:]]
        if name in MODULE_FLAGS | NO_SCRIPT_FLAGS:
            raise ValueError(f"has {rest[0]}")
        taken = 1 if equals or name in switches or not value else 2
        if taken == 2 and value.endswith(".py"):
            raise ValueError(f"has {name} before {value} (write {name}={value} if that is its value)")
        flags, rest = [*flags, *rest[:taken]], rest[taken:]
    if not rest or not rest[0].endswith(".py"):
        raise ValueError("names no script that ends in .py after the flags")
    return [*flags, LAUNCHER, *ours, *rest]


# --- validation ---------------------------------------------------------------------------------------
def problem(spec: TrainingJobSpec) -> str:
    """Returns a sentence about what in the spec does not fit with `inject`; "" where all does."""
    return _taken(spec) or _command_problem(spec) if spec.runtime.inject else ""


def _taken(spec: TrainingJobSpec) -> str:
    """Rejects containers, volumes and mounts in the place of the operator's own."""
    pod, path = spec.template["spec"], "spec.template.spec"
    for kind in ("containers", "initContainers", "volumes"):
        if any(each.get("name") == INJECT_CONTAINER for each in pod.get(kind) or ()):
            return (
                f"{path}.{kind} must not have {INJECT_CONTAINER}, which is the operator's where "
                "spec.runtime.inject is set; give it another name"
            )
    mounted = {f"{trainer_path(pod)}.volumeMounts": volumes.paths(judged(pod["containers"]))}
    if spec.data_cache is not None:
        mounted["spec.dataCache.mountPath"] = {volumes.clean(spec.data_cache.path)}
    for where, paths in mounted.items():
        if taken := next((p for p in sorted(paths) if p == FOLDER or p.startswith(f"{FOLDER}/")), ""):
            return (
                f"{where} has {taken}, and {FOLDER} is where spec.runtime.inject mounts the runtime; mount "
                "it elsewhere"
            )
    return ""


def _command_problem(spec: TrainingJobSpec) -> str:
    pod = spec.template["spec"]
    trainer, where = judged(pod["containers"]), trainer_path(pod)
    if not trainer.get("command"):
        return (
            f"{where}.command is required with spec.runtime.inject, because the operator does not know what "
            "the image starts by itself; write the image's entry point there, such as [python, train.py]"
        )
    try:
        launched(words_of(trainer))
    except ValueError as error:
        return f"{where}.command {error}; {UNDERSTOOD}"
    return ""
