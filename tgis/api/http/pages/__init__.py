"""What browsers get."""
