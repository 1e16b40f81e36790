"""Makes training state durable and finds it again.

    state -> tree -> layout -> staging_buffer (one copy, the stall) -> upload_process -> manifest -> HEAD
    HEAD -> manifest -> reader -> tree -> state

manager       the checkpoints of one run: claim, save, restore, final weights
head/         HEAD, the object that says who trains and what is durable
compile_cache/  the compiler's cache, kept beside the checkpoints

Importing this package must stay cheap: the upload process does, and starts without torch.
"""
