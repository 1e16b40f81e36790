"""The compiler's cache folders, kept beside the checkpoints: a restarted pod does not compile again."""
