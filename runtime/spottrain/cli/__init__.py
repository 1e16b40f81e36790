"""The `spottrain` command.

entry, main   `spottrain run` and `spottrain profile`
checkpoints   `spottrain checkpoints ...`: arguments; then listing, logs, verifying, pruning, copying, ...
release       `spottrain release`

`checkpoints` and `release` need the standard library and `storage/` alone: no torch, so that they run on a
laptop and in an instant. Nothing here executes what it reads.
"""
