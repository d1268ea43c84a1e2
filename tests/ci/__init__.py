"""What continuous integration runs, `python -m tests.ci`: the stages, and what becomes of a test that fails."""
