"""A Kubernetes cluster without root, containers or images: real control plane, nodes whose containers are
processes.

`supervisor` starts the control plane (`controlplane`), the nodes (`node` -> `pod` -> `container`,
`volumes`, `logs`) and spottrain itself (`install`); `api` is what tests and the demo import; `cli` what a
person types.
"""
