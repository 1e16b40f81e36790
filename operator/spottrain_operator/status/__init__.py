"""The status of a job: its updates, its conditions, and the Events that follow from a change. Pure."""
