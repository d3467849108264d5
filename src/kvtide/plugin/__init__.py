"""Where engines meet kvtide: one package for each, imported by that engine alone."""
