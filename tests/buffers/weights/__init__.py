"""Tests of buffers/weights/: the format of a version, patches, and the puller."""
