"""Input and output, apart from kopf's handlers: API server, metrics and health port, log."""
