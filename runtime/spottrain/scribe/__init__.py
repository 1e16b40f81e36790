"""What the ranks print is kept beside the checkpoints, so that a reclaimed pod does not take it along.

outputs   by `launcher` and `session`: pipes in place of standard output and error, and the process's life
__main__  the process: passes on what comes out of the pipes, at once, and keeps a copy
relay     its main loop
shelf     uploads of the copy, in threads of their own
book      one rank's copy, cut into parts (pure)
"""
