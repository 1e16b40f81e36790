"""Saves training state to object storage and restores it.

    state -> tree -> layout -> staging_buffer (one copy, the stall) -> upload -> manifest -> HEAD
    HEAD -> manifest -> reader -> tree -> state

On the way to HEAD `saver` does everything up to the upload, on each rank; `manager` commits, on rank 0.

    manager         the checkpoints of one run: claim, save, restore, final weights
    final_files     `final/` of a run that is done: weights, configuration, what its script has saved
    live_state      what training changes and no state_dict() holds; `model_watch` refuses the rest
    head/           HEAD, the object that records which attempt trains and which checkpoints are durable
    compile_cache   the compiler's cache, stored beside the checkpoints

Importing this package must not import torch: the upload process imports it and must start fast.
"""
