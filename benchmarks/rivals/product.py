"""The tool that both sides of `benchmarks.peers --tool` call; imports nothing, as TRL's side has an environment of its own."""


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b
