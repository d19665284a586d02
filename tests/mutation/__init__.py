"""Drawn defects in the rules of the workers: do their tests without servers find each? See scripts/mutation."""
