"""The training loops: `Trainer`, and what makes a custom loop survive interruptions.

trainer           `Trainer`, its loop and what its checkpoints hold
evaluation, evaluation_schedule, best_checkpoint   means over an eval set; when; early stopping
metrics_log       a line per `log_every` steps, and the board of /progress
data_parallel     DDP and FSDP2
run, loop       custom loops: `Run`, and what the integrations share with it
job_settings      `spec.training` in a custom loop
optimizer_setup, components, weight_averages, extra_state
"""
