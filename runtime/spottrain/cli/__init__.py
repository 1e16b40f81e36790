"""The `spottrain` command.

entry, main   `spottrain run` and `spottrain profile`
checkpoints   `spottrain checkpoints ...`: arguments; then listing, logs, verifying, pruning, copying, ...
release       `spottrain release`

`checkpoints` and `release` need only the standard library and `storage/`. Without torch they run on a laptop
and start at once. Nothing here executes what it reads.
"""
