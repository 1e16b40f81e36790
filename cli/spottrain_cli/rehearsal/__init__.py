"""`spottrain rehearse`: a job on process nodes of this machine, which are reclaimed while it trains.

story          from the manifest to the verdict
manifest       what the job becomes on this machine; pure
source         the script's folder
local_cluster  the cluster of `make cluster-up`: kubectl, its nodes, its store
moments        when a node is reclaimed; pure
play           one job from its creation to its end
record         what was seen of it
results        what a job leaves, by digests
verdict        whether it survived, as a table and a sentence; pure
"""
