"""Messages between the front end and the engine process."""
