"""Structured output measured: whether it is what was asked for.

`outputs` generates with JSON schemas and validates, `suite` takes the JSON Schema Test Suite. `features` and `schemas`
have the schemas.
"""
