"""What everything stands on: log, run configuration, `spec.training`, preemption, progress, device, limits.

Imports nothing of ours but `contract` and `errors`.
"""
