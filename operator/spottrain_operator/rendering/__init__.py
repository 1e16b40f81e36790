"""The objects that the operator creates for a job: trainer pods, and the objects that they need. Pure."""
