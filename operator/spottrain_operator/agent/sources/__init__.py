"""Clients of the metadata services: one module per cloud, and `choose`, which detects the cloud.

A Source is a set of Watches, each of which runs in a task of its own. Pure functions (`parse_...`) turn a
response body into findings.
"""
