"""`spottrain cost`: arguments in command, what jobs say in status, one job in report, many in sums."""
