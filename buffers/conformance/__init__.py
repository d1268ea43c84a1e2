"""What any buffer of episodes must keep, as tests that run against ours and others': see `rules`."""
