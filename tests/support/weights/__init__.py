"""Support for tests of published weights: made-up versions, and what a trainer publishes."""
