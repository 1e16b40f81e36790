#!/bin/bash
# run-job.sh NAME TEMPLATE: trains, and exits with 0 if the job succeeded. A second run waits for the same job.
set -euo pipefail
job=trainingjob/$1

sed "s/generateName: .*/name: $1/" "$2" | kubectl apply --filename=-
kubectl wait "$job" --for=condition=Accepted --timeout=10m
kubectl wait "$job" --for=jsonpath='{.status.completionTime}' --timeout=72h   # Succeeded or Failed

kubectl logs --selector="spottrain.io/job=$1,spottrain.io/rank=0" --tail=200 || true   # its pods may be gone
phase=$(kubectl get "$job" --output=jsonpath='{.status.phase}')
kubectl get "$job" --output=jsonpath="$phase: {.status.conditions[?(@.type=='$phase')].message}{'\n'}"
[ "$phase" = Succeeded ]
