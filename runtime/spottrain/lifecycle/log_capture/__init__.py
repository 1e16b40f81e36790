"""Keeps what the ranks print beside the checkpoints, so that a reclaimed pod does not take it along.

outputs   pipes in place of standard output and error, and the life of the process that reads them
__main__  that process: passes on what comes out of the pipes, at once, and keeps a copy
relay     its main loop
uploader  uploads of the copy, in threads of their own
parts     one rank's copy, cut into parts (pure)
"""
