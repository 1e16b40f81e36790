"""Replays spot traces under the rules that choose between spot and on-demand: `make bench-policy TRACES=...`."""
