"""One module per command of `tgis`, each with `main(argv, prog) -> exit code`."""
