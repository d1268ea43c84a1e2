"""Where a program that the model wrote may run: the protocol, and a fenced child process."""
