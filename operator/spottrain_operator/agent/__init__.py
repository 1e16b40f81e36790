"""The notice agent: one process per spot node writes the cloud's notice to the node and its trainer pods.

Data flow: sources -> findings -> plan -> api, driven by loop. The operator and the runtime read the marks.
It runs on every node, so it is a separate process with its own API client: without kopf and the official
client it needs 50 MiB, not 125.
"""
