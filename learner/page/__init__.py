"""The live page of runs: one process that reads what runs leave in their folders, and shows it to a browser on this machine."""
