"""`spottrain checkpoints ...`: what a person does to the checkpoints of a URI. Called by `__main__`.

    checkpoints (arguments) -> listing, logs, verifying, pruning, copying, exporting, ... -> reading -> store

Standard library and `store/` alone: no torch, so that it runs on a laptop and in an instant. Nothing here
executes what it reads. HEAD is changed by the intents of `headcare.py`, and never while a job runs.
"""
