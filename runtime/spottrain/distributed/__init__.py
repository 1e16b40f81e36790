"""The ranks of one training: identity, agreement and communication.

world           rank and size, from the environment
process_group   torch's process group; sums over ranks; errors of lost peers
channel         connections to ranks, pods and child processes: framing, handshake, limits
control_channel messages from rank 0 to all ranks, and reports back to it
stop_agreement  saves and stops at the same step on all ranks
dtensor         helpers for FSDP2's tensors
"""
