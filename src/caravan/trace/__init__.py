"""Counters that every floor may feed."""
