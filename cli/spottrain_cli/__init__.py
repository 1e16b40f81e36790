"""The `spottrain` command: from a script to a model. A distribution of its own; no pod imports it.

app            the verbs; each is a thin function in commands/
kubectl        the cluster, by the user's own kubectl
output         what is printed: tables for people, JSON and YAML for programs
errors         exit codes
checkpoints/   `spottrain checkpoints VERB URI`
cost/          `spottrain cost`
planner/       calculators of `spottrain plan`; no torch
"""
