"""The ranks of one training: who is which, what they agree on and by which links, and DDP and FSDP2.

world      rank and size, from the environment
link       TCP between the ranks, that notices when one falls silent
control    rank 0's orders to all, and their words to it
agreement  on saves and stops, all after the same step
parallel   DDP and FSDP2
"""
