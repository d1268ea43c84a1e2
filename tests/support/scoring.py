"""A score function for whole runs, as a user names one in a configuration: the random model's texts differ in it."""

from __future__ import annotations

from buffers.records import Task


def early_letters(task: Task, answer: str) -> float:
    """1 when most letters of the answer are of the first half of the alphabet."""
    letters = [letter for letter in answer.lower() if letter.isalpha()]
    return float(sum(letter < "n" for letter in letters) * 2 > len(letters))
