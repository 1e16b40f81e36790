"""Training loops: `Trainer`, and `Run`, which makes a custom loop survive interruptions.

trainer           `Trainer`, its loop and its checkpoint state
evaluation, evaluation_schedule, best_checkpoint   means over an eval set; when to evaluate; early stopping
metrics_log       a line per `log_every` steps, and the board of /progress
data_parallel     DDP and FSDP2
run, loop         custom loops: `Run` and its base, which the Accelerate integration shares
job_settings      `spec.training` in a custom loop
optimizer_setup, components   optimizer, schedule, trackers and early stopping from the settings
weight_averages, extra_state  averages, and plain values in `Run(extra=...)`
"""
