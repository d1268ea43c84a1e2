"""Rules of buffers/logs."""
