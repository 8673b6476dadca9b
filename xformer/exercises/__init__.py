"""Exercises of the lectures: files to complete, and what grades them on every array library.

    exercise = xformer.exercises.get("softmax")
    print(exercise.stub)
    print(xformer.exercises.grade(exercise, names, libraries))

`xformer exercise` is the command.
"""

from __future__ import annotations

from dataclasses import replace

from xformer.base.choices import did_you_mean
from xformer.exercises import lecture1, lecture2, lecture3, lecture4, lecture5, lecture6
from xformer.exercises.exercise import Exercise, Mistake
from xformer.exercises.findings import Finding, Grade
from xformer.exercises.grade import grade, load

__all__ = ["EXERCISES", "Exercise", "Finding", "Grade", "Mistake", "get", "grade", "load"]

_LECTURES = (lecture1, lecture2, lecture3, lecture4, lecture5, lecture6)
EXERCISES = {
    one.name: replace(one, lecture=n)
    for n, lecture in enumerate(_LECTURES, start=1)
    for one in lecture.EXERCISES
}


def get(name: str) -> Exercise:
    """The exercise of this name. ValueError, with a name that is like it, if there is none."""
    if name not in EXERCISES:
        near = did_you_mean(name, EXERCISES) or "; `xformer exercise` lists them"
        raise ValueError(f"there is no exercise {name!r}{near}")
    return EXERCISES[name]
