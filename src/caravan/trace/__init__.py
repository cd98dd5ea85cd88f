"""Counters that every floor may feed, and timelines for when somebody wants to see more."""
