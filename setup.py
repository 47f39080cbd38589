"""Finds the packages, which pyproject.toml cannot do for a tree with one package from another folder."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["compress", "compress.*"]), "compress.recipes"])
