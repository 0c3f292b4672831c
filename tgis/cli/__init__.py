"""The commands of `tgis`: functions of (argv, prog) that return an exit code, as listed in `tgis.__main__`."""
