"""The ranks of one training: who is which, what they agree on, and how they talk.

world           rank and size, from the environment
process_group   torch's process group; sums over ranks; errors of lost peers
connections     TCP between the ranks, which notices when one falls silent
control_channel rank 0's orders to all ranks, and their reports to it
stop_agreement  saves and stops, at the same step on all ranks
dtensor         FSDP2's tensors
"""
