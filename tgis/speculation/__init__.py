"""Proposes tokens that may come next, so that one step can compute several of a sequence; never torch, no clock."""
