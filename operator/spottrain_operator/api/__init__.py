"""Kubernetes objects as frozen dataclasses: the TrainingJob, and views of pods and nodes.

training_job   the CRD's schema as dataclasses; `validation` parses and checks it, `wire` writes it
template, gpus, volumes, data_cache   rules for the pod template
job_defaults   what a namespace or the chart says where a spec is silent
observed       what one reconcile observes: `Observed`
reports        what a container says, bounded before it is used
views          raw pods and nodes as `PodView`, `NodeView`
node_signals   termination signals of other components
node_pools     labels and taints of a pool's nodes
native_gangs   Kubernetes' own gang scheduling
"""
