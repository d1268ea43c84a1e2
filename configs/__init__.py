"""Every knob of a run (schema.py), how a file and overrides become one (load.py), and the shipped YAML files."""
