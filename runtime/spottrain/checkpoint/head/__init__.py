"""HEAD: the one object that says who trains and what is durable.

state             what it says, and the rules by which it may change
compare_and_swap  one change by conditional writes: explicit states, no I/O
owner             the two of them over a store, for a training
admin             what a person may change while none runs
"""
