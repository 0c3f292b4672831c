"""Structured output: does it validate, and what does it cost?

`outputs` generates with JSON schemas and validates, `suite` runs the JSON Schema Test Suite, `cost` compares streams
with and without a schema, `hostile` measures streams beside random grammars. The schemas are in `features` and
`schemas`.
"""
