"""The objects that the operator makes for a job: trainer pods, and what they need beside them. Pure."""
