"""The status of a job: how it changes, its conditions, and the Events that a change is worth. Pure."""
