"""`make demo`: one spot job survives a reclaim on a real cluster, beside the same job uninterrupted."""
