"""The files of a release beside wheel and sdist."""
