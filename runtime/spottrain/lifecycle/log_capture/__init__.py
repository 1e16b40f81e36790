"""Log capture: stores the output of the ranks beside the checkpoints, so that it survives a reclaimed pod.

outputs   pipes in place of standard output and error; starts and replaces the process that reads them
__main__  that process: forwards the output at once, and keeps a copy
relay     its main loop
uploader  uploads the copy, in threads of its own
parts     one rank's copy, cut into parts (pure)
"""
