"""Tools that are shipped: arithmetic, file search, GSM8K's reward, a Python interpreter."""
