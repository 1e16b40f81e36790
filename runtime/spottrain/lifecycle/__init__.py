"""From the start of a process to its exit code: when to save, when to stop, and what is said at the end.

session              one run of one process: what it was told, how it may end
preemption           SIGTERM, SIGINT, the deadline file: a notice and its deadline
coordinator          claim, restore, save, agree with the other ranks, stop
early_end            the ways in which a training ends before its last step
save_interval, notice_budget, rebalance   when a save is due, whether it fits into a notice
launcher, topology, rendezvous            one process per GPU of a pod; all pods of a gang meet
hang_watchdog, gpu_faults                 no progress; a GPU that has failed
termination_message                       what the operator reads when the pod has ended
log_capture/                              what the ranks print, kept beside the checkpoints
worker_signals, parent_signals, signal_scope, restart_request
"""
