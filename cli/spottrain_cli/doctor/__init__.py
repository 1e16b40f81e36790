"""`spottrain doctor`: what stands between a person and a training that survives, each with its fix.

seen        what was read of the cluster, the store and the job, as it came
reading     reads it: kubectl in parallel, in bounded time
judging     from what was seen to findings, by a pure rule for each subject
findings    a finding, and how findings are shown
"""
