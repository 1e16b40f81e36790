#!/bin/bash
# Posts each job that has settled to $WEBHOOK_URL, once: an annotation on the job says what was posted.
set -euo pipefail

kubectl get trainingjobs --output=json | jq --raw-output '
  .items[] | .metadata.name as $job | .status as $is
  | select($is.phase == ("Succeeded", "Failed", "Suspended", "Invalid"))
  | select(.metadata.annotations.notified != $is.phase)
  | (if $is.phase == "Invalid" then "Accepted" else $is.phase end) as $condition
  | ($is.conditions[] | select(.type == $condition) | .message) as $why
  | {text: "\($job) is \($is.phase), \($is.cost.spent // "unknown") USD: \($why)"}
  | "\($job) \($is.phase) \(tojson)"
' | while read -r job phase body; do
  curl --fail --silent --show-error --max-time 30 --json "$body" "$WEBHOOK_URL"
  kubectl annotate --overwrite trainingjob "$job" "notified=$phase"
done
