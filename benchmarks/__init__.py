"""What the product claims about speed, as programs: `python -m benchmarks.<name> [--quick] [--json PATH]`."""
