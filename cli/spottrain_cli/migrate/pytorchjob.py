"""PyTorchJob (kubeflow.org/v1) of Kubeflow's training-operator."""

from __future__ import annotations

import re
from typing import Any, Final

from spottrain_cli.errors import UsageError
from spottrain_cli.migrate.pod import RANK_FIELD, Gang
from spottrain_cli.migrate.source import Json, Rule, Source, apply, put, shown

CONTROLLER: Final = "kubeflow.org/training-operator"
ONE_TEMPLATE: Final = "all pods of a TrainingJob are alike, here as the Master"
RUN_POLICY: Final = (
    Rule("activeDeadlineSeconds", to="activeDeadlineSeconds"),
    Rule("ttlSecondsAfterFinished", to="ttlSecondsAfterFinished"),
    Rule("backoffLimit", to="failurePolicy.maxFailures"),
    Rule("suspend", to="suspend"),
    Rule(
        "cleanPodPolicy",
        note="the operator removes ended pods; their output is in the store with "
        "checkpoint.mode Runtime, or where the cluster keeps logs",
    ),
    Rule(
        "managedBy",
        only=(CONTROLLER,),
        note="spottrain's operator runs it now",
        lost="only spottrain's operator runs a TrainingJob",
    ),
    Rule(
        "schedulingPolicy.queue",
        lost="a queue of Volcano; a TrainingJob asks a queue of Kueue, by the label "
        "kueue.x-k8s.io/queue-name",
    ),
    Rule("schedulingPolicy.minResources", note="the pods say what they need"),
    Rule("schedulingPolicy.scheduleTimeoutSeconds", to="capacity.pendingTimeoutSeconds"),
)
ELASTIC: Final = (
    *(
        Rule(
            name, note="left out: the workers meet at rank 0 by torchrun's variables, which the operator sets"
        )
        for name in ("rdzvBackend", "rdzvHost", "rdzvPort", "rdzvId", "rdzvConf", "standalone")
    ),
    Rule(
        "metrics",
        lost="the number of workers does not follow a metric; it is changed while the job is suspended",
    ),
)


def gang_of(source: Source, spec: Json, name: str, *, launched: bool) -> tuple[Gang, Source]:
    """Takes a PyTorchJob's own fields. Returns its pods as a gang, and their one template.

    launched: our launcher starts the ranks, and sets RANK and WORLD_SIZE for each.
    """
    processes = source.take("nprocPerNode")
    replicas = source.part("pytorchReplicaSpecs")
    master, worker = replicas.part("Master"), replicas.part("Worker")
    counts = {"Master": _count(master), "Worker": _count(worker)}
    workers = sum(counts.values())
    if not workers:
        raise UsageError("spec.pytorchReplicaSpecs has neither Master nor Worker with replicas")
    main = master if counts["Master"] else worker
    policy = source.part("runPolicy")
    _scheduling(policy, workers)
    apply(RUN_POLICY, policy, spec)
    elastic_policy = source.look("elasticPolicy") is not None
    elastic = _elastic(source.part("elasticPolicy"), spec, workers)
    policy_of_pods = main.look("restartPolicy")
    _restarts(main, spec)
    if counts["Master"] and counts["Worker"]:
        _one_template(master, worker, policy_of_pods)
    variables = _processes(processes) or elastic
    variables.append({"name": "PYTHONUNBUFFERED", "value": "1"})
    if counts["Master"] and not launched:  # with an elastic policy alone Kubeflow leaves these to torchrun
        size = workers * (int(processes) if str(processes or "").isdecimal() else 1)
        variables += [{"name": "WORLD_SIZE", "value": str(size)}, _rank(workers)]
    role = "master" if counts["Master"] else "worker"
    end = r"(\.[a-z0-9-]+(\.svc(\.cluster\.local)?)?)?\b"
    gang = Gang(
        workers=workers,
        job=name,
        trainer="pytorch",
        first=rf"\b{re.escape(name)}-{role}-0{end}",
        others=rf"\b{re.escape(name)}-(master|worker)-[0-9]+{end}",
        variables=tuple(variables),
        endpoint=elastic_policy and workers > 1,
        replaced=frozenset({"RANK", "WORLD_SIZE"} if workers > 1 else ()),
    )
    return gang, main.part("template")


def _rank(workers: int) -> Json:
    return {"name": "RANK", "valueFrom": RANK_FIELD} if workers > 1 else {"name": "RANK", "value": "0"}


def _count(replica: Source) -> int:
    there = replica.has("template")
    found = replica.whole("replicas")
    return (1 if found is None else found) if there else 0


def _restarts(replica: Source, spec: Json) -> None:
    policy = replica.take("restartPolicy")
    if policy == "Never" and "maxFailures" not in spec.get("failurePolicy", {}):
        put(spec, "failurePolicy.maxFailures", 0)
    elif policy == "ExitCode":
        replica.lose(
            "restartPolicy",
            "ExitCode: exit with 64 where a restart will not help; "
            "failurePolicy.maxFailures counts every other failure",
        )
    elif policy is not None:
        replica.note(
            "restartPolicy",
            f"{policy}: here a failed pod is a new attempt of all pods, which "
            "failurePolicy.maxFailures counts",
        )


def _one_template(master: Source, worker: Source, policy: Any) -> None:
    """Takes the workers' template where it is the master's; each difference is lost."""
    theirs_policy = worker.take("restartPolicy")
    if theirs_policy != policy:
        worker.lose("restartPolicy", f"{theirs_policy}, and of the Master {policy}: {ONE_TEMPLATE}")
    ours = dict(_flat(master.look("template")))
    theirs = dict(_flat(worker.take("template")))
    for path in sorted(theirs.keys() | ours.keys()):
        if theirs.get(path) == ours.get(path) and not _of_rank(path):
            continue
        said = shown(theirs.get(path, "absent"))
        if _of_rank(path):
            worker.note(f"template.{path}", f"{said}: left out, because each pod gets its own")
        else:
            worker.lose(
                f"template.{path}",
                f"{said}, and of the Master {shown(ours.get(path, 'absent'))}: {ONE_TEMPLATE}",
            )


def _of_rank(path: str) -> bool:
    return path.endswith(
        tuple(f".env[{name}]" for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    )


def _flat(template: Any) -> list[tuple[str, Any]]:
    """Returns path and value of each leaf; lists of named things by their names, variables as one."""

    def of(value: Any, path: str) -> list[tuple[str, Any]]:
        if isinstance(value, dict) and value:
            return [leaf for key, inner in value.items() for leaf in of(inner, f"{path}.{key}".strip("."))]
        if isinstance(value, list) and value:
            named = all(isinstance(inner, dict) and "name" in inner for inner in value)
            names = [str(inner["name"]) if named else str(at) for at, inner in enumerate(value)]
            if path.endswith(".env") and named:
                return [(f"{path}[{key}]", inner) for key, inner in zip(names, value, strict=True)]
            return [
                leaf for key, inner in zip(names, value, strict=True) for leaf in of(inner, f"{path}[{key}]")
            ]
        return [(path, value)]

    return of(template, "")


def _scheduling(policy: Source, workers: int) -> None:
    least = policy.whole("schedulingPolicy.minAvailable")
    if least is not None and least < workers:
        policy.lose(
            "schedulingPolicy.minAvailable", f"{least}: a TrainingJob trains with all {workers} workers"
        )
    elif least is not None:
        policy.note("schedulingPolicy.minAvailable", f"{least}: all workers start together")
    priority = policy.take("schedulingPolicy.priorityClass")
    if priority is not None:
        policy.lose(
            "schedulingPolicy.priorityClass",
            f"{shown(priority)}: set spec.template.spec.priorityClassName, or "
            "the label kueue.x-k8s.io/priority-class with a queue of Kueue",
        )


def _elastic(elastic: Source, spec: Json, workers: int) -> list[Json]:
    least, most = elastic.whole("minReplicas"), elastic.whole("maxReplicas")
    for name, number in (("minReplicas", least), ("maxReplicas", most)):
        if number is not None and number != workers:
            elastic.lose(
                name,
                f"{number}: the number of workers is fixed at {workers}; it is changed while the job is "
                "suspended, and the checkpoint is read by as many as there are then",
            )
    apply(ELASTIC, elastic, {})
    restarts = elastic.whole("maxRestarts")
    if restarts is not None and "maxFailures" not in spec.get("failurePolicy", {}):
        elastic.note(
            "maxRestarts",
            f"{restarts}: now failurePolicy.maxFailures; a restart is a new attempt of all pods",
        )
        put(spec, "failurePolicy.maxFailures", restarts)
    elif restarts is not None:
        elastic.note("maxRestarts", f"{restarts}: failurePolicy.maxFailures has the backoffLimit instead")
    return _processes(elastic.take("nProcPerNode"))


def _processes(number: Any) -> list[Json]:
    return [] if number is None else [{"name": "PET_NPROC_PER_NODE", "value": str(number)}]
