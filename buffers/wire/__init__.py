"""The wire: what this project's processes say to each other, on one machine and between machines."""
