"""Structured output measured: whether it is what was asked for, and what it costs.

`outputs` generates with JSON schemas and validates, `suite` takes the JSON Schema Test Suite, `cost` compares streams
with and without a schema, `hostile` sends random grammars beside them. `features` and `schemas` have the schemas.
"""
