"""Knowing what is slow: where each step's time goes, what binds it, and what to change.

    split (marks around the phases of a step) -> Shares --+
    flops (one counted step) -> Work -> machine -> Roofline --+-> verdict.diagnose -> Verdict
    nvml, compiling, ranks (further facts) ---------------+
    watch: all of that for one loop
    window, profiling: a profile of some steps, when asked for

Each is one import for a loop of one's own. Only `window` is without torch, for the command line.
"""
