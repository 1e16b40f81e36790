"""Keeps a folder of checkpoints that any program writes in an object store (`spottrain sync`).

    folder          what is in the folder: one look at it, and what it was filled from
    whole           which files and which part of it are whole, by formats and by rules that a person names
    saves           which save is whole, by the files themselves and the `writes` that the kernel tells of
    manifest        what a checkpoint of the folder consists of, and which contents none needs any more
    upload          sends what is not stored yet, with bounded memory
    restore         fills the folder
    checkpoints     the checkpoints of one run: claim, restore, commit, delete
    watch           looks at the folder again and again, and commits what is whole and fits before a deadline
    command         the user's command as a child process
    program         one run of `spottrain sync`: environment, signals, ends

No module here imports torch, numpy or a library beyond the store's: it runs beside images of any kind.
"""
