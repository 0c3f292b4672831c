"""Compiles grammars within limits on the work that llguidance counts, so that no compilation and no mask takes long."""

import llguidance

from tgis.errors import GrammarError
from tgis.ipc.lookups import GrammarKind, GrammarSpec
from tgis.structured_output.lark import problem_of, to_lark
from tgis.structured_output.matcher import GrammarMatcher, TokenTable

_INITIAL_LEXER_FUEL = 1_000_000  # about 20 ms
_STEP_LEXER_FUEL = 100_000  # per mask: about 7 ms
_STEP_MAX_ITEMS = 20_000  # per mask; 10,000 are too few for some objects with 300 optional properties
_MAX_GRAMMAR_SIZE = 200_000  # symbols
_MAX_STATES = 20_000  # per compiled grammar: about 2 KiB each


def compile_grammar(spec: GrammarSpec, table: TokenTable) -> GrammarMatcher:
    """Compile a grammar; GrammarError if it cannot be used."""
    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=_INITIAL_LEXER_FUEL,
        step_lexer_fuel=_STEP_LEXER_FUEL,
        step_max_items=_STEP_MAX_ITEMS,
        max_lexer_states=_MAX_STATES,
        max_grammar_size=_MAX_GRAMMAR_SIZE,
        verbose_errors=False,  # they would quote the grammar
    )
    matcher = llguidance.LLMatcher(table.tokenizer, to_lark(spec), log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(problem_of(matcher.get_error(), spec))
    compiled = GrammarMatcher(matcher, table, in_thread=spec.kind is GrammarKind.GRAMMAR)
    compiled.mask(table.forced_ids)  # GrammarError if there is no first token
    return compiled
