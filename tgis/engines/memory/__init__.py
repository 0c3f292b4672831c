"""How much memory there is and what a step takes."""
