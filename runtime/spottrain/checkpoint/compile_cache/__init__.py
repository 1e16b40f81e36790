"""The compiler's cache folders, stored beside the checkpoints: a restarted pod does not compile again."""
