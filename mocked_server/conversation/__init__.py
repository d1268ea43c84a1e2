"""An episode's conversation: which earlier tokens a request continues, and why it could not."""
