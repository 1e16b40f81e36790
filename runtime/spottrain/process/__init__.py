"""This process and its relatives: from SIGTERM to the exit code.

launcher, gang  one process per GPU of a pod
parents         what started us, and whether it passes SIGTERM on
interruption    a notice and its deadline; the watchdog
session         from the environment to the way out
meanwhile       signals while something is downloaded for a script that we have not launched
lastwords       the termination message
"""
