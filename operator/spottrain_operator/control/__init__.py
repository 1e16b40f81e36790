"""The control loop: observe -> plan -> apply, and its inputs.

handlers, informer, caches   the state from watches and LISTs
workloads, resync          Kueue's Workloads, and what else this cluster serves
work_queue, reconcile      which job is reconciled, and when
observe, plan, follow, apply   one reconcile of one job; plan and follow are pure
actions                    what a plan does: values that run themselves by the client's requests
measurements               what a change of status says for the metrics
progress                   polls of trainers
memory                     what this process knows beyond the caches
leader                     which of several processes writes
service                    starts and connects the components
"""
