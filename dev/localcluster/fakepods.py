"""kwok's part of a kubelet: pods that start when they are bound, and end when they are deleted.

A trainer that is deleted ends as the runtime would: exit code 75 and a termination message that says up to
which step it has saved. Its steps are the seconds since `epoch`, so that they never go down, whichever
attempt says them. One that has the annotation FINISHES ends with 0 and the message `done` after so long.
"""

from __future__ import annotations

from typing import Final

FINISHES: Final = "kwok.spottrain.dev/finishes-after"
"""Annotation of a pod: how long it trains, as Go writes durations (`90s`)."""

_STAGE: Final = """apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata:
  name: {name}
spec:
  resourceRef: {{apiGroup: v1, kind: Pod}}
  selector:
    matchExpressions:{match}
  delay: {delay}
  next:{then}
"""
_LIVE: Final = "\n    - {key: .metadata.deletionTimestamp, operator: DoesNotExist}"
_DELETED: Final = "\n    - {key: .metadata.deletionTimestamp, operator: Exists}"
_PHASE: Final = "\n    - {{key: .status.phase, operator: In, values: [{0}]}}"
_FINISHES: Final = f"\n    - {{key: '.metadata.annotations[\"{FINISHES}\"]', operator: Exists}}"
_NOT_AGAIN: Final = "\n    - {key: .metadata.deletionGracePeriodSeconds, operator: NotIn, values: ['0']}"

_STATUS: Final = """
    statusTemplate: |
      {{ $now := Now }}%(first)s
      conditions:
      {{ range tuple "Ready" "ContainersReady" %(conditions)s }}
      - {lastTransitionTime: {{ $now | Quote }}, status: %(status)s, type: {{ . }}}
      {{ end }}
      containerStatuses:
      {{ range .spec.containers }}
      - name: {{ .name | Quote }}
        image: {{ .image | Quote }}
        imageID: ""
        ready: %(ready)s
        restartCount: 0
        started: %(ready)s
        state: %(state)s
      {{ end }}
      phase: %(phase)s%(last)s
"""
_RUNNING: Final = _STATUS % {
    "first": "",
    "conditions": '"Initialized" "PodReadyToStartContainers"',
    "status": '"True"',
    "ready": "true",
    "state": "{running: {startedAt: {{ $now | Quote }}}}",
    "phase": "Running",
    "last": """
      startTime: {{ $now | Quote }}
      {{ $of := .metadata }}
      {{ $ip := PodIPWith .spec.nodeName false $of.uid $of.name $of.namespace }}
      podIP: {{ $ip | Quote }}
      podIPs: [{ip: {{ $ip | Quote }}}]""",
}
_WORD: Final = """
      {{ $step := sub ( now | unixEpoch | int64 ) %(epoch)d | int64 }}
      {{ $word := dict "outcome" "%(outcome)s" "step" $step "durableStep" $step "durableSeconds" 0.5 }}
      {{ $attempt := index ( or .metadata.labels dict ) "spottrain.io/attempt" }}
      {{ if $attempt }}{{ $_ := set $word "attempt" ( int64 $attempt ) }}{{ end }}
      {{ $began := ( index .status.containerStatuses 0 ).state.running.startedAt }}"""
_TERMINATED: Final = """
          running: null
          terminated:
            exitCode: %(code)d
            reason: %(reason)s
            message: {{ if $attempt }}{{ $word | toJson | Quote }}{{ else }}""{{ end }}
            startedAt: {{ $began | Quote }}
            finishedAt: {{ $now | Quote }}"""
_GONE: Final = "\n    delete: true"


def pod_stages(*, epoch: int, stop_seconds: float = 0.0) -> str:
    """kwok's configuration. `stop_seconds`: from the DELETE of a pod until its containers have ended."""
    at_once, later = "{durationMilliseconds: 0}", f"{{durationMilliseconds: {int(1000 * stop_seconds)}}}"
    lasts = f"{{durationFrom: {{expressionFrom: '.metadata.annotations[\"{FINISHES}\"]'}}}}"
    stages = (
        ("pod-runs", _LIVE + _PHASE.format("Pending"), at_once, _RUNNING),
        ("pod-is-done", _LIVE + _PHASE.format("Running") + _FINISHES, lasts, _ended(epoch, 0)),
        ("pod-stops", _DELETED + _PHASE.format("Running"), later, _ended(epoch, 75)),
        ("pod-goes", _DELETED + _PHASE.format("Pending, Succeeded, Failed") + _NOT_AGAIN, at_once, _GONE),
    )
    return "---\n".join(_STAGE.format(name=n, match=m, delay=d, then=t) for n, m, d, t in stages)


def _ended(epoch: int, code: int) -> str:
    word = {"epoch": epoch, "outcome": "interrupted" if code else "done"}
    end = {"code": code, "reason": "Error" if code else "Completed"}
    return _STATUS % {
        "first": _WORD % word,
        "conditions": "",
        "status": '"False"',
        "ready": "false",
        "state": _TERMINATED % end,
        "phase": "Failed" if code else "Succeeded",
        "last": "",
    }
