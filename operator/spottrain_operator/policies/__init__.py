"""Pure decision rules: why a pod ended, whether it is gone, when and where to start again."""
