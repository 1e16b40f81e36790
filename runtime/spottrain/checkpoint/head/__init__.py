"""HEAD: the one object that records which attempt trains and which checkpoints are durable.

state             the contents of HEAD and the rules for changing it
compare_and_swap  one change by conditional writes: explicit states, no I/O
owner             applies both to a store, for a training run
admin             changes that a person may make while no job runs
"""
