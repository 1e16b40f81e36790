"""The spottrain operator: TrainingJob in, pods on spot nodes out."""
