"""Foundation of all packages: log, run configuration, `spec.training`, preemption, progress, device, limits.

Of spottrain it imports only `contract` and `errors`.
"""
