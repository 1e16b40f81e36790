"""The `spottrain` command.

entry, main   `spottrain run` and `spottrain profile`
plan          `spottrain plan QUESTION`
cost          `spottrain cost JOB`: arguments. kubectl (reading jobs), cost_status (what they say),
              cost_report (one job), cost_sums (a namespace, by team)
inject        `spottrain inject FOLDER`; it copies launch, which starts `spottrain run` from that folder
checkpoints   `spottrain checkpoints VERB URI`: arguments; each verb has a module

`checkpoints` needs only the standard library and `storage/`, `cost` not even that. `plan` needs no torch:
they run on a laptop and start at once. Nothing here executes what it reads.
"""
