"""What a run leaves in its folder, read as it grows: configuration, summary, figures of steps, lines of the machine."""
