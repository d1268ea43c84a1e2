"""Sandboxes for programs that the model wrote: the protocol, and a fenced child process."""
