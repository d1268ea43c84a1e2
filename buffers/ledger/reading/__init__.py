"""What a page and other readers ask of a run's ledger while it lives: an index of its episodes, one episode, groups, counts."""
