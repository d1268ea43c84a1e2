"""Kills by the thousand, of a ledger's owner, a server and a run: `python -m tests.faults`."""
