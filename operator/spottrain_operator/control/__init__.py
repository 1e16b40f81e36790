"""The control loop: observe -> plan -> apply, and its inputs.

handlers, informer, lister, resync, caches   the state from watches and LISTs, and features of the cluster
work_queue, reconcile      which job is reconciled, and when
observe, plan, follow, apply   one reconcile of one job; plan and follow are pure
actions                    what a plan does: values that run themselves by the client's requests
workloads                  Kueue's Workloads, where the cluster serves them
progress                   polls of trainers
memory                     per-process state beyond the caches; stores what an observation has learned
service                    starts and connects the components
"""
