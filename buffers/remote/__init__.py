"""A ledger in another process, on this machine or another: its owner, its client, and the way between them."""
