"""The wire: proofs, limits, versions, and what is lost with a connection."""
