"""Pure rule families: why a pod ended, whether it is gone, when to start again."""
