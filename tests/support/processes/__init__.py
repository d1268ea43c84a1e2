"""Processes of tests: child processes that end with their test, and forks of processes that have imported all."""
