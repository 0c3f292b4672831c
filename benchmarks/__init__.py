"""Measurements of this project for its makers; not shipped."""
