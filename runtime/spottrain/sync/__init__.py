"""Keeps a folder of checkpoints that any program writes in an object store (`spottrain sync`).

    tree            what is in the folder: one look at it
    whole           which part of that is a whole checkpoint, by a rule that a person names
    saves           the same by the files themselves: `formats`, and `writes` that the kernel tells of
    manifest        what a checkpoint of the folder consists of, and which contents none needs any more
    upload          sends what is not stored yet, with bounded memory
    restore         fills the folder; `record` notes what the folder holds
    checkpoints     the checkpoints of one run: claim, restore, commit, delete
    watch           looks at the folder again and again, and commits what is whole and fits before a deadline
    command         the user's command as a child process
    program         one run of `spottrain sync`: environment, signals, ends

No module here imports torch, numpy or a library beyond the store's: it runs beside images of any kind.
"""
