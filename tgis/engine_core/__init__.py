"""The engine process: receive, schedule, step, commit, send."""
