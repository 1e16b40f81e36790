"""Replays spot traces under rules that choose between spot and on-demand: `make bench-policy TRACES=...`."""
