"""How long tests wait for a state: reached only where it never comes. No test judges by it how fast something is."""

PATIENCE_S = 180.0
