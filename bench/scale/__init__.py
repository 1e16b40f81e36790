"""How the operator does with thousands of jobs, on a real control plane whose kubelets are kwok's.

Each scenario runs in a network namespace of its own. `world` starts etcd, API server, scheduler, controller
manager, kwok, the operator and the trainers' stub; `client` speaks to the API server; `cloud` gives notices
to nodes; `audit` reads who wrote what and when, `metrics` what a program says of itself; `options` has the
arguments that several have. bench/soak.py is one more scenario.
"""
