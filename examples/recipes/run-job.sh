#!/bin/bash
# run-job.sh NAME TEMPLATE: trains, and exits with 0 if the job succeeded. A second run waits for the same job.
set -euo pipefail
job=trainingjob/$1
say() { kubectl get "$job" --output=jsonpath="$1: {.status.conditions[?(@.type=='$1')].message}{'\n'}"; }

sed "s/generateName: .*/name: $1/" "$2" | kubectl apply --filename=-
kubectl wait "$job" --for=condition=Accepted --timeout=10m || { say Accepted; exit 1; }
kubectl wait "$job" --for=jsonpath='{.status.completionTime}' --timeout=72h   # Succeeded or Failed

kubectl logs --selector="spottrain.io/job=$1,spottrain.io/rank=0" --tail=200 || true   # its pods may be gone
phase=$(kubectl get "$job" --output=jsonpath='{.status.phase}')
say "$phase"
[ "$phase" = Succeeded ]
