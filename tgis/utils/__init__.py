"""Options, logs, files, child processes, progress."""
