"""Kubernetes objects as frozen dataclasses: the TrainingJob, and what decisions need of pods and nodes.

training_job   the CRD's schema; `wire` between JSON and dataclasses
template, gpus, volumes, data_cache   what a pod template may say
observed       what one look sees, and what it decides on: `Observed`, `Plan`
views          raw pods and nodes as `PodView`, `NodeView`; node_signals: what others wrote about a node's end
node_pools     labels and taints of a pool's nodes
native_gangs   Kubernetes' own gang scheduling
"""
