"""Training loops: `Trainer`, and `Run`, which makes a custom loop survive interruptions.

engine            what every training needs around its steps; the log line and the board of /progress
trainer, phases   `Trainer`, its loop and its checkpoint state; what the diagnostics ask it
evaluation        means over an eval set; when to evaluate; the best checkpoint
data_parallel     DDP and FSDP2
components        optimizer, schedule, trackers and early stopping from the settings
script_functions  what loss_fn, metrics and loss_weight return
finished_step     the last step of a custom loop, for a stop that comes between two steps
run               custom loops: `Run`
given_state       what a `Run` is given
position, epochs  where its loop is, and whether a resume would find that place
drawn_batch       the batch that a custom loop has drawn ahead
state_tree        what checkpoints of both hold, beside the position
job_settings      `spec.training` in a custom loop
"""
