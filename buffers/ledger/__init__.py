"""The ledger: one SQLite file with every task, episode, round and score of a run, and what happens to them."""
