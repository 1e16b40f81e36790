"""How the operator does with thousands of jobs, on a real control plane whose kubelets are kwok's.

    python -m bench.scale.burst       125 jobs x 8 pods beside the built-in Job controller: `make bench NAME=scale`
    python -m bench.scale.storm       notices for a third of the nodes: `make bench-storm`
    python -m bench.scale.capacity    5,000 jobs and 10,000 pods: `make bench NAME=scale`
    python -m bench.scale.soak        a day of churn in minutes: `make bench NAME=soak`

Each runs as root in a network namespace of its own (`network`). `world` starts etcd, API server, scheduler,
controller manager, kwok, the operator and the trainers' stub; `client` speaks to the API server; `cloud`
gives notices to nodes; `audit` reads who wrote what and when, `metrics` what a program says of itself;
`options` has the arguments that several have.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "dev"))
