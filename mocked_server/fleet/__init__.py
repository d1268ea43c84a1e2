"""Many engines behind the one `Engine` that generation asks: routing, failover, weights one after another, figures."""
