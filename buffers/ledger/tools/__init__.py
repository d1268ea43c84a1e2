"""What `python -m buffers.ledger` does with a ledger's file: inspect, export, check, back up, score again."""
