"""Foundation of all packages: log, run configuration, `spec.training`, preemption, progress, device, limits.

`progress` is the board of the run's figures; `time_split` is the clock on it that says where the time went.
Of spottrain it imports only `contract` and `errors`.
"""
