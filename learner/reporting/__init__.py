"""What a run says of itself: metrics and trackers, the live panel, sample episodes, the summary."""
