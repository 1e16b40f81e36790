"""batch/v1 Job."""

from __future__ import annotations

import re
from typing import Any, Final

from spottrain_cli.migrate.pod import RANK_FIELD, Gang
from spottrain_cli.migrate.source import Json, Rule, Source, apply, shown

GANG: Final = "the pods of a TrainingJob are one gang, which starts again whole"
RULES: Final = (
    Rule("activeDeadlineSeconds", to="activeDeadlineSeconds"),
    Rule("ttlSecondsAfterFinished", to="ttlSecondsAfterFinished"),
    Rule("suspend", to="suspend"),
    Rule("backoffLimit", to="failurePolicy.maxFailures"),
    Rule(
        "podReplacementPolicy",
        only=("Failed", "TerminatingOrFailed"),
        note="an attempt starts when the one before it has saved or ended",
    ),
    Rule("backoffLimitPerIndex", lost=f"{GANG}; failurePolicy.maxFailures counts its failures"),
    Rule("maxFailedIndexes", lost=f"{GANG}; failurePolicy.maxFailures counts its failures"),
    Rule("successPolicy", lost="a TrainingJob succeeds when all of its pods have done their work"),
    Rule("managedBy", lost="only spottrain's operator runs a TrainingJob"),
    Rule("manualSelector", only=(False,), note="the operator finds its pods itself", lost=""),
    Rule("selector", note="left out: the operator finds its pods itself"),
)
INDEX: Final = "JOB_COMPLETION_INDEX"


def gang_of(source: Source, spec: Json, name: str) -> Gang:
    """Takes a Job's own fields; returns its pods as a gang. Without the pod template."""
    workers = _workers(source, spec)
    mode = source.take("completionMode")
    if mode not in (None, "Indexed", "NonIndexed"):
        source.lose("completionMode", f"{mode}: Kubernetes has Indexed and NonIndexed")
    indexed = mode == "Indexed"
    if workers > 1 and not indexed:
        source.lose(
            "parallelism",
            f"{workers} pods that know nothing of each other (completionMode NonIndexed): the "
            "workers of a TrainingJob train one model together; make one TrainingJob for each",
        )
    _failure_rules(source)
    apply(RULES, source, spec)
    first, others = hosts(name, source.look("template.spec.subdomain"))
    return Gang(
        workers=workers,
        job=name,
        variables=({"name": INDEX, "valueFrom": RANK_FIELD},) if indexed else (),
        first=first,
        others=others,
    )


def hosts(name: str, subdomain: Any) -> tuple[str, str]:
    """Returns patterns of the host names of an indexed Job's first pod, and of any: NAME-INDEX.SUBDOMAIN."""
    if not subdomain:
        return "", ""
    end = rf"\.{re.escape(str(subdomain))}(\.[a-z0-9-]+(\.svc(\.cluster\.local)?)?)?\b"
    return rf"\b{re.escape(name)}-0{end}", rf"\b{re.escape(name)}-[0-9]+{end}"


def _workers(source: Source, spec: Json) -> int:
    parallelism, completions = source.whole("parallelism"), source.whole("completions")
    if parallelism == 0:
        source.note("parallelism", "0: now suspend: true")
        spec["suspend"] = True
    pods = parallelism or 1
    if completions is not None and completions < pods:
        source.note("parallelism", f"{pods}: no more pods than completions, {completions}")
        return max(completions, 1)
    if completions is not None and completions > pods:
        source.lose(
            "completions",
            f"{completions} with parallelism {pods}: all pods of a TrainingJob run at once; "
            f"workers is {pods}",
        )
    return pods


def _failure_rules(source: Source) -> None:
    for rule in source.parts("podFailurePolicy.rules"):
        action = rule.take("action")
        conditions, codes = rule.take("onPodConditions"), rule.take("onExitCodes")
        kinds = [str(each.get("type")) for each in conditions or () if isinstance(each, dict)]
        if action == "Ignore" and kinds == ["DisruptionTarget"] and not codes:
            rule.note("onPodConditions", "an interruption never counts as a failure")
        elif codes:
            rule.lose(
                "onExitCodes",
                f"{action} on {shown(_codes(codes))}: exit with 64 where a restart will not help; "
                "failurePolicy.maxFailures counts every other failure",
            )
        else:
            rule.lose(
                "onPodConditions",
                f"{action} on {shown(', '.join(kinds))}: the operator decides by its own rules "
                "(docs/interruptions.md)",
            )


def _codes(codes: Any) -> str:
    if not isinstance(codes, dict):
        return str(codes)
    where = f" of {codes['containerName']}" if "containerName" in codes else ""
    return f"{codes.get('operator', 'In')} {codes.get('values', '')}{where}"
