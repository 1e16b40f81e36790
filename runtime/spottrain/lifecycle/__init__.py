"""Process lifecycle: when to save, when to stop, and the exit code and termination message.

session              one run of one process: environment, store, ways to end
endings              the ways in which a run ends, in the words of its termination message
coordinator          claim, restore, save, agree with the other ranks, stop
save_interval, notice_budget              when a save is due; whether it fits into the notice period
launcher, topology, rendezvous            one process per GPU of a pod; rendezvous of all pods of a gang
outage_report        what is logged and shown while the store does not respond
hang_watchdog, gpu_faults                 detect stalled training and failed GPUs
termination_message, rank_reports         what the operator and the launcher read after a rank has ended
log_capture/                              stores the output of the ranks beside the checkpoints
worker_signals, parent_signals, signal_scope   SIGTERM in DataLoader workers, parent processes and scripts

The notice of a preemption itself (SIGTERM, SIGINT, deadline file) is in `core/preemption.py`.
"""
