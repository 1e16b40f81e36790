"""The notice agent: one process on each spot node writes the cloud's notice on its pods and its node.

sources -> findings -> plan -> api, driven by loop; the operator and the runtime read the marks. Started as
`python -m spottrain_operator.agent` by the chart's DaemonSet. It is a process of its own with a client of its
own, because it is resident on every node: without kopf and the official client it needs 40 MiB, not 125.
"""
