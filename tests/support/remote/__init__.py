"""Parts of tests with a ledger elsewhere."""
