"""Makes training state durable and finds it again.

    tree -> layout -> arena (one copy, the stall) -> uploader (a process of its own) -> manifest -> HEAD
    HEAD -> manifest -> restore -> tree

`checkpointer.Checkpointer` is what `guard` calls. Importing this package must stay cheap: the uploader
process does, and it must start without torch.
"""
