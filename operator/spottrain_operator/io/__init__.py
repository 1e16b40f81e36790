"""What talks to the outside, apart from kopf's handlers: API server, metrics and health ports, log."""
