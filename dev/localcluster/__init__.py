"""A real Kubernetes cluster on one machine, from package registries alone (see dev/README.md).

Standard library only: it has to run before anything is installed.
"""
