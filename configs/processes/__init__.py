"""Small parts of processes: their environment, a fork of one that has imported much, temporary folders that end with them."""
