"""`spottrain checkpoints VERB JOB|URI` (commands/checkpoints.py). Nothing here executes what it reads.

source        the store of a job, or at a URI
reading       finds a checkpoint and reads it, verified; contents: files of synced folders that none names
downloading   `download`: from a `model` and its `items` to a folder; `weights` joins what ranks have stored
synced        folders that `spottrain sync` keeps, for `download` and `copy`

Every other module is one verb.
"""
