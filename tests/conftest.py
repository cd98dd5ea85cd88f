"""Shared by all tests: the check for leaks."""

pytest_plugins = ("leaks",)
