"""Process lifecycle: when a save is due, what a stop does, the exit code and the termination message.

life                 the phases of a run, and what a stop does in each
session              one run of one process: environment, store, its phase and its end
endings              the ways in which a run ends, in the words of its termination message
peers                the other ranks: one agreement on saves and stops; what to do if one is lost
save_interval, notice_budget              when a save is due; whether it fits into the notice period
launcher, topology   one process per GPU of a pod; rendezvous of all pods of a gang
outage_report        what is logged and shown while the store does not respond
hang_watchdog, gpu_faults                 detect stalled training and failed GPUs
termination_message  what the operator and the launcher read after a rank has ended
log_capture/                              stores the output of the ranks beside the checkpoints
worker_signals, parent_signals            SIGTERM in DataLoader workers and parent processes

The notice of a preemption itself (SIGTERM, SIGINT, deadline file) is in `core/preemption.py`.
"""
