"""The `spottrain` command as a pod has it. What a person types on a laptop is in cli/spottrain_cli.

entry        whose a verb is: the runtime's, or that of spottrain_cli, if it is there
main         `spottrain run` and `spottrain profile SCRIPT`
sync         `spottrain sync`
inject       `spottrain inject FOLDER`; it copies launch, which starts `spottrain run` from that folder
checkpoints  `spottrain checkpoints delete URI`

Nothing here executes what it reads.
"""
