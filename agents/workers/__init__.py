"""Agent loops in worker processes: their configuration, the workers, the client of a model server, timings."""
