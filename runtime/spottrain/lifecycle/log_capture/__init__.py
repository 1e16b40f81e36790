"""Log capture: stores the output of the ranks beside the checkpoints, so that it survives a reclaimed pod.

outputs   pipes in place of standard output and error; starts the process that reads them
relay     that process: forwards the output at once, and keeps a copy
uploader  cuts each rank's copy into parts (pure), and stores them in a thread
"""
