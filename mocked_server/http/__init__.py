"""The HTTP side of the server: keys, limits, retries, refusals, and our own routes beside the model API."""
