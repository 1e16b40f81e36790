"""Calculators for a training before it runs: model size, time, memory, network, hardware, money.

Pure functions without torch. `questions` words what they return for `spottrain plan`. Every constant has a
source; every result is an estimate whose assumptions are stated where it is computed.

compute_optimal   model size and tokens for a compute budget
transformer       parameters and FLOPs of a transformer
memory            what one GPU holds, and the largest batch
communication     all-reduce, and scaling efficiency
checkpoint        size of a checkpoint, and whether it can be saved within a cloud's notice
instances         instance types and prices of three clouds
hardware          the cheapest instances that meet a deadline or a budget
questions         what `spottrain plan` answers; values: its options and figures in words
breakdown         what levers on cost bring one after the other
"""
