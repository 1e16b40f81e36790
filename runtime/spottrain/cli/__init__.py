"""The `spottrain` command.

entry, main   `spottrain run` and `spottrain profile`
checkpoints   `spottrain checkpoints VERB URI`: arguments; each verb has a module

`checkpoints` needs only the standard library and `storage/`. Without torch it runs on a laptop and starts at
once. Nothing here executes what it reads.
"""
