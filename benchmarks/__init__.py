"""What the product claims about speed, as programs: `python -m benchmarks.NAME [--quick] [--json PATH]`."""
