"""Replays recorded spot availability: the cost of spot or on-demand, and how much work is saved."""
